"""Who may use a device: online requests first, jobs in turn, nobody for ever."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from qinfer.models.spec import Device
from qinfer_workers.inference.bulk import arbiter as module
from qinfer_workers.inference.bulk.arbiter import DeviceArbiter
from qinfer_workers.inference.ensembles.runs import EnsembleBatcher
from tests.support.batching import Bench, Scene

GPU0, GPU1 = Device("gpu", 0), Device("gpu", 1)


def scene() -> Scene:
    return Scene(Bench())


def busy() -> Scene:
    """Returns a model that executes an online request until `scene.bench.end()`."""
    made = scene()
    made.batcher.add_items(made.items(1))
    return made


def full() -> Scene:
    """Returns a model whose online batches are full."""
    made = busy()
    made.batcher.add_items(made.items(4))
    return made


class Ensemble:
    """What the arbiter looks at of an ensemble whose steps run these versions."""

    def __init__(self, *versions: tuple[str, int]) -> None:
        self.versions = frozenset(versions)
        self.has_work = False
        self.model = replace(scene().batcher.model, version=9)


def arbiter(*places: tuple[Scene, Sequence[Device]]) -> DeviceArbiter:
    made = DeviceArbiter()
    for one, devices in places:
        made.place(one.batcher, devices)
    return made


async def test_a_turn_begins_at_once_on_a_quiet_device_and_ends_with_online_work() -> None:
    """It looks after each batch."""
    mine = scene()

    async with arbiter((mine, [GPU0])).turn(mine.batcher) as turn:
        before = turn.goes_on()
        mine.batcher.add_items(mine.items(1))
        during = turn.goes_on()
        mine.bench.end()

        assert (before, during, turn.goes_on()) == (True, False, True)


async def test_bulk_waits_for_online_work_of_any_model_on_the_device() -> None:
    """And begins when it has ended."""
    mine, other = scene(), busy()
    order: list[str] = []

    async def bulk() -> None:
        async with arbiter((mine, [GPU0]), (other, [GPU0])).turn(mine.batcher):
            order.append("bulk")

    task = asyncio.create_task(bulk())
    await asyncio.sleep(0.01)
    order.append("online")
    other.bench.end()
    await task

    assert order == ["online", "bulk"]


async def test_work_on_another_device_holds_nobody_up() -> None:
    """A worker may have several."""
    mine, other = scene(), busy()

    async with arbiter((mine, [GPU0]), (other, [GPU1])).turn(mine.batcher) as turn:
        assert turn.goes_on()


async def test_a_model_that_is_served_no_more_holds_nobody_up() -> None:
    """Its last batch may hang for ever."""
    mine, other = scene(), busy()
    shared = arbiter((mine, [GPU0]), (other, [GPU0]))
    shared.remove_batcher(other.batcher)

    async with shared.turn(mine.batcher) as turn:
        assert turn.goes_on()


async def test_online_work_without_end_lets_one_batch_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, and then only one."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)
    mine = full()

    async with arbiter((mine, [GPU0])).turn(mine.batcher) as turn:
        mine.bench.end()  # too late for this turn

        assert not turn.goes_on()


async def test_a_device_with_time_to_spare_lets_a_batch_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time to spare is where online batches are half full at most; elsewhere bulk has patience."""
    monkeypatch.setattr(module, "PATIENCE_S", 3600.0)
    mine = busy()
    shared = arbiter((mine, [GPU0]))

    async with shared.turn(mine.batcher) as turn:
        assert not turn.goes_on()

    mine.batcher.add_items(mine.items(4))
    assert not mine.batcher.has_room
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), shared.turn(mine.batcher):
            pass


async def test_beside_another_model_it_waits_as_long_as_its_last_batch_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two would execute at the same time."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)
    mine, other = scene(), busy()
    shared = arbiter((mine, [GPU0]), (other, [GPU0]))
    async with shared.turn(mine.batcher):
        pass
    monkeypatch.setattr(module, "PATIENCE_S", 3600.0)

    async with shared.turn(mine.batcher) as turn:
        assert not turn.goes_on()


async def test_jobs_of_two_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn ends when its time is over and somebody waits for the device; else it goes on."""
    monkeypatch.setattr(module, "TURN_S", 0.0)
    first, second = scene(), scene()
    shared = arbiter((first, [GPU0]), (second, [GPU0]))
    order: list[str] = []

    async def wait() -> None:
        async with shared.turn(second.batcher):
            order.append("second")

    async with shared.turn(first.batcher) as turn:
        alone = turn.goes_on()
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        order.append("first")
        with_another = turn.goes_on()
    await task

    assert (order, alone, with_another) == (["first", "second"], True, False)


async def test_whoever_stops_waiting_leaves_the_device_to_others() -> None:
    """A worker that drains cancels the wait."""
    mine = busy()
    shared = arbiter((mine, [GPU0]))

    async def wait() -> None:
        async with shared.turn(mine.batcher):
            raise AssertionError("it should still wait")

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    mine.bench.end()

    async with shared.turn(mine.batcher) as turn:
        assert turn.goes_on()


async def test_a_turn_tells_whether_there_were_online_requests_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    """For how long is settled elsewhere."""
    mine = busy()
    shared = arbiter((mine, [GPU0]))
    asyncio.get_running_loop().call_soon(mine.bench.end)
    async with shared.turn(mine.batcher) as first:
        pass
    monkeypatch.setattr(module, "LATELY_S", 0.0)
    async with shared.turn(mine.batcher) as second:
        pass

    assert (first.is_shared, second.is_shared) == (True, False)


async def test_an_ensemble_uses_the_devices_of_its_steps_models() -> None:
    """Online work of these goes before its jobs, and its own before theirs; other devices are nothing to it."""
    step, other = busy(), busy()
    ensemble = cast(EnsembleBatcher, Ensemble((step.batcher.model.spec.name, 1)))
    other.batcher.model = replace(other.batcher.model, version=2)
    shared = arbiter((step, [GPU0]), (other, [GPU1]))
    shared.place(ensemble, ())
    order: list[str] = []

    async def bulk() -> None:
        async with shared.turn(ensemble) as turn:
            order.append("bulk")
            assert turn.goes_on()
            cast(Ensemble, ensemble).has_work = True
            assert not turn.goes_on()

    task = asyncio.create_task(bulk())
    await asyncio.sleep(0)
    order.append("online")
    step.bench.end()
    await task

    assert order == ["online", "bulk"]
