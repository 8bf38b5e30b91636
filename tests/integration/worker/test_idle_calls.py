"""What a worker that has nothing to do asks Redis: it does not depend on how many models it serves."""

import asyncio

import pytest

from qinfer.models.state import State
from qinfer.queue import readers
from qinfer.testing import eventually
from tests.support.inline_workers import InlineWorkers, value

MODELS = 150
MOST_PER_S = 50
WINDOW_S = 4


async def calls(scene: InlineWorkers) -> int:
    """Returns how many commands Redis has executed, those in scripts included."""
    text = await scene.delivery.router.call(0, b"INFO", b"commandstats")
    lines = [line.partition(":calls=")[2] for line in text.decode().splitlines()]
    return sum(int(line.split(",")[0]) for line in lines if line)


async def served(scene: InlineWorkers, models: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts a worker with so many models, and waits until it has forgotten its start."""
    monkeypatch.setattr(readers, "AWAKE_S", 0.2)
    for number in range(models):
        await scene.model(f"m{number}")
    await scene.worker(max_wait_s=0.5, lease_s=1.0, renew_every_s=0.3, ready=False)

    async def is_ready() -> bool:
        states = [s.state for r in await scene.store.workers() for each in r.models.values() for s in each.values()]
        return len(states) == models and set(states) == {State.READY}

    await eventually(is_ready, timeout_s=60.0, description="all models ready")

    def is_quiet() -> bool:
        every = list(scene.delivery._readers.values())
        return len(every) == models and not any(r._sleep is None or _is_stirred(scene, r) for r in every)

    await eventually(is_quiet, timeout_s=30.0, description="an idle worker")


def _is_stirred(scene: InlineWorkers, reader: readers.LaneReader) -> bool:
    return scene.delivery.doorbell.is_stirred(reader.stirred_at_s)


@pytest.mark.timeout(150)
async def test_an_idle_worker_asks_little_however_many_models_it_serves(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats, statistics, renewals and looks of its own accord are included."""
    await served(scene, MODELS, monkeypatch)
    before = await calls(scene)

    await asyncio.sleep(WINDOW_S)

    assert await calls(scene) - before <= MOST_PER_S * WINDOW_S


async def test_a_request_after_a_long_sleep_is_answered(scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes its model's reader."""
    await served(scene, 3, monkeypatch)

    answers = [await scene.submit(7.0, model=f"m{number}") for number in range(3)]

    assert [value(answer) for answer in answers] == [7.0] * 3
