"""Questions to the workers for their counts, and the answers, on each server; no worker lives."""

import pytest

from qinfer.models.count_pushes import ALL, CountPushes
from qinfer.queue import keys
from qinfer.queue.clients import admin_client
from tests.contract.conftest import RedisQueue


async def test_an_answer_in_the_millisecond_of_its_question_is_heard(queue: RedisQueue) -> None:
    """Both streams take their ids from the clock, so the two may have the same."""
    client = admin_client(queue.settings)
    pushes = CountPushes(client)
    question = await pushes.ask([ALL])
    await client.xadd(keys.counts_added(), {"worker": "w", "question": question}, id=question)

    assert await pushes.answered(question, {"w"}, within_s=5.0)
    await client.aclose()


@pytest.mark.parametrize("answer", [("other", 1), ("w", 0)], ids=["of another worker", "from before"])
async def test_who_has_not_answered_is_waited_for(queue: RedisQueue, answer: tuple[str, int]) -> None:
    """Neither another worker's answer counts, nor one to a question before."""
    client = admin_client(queue.settings)
    pushes = CountPushes(client)
    questions = [await pushes.ask([ALL]), await pushes.ask([ALL])]
    worker, answered = answer
    await pushes.answer(worker, questions[answered])

    assert not await pushes.answered(questions[-1], {"w"}, within_s=0.05)
    await client.aclose()
