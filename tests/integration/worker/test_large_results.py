"""Results that travel beside the reply stream: a worker that can't store them in time fetches no more requests."""

import asyncio
from typing import Any

import pytest

from qinfer.testing import eventually
from qinfer_workers.inference import publisher
from tests.support.inline_workers import InlineWorkers, value

WIDTH = 300_000
"""Elements of a request: 1.2 MB, more than travels in a reply stream."""


async def test_large_results_that_wait_keep_others_in_the_queue(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's memory has those of a few executions; another model of it goes on."""
    monkeypatch.setattr(publisher, "MOVED_AT_ONCE_BYTES", 2**20)
    await scene.model(dims=-1, scheduler="")
    await scene.model("other")
    worker = await scene.worker()
    store, may_go = worker._queue.store_result, asyncio.Event()
    begun: list[str] = []

    async def slow(*arguments: Any) -> None:
        begun.append(arguments[1])
        await may_go.wait()
        await store(*arguments)

    monkeypatch.setattr(worker._queue, "store_result", slow)
    answers = [scene.submit_apart(float(number), width=WIDTH) for number in range(20)]
    await eventually(lambda: bool(begun), description="a result that waits")

    assert [value(await scene.submit(float(number), model="other")) for number in range(20)] == list(range(20))
    seen, still = 0, 0
    while still < 20:
        await asyncio.sleep(0.02)  # nothing tells that nothing happens
        seen, still = len(begun), still + 1 if len(begun) == seen else 0
    assert seen < 10
    may_go.set()
    assert [response.stored for response in await asyncio.gather(*answers)] == [True] * 20
