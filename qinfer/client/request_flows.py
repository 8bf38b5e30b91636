"""The client's calls about many stored requests as flows (`qinfer.client.steps`), without I/O."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict
from urllib.parse import urlencode

from qinfer.client.flows import status_of
from qinfer.client.results import RequestHandle, RequestStatus
from qinfer.client.steps import Flow, Policy, Send, call, json_object
from qinfer.errors import InvalidRequest, RequestNotFound

PAGE = 500


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
    given, found, after = given_filters(filters), list[RequestStatus](), ""
    while len(found) < limit:
        query = given | {"limit": min(limit - len(found), PAGE)} | ({"after": after} if after else {})
        reply = yield from call(policy, Send("GET", f"/v1/requests?{urlencode(query, doseq=True)}", {}))
        fields = json_object(policy, reply)
        found += [status_of(entry, "") for entry in _objects(fields, "requests")]
        after = str(fields.get("next") or "")
        if not after:
            break
    return found


def timeline(policy: Policy, handle: RequestHandle) -> Flow[list[dict[str, Any]]]:
    """Returns the steps of a request."""
    reply = yield from call(policy, Send("GET", f"{handle.url}/timeline", {}), not_found=RequestNotFound)
    return [dict(event) for event in _objects(json_object(policy, reply), "events")]


def _objects(fields: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    entries = fields.get(name)
    return (entry for entry in entries if isinstance(entry, Mapping)) if isinstance(entries, list) else iter(())
