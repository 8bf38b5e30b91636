"""What follows from ensembles that use models: order, readiness, new generations, unloads."""

import msgspec
import pytest

from qinfer.models.dependents import in_order, unneeded, users_of
from qinfer.models.readiness import assess
from qinfer.models.state import Desired, State, StoredModel, Use, VersionState, WorkerRecord

STEP = StoredModel("step", generation=1, versions=(1, 2))
OTHER = StoredModel("other", generation=1, versions=(1,))
INNER = StoredModel("inner", generation=1, versions=(1,), uses=(Use("step"),))
OUTER = StoredModel("outer", generation=1, versions=(1,), uses=(Use("inner"), Use("other")))
STORED = {one.model: one for one in (STEP, OTHER, INNER, OUTER)}


def worker(*models: str, versions: tuple[int, ...] = (1,)) -> WorkerRecord:
    ready = {version: VersionState(State.READY, 1) for version in versions}
    return WorkerRecord(id="w", started_at=0.0, models=dict.fromkeys(models, ready))


def reasons(worker: WorkerRecord, stored: dict[str, StoredModel] | None = None) -> dict[str, str]:
    """Returns model → why its first version is not READY; empty = it is."""
    wishes = {name: Desired(name, 1) for name in stored or STORED}
    statuses = assess(wishes, stored or STORED, [worker])
    return {name: "" if 1 in one.ready_versions else one.versions[1].reason for name, one in statuses.items()}


def test_models_come_after_those_that_they_use() -> None:
    assert [one.model for one in in_order([OUTER, INNER, OTHER, STEP])] == ["step", "inner", "other", "outer"]


def test_ensembles_that_use_one_another_have_an_order_too() -> None:
    """Their load says what is wrong."""
    again = msgspec.structs.replace(STEP, uses=(Use("outer"),))

    assert {one.model for one in in_order([again, INNER, OTHER, OUTER])} == set(STORED)


def test_users_are_found_through_others() -> None:
    assert users_of(["step"], STORED) == ["inner", "outer"]
    assert users_of(["other"], STORED) == ["outer"]


def test_an_ensemble_is_ready_with_all_that_it_uses() -> None:
    assert set(reasons(worker("step", "other", "inner", "outer")).values()) == {""}


def test_an_ensemble_is_not_ready_without_a_step_of_one_within() -> None:
    said = reasons(worker("other", "inner", "outer"))

    assert said["inner"] == "ensemble 'inner' depends on 'step' which has no loaded version"
    assert said["outer"] == "ensemble 'outer' depends on 'inner' which has no loaded version"


def test_an_ensemble_that_needs_another_version() -> None:
    needs = msgspec.structs.replace(INNER, uses=(Use("step", 2),))
    stored = {"step": STEP, "inner": needs}

    assert reasons(worker("step", "inner"), stored)["inner"].endswith("whose required version 2 is not loaded")
    assert not reasons(worker("step", "inner", versions=(1, 2)), stored)["inner"]


@pytest.mark.parametrize(
    ("dependent", "loaded", "expected"),
    [
        (("step", "other", "inner"), ("step", "other", "inner", "outer"), ["inner", "other", "step"]),
        (("step", "inner"), ("step", "other", "inner", "outer"), ["inner", "step"]),
        (("step", "other"), ("step", "other", "inner", "outer"), ["other"]),
        ((), ("step", "other", "inner", "outer"), []),
    ],
)
def test_what_nobody_needs_any_more(dependent: tuple[str, ...], loaded: tuple[str, ...], expected: list[str]) -> None:
    """Only what was loaded for an ensemble, and what no other loaded one uses."""
    wishes = {name: Desired(name, 1, load=name in loaded, dependent=name in dependent) for name in STORED}

    assert sorted(unneeded("outer", wishes, STORED)) == expected
