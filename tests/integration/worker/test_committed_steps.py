"""Steps of implicit sequences in the lanes of their owners: workers that die or drain lose and repeat none."""

import asyncio
from collections.abc import Sequence as Items
from itertools import accumulate

import pytest

from qinfer.core.messages import Response
from qinfer.errors import BrokerUnavailable
from qinfer.queue.sequences.answers import answer_rest
from qinfer.queue.sequences.ownership import Sequences
from qinfer.queue.sequences.records import OwnedLife, StepPlace
from qinfer.testing import eventually
from qinfer_workers.inference.publisher import Publisher
from tests.support.inline_workers import InlineWorkers, value
from tests.support.sequence_scene import Sequencing, entry_of


@pytest.fixture
async def sums(scene: InlineWorkers) -> Sequencing:
    """Provides callers of a stub whose state is kept beside the queue, served by `w1`."""
    sequencing = Sequencing(scene)
    await sequencing.model()
    await scene.worker("w1", lease_s=2.0)
    return sequencing


async def values(answers: Items["asyncio.Future[Response]"]) -> list[float]:
    """Waits for answers."""
    return [value(await answer) for answer in answers]


async def in_lane(sums: Sequencing, *numbers: float) -> list["asyncio.Future[Response]"]:
    """Executes two steps, and sends more to the lane while nothing executes further."""
    assert await values([await sums.send(number, start=number == 1) for number in (1, 2)]) == [1, 3]
    assert value(await (await sums.send(3))) == 6
    sums.scene.hold()
    answers = [await sums.send(number) for number in numbers]
    assert all(entry_of(each).lane.name.startswith("seq@w1-") for each in sums.submitted[-len(numbers) :])
    return answers


async def reaped(sums: Sequencing) -> None:
    """Waits until a dead worker's sequences are handed over."""

    async def is_so() -> bool:
        await answer_rest(sums.scene.delivery, sums.sequences)
        return bool(await sums.sequences.reap())

    await eventually(is_so, description="a hand-over")


async def test_the_lane_of_a_dead_worker_is_executed_by_the_next_one(sums: Sequencing) -> None:
    """In order, before the steps that came since."""
    answers = await in_lane(sums, *range(4, 9))
    await sums.scene.kill("w1")
    await reaped(sums)
    answers += [await sums.send(number) for number in (9, 10)]
    sums.scene.go()
    await sums.scene.worker("w2", lease_s=60.0)

    answers.append(await sums.send(11, end=True))

    assert await values(answers) == list(accumulate(range(1, 12)))[3:]


async def test_a_stored_response_outlives_the_next_step_until_it_is_read(
    sums: Sequencing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker died before it published; the next one can't read the response before it has executed the next step."""
    assert await values([await sums.send(number, start=number == 1) for number in (1, 2)]) == [1, 3]
    is_committed, response = asyncio.Event(), Sequences.response

    async def hang(*_: object) -> None:
        is_committed.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "publish", hang)
        answers = [await sums.send(3)]
        await is_committed.wait()
        await sums.scene.kill("w1")
    await reaped(sums)
    answers.append(await sums.send(4))

    async def late(sequences: Sequences, place: StepPlace) -> bytes | None:
        if not answers[1].done():
            raise BrokerUnavailable("the connection is lost")
        return await response(sequences, place)

    monkeypatch.setattr(Sequences, "response", late)
    await sums.scene.worker("w2", lease_s=60.0)

    assert await values(answers) == [6, 10]


async def test_the_lane_of_a_worker_that_drains_is_executed_by_the_next_one(sums: Sequencing) -> None:
    answers = await in_lane(sums, *range(4, 9))
    await sums.scene.worker("w2", lease_s=60.0)
    stopping = asyncio.create_task(sums.scene.stop("w1"))
    await asyncio.sleep(0)
    sums.scene.go()
    await stopping

    answers.append(await sums.send(9, end=True))

    assert await values(answers) == list(accumulate(range(1, 10)))[3:]


async def test_a_worker_whose_answer_to_own_is_lost_joins_again(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may own sequences unknowingly: it gives all back."""
    sums, own, lost = Sequencing(scene), Sequences.own, 1
    await sums.model()

    async def own_once_lost(*words: object, **more: object) -> list[OwnedLife] | None:
        nonlocal lost
        owned = await own(*words, **more)  # type: ignore[arg-type]
        if owned and lost:
            lost -= 1
            raise BrokerUnavailable("the reply is lost")
        return owned

    monkeypatch.setattr(Sequences, "own", own_once_lost)
    await scene.worker("w1")

    assert await sums.sum(1, 2, 3) == [1, 3, 6]
    assert lost == 0


async def test_a_start_behind_steps_in_a_closed_lane_lets_them_finish(sums: Sequencing) -> None:
    """Before and after the lane was closed."""
    answers = await in_lane(sums, 4, 5)
    answers += [await sums.send(10, start=True), await sums.send(20)]
    await sums.scene.kill("w1")
    await reaped(sums)
    answers += [await sums.send(100, start=True), await sums.send(200, end=True)]
    sums.scene.go()
    await sums.scene.worker("w2", lease_s=60.0)

    assert await values(answers) == [10, 15, 10, 30, 100, 300]
