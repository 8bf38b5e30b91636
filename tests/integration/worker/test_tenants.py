"""Tenants of one model under load, with real workers: what one of them sends does not delay the others."""

import asyncio
import threading
from functools import partial

import pytest

from qinfer.backends.base import Batch, Context
from qinfer.backends.stub import StubBackend
from qinfer.core.messages import Response
from qinfer.queue.entries import Lane, share_of
from qinfer.testing import eventually
from tests.support.inline_workers import InlineWorkers, value

BATCH = 8
WAITING = 50 * BATCH
"""Requests of the flood that wait at any time: fifty times as many as the other tenant has."""
ASKED = 20


class Flood:
    """A tenant that has as many requests waiting as it can: each answer has it send the next."""

    def __init__(self, scene: InlineWorkers, tenant: str) -> None:
        self.answered = 0
        self._scene, self._tenant = scene, tenant
        self._is_over = False
        for _ in range(WAITING):
            self._send()

    def _send(self) -> None:
        self._scene.submit(2.0, tenant=self._tenant).add_done_callback(self._answered)

    def _answered(self, _: "asyncio.Future[Response]") -> None:
        self.answered += 1
        if not self._is_over:
            self._send()

    def end(self) -> None:
        self._is_over = True


class Recorder(StubBackend):
    """Remembers whose requests were in each batch: the values that it had."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(gate)
        self.batches: list[set[float]] = []

    def execute(self, batch: Batch, ctx: Context) -> None:
        self.batches.append(set(batch.inputs["x"].flat))
        super().execute(batch, ctx)


async def overtaken(scene: InlineWorkers, flood: Flood, tenant: str) -> list[int]:
    """Sends requests one after the other; returns how many of the flood were answered during each."""
    counts = []
    for _ in range(ASKED):
        before = flood.answered
        assert value(await scene.submit(1.0, tenant=tenant)) == 1.0
        counts.append(flood.answered - before)
    return counts


def is_stored(scene: InlineWorkers, share: Lane, count: int) -> bool:
    """Tells whether so many requests were stored in a share since the start."""
    return [entry.lane for entry in scene.entries].count(share) == count


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_tenants_flood_delays_no_other(scene: InlineWorkers, workers: int) -> None:
    """A request of another is in the batch that is fetched next: no backlog is before it."""
    instances: list[Recorder] = []

    def instance(gate: threading.Event) -> StubBackend:
        instances.append(Recorder(gate))
        return instances[-1]

    scene.backend = instance
    await scene.model(mode="echo", dims=-1)
    for number in range(workers):
        await scene.worker(f"w{number}")
    flood = Flood(scene, "heavy")
    await scene.submit(1.0, tenant="light")
    share, before = share_of(scene.lane, 1), []

    for asked in range(ASKED):
        scene.hold()
        begun = [len(each.batches) for each in instances]
        answer = scene.submit(1.0, tenant="light")
        await eventually(partial(is_stored, scene, share, 2 + asked))
        scene.go()
        assert value(await answer) == 1.0
        before += [
            index
            for each, count in zip(instances, begun, strict=True)
            for index, values in enumerate(each.batches[count:])
            if 1.0 in values
        ]
    flood.end()

    # Its worker had room for the batch that began while executions were held, one placed ahead, and one fetched.
    assert len(before) == ASKED
    assert max(before) <= 3, before


async def test_requests_beside_a_flood_are_answered_before_most_of_it(scene: InlineWorkers) -> None:
    """What is under way in two workers goes before each: a small part of what one without a share waits for."""
    await scene.model(mode="echo", dims=-1)
    for number in range(2):
        await scene.worker(f"w{number}")
    flood = Flood(scene, "heavy")
    await scene.submit(1.0, tenant="light")

    counts = await overtaken(scene, flood, "light")
    flood.end()

    assert sum(counts) <= ASKED * WAITING / 4, counts
    assert {entry.lane for entry in scene.entries} == {scene.lane, share_of(scene.lane, 1)}


async def test_without_shares_each_request_would_wait_for_the_flood(scene: InlineWorkers) -> None:
    """The same by requests of nobody, which have one stream: the measure of the test above."""
    await scene.model(mode="echo", dims=-1)
    await scene.worker("w0")
    flood = Flood(scene, "")

    counts = await overtaken(scene, flood, "")
    flood.end()

    assert min(counts) >= WAITING // 2, counts


async def test_both_of_two_floods_have_their_share(scene: InlineWorkers) -> None:
    """By weight, of all that is executed while both wait."""
    scene.delivery.places.weigh = {"one": 1, "three": 3}.__getitem__
    await scene.model(mode="echo", dims=-1)
    await scene.worker("w0")
    floods = {tenant: Flood(scene, tenant) for tenant in ("one", "three")}

    answered = asyncio.Event()

    def look(_: object) -> None:
        if sum(flood.answered for flood in floods.values()) >= 4 * WAITING:
            answered.set()
        else:
            scene.submit(3.0, tenant="one").add_done_callback(look)

    look(None)
    await answered.wait()
    counts = {tenant: flood.answered for tenant, flood in floods.items()}
    for flood in floods.values():
        flood.end()

    share = counts["three"] / sum(counts.values())
    assert 0.6 < share < 0.8, counts


async def test_a_worker_that_leaves_gives_back_what_it_had_of_shares(scene: InlineWorkers) -> None:
    """Another one executes it."""
    await scene.model(mode="echo", dims=-1)
    await scene.worker("w0")
    calls = [scene.submit(1.0, tenant=tenant) for tenant in ("one", "two") for _ in range(4 * BATCH)]
    await scene.worker("w1")

    await scene.stop("w0")

    assert {value(answer) for answer in await asyncio.gather(*calls)} == {1.0}
