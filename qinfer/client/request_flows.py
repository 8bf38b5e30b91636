"""The client's calls about many stored requests as flows (`qinfer.client.steps`), without I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from qinfer.client.flows import status_of
from qinfer.client.results import RequestHandle, RequestStatus, path_part
from qinfer.client.steps import (
    JSON,
    Flow,
    Pause,
    Policy,
    Send,
    call,
    converted,
    encode_json,
    json_object,
    objects,
    pages,
)
from qinfer.core.retry import Backoff
from qinfer.errors import InvalidRequest, RequestNotFound

_OPERATIONS = "/v1/operations"
_POLLS_S = (0.1, 2.0)


class RequestFilters(TypedDict, total=False):
    """A choice of stored requests; an omitted field chooses all.

    Attributes:
        model: A model, or an endpoint: the models of its targets.
        version: The model's version.
        state: The states, such as `["failed"]`.
        tenant: The tenant; other tenants than one's own need the scope `admin`.
        id_prefix: The beginning of the id.
        error: A part of the error's `<code>: <message>`, in letters of either case.
        older_than_s: The least age, in seconds since the acceptance.
        newer_than_s: The greatest age.
    """

    model: str
    version: int
    state: Sequence[str]
    tenant: str
    id_prefix: str
    error: str
    older_than_s: float
    newer_than_s: float


def given_filters(filters: RequestFilters) -> dict[str, Any]:
    """Returns the filters with values; refuses unknown ones."""
    if unknown := sorted(filters.keys() - RequestFilters.__annotations__.keys()):
        raise InvalidRequest(
            f"requests can't be chosen by '{unknown[0]}'; by {', '.join(RequestFilters.__annotations__)}"
        )
    given: dict[str, Any] = {name: value for name, value in filters.items() if value not in (None, "", (), [])}
    if isinstance(state := given.get("state"), str):
        given["state"] = [state]
    return given


def requests(policy: Policy, limit: int, filters: RequestFilters) -> Flow[list[RequestStatus]]:
    """Returns stored requests, page by page."""
    found = yield from pages(policy, "/v1/requests", "requests", given_filters(filters), limit)
    return [status_of(entry, "") for entry in found]


def timeline(policy: Policy, handle: RequestHandle) -> Flow[list[dict[str, Any]]]:
    """Returns the steps of a request."""
    reply = yield from call(policy, Send("GET", f"{handle.url}/timeline", {}), not_found=RequestNotFound)
    return objects(json_object(policy, reply), "events")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationStatus:
    """The state and the progress of an operation on many stored requests.

    Attributes:
        id: The operation's id.
        action: `cancel`, `purge`, `replay` or `discard`.
        state: `running`, `done` or `stopped`.
        found: Requests or dead letters that it has chosen so far; a dry run counts no others.
        changed: The exact number of changed ones.
        refused: The number of unchangeable ones, such as dead letters without tensors.
        total: The number to look at; `None` without the scope `admin`.
        looked: The number looked at; `None` without the scope `admin`.
        fields: All fields of the gateway's answer, such as `reason` and `sample`.
    """

    id: str
    action: str
    state: str
    found: int = 0
    changed: int = 0
    refused: int = 0
    total: int | None = None
    looked: int | None = None
    fields: Mapping[str, Any]


OnOperation = Callable[[OperationStatus], object]


def operate(
    policy: Policy, action: str, filters: RequestFilters, observe: OnOperation, *, dry_run: bool, wait_s: float
) -> Flow[OperationStatus]:
    """Starts an operation, and waits up to `wait_s` for its end."""
    body = {"action": action, "filter": given_filters(filters), "dry_run": dry_run}
    send, pauses = Send("POST", _OPERATIONS, JSON, encode_json("the operation", body)), Backoff(*_POLLS_S, factor=1.5)
    ends_s = policy.clock.monotonic_s() + wait_s
    while True:
        reply = yield from call(policy, send, not_found=RequestNotFound)
        status = _operation(policy, json_object(policy, reply))
        observe(status)
        left_s = ends_s - policy.clock.monotonic_s()
        if status.state != "running" or left_s <= 0:
            return status
        yield Pause(min(pauses.next_s(), left_s))
        send = Send("GET", f"{_OPERATIONS}/{path_part('the operation', status.id)}", {})


def operations(policy: Policy, limit: int) -> Flow[list[OperationStatus]]:
    """Returns the newest operations."""
    reply = yield from call(policy, Send("GET", f"{_OPERATIONS}?limit={limit}", {}))
    return [_operation(policy, one) for one in objects(json_object(policy, reply), "operations")]


def stop_operation(policy: Policy, operation_id: str) -> Flow[OperationStatus]:
    """Stops an operation."""
    send = Send("DELETE", f"{_OPERATIONS}/{path_part('the operation', operation_id)}", {})
    return _operation(policy, json_object(policy, (yield from call(policy, send, not_found=RequestNotFound))))


def _operation(policy: Policy, fields: Mapping[str, Any]) -> OperationStatus:
    return converted(policy, {**fields, "fields": fields}, OperationStatus, "operation")
