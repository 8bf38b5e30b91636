"""Pins: what they keep, and why they can't."""

import pytest

from qinfer.models.readiness import ExecutedVersion, Pin, executed, executed_hash, joint_hash, kept_by_pins, why_lost
from qinfer.models.state import State, StepVersion, StoredModel, VersionState, WorkerRecord

A, B = "sha256:a", "sha256:b"


def pin(version: int = 1, content_hash: str = A, model: str = "m", holder: str = "j") -> Pin:
    return Pin(model=model, version=version, content_hash=content_hash, reason="job", holder=holder, expires_at=9.0)


def worker(state: State, executed: str = "", *, generation: int = 1, reason: str = "") -> WorkerRecord:
    states = {"m": {1: VersionState(state, generation, reason, executed_hash=executed)}}
    return WorkerRecord(id=f"{state}{executed}", started_at=0.0, models=states)


READY_A, READY_B, READY_NONE = (worker(State.READY, executed) for executed in (A, B, ""))
LOADING, GONE = worker(State.LOADING), worker(State.UNAVAILABLE, reason="no such file")


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([READY_A, READY_A, LOADING, GONE], A),
        ([READY_A, READY_B], ""),  # they do not agree
        ([READY_A, READY_NONE], ""),  # an earlier qinfer's
        ([READY_A, worker(State.READY, B, generation=2)], B),  # the first is about to load that, too
        ([LOADING, GONE], ""),
        ([], ""),
    ],
)
def test_a_version_executes_what_the_workers_of_its_newest_generation_agree_on(
    workers: list[WorkerRecord], expected: str
) -> None:
    assert executed_hash(workers, "m", 1) == expected


def ensemble(*steps: StepVersion) -> WorkerRecord:
    states = {"e": {1: VersionState(State.READY, 1, executed_hash=B, steps=steps)}}
    return WorkerRecord(id="ensemble", started_at=0.0, models=states)


def test_an_ensemble_executes_its_steps_too() -> None:
    """As long as it is known what they execute, and workers run the same; another version of a step is another hash."""
    latest, first = StepVersion("m", 0, 1), StepVersion("m", 1, 1)
    found = executed([ensemble(latest, first), READY_A], "e", 1)

    assert found == (ExecutedVersion("e", 1, B), ExecutedVersion("m", 1, A, 0), ExecutedVersion("m", 1, A, 1))
    assert executed([ensemble(latest), READY_NONE], "e", 1) == ()
    assert executed([ensemble(latest), ensemble(), READY_A], "e", 1) == ()
    assert joint_hash(found) != joint_hash(
        [ExecutedVersion("e", 1, B), ExecutedVersion("m", 2, A), ExecutedVersion("m", 1, A, 1)]
    )
    assert joint_hash(executed([READY_A], "m", 1)) == A


def test_pins_keep_what_the_version_policy_has_dropped() -> None:
    """A version that it selects needs none; each holder may have pinned other content."""
    pins = [pin(), pin(1, B, holder="other"), pin(2), pin(3, ""), pin(1, model="another")]

    assert kept_by_pins(pins, StoredModel("m", versions=(2,))) == {1: {A, B}, 3: {""}}


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([GONE, READY_A], ""),
        ([READY_B, READY_NONE], ""),  # an earlier qinfer's worker may have it
        ([GONE, LOADING], ""),
        ([], ""),
        ([GONE], "version 1 of model 'm' can't be kept: no such file"),
        ([READY_B], "version 1 of model 'm' can't be kept: its files or configuration have changed"),
    ],
)
def test_a_pin_is_lost_when_no_worker_can_keep_it(workers: list[WorkerRecord], expected: str) -> None:
    assert why_lost(pin(), workers) == expected


def test_a_pin_of_any_content_is_kept_by_any() -> None:
    """Its job is not planned; or it was planned by an earlier qinfer, whose hash says nothing of what is executed."""
    assert why_lost(pin(content_hash=""), [READY_B]) == why_lost(pin(content_hash="0a1b"), [READY_B]) == ""
