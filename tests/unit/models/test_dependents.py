"""What follows from ensembles that use models: order, readiness, new generations, unloads."""

from itertools import pairwise

import msgspec
import pytest

from qinfer.models.config.config import parse, to_json
from qinfer.models.dependents import in_order, kind_of_ensemble, labels_of, unneeded, users_of, uses_of
from qinfer.models.readiness import assess
from qinfer.models.state import DesiredState, ModelUse, State, StoredModel, VersionState, WorkerRecord

STEP = StoredModel("step", generation=1, versions=(1, 2))
OTHER = StoredModel("other", generation=1, versions=(1,))
INNER = StoredModel("inner", generation=1, versions=(1,), uses=(ModelUse("step"),))
OUTER = StoredModel("outer", generation=1, versions=(1,), uses=(ModelUse("inner"), ModelUse("other")))
STORED = {one.model: one for one in (STEP, OTHER, INNER, OUTER)}


def worker(*models: str, versions: tuple[int, ...] = (1,)) -> WorkerRecord:
    ready = {version: VersionState(State.READY, 1) for version in versions}
    return WorkerRecord(id="w", started_at=0.0, models=dict.fromkeys(models, ready))


def reasons(worker: WorkerRecord, stored: dict[str, StoredModel] | None = None) -> dict[str, str]:
    """Returns model → why its first version is not READY; empty = it is."""
    wishes = {name: DesiredState(name, 1) for name in stored or STORED}
    statuses = assess(wishes, stored or STORED, [worker])
    return {name: "" if 1 in one.ready_versions else one.versions[1].reason for name, one in statuses.items()}


def test_models_come_after_those_that_they_use() -> None:
    assert [one.model for one in in_order([OUTER, INNER, OTHER, STEP])] == ["step", "inner", "other", "outer"]


def test_ensembles_that_use_one_another_have_an_order_too() -> None:
    """Their load says what is wrong."""
    again = msgspec.structs.replace(STEP, uses=(ModelUse("outer"),))

    assert {one.model for one in in_order([again, INNER, OTHER, OUTER])} == set(STORED)


def test_ensembles_may_be_deep_within_one_another() -> None:
    """A chain of them, longer than Python lets functions call one another, stops no view of the models."""
    names = [f"e{number:04}" for number in range(1200)]
    chain = [StoredModel(name, 1, versions=(1,), uses=(ModelUse(below),)) for name, below in pairwise(reversed(names))]
    stored = {one.model: one for one in (*chain, StoredModel(names[0], 1, versions=(1,)))}

    assert [one.model for one in in_order(stored.values())] == names
    assert set(reasons(worker(*names), stored).values()) == {""}
    assert "" not in reasons(worker(*names[1:]), stored).values()


def test_labels_of_ensembles_that_contain_others_many_times() -> None:
    """Each level has two steps of the one below: a billion ways lead to the labels of the last."""
    stored = {"e0": StoredModel("e0", 1, labels={"y": ("cat", "dog")})}
    for level in range(1, 31):
        below = f"step {{ model_name: 'e{level - 1}' model_version: -1 input_map {{ key: 'x' value: 'x' }} "
        steps = [below + f"output_map {{ key: 'y' value: '{tensor}' }} }}" for tensor in ("y", "z")]
        config = parse(f"name: 'e{level}' platform: 'ensemble' ensemble_scheduling {{ {' '.join(steps)} }}")
        stored[config.name] = StoredModel(config.name, 1, to_json(config), uses=uses_of(config))

    assert labels_of(stored["e30"], stored) == {"y": ("cat", "dog"), "z": ("cat", "dog")}


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
    needs = msgspec.structs.replace(INNER, uses=(ModelUse("step", 2),))
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
    wishes = {name: DesiredState(name, 1, load=name in loaded, dependent=name in dependent) for name in STORED}

    assert sorted(unneeded("outer", wishes, STORED)) == expected


def test_ensembles_with_decoupled_steps() -> None:
    """Whatever they say themselves, and however deep the step is."""
    says = '{"model_transaction_policy":{"decoupled":true}}'
    liar = msgspec.structs.replace(INNER, model="liar", config=says)

    assert not any(kind_of_ensemble(one, STORED).decoupled for one in (INNER, OUTER, liar))

    known = STORED | {"step": msgspec.structs.replace(STEP, config=says)}
    assert all(kind_of_ensemble(one, known).decoupled for one in (INNER, OUTER, liar))
