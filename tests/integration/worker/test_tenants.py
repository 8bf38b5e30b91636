"""Tenants of one model under load, with real workers: what one of them sends does not delay the others."""

import asyncio

import pytest

from qinfer.core.messages import Response
from qinfer.queue.entries import share_of
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


async def overtaken(scene: InlineWorkers, flood: Flood | None, tenant: str) -> list[int]:
    """Sends requests one after the other; returns how many of the flood were answered during each."""
    counts = []
    for _ in range(ASKED):
        before = flood.answered if flood else 0
        assert value(await scene.submit(1.0, tenant=tenant)) == 1.0
        counts.append(flood.answered - before if flood else 0)
    return counts


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_tenants_flood_delays_no_other(scene: InlineWorkers, workers: int) -> None:
    """A request of another meets the batches that run or are placed ahead, and the one that it joins: no backlog."""
    await scene.model(mode="echo", dims=-1)
    for number in range(workers):
        await scene.worker(f"w{number}")
    flood = Flood(scene, "heavy")
    await scene.submit(1.0, tenant="light")

    counts = await overtaken(scene, flood, "light")
    flood.end()

    # Of each worker: what executes, what is ahead, and the batch with the request, whose answers come together.
    most = sorted(counts)[int(0.9 * ASKED)]
    assert most <= workers * 4 * BATCH, counts
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
