"""Stored requests: lists by a filter, one with its timeline and outputs, and operations on many."""

import asyncio
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from qinfer.core.api_keys import Scope
from qinfer.errors import Forbidden, InvalidRequest, QinferError
from qinfer.queue.entries import RequestRecord, RequestState
from qinfer.queue.values import LARGE_BYTES
from qinfer_api.console.tensors import ShownTensor, view_of
from qinfer_api.console.visit import PAGE_ROWS, Pages, Visit
from qinfer_api.requests.listing import RequestFilter, list_page, read_filter, timeline_of
from qinfer_api.requests.operations import NewOperation, OperationAction
from qinfer_api.requests.records import address_of, shown_id

MOST_RESPONSES = 50
MOST_OPERATIONS = 100
_FILTER = ("model", "tenant", "id_prefix", "error", "older_than_s", "newer_than_s")


class RequestResult(NamedTuple):
    """The outputs of each response of an ended request, or why it has no outputs."""

    responses: list[list[ShownTensor]]
    problem: str = ""


def requests_routes(pages: Pages) -> list[Route]:
    """Returns the routes of these pages."""
    one = {"cancel": (_cancel, Scope.INFER)}
    operated = {"again": (_again, Scope.INFER), "stop": (_stop, Scope.INFER)}
    return [
        pages.route("/requests", requests, Scope.VIEWER, {"operate": (operate, Scope.INFER)}),
        pages.route("/requests/{request}", request, Scope.VIEWER, one),
        pages.route("/operations", operations, Scope.VIEWER),
        pages.route("/operations/{operation}", operation, Scope.VIEWER, operated),
    ]


def asked_filter(visit: Visit, *, has_state: bool = True) -> RequestFilter:
    """Reads the filter of a list's form; a wrong field becomes the page's problem, and chooses all."""
    try:
        return _read_query(visit, has_state=has_state)
    except InvalidRequest as error:
        visit.problem = visit.problem or error.message
        return RequestFilter()


def _read_query(visit: Visit, *, has_state: bool = True) -> RequestFilter:
    given: dict[str, Any] = {name: visit.query(name) for name in _FILTER if visit.query(name)}
    if has_state and visit.query("state"):
        given["state"] = [visit.query("state")]
    return read_filter(given, strict=False)


async def requests(visit: Visit) -> Response:
    """Lists stored requests."""
    chosen = asked_filter(visit)
    try:
        records, following = await list_page(
            visit.parts.services.requests, visit.context, chosen, visit.query("after"), PAGE_ROWS
        )
    except (InvalidRequest, Forbidden) as error:
        visit.problem, records, following = error.message, [], ""
    return visit.render(
        "requests.html",
        "Requests",
        "requests",
        rows=[(record, shown_id(record.address)) for record in records],
        following=following,
        chosen=chosen,
        query=query_of(visit),
        states=list(RequestState),
        models=visit.parts.services.catalog.known()[:500],
        now_s=visit.parts.services.requests.now_s(),
    )


def query_of(visit: Visit) -> str:
    """Returns the query of a list's page without its place."""
    return "&".join(part for part in visit.request.url.query.split("&") if not part.startswith("after="))


async def operate(visit: Visit) -> str:
    """Creates a dry run of an operation on all that fit the list's filter, and shows it."""
    action = visit.value("action")
    if action not in list(OperationAction):
        raise InvalidRequest("the form asks for no action of this page; reload it")
    return await _create(visit, OperationAction(action), _read_query(visit), dry_run=True)


async def _create(visit: Visit, action: OperationAction, chosen: RequestFilter, *, dry_run: bool) -> str:
    new = NewOperation(action=action, filter=msgspec.to_builtins(chosen), dry_run=dry_run)
    created = await visit.parts.operations.create(visit.context, new)
    visit.go_to = f"operations/{created.id}"
    return ""


async def request(visit: Visit) -> Response:
    """Shows one request."""
    record = await _record(visit)
    return visit.render(
        "request.html",
        shown_id(record.address),
        "requests",
        record=record,
        id=shown_id(record.address),
        events=timeline_of(record).events,
        result=await _result(visit, record) if visit.context.reads else None,
        reads=visit.context.reads,
    )


async def _record(visit: Visit) -> RequestRecord:
    tenant = visit.query("tenant") or visit.context.tenant
    address = address_of(visit.name("request"), tenant, visit.query("model") or None)
    return await visit.parts.services.requests.record(visit.context, address)


async def _result(visit: Visit, record: RequestRecord) -> RequestResult | None:
    if not record.state.is_terminal or record.code:
        return None
    service = visit.parts.services.requests
    spec = visit.parts.services.catalog.spec(record.address.model)
    labels = {} if spec is None else {output.name: output.labels for output in spec.outputs}
    responses, room = [], visit.room()
    try:
        if record.stored_bytes > LARGE_BYTES:
            await room(record.stored_bytes)
        if record.decoupled:
            async for one in service.stored(record):
                responses.append(one)
                if len(responses) == MOST_RESPONSES:
                    break
        responses.append((await service.result(record, room))[0])
    except QinferError as error:
        return RequestResult([], error.message)
    shown = await asyncio.to_thread(
        lambda: [[view_of(tensor, labels.get(tensor.name, ())) for tensor in one.outputs] for one in responses]
    )
    return RequestResult(shown)


async def _cancel(visit: Visit) -> str:
    record = await _record(visit)
    await visit.parts.services.requests.cancel(visit.context, record.address)
    return "The result is removed." if record.state.is_terminal else "The request is cancelled."


async def operations(visit: Visit) -> Response:
    """Lists the newest operations on many requests or dead letters."""
    rows = await visit.parts.operations.newest(visit.context, MOST_OPERATIONS)
    return visit.render("operations.html", "Operations", "requests", rows=rows)


async def operation(visit: Visit) -> Response:
    """Shows one operation with its progress."""
    found = await visit.parts.operations.find(visit.context, visit.name("operation"))
    total, looked = found.total, found.looked or 0
    return visit.render(
        "operation.html",
        f"{found.action} of {found.model}",
        "letters" if not found.action.indexes else "requests",
        operation=found,
        chosen={
            name: value for name, value in msgspec.structs.asdict(found.filter).items() if value and name != "state"
        },
        states=[state.value for state in found.filter.state],
        part=100 if found.ended_at else min(round(100 * looked / total), 100) if total else 0,
    )


async def _again(visit: Visit) -> str:
    """Does what a dry run has shown."""
    found = await visit.parts.operations.find(visit.context, visit.name("operation"))
    return await _create(visit, found.action, found.filter, dry_run=False)


async def _stop(visit: Visit) -> str:
    await visit.parts.operations.stop(visit.context, visit.name("operation"))
    return "The operation stops after its present portion; its changes stay."
