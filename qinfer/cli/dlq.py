"""`qinfer dlq`: dead letters, the requests that failed for good."""

import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from qinfer.cli.console import (
    CommandFailed,
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

    from qinfer.models.store import ControlStore
    from qinfer.queue.dead_letters import DeadLetter, DeadLetters
    from qinfer.tensors import Tensor

T = TypeVar("T")

app = Commands(help="Dead letters, requests that failed for good: list, show, replay, remove.", no_args_is_help=True)

LIST_EXAMPLE = "Example: qinfer dlq list   or   qinfer dlq list digits --count 20"
SHOW_EXAMPLE = "Example: qinfer dlq show digits 1700000000123-0 --output ./letter"
REPLAY_EXAMPLE = "Example: qinfer dlq replay digits 1700000000123-0   or   qinfer dlq replay digits --all"
PURGE_EXAMPLE = "Example: qinfer dlq purge digits --all --yes"

AnyModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="The model's name; default: all models.", autocompletion=model_names)
]
IdsArgument = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids, as `dlq list` prints them.")]

_PAGE = 500
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


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
    if after and not model:
        raise typer.BadParameter("it needs a MODEL, because each model has its own ids", param_hint="--after")

    async def read(store: "ControlStore", letters: "DeadLetters") -> list[dict[str, Any]]:
        models = [model] if model else sorted(await store.desired())
        pages = [await letters.list(name, after=after, count=count) for name in models]
        return [_row(letter) for page in pages for letter in page]

    rows = _run(redis, data_dir, read, has_payloads=False)
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
    from qinfer.queue.dead_letters import place_after

    place_after(letter_id)  # refuses a malformed id
    found = _run(redis, data_dir, lambda _, letters: letters.show(model, letter_id))
    if found is None:
        raise _missing(model, letter_id)
    letter = _letter_fields(found, output)
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
    chosen = _choose(ids, everything=everything)

    async def replay(_: "ControlStore", letters: "DeadLetters") -> int:
        count = 0
        for letter_id in await _all_ids(letters, model) if chosen is None else chosen:
            if await letters.replay(model, letter_id):
                count += 1
            elif chosen is not None:
                raise _missing(model, letter_id, f"; {count} were put back")
        return count

    count = _run(redis, data_dir, replay)
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
    chosen = _choose(ids, everything=everything)
    if not yes:
        raise InvalidRequest("purge removes dead letters for good; add --yes to confirm")
    count = _run(redis, data_dir, lambda _, letters: letters.purge(model, chosen))
    show({"purged": count}, f"{count} removed", as_json=as_json)


def _run(
    redis: str,
    data_dir: Path,
    work: "Callable[[ControlStore, DeadLetters], Awaitable[T]]",
    *,
    has_payloads: bool = True,
) -> T:
    from qinfer.cli.overview import payload_limits, redis_settings, run

    settings, limits = redis_settings(redis, data_dir), payload_limits(redis, data_dir) if has_payloads else None
    return run(settings, lambda store, queue: work(store, queue.dead_letters), limits)


def _choose(ids: Sequence[str] | None, *, everything: bool) -> Sequence[str] | None:
    """Returns the ids of the dead letters to process; `None` = all."""
    from qinfer.queue.dead_letters import place_after

    if bool(ids) == everything:
        raise InvalidRequest("name dead letters by their ids, or give --all; `qinfer dlq list MODEL` lists them")
    for letter_id in ids or ():
        place_after(letter_id)
    return ids or None


def _letter_fields(letter: "DeadLetter", directory: Path | None) -> dict[str, Any]:
    """Returns a dead letter as `dlq show` prints it; writes its tensors to `directory`."""
    from qinfer.errors import CorruptEntry
    from qinfer.queue.dead_letters import GONE, NOT_KEPT, head_of
    from qinfer.wire.frame import decode_request

    found: dict[str, Any] = {"row": _row(letter), "kind": "unreadable", "timeout_s": 0.0, "tenant": ""}
    found |= {"parameters": {}, "inputs": [], "problem": "", "written": []}
    contents: list[tuple[str, Tensor | bytes]] = [("frame.bin", letter.frame)]
    try:
        request = decode_request(letter.frame, letter.payload)
    except CorruptEntry as error:
        found["problem"] = error.message
        if (head := head_of(letter.frame)) is not None and head.memory is not None:
            found["problem"] = NOT_KEPT.format(letter.id)
        elif head is not None and head.payload and not letter.payload:
            found["problem"] = GONE.format(letter.id)
    else:
        found |= {
            "kind": "synchronous request" if request.reply_to else "asynchronous request",
            "timeout_s": request.timeout_s,
            "tenant": request.tenant,
            "parameters": dict(request.parameters),
            "inputs": [
                {"name": one.name, "datatype": one.datatype, "shape": one.shape, "size": one.nbytes}
                for one in request.inputs
            ],
        }
        # A name must not become a path.
        contents = [(f"{i}-{_UNSAFE.sub('_', one.name)[:100]}", one) for i, one in enumerate(request.inputs)]
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            found["written"] = [str(_write(directory / name, content)) for name, content in contents]
        except OSError as error:
            raise CommandFailed(f"the tensors can't be written to {directory}: {error.strerror or error}") from None
    return found


async def _all_ids(letters: "DeadLetters", model: str) -> list[str]:
    """Returns all ids first: a letter that fails again is replayed once."""
    ids: list[str] = []
    while page := await letters.list(model, after=ids[-1] if ids else "", count=_PAGE):
        ids += [letter.id for letter in page]
    return ids


def _missing(model: str, letter_id: str, done: str = "") -> CommandFailed:
    return CommandFailed(f"model '{model}' has no dead letter {letter_id}{done}; list them: qinfer dlq list {model}")


def _row(letter: "DeadLetter") -> dict[str, Any]:
    """`buried_at` is UTC, in ISO 8601."""
    names = ("id", "model", "request_id", "version", "lane", "code", "reason", "deliveries", "buried_at", "size")
    own = {"model": letter.lane.model, "version": letter.lane.version, "lane": letter.lane.name}
    own["buried_at"] = datetime.fromtimestamp(letter.buried_at, UTC).isoformat(timespec="milliseconds")
    return {name: own[name] if name in own else getattr(letter, name) for name in names}


def _write(path: Path, content: "Tensor | bytes") -> Path:
    """BYTES, or damaged data, become raw bytes, because objects would have to be pickled."""
    import numpy as np

    from qinfer.errors import RequestError
    from qinfer.tensors import to_numpy

    if isinstance(content, bytes):
        path.write_bytes(content)
        return path
    try:
        array = to_numpy(content)
    except RequestError:
        array = None
    if array is None or array.dtype.hasobject:
        return _write(path.with_name(f"{path.name}.bin"), bytes(content.data))
    path = path.with_name(f"{path.name}.npy")
    np.save(path, array, allow_pickle=False)
    return path


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
