"""`qinfer endpoints`: names that stand for several models or versions."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.console import DEFAULT_URL, Commands, JsonOption, UrlOption, gateway_client, show, table

if TYPE_CHECKING:
    from rich.console import RenderableType

app = Commands(help="Manage endpoints, their shadows and their canaries.", no_args_is_help=True)

LIST_EXAMPLE = "Example: qinfer endpoints list"
SHOW_EXAMPLE = "Example: qinfer endpoints show digit-reader"
DIFFERENCES_EXAMPLE = "Example: qinfer endpoints differences digit-reader"
PUT_EXAMPLE = "Example: qinfer endpoints put digit-reader.yaml"
DELETE_EXAMPLE = "Example: qinfer endpoints delete digit-reader"
PROMOTE_EXAMPLE = "Example: qinfer endpoints promote digit-reader"
ROLLBACK_EXAMPLE = "Example: qinfer endpoints rollback digit-reader"
PAUSE_EXAMPLE = "Example: qinfer endpoints pause digit-reader"
RESUME_EXAMPLE = "Example: qinfer endpoints resume digit-reader"

# The number of events that are shown, the latest ones.
_EVENTS = 8

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The endpoint's name.")]
RevisionOption = Annotated[
    int | None,
    typer.Option("--revision", min=1, help="Only if this is the current revision, as `show` prints it."),
]


@app.command("list", epilog=LIST_EXAMPLE)
def list_endpoints(*, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """List the endpoints, their targets and shares."""
    with gateway_client(url) as client:
        states = client.endpoints()
    show(states, lambda: _table(states), as_json=as_json)


@app.command("show", epilog=SHOW_EXAMPLE, short_help="Show an endpoint, its targets and their requests.")
def show_endpoint(name: NameArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Show an endpoint: its targets with their configured and actual shares, and its problems.

    Of a canary it shows the step, the numbers of the checks, and the events. The requests are those that the gateway at
    the URL has forwarded since it started.
    """
    with gateway_client(url) as client:
        state = client.endpoint(name)
    show(state, lambda: _details(state), as_json=as_json)


