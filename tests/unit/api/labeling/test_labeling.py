"""What Label Studio sends, how its client reads what it answers, and which tasks are asked for again."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from qinfer.core.settings import LabelingSettings
from qinfer.errors import InvalidRequest
from qinfer.labeling.tasks import LabelState, LabelTask
from qinfer_api.labeling.intake import PredictionReason, _attempt
from qinfer_api.labeling.studio import LabelStudio, StudioAway, StudioFailed, StudioRefused
from qinfer_api.labeling.wire import EventCall, PredictCall, read_call, task_id
from tests.support.servers.label_studio_server import LEGACY, PERSONAL, LabelStudioServer, label_studio

NAME = "ls-12-7-v1-0123456789abcdef"


def encoded(body: object) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("project", "number"),
    [("12.1735689600", 12), ("12", 12), (12, 12), (12.5, 12), (None, None), ("", None)],
)
def test_projects_come_in_several_forms(project: object, number: int | None) -> None:
    """Label Studio appends the instant of a project's creation; older ones said the number only."""
    assert read_call(encoded({"project": project, "tasks": []}), 100, PredictCall).project == number


@pytest.mark.parametrize(
    "project", ["a", "-1", "0", [1], {"id": 1}, True, "9" * 30, "0" * 19 + "1" * 5000, 1e300, "١٢"]
)
def test_what_is_no_project_is_refused(project: object) -> None:
    """With what was sent."""
    with pytest.raises(InvalidRequest, match="'project'"):
        read_call(encoded({"project": project}), 100, PredictCall)


def test_a_person_waits_where_there_is_a_context() -> None:
    """Label Studio sends null otherwise."""
    for params, is_interactive in ((None, False), ({"context": None}, False), ({"context": {}}, True), (7, False)):
        assert read_call(encoded({"params": params}), 100, PredictCall).is_interactive is is_interactive


def test_an_event_names_its_project() -> None:
    """As an object, or in its tasks."""
    tasks = [{"id": 1, "project": 5, "data": {}}]
    assert (
        read_call(encoded({"action": "TASKS_CREATED", "project": {"id": 12}, "tasks": tasks}), 100, EventCall).project
        == 12
    )
    assert read_call(encoded({"action": "TASKS_CREATED", "tasks": tasks}), 100, EventCall).project == 5
    assert read_call(encoded({"action": "PROJECT_UPDATED"}), 100, EventCall) == EventCall(action="PROJECT_UPDATED")
    with pytest.raises(InvalidRequest, match="'action'"):
        read_call(b"{}", 100, EventCall)


@pytest.mark.parametrize("number", [None, "7", True, 0, -1, 1.5, 2**53])
def test_tasks_have_numbers(number: object) -> None:
    """Nothing else names a task."""
    with pytest.raises(InvalidRequest, match="'id'"):
        task_id({"id": number})
    assert task_id({"id": 7}) == 7


def entry(state: LabelState, *, attempt: int = 1, age_s: float = 0.0) -> LabelTask:
    name = NAME if attempt == 1 else f"{NAME}-{attempt}"
    return LabelTask(task=7, request_id=name, version=1, state=state, attempt=attempt, updated_at=1000.0 - age_s)


@pytest.mark.parametrize(
    ("known", "reason", "attempt"),
    [
        (None, PredictionReason.CREATED, 1),
        (entry(LabelState.FAILED), PredictionReason.CREATED, 0),
        (entry(LabelState.DONE, age_s=9999), PredictionReason.CREATED, 0),
        (entry(LabelState.WAITING, age_s=9999), PredictionReason.ORDERED, 0),
        (entry(LabelState.OPEN, age_s=9999), PredictionReason.ORDERED, 0),
        (entry(LabelState.SENDING, age_s=9999), PredictionReason.ASKED, 0),
        (entry(LabelState.DONE), PredictionReason.ASKED, 0),
        (entry(LabelState.DONE, age_s=61), PredictionReason.ASKED, 2),
        (entry(LabelState.FAILED, age_s=61), PredictionReason.ASKED, 0),
        (entry(LabelState.FAILED, attempt=3), PredictionReason.ORDERED, 4),
        (entry(LabelState.DONE), PredictionReason.ORDERED, 2),
    ],
)
def test_what_is_asked_for_again(known: LabelTask | None, reason: PredictionReason, attempt: int) -> None:
    """Never what is under way; what failed, by a person's order only: Label Studio asks at every look."""
    assert _attempt(known, NAME, reason, 1000.0) == attempt


def test_other_data_is_another_request() -> None:
    """Whatever became of the one before."""
    assert _attempt(entry(LabelState.OPEN, attempt=3), "ls-12-7-v1-ffff", PredictionReason.CREATED, 1000.0) == 1


@pytest.fixture
async def server() -> AsyncIterator[LabelStudioServer]:
    async with label_studio() as server:
        yield server


@pytest.fixture
async def studio(server: LabelStudioServer) -> AsyncIterator[LabelStudio]:
    settings = LabelingSettings.model_validate({"url": server.url + "/", "token": LEGACY, "call_timeout_s": 5.0})
    studio = LabelStudio(settings)
    yield studio
    await studio.close()


@pytest.mark.parametrize(
    ("status", "error"),
    [(500, StudioFailed), (503, StudioAway), (429, StudioAway), (302, StudioAway), (401, StudioAway),
     (404, StudioRefused), (403, StudioRefused), (200, StudioAway)],
)  # fmt: skip
async def test_what_answers_mean(
    server: LabelStudioServer, studio: LabelStudio, status: int, error: type[Exception]
) -> None:
    """Whether later may be better is told apart; what is no JSON is not repeated."""
    server.failures["/api/"] = [status]

    with pytest.raises(error) as raised:
        await studio.push(12, [])

    assert "<html>" not in str(raised.value)
    assert await studio.push(12, []) == 0


async def test_a_project_is_not_read_at_every_push(server: LabelStudioServer, studio: LabelStudio) -> None:
    """Its label config is remembered for a while."""
    for _ in range(3):
        assert await studio.label_config(12) == server.configs[12]
    assert server.calls == ["GET /api/projects/12/"]
    with pytest.raises(StudioRefused, match="Not found"):
        await studio.label_config(13)


async def test_tasks_are_read_by_pages(server: LabelStudioServer, studio: LabelStudio) -> None:
    """Behind the last one there is none."""
    server.add(*["a"] * 150)

    pages = [await studio.tasks(12, page) for page in (1, 2, 3)]

    assert [(len(tasks), has_more) for tasks, has_more in pages] == [(100, True), (50, False), (0, False)]


@pytest.mark.parametrize("access", [None, "", 7, "a.b.c", "nothing", "e30.e30.x"])
async def test_odd_access_tokens(server: LabelStudioServer, access: Any) -> None:
    """What gives none is not Label Studio; one that says no end is used for some minutes."""
    settings = LabelingSettings.model_validate({"url": server.url, "token": PERSONAL})
    studio = LabelStudio(settings)
    server._refresh = lambda body: (200, encoded({"access": access}))  # type: ignore[method-assign]  # the test's
    with pytest.raises((StudioAway, StudioFailed, StudioRefused)):
        await studio.push(12, [])
    await studio.close()
    assert server.refreshes == 0
