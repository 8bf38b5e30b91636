"""Questions to the workers for their counts, and the answers, on each server; no worker lives."""

import pytest

from qinfer.models.store import EVERY_MODEL, CountPushes, Underway
from qinfer.queue import keys
from qinfer.queue.clients import admin_client
from tests.contract.conftest import RedisQueue

IDLE = Underway({}, {})


async def test_an_answer_in_the_millisecond_of_its_question_is_heard(queue: RedisQueue) -> None:
    """Both streams take their ids from the clock, so the two may have the same."""
    client = admin_client(queue.settings)
    pushes = CountPushes(client)
    question = await pushes.ask([EVERY_MODEL])
    await client.xadd(keys.counts_added(), {"worker": "w", "question": question}, id=question)

    assert await pushes.answers(question, {"w"}, within_s=5.0) == {"w": None}
    await client.aclose()


@pytest.mark.parametrize("answer", [("other", 1), ("w", 0)], ids=["of another worker", "from before"])
async def test_who_has_not_answered_is_waited_for(queue: RedisQueue, answer: tuple[str, int]) -> None:
    """Neither another worker's answer counts, nor one to a question before."""
    client = admin_client(queue.settings)
    pushes = CountPushes(client)
    questions = [await pushes.ask([EVERY_MODEL]), await pushes.ask([EVERY_MODEL])]
    worker, answered = answer
    await pushes.send_answer(worker, questions[answered], IDLE)

    assert "w" not in await pushes.answers(questions[-1], {"w"}, within_s=0.05)
    await client.aclose()


async def test_an_answer_says_what_is_under_way(queue: RedisQueue) -> None:
    client = admin_client(queue.settings)
    pushes = CountPushes(client)
    question = await pushes.ask([EVERY_MODEL])
    underway = Underway({"m": {1: 2}}, {"m": {1: 5}})
    await pushes.send_answer("w", question, underway)

    assert await pushes.answers(question, {"w"}, within_s=5.0) == {"w": underway}
    await client.aclose()
