"""`qinfer endpoints`: names that stand for several models or versions."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.console import DEFAULT_URL, Commands, JsonOption, UrlOption, show

if TYPE_CHECKING:
    from rich.console import RenderableType

app = Commands(help="Manage endpoints: list, show, put, delete.", no_args_is_help=True)

LIST_EXAMPLE = "Example: qinfer endpoints list"
SHOW_EXAMPLE = "Example: qinfer endpoints show digit-reader"
PUT_EXAMPLE = "Example: qinfer endpoints put digit-reader.yaml"
DELETE_EXAMPLE = "Example: qinfer endpoints delete digit-reader"

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The endpoint's name.")]
RevisionOption = Annotated[
    int | None,
    typer.Option("--revision", min=1, help="Only if this is the revision that is there; `show` tells it."),
]


@app.command("list", epilog=LIST_EXAMPLE)
def list_endpoints(*, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """List the endpoints, their targets and shares."""
    from qinfer.cli.client import GatewayClient

    with GatewayClient(url) as client:
        states = client.endpoints()
    show(states, lambda: _table(states), as_json=as_json)


@app.command("show", epilog=SHOW_EXAMPLE, short_help="Show an endpoint, its targets and their requests.")
def show_endpoint(name: NameArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Show an endpoint: its targets with the shares that they are to get and have got, and what is wrong with it.

    The requests are those that the gateway at the URL has passed on since it started.
    """
    from qinfer.cli.client import GatewayClient

    with GatewayClient(url) as client:
        state = client.endpoint(name)
    show(state, lambda: _details(state), as_json=as_json)


@app.command("put", epilog=PUT_EXAMPLE, short_help="Declare an endpoint, or change it, as a file says.")
def put_endpoint(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The declaration: YAML, TOML or JSON.")],
    *,
    revision: RevisionOption = None,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Declare an endpoint, or change it, as a file says: every gateway goes by it within a second.

    Without a name in the file it has that of the file. Requires the scope admin.
    """
    from msgspec import structs, to_builtins

    from qinfer.cli.client import GatewayClient
    from qinfer.traffic.files import read_file

    declared = structs.replace(read_file(file), file="")
    if revision is not None:
        declared = structs.replace(declared, revision=revision)
    with GatewayClient(url) as client:
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
    """Remove an endpoint: its name is then that of a model, if there is one. Requires the scope admin."""
    from qinfer.cli.client import GatewayClient

    with GatewayClient(url) as client:
        client.delete_endpoint(name, revision)
    show({"deleted": name}, f"{name} is removed", as_json=as_json)


def _table(states: "list[dict[str, Any]]") -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table("endpoint", "revision", "targets", "problems", title="Endpoints", title_justify="left")
    for state in states:
        targets = ", ".join(f"{one['target']} {one['role']} {_percent(one['weight'])}" for one in state["targets"])
        endpoint, problems = state["endpoint"], "; ".join(state["problems"]) or "-"
        table.add_row(Text(endpoint["name"]), str(endpoint["revision"]), Text(targets), Text(problems))
    return table


def _details(state: "Mapping[str, Any]") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    endpoint, targets = state["endpoint"], state["targets"]
    title = f"{endpoint['name']}, revision {endpoint['revision']}"
    if sticky := endpoint.get("sticky"):
        title += f", sticky by {sticky}"
    table = Table("target", "role", "version", "ready", "share", "requests", "has got", title=title)
    table.title_justify = "left"
    total = sum(one["requests"] for one in targets)
    for one in targets:
        got = _percent(one["requests"] / total) if total else "-"
        version, ready = str(one["version"] or "-"), "yes" if one["ready"] else "no"
        row = (one["target"], one["role"], version, ready, _percent(one["weight"]), str(one["requests"]), got)
        table.add_row(*map(Text, row))
    return Group(table, *(Text(f"Problem: {problem}", style="red") for problem in state["problems"]))


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"
