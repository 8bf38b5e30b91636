"""`qinfer dlq`: dead letters, the requests that failed for good."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.console import (
    Commands,
    DataDirOption,
    JsonOption,
    ModelArgument,
    RedisOption,
    facts,
    model_names,
    show,
    table,
)
from qinfer.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import RenderableType

app = Commands(help="Dead letters, requests that failed for good: list, show, replay, remove.", no_args_is_help=True)

LIST_EXAMPLE = "Example: qinfer dlq list   or   qinfer dlq list digits --count 20"
SHOW_EXAMPLE = "Example: qinfer dlq show digits 1700000000123-0 --output ./letter"
REPLAY_EXAMPLE = "Example: qinfer dlq replay digits 1700000000123-0   or   qinfer dlq replay digits --all"
PURGE_EXAMPLE = "Example: qinfer dlq purge digits --all --yes"

AnyModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="The model's name; default: all models.", autocompletion=model_names)
]
IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids, as `dlq list` prints them.")]


@app.command("list", epilog=LIST_EXAMPLE, short_help="List the dead letters of a model, or of all.")
def list_dead_letters(
    model: AnyModelArgument = "",
    *,
    after: Annotated[str, typer.Option("--after", help="Start after this id, the last of the previous page.")] = "",
    count: Annotated[int, typer.Option("--count", min=1, max=10_000, help="Maximum number to show, of a model.")] = 100,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """List the dead letters of a model, or of all models, oldest first, with time and reason.

    Dead letters are kept for 7 days, within 256 MiB per model.
    """
    from qinfer.cli import dead_letters
    from qinfer.cli.overview import redis_settings

    if after and not model:
        raise typer.BadParameter("it needs a MODEL, because each model has its own ids", param_hint="--after")
    settings = redis_settings(redis, data_dir)
    rows = dead_letters.run_list(settings, model, after, count)
    none = f"model '{model}' has no dead letters" if model else "there are no dead letters"
    show(rows, (lambda: _listed(model, rows)) if rows else none, as_json=as_json)
    if model and len(rows) == count and not as_json:
        print(f"There may be more: qinfer dlq list {model} --after {rows[-1]['id']}")


@app.command("show", epilog=SHOW_EXAMPLE)
def show_dead_letter(
    model: ModelArgument,
    letter_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the dead letter, as `dlq list` prints it.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory to write the tensors to, as .npy, or .bin for BYTES."),
    ] = None,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter: the error, and the request with its inputs."""
    from qinfer.cli import dead_letters
    from qinfer.cli.overview import payload_limits, redis_settings

    settings, limits = redis_settings(redis, data_dir), payload_limits(redis, data_dir)
    letter = dead_letters.run_show(settings, limits, model, letter_id, output)
    show(letter, lambda: _details(letter), as_json=as_json)


@app.command("replay", epilog=REPLAY_EXAMPLE)
def replay_dead_letters(
    model: ModelArgument,
    ids: IdsArgument = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Replay all of the model's dead letters.")] = False,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """Put dead letters back into their lanes, to be executed again.

    An asynchronous request is queued again, and its timeout starts anew. The answer to a synchronous request is
    dropped, because its caller is gone.
    """
    from qinfer.cli import dead_letters
    from qinfer.cli.overview import payload_limits, redis_settings

    chosen = dead_letters.choose(ids, everything=everything)
    count = dead_letters.run_replay(redis_settings(redis, data_dir), payload_limits(redis, data_dir), model, chosen)
    show({"replayed": count}, f"{count} replayed", as_json=as_json)


@app.command("purge", epilog=PURGE_EXAMPLE)
def purge_dead_letters(
    model: ModelArgument,
    ids: IdsArgument = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="Remove all of the model's dead letters.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm the removal, which cannot be undone.")] = False,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """Remove dead letters for good."""
    from qinfer.cli import dead_letters
    from qinfer.cli.overview import payload_limits, redis_settings

    chosen = dead_letters.choose(ids, everything=everything)
    if not yes:
        raise InvalidRequest("purge removes dead letters for good; add --yes to confirm")
    count = dead_letters.run_purge(redis_settings(redis, data_dir), payload_limits(redis, data_dir), model, chosen)
    show({"purged": count}, f"{count} removed", as_json=as_json)


def _listed(model: str, rows: "list[dict[str, Any]]") -> "RenderableType":
    cells = []
    for row in rows:
        place = (row["buried_at"], f"{row['version']}:{row['lane']}", row["request_id"], row["deliveries"], row["size"])
        cells.append((*([] if model else [row["model"]]), row["id"], *place, f"{row['code']}: {row['reason']}"))
    columns = "id!, buried at, lane, request, deliveries>, bytes>, error"
    return table("Dead letters", columns if model else f"model, {columns}", cells)


def _details(letter: "dict[str, Any]") -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    row = letter["row"]
    about = {
        "request": row["request_id"] or "-",
        "error": f"{row['code']}: {row['reason']}",
        "deliveries": row["deliveries"],
        "buried at": row["buried_at"],
        "lane": f"{row['lane']} of version {row['version']}",
        "kind": letter["kind"],
    }
    if letter["problem"]:
        about["problem"] = letter["problem"]
    else:
        about["timeout"] = f"{letter['timeout_s']:g} s"
        about |= {"tenant": letter["tenant"] or "-", "parameters": letter["parameters"]}
    inputs = [(one["name"], one["datatype"], str(list(one["shape"])), one["size"]) for one in letter["inputs"]]
    parts: list[RenderableType] = [facts(f"Dead letter {row['id']}", about)]
    parts += [table("Inputs", "input, datatype, shape, bytes>", inputs)] if inputs else []
    return Group(*parts, *(Text(f"wrote {path}") for path in letter["written"]))
