"""The measurements of an analysis on disk, a line of JSON each: the same command goes on with them after a kill.

A search asks in the same order if it gets the same figures, so the journal needs no state of the search. A line that a
kill cut off is measured again.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from qinfer.cli.analyze.figures import Figures, Goal
from qinfer.cli.analyze.search import Beside, Wanted
from qinfer.cli.analyze.space import Point, Space
from qinfer.cli.console import CommandFailed

FILE = "measurements.jsonl"


class Measured(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line: what was wanted (`search.Wanted`), and what was found."""

    point: Point
    turn: int
    figures: Figures
    model: str = ""
    beside: Beside = ()


class Subject(msgspec.Struct, frozen=True):
    """The first line: what is analysed, and how. Measurements of one subject never serve another.

    `files` is a digest of the models' files, `sent` one of the requests and of the models' configurations.
    """

    files: str
    spaces: Mapping[str, Space]
    goal: Goal
    mode: str
    window_s: float
    sent: str = ""


def digest(directories: Iterable[Path]) -> str:
    """Returns a digest of the files below directories, without Python's caches."""
    found = hashlib.sha256()
    for directory in directories:
        for file in sorted(directory.rglob("*")):
            if file.is_file() and file.parent.name != "__pycache__":
                found.update(f"{file.relative_to(directory)}\n".encode())
                with file.open("rb") as opened:
                    found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()


class Journal:
    """The measurements of a directory.

    Raises:
        CommandFailed: The directory can't be written, another analysis writes into it, or it has measurements of
            another model, space or objective.
    """

    def __init__(self, directory: Path, subject: Subject) -> None:
        self.path = directory / FILE
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise CommandFailed(f"another analysis writes into {directory}; give another --output") from None
        except OSError as error:
            raise CommandFailed(f"{directory} can't be written: {error.strerror}; give another --output") from None
        try:
            self.known = self._measured(subject)
        except CommandFailed:
            self._file.close()
            raise

    def _measured(self, subject: Subject) -> dict[Wanted, Figures]:
        self._file.seek(0)
        whole = [line for line in self._file.read().splitlines(keepends=True) if line.endswith(b"\n")]
        try:
            if whole and msgspec.json.decode(whole[0]) != msgspec.json.decode(_line(subject)):
                raise CommandFailed(
                    f"{self.path} has measurements of another model, configuration or set of options; "
                    "give another --output, or delete the file"
                )
            measured = [msgspec.json.decode(line, type=Measured) for line in whole[1:]]
        except msgspec.DecodeError as error:
            raise CommandFailed(f"{self.path} is damaged: {error}; give another --output, or delete the file") from None
        self._file.truncate(sum(map(len, whole)))
        if not whole:
            self._write(subject)
        return {Wanted(one.point, one.turn, model=one.model, beside=one.beside): one.figures for one in measured}

    def add(self, wanted: Wanted, figures: Figures) -> None:
        """Writes a measurement to the disk."""
        self.known[wanted.key] = figures
        self._write(Measured(wanted.point, wanted.turn, figures, wanted.model, wanted.beside))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def write_parquet(self, path: Path) -> None:
        """Writes a row for each window to a Parquet file."""
        import pyarrow as pa
        from pyarrow import parquet

        rows: list[dict[str, Any]] = [
            {
                "model": wanted.model,
                "beside": "; ".join(f"{name}: {candidate.text()}" for name, candidate in wanted.beside),
                **wanted.point.candidate._asdict(),
                "concurrency": wanted.point.level,
                "turn": wanted.turn,
                "window": number,
                **window._asdict(),
                "mean_batch": figures.mean_batch,
                "memory_mb": figures.memory_mb,
            }
            for wanted, figures in self.known.items()
            for number, window in enumerate(figures.windows)
        ]
        parquet.write_table(pa.Table.from_pylist(rows), path)

    def _write(self, line: msgspec.Struct) -> None:
        self._file.write(_line(line))
        self._file.flush()
        os.fsync(self._file.fileno())


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"
