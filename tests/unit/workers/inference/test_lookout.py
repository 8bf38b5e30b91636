"""Where a worker looks for entries of dead ones."""

from types import SimpleNamespace
from typing import Any

import pytest

from qinfer.core.settings import WorkerSettings
from qinfer.errors import BrokerUnavailable
from qinfer_workers.inference.serving import Lookout

MODELS = 100
TURN_S = 5.0


class Scene:
    """Many models of one worker; it stands for the worker's store and its doorbell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.last: dict[str, float] = {"me": 0.0, "other": 0.0}
        self.stirred: set[str] = set()
        self.stirred_s = 0.0
        self.error: BrokerUnavailable | None = None
        self.alarms = 0
        self.servings: dict[Any, Any] = {
            (f"m{number}", 1): SimpleNamespace(lanes=[f"m{number}"], is_settled=True) for number in range(MODELS)
        }
        monkeypatch.setattr("qinfer_workers.inference.serving.time.monotonic", lambda: self.now_s)
        queue: Any = SimpleNamespace(doorbell=self, is_stirred=lambda lanes: lanes[0] in self.stirred)
        store: Any = self
        self.lookout = Lookout(queue, store, WorkerSettings(), "me")

    def alarm(self) -> None:
        self.alarms += 1

    async def beats(self) -> dict[str, float]:
        if self.error is not None:
            raise self.error
        return dict(self.last)

    async def look(self, *beating: str) -> list[str]:
        """Lets the time between two looks pass, in which some workers beat; returns the models that are chosen."""
        self.now_s += TURN_S
        for worker in beating:
            self.last[worker] = self.last.get(worker, 0.0) + TURN_S
        return [model for (model, _), _ in await self.lookout.chosen(self.servings)]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_start_is_an_alarm(scene: Scene) -> None:
    """What workers left that died before is looked for."""
    assert scene.alarms == 1
    assert scene.stirred_s > 2 * WorkerSettings().lease_s


async def test_without_an_event_a_few_have_their_turn(scene: Scene) -> None:
    """Each of them in the end."""
    turns = [await scene.look("me", "other") for _ in range(MODELS)]

    assert {len(turn) for turn in turns} == {5}
    assert {model for turn in turns[: MODELS // 5] for model in turn} == {model for model, _ in scene.servings}
    assert scene.alarms == 1


async def test_what_was_stirred_is_looked_at_each_time(scene: Scene) -> None:
    """And what may have left something in other lanes."""
    scene.stirred = {"m70"}
    scene.servings["m80", 1].is_settled = False

    turns = [await scene.look("me", "other") for _ in range(3)]

    assert all({"m70", "m80"} <= set(turn) for turn in turns)


async def test_a_worker_that_beats_no_more_is_an_alarm(scene: Scene) -> None:
    """One, not one at each look: it may stay in the index for ever."""
    await scene.look("me", "other")

    for _ in range(5):
        await scene.look("me")

    assert scene.alarms == 2


async def test_a_worker_that_has_gone_is_an_alarm(scene: Scene) -> None:
    """It may have retired, or somebody has taken it out of the index."""
    await scene.look("me", "other")
    del scene.last["other"]

    await scene.look("me")
    await scene.look("me")

    assert scene.alarms == 2


async def test_new_workers_are_no_alarm(scene: Scene) -> None:
    """They have left nothing yet."""
    await scene.look("me", "other")

    await scene.look("me", "other", "new")

    assert scene.alarms == 1


async def test_where_beats_are_unknown_it_is_an_alarm(scene: Scene) -> None:
    """Redis is away: what was lost there is looked for."""
    scene.error = BrokerUnavailable("away")

    assert len(await scene.look()) == 5

    assert scene.alarms == 2
