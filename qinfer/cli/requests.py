"""`qinfer requests`: stored requests, many at a time."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.console import (
    DEFAULT_URL,
    Commands,
    JsonOption,
    Options,
    UrlOption,
    facts,
    gateway_client,
    option,
    show,
    state,
    table,
    with_options,
)
from qinfer.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qinfer.client import OperationStatus, RequestHandle, RequestStatus

app = Commands(
    help="Stored requests (/v1): list, show, cancel, purge, replay many. Synchronous requests are not stored: see "
    "`qinfer queues` and the metrics.",
    no_args_is_help=True,
)

LIST_EXAMPLE = "Example: qinfer requests list --model digits --state failed --error memory"
SHOW_EXAMPLE = "Example: qinfer requests show 01JX3M3TC8Z6Q5RYB7WS2K4D9F.0.digits"

FILTER_OPTIONS: Options = {
    "model": option(str, "", "Only requests of this model, or of the models of this endpoint.", "--model"),
    "version": option(int, 0, "Only requests of this version; 0: all.", "--version", min=0, show_default=False),
    "state": option(list[str] | None, None, "Only in this state: queued, running, failed …; repeatable.", "--state"),
    "tenant": option(str, "", "Only requests of this tenant; all tenants need the scope admin.", "--tenant"),
    "id_prefix": option(str, "", "Only requests whose id begins so.", "--id"),
    "error": option(str, "", "Only requests with this text in their error.", "--error"),
    "older_than": option(float, 0.0, "Only requests accepted at least so many seconds ago.", "--older-than", min=0),
    "newer_than": option(float | None, None, "Only requests accepted at most so many seconds ago.", "--newer-than"),
}


def read_filters(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options as the client's filters."""
    names = {"older_than": "older_than_s", "newer_than": "newer_than_s"}
    return {
        names.get(name, name): value
        for name, value in given.items()
        if value or (name == "newer_than" and value is not None)  # newer than 0 s is none, not all
    }