@app.command("differences", epilog=DIFFERENCES_EXAMPLE, short_help="Show how a shadow's answers differ.")
def show_differences(name: NameArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Show how the answers of an endpoint's shadows differ from those that callers got, with the most different rows.

    The gateway at the URL has compared them since it started. Requires the scope admin.
    """
    with gateway_client(url) as client:
        found = client.endpoint_differences(name)
    show(found, lambda: _differences(found), as_json=as_json)


@app.command("put", epilog=PUT_EXAMPLE, short_help="Declare an endpoint, or change it, as a file says.")
def put_endpoint(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The declaration: YAML, TOML or JSON.")],
    *,
    revision: RevisionOption = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Declare an endpoint, or change it, as a file says: every gateway follows within a second.

    The default name is that of the file. Requires the scope admin.
    """
    from msgspec import structs, to_builtins

    from qinfer.traffic.endpoints import read_file

    declared = structs.replace(read_file(file), file="")
    if revision is not None:
        declared = structs.replace(declared, revision=revision)
    with gateway_client(url) as client:
        state = client.put_endpoint(declared.name, to_builtins(declared))
    show(state, lambda: _details(state), as_json=as_json)


@app.command("delete", epilog=DELETE_EXAMPLE, short_help="Remove an endpoint.")
def delete_endpoint(
    name: NameArgument,
    *,
    revision: RevisionOption = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Remove an endpoint: its name then stands for the model of that name, if any. Requires the scope admin."""
    with gateway_client(url) as client:
        client.delete_endpoint(name, revision)
    show({"deleted": name}, f"{name} is removed", as_json=as_json)


@app.command("promote", epilog=PROMOTE_EXAMPLE, short_help="Promote a canary to its next step.")
def promote(name: NameArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Promote a canary to its next step, regardless of the checks; after the last one it becomes the stable target.

    Requires the scope admin.
    """
    _decide(name, "promote", url, as_json=as_json)


@app.command("rollback", epilog=ROLLBACK_EXAMPLE, short_help="Roll a canary back.")
def rollback(name: NameArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Roll a canary back: it gets no more requests. `show` tells when every gateway has confirmed it.

    Requires the scope admin.
    """
    _decide(name, "rollback", url, as_json=as_json)


@app.command("pause", epilog=PAUSE_EXAMPLE, short_help="Keep a canary in its step.")
def pause(name: NameArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Keep a canary in its step, with its share; checks continue, and may roll it back. Requires the scope admin."""
    _decide(name, "pause", url, as_json=as_json)


@app.command("resume", epilog=RESUME_EXAMPLE, short_help="Let a paused canary continue, or retry it.")
def resume(name: NameArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Let a paused canary continue, or retry a rolled back one from the first step. Requires the scope admin."""
    _decide(name, "resume", url, as_json=as_json)


def _decide(name: str, decision: str, url: str, *, as_json: bool) -> None:

    with gateway_client(url) as client:
        state = client.decide_endpoint(name, decision)
    show(state, lambda: _details(state), as_json=as_json)


def _table(states: "list[dict[str, Any]]") -> "RenderableType":
    rows = []
    for state in states:
        targets = ", ".join(f"{one['target']} {one['role']} {_percent(one['weight'])}" for one in state["targets"])
        endpoint = state["endpoint"]
        rows.append((endpoint["name"], str(endpoint["revision"]), targets, "; ".join(state["problems"]) or "-"))
    return table("Endpoints", "endpoint, revision>, targets, problems", rows)


def _differences(found: "Mapping[str, Any]") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for one in found["targets"]:
        outputs = [
            (
                *(each["output"], each["rows"], _percent(each["agreement"]), f"{each['mean_distance']:.4g}"),
                *(f"{each['largest_distance']:.4g}", each["unmeasured"]),
            )
            for each in one["outputs"]
        ]
        samples = [
            (each["row"], each["output"], each["stable"] or "-", each["canary"] or "-") for each in one["samples"]
        ]
        title = f"{one['target']}: {_shadows(one['shadows'])}"
        parts.append(table(title, "output, rows>, agree>, mean distance>, largest>, not measured>", outputs))
        if samples:
            parts.append(table("The most different rows", "row, output, stable, shadow", samples))
    return Group(*parts) if parts else Text(f"{found['endpoint']} has no shadow")


def _shadows(counts: "Mapping[str, int]") -> str:
    return ", ".join(f"{counts[name]} {name}" for name in ("compared", "disagreed", "failed", "dropped"))


def _details(state: "Mapping[str, Any]") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    endpoint, targets = state["endpoint"], state["targets"]
    sticky = f", sticky by {endpoint['sticky']}" if endpoint.get("sticky") else ""
    total = sum(one["requests"] for one in targets)
    rows = [
        (
            *(one["target"], one["role"], str(one["version"] or "-"), "yes" if one["ready"] else "no"),
            *(_percent(one["weight"]), one["requests"], _percent(one["requests"] / total) if total else "-"),
        )
        for one in targets
    ]
    columns = "target, role, version>, ready, share>, requests>, has got>"
    parts: list[RenderableType] = [table(f"{endpoint['name']}, revision {endpoint['revision']}{sticky}", columns, rows)]
    parts += [Text(f"Problem: {one}", style="red") for one in state["problems"]]
    parts += [Text(f"{one['target']}: {_shadows(one['shadows'])}") for one in targets if one.get("shadows")]
    if canary := state.get("canary"):
        parts += _canary(canary)
    for one in state.get("events", [])[:_EVENTS]:
        what = f"{one['event']}: {_tried(one)}, step {one['step']}: {one['reason']}"
        parts.append(Text(f"{_instant(one['at_s'])}  {what}"))
    return Group(*parts)


def _canary(canary: "Mapping[str, Any]") -> "Iterator[RenderableType]":
    from rich.text import Text

    step = f"step {canary['step']} of {canary['steps']}, {canary['requests']} requests in it"
    rows = []
    for one in canary["checks"]:
        tried = _share(one["canary_bad"], one["canary_requests"])
        stable = _share(one["stable_bad"], one["stable_requests"])
        if one.get("allowed") is not None:
            stable = f"{_percent(one['allowed'])} allowed"
        rows.append((one["check"], tried, stable, f"{one['evidence']:.3g}", f"{one['decides']:.4g}"))
    title = f"Canary: {_tried(canary)}, {canary['state']}, {step}"
    yield table(title, "check, canary>, stable>, evidence>, decides>", rows)
    yield Text(f"Why: {canary['reason']}")
    if canary["done_s"]:
        yield Text(f"Done: every gateway had confirmed the rollback at {_instant(canary['done_s'])}")


def _tried(one: "Mapping[str, Any]") -> str:
    return f"{one['model']}:{one['version']}" if one.get("model") else f"version {one['version']}"


def _instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _share(bad: int, requests: int) -> str:
    return f"{bad} of {requests} ({_percent(bad / requests)})" if requests else "-"


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
