"""Readiness and placement: pure decisions."""

import msgspec
import pytest

from qinfer.models.readiness import (
    LoadOutcome,
    LoadProgress,
    ModelStatus,
    assess,
    failed_loads,
    have_begun,
    is_placed,
    outcome,
)
from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord


def stored(
    generation: int = 2, versions: tuple[int, ...] = (1,), error: str = "", min_workers: int = 1
) -> dict[str, StoredModel]:
    fields = {"generation": generation, "versions": versions, "error": error, "min_workers": min_workers}
    return {"m": msgspec.convert({"model": "m", "config": "{}", **fields}, StoredModel)}


def worker(state: State, generation: int = 2, reason: str = "", version: int = 1) -> WorkerRecord:
    models = {"m": {version: VersionState(state, generation, reason)}}
    return WorkerRecord(id=f"{state}{generation}", started_at=0.0, models=models)


def status_of(*workers: WorkerRecord, generation: int = 2) -> ModelStatus:
    return assess({"m": DesiredState("m", generation)}, stored(generation), workers)["m"]


def test_a_loaded_version_of_a_live_worker_is_ready() -> None:
    """Desired and loaded at this generation."""
    status = status_of(worker(State.READY))

    assert status.ready_versions == (1,)
    assert status.is_ready


def test_without_a_worker_a_version_is_unavailable_and_says_why() -> None:
    """The reason is for people who look at the status."""
    status = status_of()

    assert status.versions[1] == VersionState(State.UNAVAILABLE, 2, "no live worker has loaded it")
    assert not status.is_ready


def test_the_best_of_several_workers_counts() -> None:
    """One worker that has it is enough."""
    status = status_of(worker(State.UNAVAILABLE, reason="out of memory"), worker(State.READY), worker(State.LOADING))

    assert status.versions[1] == VersionState(State.READY, 2)


def test_a_model_that_says_no_on_one_worker_is_ready_by_another() -> None:
    """And READY in either case: its requests execute."""
    says_no = WorkerRecord(
        id="w", started_at=0.0, models={"m": {1: VersionState(State.READY, 2, unready="no weights")}}
    )

    assert status_of(says_no).versions[1].unready == "no weights"
    assert status_of(says_no).is_ready
    assert status_of(says_no, worker(State.READY)).versions[1].unready == ""


def test_a_failed_load_shows_its_reason() -> None:
    """It is passed on from the worker."""
    assert status_of(worker(State.UNAVAILABLE, reason="bad file")).versions[1].reason == "bad file"


def test_a_load_that_fails_names_each_version() -> None:
    states = {version: VersionState(State.UNAVAILABLE, 1, f"no file {version}", tried=2) for version in (1, 3)}
    found = outcome(stored(versions=(1, 3))["m"], [WorkerRecord(id="w", started_at=0.0, models={"m": states})])

    assert found == LoadOutcome(
        LoadProgress.FAILED,
        "version 1 is at UNAVAILABLE state: Internal: no file 1;"
        "version 3 is at UNAVAILABLE state: Internal: no file 3;",
    )


def test_a_reload_makes_no_gap() -> None:
    """While no worker has the new generation, one that has the old one serves; then the new one counts."""
    assert status_of(worker(State.READY, 2), worker(State.LOADING, 3), generation=3).versions[1].generation == 2
    assert status_of(worker(State.READY, 2), worker(State.READY, 3), generation=3).versions[1].generation == 3


def test_a_generation_from_the_future_does_not_count() -> None:
    """A record of a generation that is not desired yet, or any more, makes nothing READY."""
    assert status_of(worker(State.READY, 9)).ready_versions == ()


def test_one_version_that_is_not_ready_makes_the_model_not_ready() -> None:
    """Strict readiness counts every version; the ready one can be asked all the same."""
    status = assess({"m": DesiredState("m", 2)}, stored(versions=(1, 3)), [worker(State.READY)])["m"]

    assert status.ready_versions == (1,)
    assert not status.is_ready


@pytest.mark.parametrize(
    ("states", "begun"),
    [
        ([], True),
        ([State.LOADING], False),
        ([None], False),
        ([State.UNAVAILABLE], True),
        ([State.UNAVAILABLE, State.LOADING], False),
        ([State.READY, State.LOADING, State.UNAVAILABLE, None], True),
    ],
)
def test_a_server_begins_with_its_first_model(states: list[State | None], *, begun: bool) -> None:
    """That can be asked, or when all have failed; without models at once. `None` = no worker reports on it."""
    names = [f"m{number}" for number in range(len(states))]
    models = {name: {1: VersionState(state, 2)} for name, state in zip(names, states, strict=True) if state}
    reports = [WorkerRecord(id="w", started_at=0.0, models=models)]
    configurations = {name: StoredModel(name, 2, "{}", (1,)) for name in names}

    statuses = assess({name: DesiredState(name, 2) for name in names}, configurations, reports)

    assert have_begun(statuses.values()) is begun


