"""What a worker that has nothing to do asks each node of Redis: it does not depend on how many models it serves."""

import asyncio

import pytest

from qinfer.models.state import State
from qinfer.queue import doorbell, readers
from qinfer.testing import eventually
from qinfer_workers.inference.worker import Worker
from tests.integration.worker.test_sequence_owners import lose_lease
from tests.support.inline_workers import InlineWorkers, value
from tests.support.sequence_scene import Sequencing, scheduler

MODELS = 150
MOST_PER_S = 50
WINDOW_S = 4


async def calls(scene: InlineWorkers, command: str = "") -> dict[str, int]:
    """Returns how many commands, or calls of one, each node has executed, those in scripts included."""
    found = {}
    for label, link in scene.delivery.router.owners().items():
        text = await link.call(b"INFO", b"commandstats")
        lines = [line.partition(":calls=") for line in text.decode().splitlines()]
        counts = {name: int(rest.split(",")[0]) for name, _, rest in lines if rest}
        found[label] = counts.get(f"cmdstat_{command}", 0) if command else sum(counts.values())
    return found


async def calls_per_s(scene: InlineWorkers, command: str = "") -> float:
    """Returns how many each node executes, of the one that executes most."""
    before = await calls(scene, command)
    await asyncio.sleep(WINDOW_S)
    after = await calls(scene, command)
    return max(count - before.get(label, 0) for label, count in after.items()) / WINDOW_S


async def served(scene: InlineWorkers, models: int, monkeypatch: pytest.MonkeyPatch, *, stateful: int = 0) -> Worker:
    """Starts a worker with so many models, and as many with sequences; waits until it has forgotten its start."""
    monkeypatch.setattr(readers, "AWAKE_S", 0.2)
    for number in range(models):
        await scene.model(f"m{number}")
    for number in range(stateful):
        await scene.model(f"s{number}", mode="add", scheduler=scheduler())
    worker = await scene.worker(max_wait_s=0.5, lease_s=1.0, renew_every_s=0.3, ready=False)

    async def is_ready() -> bool:
        states = [s.state for r in await scene.store.workers() for each in r.models.values() for s in each.values()]
        return len(states) >= models + stateful and set(states) == {State.READY}

    await eventually(is_ready, timeout_s=60.0, description="all models ready")
    await quiet(scene, worker)
    return worker


async def quiet(scene: InlineWorkers, worker: Worker) -> None:
    """Waits until a worker looks for nothing any more: all its readers sleep, and it has no lease on sequences."""

    def is_quiet() -> bool:
        services = worker._sequences._all()
        if worker._keeper.owners or not all(service._tickets.is_asleep for service in services):
            return False
        return not any(r._sleep is None or _is_stirred(scene, r) for r in scene.delivery._readers.values())

    await eventually(is_quiet, timeout_s=30.0, description="an idle worker")


def _is_stirred(scene: InlineWorkers, reader: readers.LaneReader) -> bool:
    return scene.delivery.doorbell.is_stirred(reader.stirred_at_s)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("models", "stateful"), [(MODELS, 0), (0, MODELS)])
async def test_an_idle_worker_asks_little_however_many_models_it_serves(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch, models: int, stateful: int
) -> None:
    """Heartbeats, statistics, renewals and looks of its own accord are included."""
    await served(scene, models, monkeypatch, stateful=stateful)

    assert await calls_per_s(scene) <= MOST_PER_S


async def test_a_request_after_a_long_sleep_is_answered(scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes its model's reader."""
    await served(scene, 3, monkeypatch)

    answers = [await scene.submit(7.0, model=f"m{number}") for number in range(3)]

    assert [value(answer) for answer in answers] == [7.0] * 3


async def test_sequences_after_a_long_sleep_are_answered(scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has a lease while it owns them, and gives it back afterwards."""
    monkeypatch.setattr(doorbell, "SHORTEST_S", 600.0)
    sums = Sequencing(scene)
    await sums.model()
    worker = await served(scene, 0, monkeypatch)

    first = await sums.sum(1, 2, 3)
    await quiet(scene, worker)
    second = await sums.sum(4, 5)

    assert (first, second) == ([1, 3, 6], [4, 9])


async def test_open_sequences_without_steps_cost_their_lease_only(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step wakes the owner, though it has no free slot."""
    monkeypatch.setattr(doorbell, "SHORTEST_S", 600.0)
    sums = Sequencing(scene)
    await sums.model()
    worker = await served(scene, 0, monkeypatch)
    for number in range(8):
        await (await sums.send(1, number + 1, start=True))
    (service,) = worker._sequences._all()
    await eventually(lambda: service._tickets.is_asleep, description="a sleeping owner")
    looks = await calls_per_s(scene, "xrange")
    again = [value(await (await sums.send(2, number + 1))) for number in range(8)]

    assert (service.batcher.free_slots, again) == (0, [3] * 8)
    assert looks == 0


async def test_a_lease_on_sequences_that_ends_in_a_sleep_is_noticed(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker owns them again, though all its slots were taken by them."""
    monkeypatch.setattr(doorbell, "SHORTEST_S", 600.0)
    sums = Sequencing(scene)
    await sums.model()
    worker = await served(scene, 0, monkeypatch)
    for number in range(8):
        await (await sums.send(1, number + 1, start=True))
    (service,) = worker._sequences._all()
    await eventually(lambda: service._tickets.is_asleep, description="a sleeping owner")

    await lose_lease(sums, "w1")
    again = [value(await (await sums.send(2, number + 1))) for number in range(8)]

    assert again == [3] * 8
