"""`qinfer backends`: the backends of this machine, for models of workers that run here."""

from pathlib import Path
from typing import TYPE_CHECKING

from qinfer.cli.console import Commands, JsonOption, show, table

if TYPE_CHECKING:
    from rich.console import RenderableType

app = Commands(help="Show the backends of this machine.", no_args_is_help=True)

EXAMPLE = "Example: qinfer backends list"


@app.command("list", epilog=EXAMPLE)
def list_backends(*, as_json: JsonOption = False) -> None:
    """List the backends that a worker here would have: qinfer's, those of packages, and Triton's in C.

    Triton's backends are searched where QINFER_WORKER__TRITON_DIRECTORY and QINFER_WORKER__TRITON_BACKENDS say; those
    beside a model are not listed. Runtimes are imported, which may take seconds.
    """
    from qinfer.backends.registry import listed
    from qinfer.backends.triton_host.library import REMEDY, TritonFiles
    from qinfer.core.settings import load_settings

    worker = load_settings().worker
    files = TritonFiles(worker.triton_directory, worker.triton_backends)
    rows = [_row(name, origin, problem) for name, origin, problem in listed()]
    known = {row["name"] for row in rows}
    missing = "" if files.library() is not None else f"libtritonserver.so is not on this machine; {REMEDY}"
    rows += [
        _row(name, f"Triton ({_kind(path)})", missing) for name, path in files.backends_there() if name not in known
    ]
    if missing and all(row["origin"] in ("qinfer", "package") for row in rows):
        rows.append(_row("others", "Triton (C)", missing))
    show(rows, lambda: _table(rows), as_json=as_json)


def _kind(path: Path) -> str:
    return "C" if path.suffix == ".so" else "Python"


def _row(name: str, origin: str, problem: str) -> dict[str, str]:
    return {"name": name, "origin": origin, "state": "missing" if problem else "ready", "remedy": problem}


def _table(rows: list[dict[str, str]]) -> "RenderableType":
    return table("Backends", "backend!, from, state!, remedy", [list(row.values()) for row in rows])
