"""Models that have the states of their sequences in memory, and lose it: what has no state any more is not executed."""

import asyncio
from typing import Any

import pytest

from qinfer.backends.base import Batch, Context
from qinfer.backends.stub import StubBackend
from qinfer.errors import SequenceLost
from qinfer.queue.sequences.ownership import Sequences
from qinfer.testing import eventually
from tests.support.inline_workers import InlineWorkers, failure, value
from tests.support.sequence_scene import Sequencing


class Forgetful(StubBackend):
    """A model whose process dies when a test says so, and with it the state in its memory."""

    dies = False
    deaths = 0

    def execute(self, batch: Batch, ctx: Context) -> None:
        super().execute(batch, ctx)
        if self.dies:
            self.deaths += 1
            raise SequenceLost("the process died")


@pytest.fixture
async def explicit(scene: InlineWorkers) -> Sequencing:
    """Provides callers of a stub that would have its state in memory, which no worker serves yet."""
    sequencing = Sequencing(scene, explicit=True)
    await sequencing.model()
    return sequencing


class Held:
    """Scripts of sequences that wait for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        self.waiting = 0
        self._go = asyncio.Event()
        original = getattr(Sequences, script)

        async def held(*args: Any, **kwargs: Any) -> Any:
            self.waiting += 1
            await self._go.wait()
            return await original(*args, **kwargs)

        monkeypatch.setattr(Sequences, script, held)

    def go(self) -> None:
        """Lets them run."""
        self._go.set()


async def test_no_step_runs_on_a_memory_that_is_gone(explicit: Sequencing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even before Redis knows that its sequence is lost."""
    explicit.scene.backend = Forgetful
    await explicit.scene.worker()
    (model,) = explicit.scene.backends["w1"]
    assert isinstance(model, Forgetful)
    await asyncio.gather(*[await explicit.send(1, n, start=True) for n in (1, 2)])
    fails = Held(monkeypatch, "fail")
    model.dies = True
    answers = [await explicit.send(2, 1)]
    await eventually(lambda: fails.waiting == 2, description="two sequences that are lost")

    model.dies = False
    answers += [await explicit.send(2, n) for n in (1, 2)]
    assert value(await (await explicit.send(7, 3, start=True))) == 7  # taken behind them
    fails.go()

    assert [failure(await each).code for each in answers] == ["sequence_lost"] * 3
    assert (await explicit.sequences.sizes([1])).lost == 2
    again = await explicit.send(8, 1, start=True, end=True), await explicit.send(9, 3, end=True)
    assert [value(await each) for each in again] == [8, 9]


async def test_a_memory_is_lost_while_a_step_is_committed(
    explicit: Sequencing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That step is answered, and the one behind it is the one that has failed."""
    explicit.scene.backend = Forgetful
    await explicit.scene.worker()
    (model,) = explicit.scene.backends["w1"]
    assert isinstance(model, Forgetful)
    await (await explicit.send(1, start=True, step=1))
    commits, fails = Held(monkeypatch, "commit"), Held(monkeypatch, "fail")
    second = await explicit.send(2, step=2)
    await eventually(lambda: commits.waiting == 1, description="a commit under way")
    model.dies = True
    third = await explicit.send(3)
    await eventually(lambda: model.deaths == 1, description="the death")

    commits.go()
    assert value(await second) == 2
    await eventually(lambda: fails.waiting == 1, description="a sequence that is lost")
    fails.go()

    lost = failure(await third)
    assert lost.code == "sequence_lost"
    assert "was ended at step 3" in lost.message
