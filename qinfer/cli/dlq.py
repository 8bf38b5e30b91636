"""`qinfer dlq`: dead letters, the requests that failed for good."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qinfer.cli.console import (
    Commands,
    DataDirOption,
    JsonOption,
    ModelArgument,
    RedisOption,
    model_names,
    print_json,
    show,
)

if TYPE_CHECKING:
    from qinfer.cli.dead_letters import DeadLetterDetails, DeadLetterRow

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
    rows = dead_letters.run_list(settings, model, after, count) if model else dead_letters.run_list_all(settings, count)
    if as_json:
        print_json(rows)
    else:
        _print_rows(model, rows)
        if model and len(rows) == count:
            print(f"There may be more: qinfer dlq list {model} --after {rows[-1].id}")


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
    from qinfer.cli.overview import redis_settings

    letter = dead_letters.run_show(redis_settings(redis, data_dir), model, letter_id, output)
    if as_json:
        print_json(letter)
    else:
        _print_details(letter)


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
    from qinfer.cli.overview import redis_settings

    chosen = dead_letters.choose(ids, everything=everything)
    count = dead_letters.run_replay(redis_settings(redis, data_dir), model, chosen)
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
    from qinfer.cli.overview import redis_settings

    chosen = dead_letters.choose(ids, everything=everything)
    dead_letters.require_yes(yes=yes)
    count = dead_letters.run_purge(redis_settings(redis, data_dir), model, chosen)
    show({"purged": count}, f"{count} removed", as_json=as_json)


def _print_rows(model: str, rows: "list[DeadLetterRow]") -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    if not rows:
        print(f"model '{model}' has no dead letters" if model else "there are no dead letters")
        return
    names = [] if model else ["model"]
    table = Table(
        *(Column(name, overflow="fold") for name in names),
        # A cut id can't be given to another command.
        Column("id", no_wrap=True, min_width=max(len(row.id) for row in rows)),
        *(Column(name, overflow="fold") for name in ("buried at", "lane", "request")),
        *(Column(name, justify="right", overflow="fold") for name in ("deliveries", "bytes")),
        Column("error", overflow="fold"),
        title=f"Dead letters of {model}" if model else "Dead letters",
        box=SIMPLE,
        pad_edge=False,
        padding=0,
    )
    for row in rows:
        error = Text.assemble((row.code, "red"), f": {row.reason}")
        place = (row.buried_at, f"{row.version}:{row.lane}", Text(row.request_id))
        own = (Text(row.model),) if names else ()
        table.add_row(*own, row.id, *place, str(row.deliveries), f"{row.size:,}", error)
    Console().print(table)


def _print_details(letter: "DeadLetterDetails") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    row = letter.row
    about = Table("field", "value", show_header=False, title=f"Dead letter {row.id}", title_justify="left")
    about.add_row("request", Text(row.request_id or "-"))
    about.add_row("error", Text.assemble((row.code, "red"), f": {row.reason}"))
    about.add_row("deliveries", str(row.deliveries))
    about.add_row("buried at", row.buried_at)
    about.add_row("lane", f"{row.lane} of version {row.version}")
    about.add_row("kind", letter.kind)
    console = Console()
    if letter.kind != letter.UNREADABLE:
        about.add_row("timeout", f"{letter.timeout_s:g} s")
        about.add_row("tenant", Text(letter.tenant or "-"))
        about.add_row("parameters", Text(str(letter.parameters)))
    console.print(about)
    if letter.problem:
        console.print(Text(letter.problem, style="yellow"))
    if letter.inputs:
        inputs = Table("input", "datatype", "shape", "bytes", title="Inputs", title_justify="left")
        for tensor in letter.inputs:
            inputs.add_row(Text(tensor.name), tensor.datatype, str(list(tensor.shape)), f"{tensor.size:,}")
        console.print(inputs)
    for path in letter.written:
        console.print(f"wrote {path}", soft_wrap=True)