@pytest.mark.parametrize(
    ("state", "failed"),
    [
        (None, False),
        (VersionState(State.READY, 2, tried=2), False),
        (VersionState(State.LOADING, 2, "its configuration is being completed by a worker"), False),
        (VersionState(State.UNAVAILABLE, 2, "no such file", tried=2), True),
        (VersionState(State.READY, 1, "no such file", tried=2), True),
        (VersionState(State.READY, 1, "no such file", tried=1), False),
    ],
)
def test_a_load_that_failed_is_known_though_an_earlier_one_serves(state: VersionState | None, *, failed: bool) -> None:
    """Of the newest generation, by any live worker; another that succeeded does not hide it."""
    bad = WorkerRecord(id="bad", started_at=0.0, models={"m": {1: state}} if state else {})
    workers = [worker(State.READY, 2), bad]
    statuses = assess({"m": DesiredState("m", 2)}, stored(), workers)

    assert failed_loads(statuses.values(), workers) == {("m", 1): failed}


def test_a_configuration_that_is_wrong_is_a_failed_load() -> None:
    """No worker need have tried."""
    wrong = {"m": StoredModel("m", 2, "{}", (), error="no such backend")}

    assert failed_loads(assess({"m": DesiredState("m", 2)}, wrong, []).values(), []) == {("m", 0): True}


def test_what_should_not_be_loaded_is_not_shown() -> None:
    """An unloaded model is unknown to requests."""
    assert assess({"m": DesiredState("m", 2, load=False)}, stored(), [worker(State.READY)]) == {}


@pytest.mark.parametrize(
    ("workers", "is_ready"),
    [
        ([], True),
        ([worker(State.LOADING)], True),
        ([worker(State.UNLOADING)], True),
        ([worker(State.READY)], True),
        ([worker(State.UNAVAILABLE, reason="bad file")], False),
        ([worker(State.UNAVAILABLE, reason="bad file"), worker(State.LOADING)], True),
    ],
    ids=["none", "loading", "unloading", "ready", "failed", "another one loads"],
)
def test_a_model_that_needs_no_worker_is_ready_without(workers: list[WorkerRecord], is_ready: bool) -> None:  # noqa: FBT001
    """Its requests wait for one; but not where all that there are could not load it."""
    status = assess({"m": DesiredState("m", 2)}, stored(min_workers=0), workers)["m"]

    assert status.is_ready is is_ready
    assert status.versions[1].generation == 2


def test_a_model_that_needs_no_worker_needs_a_good_configuration() -> None:
    """Nobody could ever load it."""
    status = assess({"m": DesiredState("m", 2)}, stored(min_workers=0, error="no file"), [])["m"]

    assert not status.is_ready
    assert status.loadable_versions == ()


@pytest.mark.parametrize(
    ("workers", "loadable"),
    [([], (1, 3)), ([worker(State.LOADING)], (1, 3)), ([worker(State.UNAVAILABLE, reason="bad file")], (3,))],
    ids=["no worker", "loading", "failed"],
)
def test_what_can_be_loaded_accepts_requests_that_may_wait(
    workers: list[WorkerRecord], loadable: tuple[int, ...]
) -> None:
    """Unless every live worker has failed to load it."""
    assert assess({"m": DesiredState("m", 2)}, stored(versions=(1, 3)), workers)["m"].loadable_versions == loadable


@pytest.mark.parametrize(
    ("models", "error"), [(stored(versions=(), error="no file"), "no file"), ({}, "its configuration is not stored")]
)
def test_a_model_that_cannot_be_loaded_has_an_error(models: dict[str, StoredModel], error: str) -> None:
    """A bad configuration, or a wish whose configuration is not there yet."""
    status = assess({"m": DesiredState("m", 2)}, models, [])["m"]

    assert status.error == error
    assert not status.is_ready


@pytest.mark.parametrize(
    ("globs", "placed"),
    [(("*",), True), (("bert-*", "m?"), True), (("bert-*",), False), (("M1",), False), ((), False)],
)
def test_placement(globs: tuple[str, ...], placed: bool) -> None:  # noqa: FBT001
    """Any glob that matches places the model; case matters."""
    assert is_placed("m1", globs) is placed


@pytest.mark.parametrize(
    ("globs", "placed"), [(("*",), False), (("m*", "?m"), False), (("~m",), True), (("m", "~*"), True)]
)
def test_a_model_that_is_apart_needs_a_glob_that_is_apart(globs: tuple[str, ...], placed: bool) -> None:  # noqa: FBT001
    """An analysis in place has a worker of its own."""
    assert is_placed("~m", globs) is placed
