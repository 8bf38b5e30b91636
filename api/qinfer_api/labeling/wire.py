"""What Label Studio sends to an ML backend, read; all of it is what somebody says, and only the tasks are used.

Addresses and tokens in it (`hostname`, `access_token`, `params`) are not looked at: where Label Studio is, and what
opens it, is a setting.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from qinfer.codec.json_depth import check_depth
from qinfer.errors import InvalidRequest

MAX_ID = 2**53 - 1
"""The largest id of a task or project."""


class Asked(NamedTuple):
    """A call of `predict` or `setup`.

    Attributes:
        project: The project's id; `None` where it is not said.
        tasks: The tasks, with their ids and data.
        label_config: The project's label config as XML; empty where it is not said.
        is_interactive: A person waits for the regions of one task.
    """

    project: int | None
    tasks: Sequence[Mapping[str, Any]]
    label_config: str
    is_interactive: bool


class Event(NamedTuple):
    """A webhook.

    Attributes:
        action: What happened, such as `TASKS_CREATED`.
        project: The project's id; `None` where it is not said.
        tasks: Its tasks; `None` where they were not sent.
    """

    action: str
    project: int | None
    tasks: Sequence[Mapping[str, Any]] | None


def read_call(body: bytes, max_depth: int, *, config: str = "label_config") -> Asked:
    """Reads a call of `predict`, or of `setup`, where the label config has another name.

    Raises:
        InvalidRequest: It is no JSON object, or a member has the wrong type.
    """
    document = _object(body, max_depth)
    label_config = document.get(config) or ""
    if not isinstance(label_config, str):
        raise InvalidRequest(f"'{config}' is the project's label config as text; got {_shown(label_config)}")
    params = document.get("params")
    context = params.get("context") if isinstance(params, dict) else None
    return Asked(
        _project(document.get("project")), _tasks(document.get("tasks", [])), label_config, context is not None
    )


def read_event(body: bytes, max_depth: int) -> Event:
    """Reads a webhook.

    Raises:
        InvalidRequest: It is no JSON object, or a member has the wrong type.
    """
    document = _object(body, max_depth)
    action, project, tasks = document.get("action"), document.get("project"), document.get("tasks")
    if not isinstance(action, str):
        raise InvalidRequest(f"a webhook names its 'action', such as TASKS_CREATED; got {_shown(action)}")
    if isinstance(project, dict):
        project = project.get("id")
    read = None if tasks is None else _tasks(tasks)
    if project is None and read:
        project = read[0].get("project")
    return Event(action, _project(project), read)


def task_id(task: Mapping[str, Any]) -> int:
    """Returns the id of a task.

    Raises:
        InvalidRequest: It has none.
    """
    number = task.get("id")
    if type(number) is not int or not 0 < number <= MAX_ID:
        raise InvalidRequest(f"a task has a number as its 'id'; got {_shown(number)}")
    return number


def _object(body: bytes, max_depth: int) -> dict[str, Any]:
    check_depth(body, max_depth)
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidRequest(f"the body is a JSON object; got {_shown(document)}")
    return document


def _tasks(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(task, dict) for task in value):
        raise InvalidRequest(f"'tasks' is a list of tasks, each an object; got {_shown(value)}")
    return value


def _project(value: object) -> int | None:
    """Reads a project: a number, or `<number>.<instant of its creation>`."""
    if value is None or value == "":
        return None
    text = str(value).partition(".")[0] if type(value) in (int, str, float) else ""
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and 0 < int(text) <= MAX_ID):
        raise InvalidRequest(f"'project' is the project's id, such as 12 or \"12.1735689600\"; got {_shown(value)}")
    return int(text)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
