"""How much a gateway logs of models that can't be loaded."""

import logging
import time

import pytest

from qinfer.models.catalog import ChangeLog
from qinfer.models.readiness import ModelStatus
from qinfer.models.state import State, VersionState

MODELS = [f"m{number}" for number in range(200)]
TRIES_S = 30.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that logs of outages see."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def view(state: State, reason: str = "") -> dict[str, ModelStatus]:
    states = {1: VersionState(state, 1, reason)}
    return {name: ModelStatus(model=name, generation=1, versions=states) for name in MODELS}


def minute(changes: ChangeLog, clock: list[float], caplog: pytest.LogCaptureFixture, reason: str) -> int:
    """Returns how many lines a minute of tries has."""
    caplog.clear()
    for _ in range(2):
        changes.log(view(State.UNAVAILABLE, reason), view(State.LOADING))
        changes.log(view(State.LOADING), view(State.UNAVAILABLE, reason))
        clock[0] += TRIES_S
    return len(caplog.records)


def test_200_broken_models_are_told_once_in_ten_minutes(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    changes = ChangeLog()

    minutes = [minute(changes, clock, caplog, "no file") for _ in range(20)]

    assert minutes[0] == 400  # that they load, and that they failed
    assert sum(minutes[1:]) == 200


def test_models_whose_error_comes_and_goes_are_told_once_in_ten_minutes(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    changes = ChangeLog()
    well = {name: ModelStatus(model=name, generation=1) for name in MODELS}
    broken = {name: ModelStatus(model=name, generation=1, error="no version") for name in MODELS}

    for _ in range(20):
        changes.log(well, broken)
        changes.log(broken, well)
        clock[0] += TRIES_S - 1

    assert len(caplog.records) == 200


def test_another_reason_is_told(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    changes = ChangeLog()
    minute(changes, clock, caplog, "no file")

    assert minute(changes, clock, caplog, "no memory") == 200


def test_what_was_loaded_is_told_and_fails_anew(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    changes = ChangeLog()
    minute(changes, clock, caplog, "no file")
    caplog.clear()

    changes.log(view(State.LOADING), view(State.READY))
    changes.log(view(State.READY), view(State.UNAVAILABLE, "no file"))

    assert len(caplog.records) == 400
