"""A program that is killed, or stopped, at a step of a job: `python -m tests.chaos.faulty`, as `CHAOS_FAULTS` says.

Each fault is tried by all processes that are started with it, and the first that comes to it makes a file of its name:
so it happens once in a run, and whoever takes over is not hurt again.

`{"program": "qinfer_workers.inference", "marks": "/folder", "faults": ["kill before job-a/part-00003.parquet", …]}`
"""

import contextlib
import json
import os
import runpy
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qinfer.storage.fsspec import FsspecStore
from qinfer.storage.local import LocalStore

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Fault(NamedTuple):
    """What is done, and when: `before` or `after` something gets its name, or `while` the rows of a part are scored."""

    kind: str
    when: str
    what: str


class Faults:
    """Those that are still to come.

    Args:
        faults: As in the module docstring.
        marks: Where it is noted which have happened; the file has the process's id.
    """

    def __init__(self, faults: list[str], marks: Path) -> None:
        self._faults = [Fault(*text.split()) for text in faults]
        self._marks = marks
        self._turn = threading.RLock()

    def reach(self, when: str, url: str) -> None:
        """Is called at every step."""
        for fault in self._faults:
            if fault.when == when and url.endswith(f"/{fault.what}"):
                with self._turn:
                    if self._mark(fault):
                        os.kill(os.getpid(), _SIGNALS[fault.kind])

    def around(self, url: str) -> contextlib.AbstractContextManager[object]:
        """Keeps the faults of other threads out of a write that has one itself.

        Killed between the write and what is to happen after it, the process would never come there again: a plan that
        is written is not written twice.
        """
        has_one = any(url.endswith(f"/{fault.what}") for fault in self._faults)
        return self._turn if has_one else contextlib.nullcontext()

    def _mark(self, fault: Fault) -> bool:
        try:
            with (self._marks / name_of(" ".join(fault))).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return False
        return True


def environment(program: str, faults: Sequence[str], marks: Path) -> dict[str, str]:
    """Returns the variables with which this program runs another one and hurts it."""
    told = {"program": program, "faults": list(faults), "marks": str(marks)}
    return {"CHAOS_FAULTS": json.dumps(told), "PYTHONPATH": str(Path(__file__).parents[2])}


def name_of(fault: str) -> str:
    """Returns the name of a fault's mark."""
    return fault.replace(" ", "-").replace("/", "-")


def install(faults: Faults) -> None:
    """Has the faults happen in this process."""
    for store in (LocalStore, FsspecStore):
        for name in ("commit_if_absent", "put_if_absent"):  # both are given what, and then the URL
            _wrap(faults, store, name)


def _wrap(faults: Faults, store: type, name: str) -> None:
    inner = getattr(store, name)

    def wrapped(self: Any, *args: Any) -> Any:
        with faults.around(args[1]):
            faults.reach("before", args[1])
            outcome = inner(self, *args)
            faults.reach("after", args[1])
        return outcome

    setattr(store, name, wrapped)


def install_scoring(faults: Faults) -> None:
    """Has those happen that are to happen while rows are scored; for inference workers."""
    from qinfer_workers.inference.bulk.shard_files import ShardFiles

    inner = ShardFiles._write_all

    def wrapped(self: ShardFiles, *args: Any) -> None:
        faults.reach("while", self._task.url)  # the first rows are scored, and not written yet
        inner(self, *args)

    setattr(ShardFiles, "_write_all", wrapped)  # noqa: B010  mypy would want its signature


def main() -> None:
    """Runs the program."""
    told = json.loads(os.environ["CHAOS_FAULTS"])
    faults = Faults(told["faults"], Path(told["marks"]))
    install(faults)
    if told["program"] == "qinfer_workers.inference":
        install_scoring(faults)
    runpy.run_module(told["program"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