@app.command("list", epilog=LIST_EXAMPLE)
@with_options(FILTER_OPTIONS)
def list_requests(
    *,
    count: Annotated[int, typer.Option("--count", min=1, max=100_000, help="Maximum number to show.")] = 50,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """List stored requests by model: first unfinished, then failed, expired, cancelled and succeeded ones."""
    with gateway_client(url) as client:
        found = client.requests(limit=count, **read_filters(given))
    show([dict(status.fields) for status in found], lambda: _requests_table(found), as_json=as_json)


@app.command("show", epilog=SHOW_EXAMPLE)
def show_request(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the request, as `list` prints it.")],
    *,
    model: Annotated[str, typer.Option("--model", help="The model; needed for an id that the caller chose.")] = "",
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Show a stored request with its timeline: when and by which worker it was fetched, executed and ended."""
    handle = handle_named(request_id, model)
    with gateway_client(url) as client:
        status, events = client.status(handle), client.timeline(handle)
    found = {**status.fields, "events": events}
    show(found, lambda: _details(status, events), as_json=as_json)


def _progress() -> "Callable[[OperationStatus], None]":
    said = ""

    def tell(status: "OperationStatus") -> None:
        nonlocal said
        looked = "" if status.total is None else f", {status.looked:,} of {status.total:,} looked at"
        line = f"{status.action} {status.state}: {status.found:,} found, {status.changed:,} changed{looked}"
        if line != said:
            said = line
            print(line, file=sys.stderr)

    return tell


OPERATION_OPTIONS: Options = {
    **FILTER_OPTIONS,
    "model": option(str, ..., "The model; required.", "--model"),
    "dry_run": option(bool, False, "Only count, and show a sample.", "--dry-run"),
    "wait": option(bool, True, "Wait for the end; the operation goes on in any case.", "--wait/--no-wait"),
    "yes": option(bool, False, "Confirm what can't be undone.", "--yes"),
}


ACTIONS = {
    "cancel": ("Cancel unfinished requests of a model.", "--older-than 3600 --dry-run"),
    "purge": (
        "Remove the results of ended requests of a model; their records stay until they expire.",
        "--state failed --yes",
    ),
    "replay": (
        "Execute dead letters of a model again; the answer to a synchronous request is dropped.",
        "--error memory --dry-run",
    ),
    "discard": ("Remove dead letters of a model for good.", "--older-than 86400 --yes"),
}
"""The commands of operations: their help, and the options of an example."""


def _add_operation(action: str, about: str, example: str) -> None:
    """Adds a command that starts an operation, and shows its progress on stderr until it ends."""

    @app.command(action, help=about, epilog=f"Example: qinfer requests {action} --model digits {example}")
    @with_options(OPERATION_OPTIONS)
    def operate(*, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False, **given: Any) -> None:
        dry_run, wait_s = given["dry_run"], math.inf if given["wait"] else 0.0
        if action in ("purge", "discard") and not (given["yes"] or dry_run):
            raise InvalidRequest(f"{action} can't be undone; look with --dry-run, then add --yes")
        filters = read_filters({name: value for name, value in given.items() if name in FILTER_OPTIONS})
        with gateway_client(url) as client:
            status = client.operate(action, dry_run=dry_run, wait_s=wait_s, on_status=_progress(), **filters)
        show(dict(status.fields), lambda: _operations([status]), as_json=as_json)


for _action, _texts in ACTIONS.items():
    _add_operation(_action, *_texts)


@app.command("operations", epilog="Example: qinfer requests operations")
def list_operations(*, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """List the operations of the last week, newest first."""
    with gateway_client(url) as client:
        found = client.operations()
    show([dict(one.fields) for one in found], lambda: _operations(found), as_json=as_json)


@app.command("stop", epilog="Example: qinfer requests stop 01JX3M3TC8Z6Q5RYB7WS2K4D9F.0.digits")
def stop_operation(
    operation_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the operation, as `operations` prints it.")],
    *,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Stop an operation; its changes stay."""
    with gateway_client(url) as client:
        status = client.stop_operation(operation_id)
    show(dict(status.fields), lambda: _operations([status]), as_json=as_json)


def _operations(found: "Sequence[OperationStatus]") -> "RenderableType":
    rows = []
    for one in found:
        kind = f"{one.action} (dry run)" if one.fields.get("dry_run") else one.action
        why = one.fields.get("reason") or ", ".join(one.fields.get("sample", ())[:3])
        rows.append((one.id, kind, state(one.state), one.found, one.changed, one.refused, why))
    return table("Operations", "id, action, state, found>, changed>, refused>, reason or sample", rows)


def handle_named(request_id: str, model: str) -> "RequestHandle":
    """Returns the handle of an id that the server made, or with a model of a chosen one."""
    from qinfer.client import RequestHandle

    return RequestHandle.named(model, request_id) if model else RequestHandle.of(request_id)


def _requests_table(found: "Sequence[RequestStatus]") -> "RenderableType":
    rows = []
    for one in found:
        fields = one.fields
        age = f"{fields.get('age_s', 0):.1f} s"
        rows.append(
            (one.id, f"{one.model}:{one.version}", state(one.state), age, fields.get("attempts", 0), _error(one))
        )
    return table("Requests", "id, model, state, age>, attempts>, error", rows)


def _error(one: "RequestStatus") -> str:
    problem = one.fields.get("error") or {}
    return ": ".join(text for text in (problem.get("code", ""), problem.get("message", "")) if text)


def _details(status: "RequestStatus", events: "Sequence[Mapping[str, Any]]") -> "RenderableType":
    from rich.console import Group

    fields = status.fields
    about = {
        "model": f"{status.model}:{status.version}",
        "state": status.state,
        "error": _error(status) or "-",
        "age": f"{fields.get('age_s', 0):.1f} s",
        "attempts": fields.get("attempts", 0),
        "deadline": fields.get("deadline_at") or "-",
        "result expires": fields.get("expires_at") or "-",
    }
    rows = [(one.get("event"), one.get("at") or "-", one.get("by") or "gateway", _batch(one)) for one in events]
    return Group(facts(f"Request {status.id}", about), table("Timeline", "step, at, by, batch", rows))


def _batch(event: "Mapping[str, Any]") -> str:
    rows, batch = event.get("rows"), event.get("batch_rows")
    return "" if rows is None else f"{rows} of {batch} rows"
