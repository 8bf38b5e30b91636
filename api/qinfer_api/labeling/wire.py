"""Bodies of Label Studio's ML-backend calls and their answers.

Addresses and tokens in a call are ignored; settings name Label Studio and its token.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from qinfer.errors import InvalidRequest
from qinfer.labeling.mapping import shown
from qinfer.tensors import Bytes
from qinfer.wire.json_scan import check_depth

MAX_ID = 2**53 - 1

_Project = str | int | float | None
_Tasks = list[Annotated[dict[str, Any], Meta(extra_json_schema={"required": ["id", "data"]})]]
_AT = re.compile(r" - at `\$\.(?P<name>\w+).*`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")


class LabelCall(msgspec.Struct, frozen=True, kw_only=True, rename={"said_project": "project"}):
    """A call of Label Studio."""

    said_project: _Project = None

    @property
    def project(self) -> int | None:
        """The project's id, if the call has it."""
        return _project(self.said_project)


class PredictCall(LabelCall, frozen=True, kw_only=True):
    """A call of `predict`.

    Attributes:
        tasks: The tasks, with their ids and data.
        project: The project's id; Label Studio appends its time of creation: `12.1735689600`.
        label_config: The project's label config as XML.
        params: With a `context`, a person waits for the regions of one task.

    Example:
        {"project": "12.1735689600",
         "label_config": "<View><Text name='text' value='$text'/><Choices name='label' toName='text'/></View>",
         "tasks": [{"id": 7, "project": 12, "data": {"text": "I like it"}}]}
    """

    tasks: _Tasks = []
    label_config: str | None = None
    params: Any = None

    @property
    def is_interactive(self) -> bool:
        """Whether a person waits for the regions of one task."""
        return isinstance(self.params, dict) and self.params.get("context") is not None


class SetupCall(LabelCall, frozen=True, kw_only=True, rename={"said_project": "project", "label_config": "schema"}):
    """A call of `setup`.

    Attributes:
        project: The project's id; Label Studio appends its time of creation: `12.1735689600`.
        schema: The project's label config as XML.

    Example:
        {"project": "12.1735689600",
         "schema": "<View><Text name='text' value='$text'/><Choices name='label' toName='text'/></View>"}
    """

    label_config: str | None = None


class EventProject(msgspec.Struct, frozen=True):
    """The project of an event."""

    id: _Project = None


class EventCall(LabelCall, frozen=True, kw_only=True):
    """A webhook.

    Attributes:
        action: TASKS_CREATED queues the tasks; other actions do nothing.
        tasks: The tasks of the event; null if they were not sent.

    Example:
        {"action": "TASKS_CREATED", "project": {"id": 12},
         "tasks": [{"id": 7, "project": 12, "data": {"text": "I like it"}}]}
    """

    action: str
    said_project: EventProject | _Project = None  # type: ignore[assignment]  # a webhook may say more of it
    tasks: _Tasks | None = None

    @property
    def project(self) -> int | None:
        """The project's id, else that of the first task's project."""
        said = self.said_project
        found: object = said.id if isinstance(said, EventProject) else said
        return _project(self.tasks[0].get("project") if found is None and self.tasks else found)


Call = TypeVar("Call", bound=LabelCall)


class LabelHealth(msgspec.Struct, frozen=True):
    """The model accepts tasks.

    Attributes:
        status: UP
    """

    status: str
    model_class: str


class LabelSetup(msgspec.Struct, frozen=True):
    """The project fits.

    Attributes:
        model_version: The model in its predictions: `<model>:<version>`.
    """

    model_version: str


class LabelVersions(msgspec.Struct, frozen=True):
    """The ready versions, newest first."""

    versions: list[str]


class LabelPredictions(msgspec.Struct, frozen=True):
    """An answer for each task, in order.

    Attributes:
        results: A prediction; `{"error": …}` for a failed task; `[]` if the prediction is pushed later.

    Example:
        {"results": [{"result": [{"id": "q7-0", "type": "choices", "from_name": "label", "to_name": "text",
                                  "value": {"choices": ["pos"]}}],
                      "score": 0.97, "model_version": "sentiment:1"}],
         "model_version": "sentiment:1"}
    """

    results: list[dict[str, Any] | list[Any]]
    model_version: str


class LabelEvent(msgspec.Struct, frozen=True):
    """The result of a webhook.

    Attributes:
        queued: New tasks that are durably queued.
    """

    action: str
    queued: int


class LabelOrder(msgspec.Struct, frozen=True):
    """The result of an order.

    Attributes:
        found: Tasks that were examined.
        queued: Tasks that were newly queued.
        next: The `page` to continue with; null at the end.
    """

    found: int
    queued: int
    next: int | None


def read_call(body: Bytes, max_depth: int, kind: type[Call]) -> Call:
    """Parses a call."""
    check_depth(body, max_depth)
    try:
        call = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_explained(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    _ = call.project
    return call


def task_id(task: Mapping[str, Any]) -> int:
    """Returns the id of a task."""
    number = task.get("id")
    if type(number) is not int or not 0 < number <= MAX_ID:
        raise InvalidRequest(f"a task has a number as its 'id'; got {shown(number)}")
    return number


def _explained(text: str) -> str:
    if missing := _MISSING.match(text):
        return f"the body has no '{missing['name']}', such as Label Studio sends"
    at = _AT.search(text)
    reason = _AT.sub("", text).replace("`", "")
    return f"'{at['name']}': {reason}" if at else f"the body is a JSON object: {reason}"


def _project(value: object) -> int | None:
    if value is None or value == "":
        return None
    text = str(value).partition(".")[0] if type(value) in (int, str, float) else ""
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and 0 < int(text) <= MAX_ID):
        raise InvalidRequest(f"'project' is the project's id, such as 12 or \"12.1735689600\"; got {shown(value)}")
    return int(text)
