"""Labels every file of a folder: what type is it, and how sure is the model? For docs/tutorials/label-a-folder.md.

    python -m examples.label_files.label FOLDER --mapping demo/filetypes.yaml --out labels.json

Files are read, asked about and written as they come, so that any number of them will do. Each is asked about under a
key that is made of its content: when the program was stopped, start it again, and what was scored before is only read.
"""

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

import qinfer
from qinfer import InferResult
from qinfer.errors import QinferError, Unreachable
from qinfer.labeling import FORMATS, Format, Mapping, Task, load_mapping, model_version

BLOCK, KEPT, MISSING = 4096, 1024, 256
"""What the model sees of a file: so many bytes from either end of these blocks, and a value for what is missing."""

SHORTEST = 8
"""Bytes that a file has at least: of less the model can say nothing."""

SHOWN = 2000
"""Characters of a file that people are shown."""

TOLD_EVERY = 100


class Found(NamedTuple):
    """A file.

    Attributes:
        name: Its path below the folder.
        features: What the model is asked, int32[1, 2048].
        text: Its beginning, for people.
    """

    name: str
    features: npt.NDArray[np.int32]
    text: str


class Counts:
    """What became of the files."""

    def __init__(self) -> None:
        self.labeled = self.failed = self.skipped = 0

    def __str__(self) -> str:
        return f"{self.labeled} files labeled, {self.failed} failed, {self.skipped} skipped"


def features(start: bytes, end: bytes) -> npt.NDArray[np.int32]:
    """Returns what the model is asked: the bytes of both ends, without the space around them."""
    head, tail = start.lstrip()[:KEPT], end.rstrip()[-KEPT:]
    padded = [*head, *[MISSING] * (KEPT - len(head)), *[MISSING] * (KEPT - len(tail)), *tail]
    return np.array([padded], np.int32)


def read(path: Path, name: str) -> Found | None:
    """Reads the two ends of a file; `None` = there is too little in it.

    Raises:
        OSError: It can't be read.
    """
    with path.open("rb") as file:
        start = file.read(BLOCK)
        file.seek(max(0, path.stat().st_size - BLOCK))
        end = file.read(BLOCK)
    if len(start) < SHORTEST:
        return None
    text = "(this is no text)" if b"\0" in start else start.decode(errors="replace")[:SHOWN]
    return Found(name, features(start, end), text)


def paths_of(folder: Path) -> Iterator[Path]:
    """Walks all files of a folder, in the same order each time; links and hidden ones are left out."""
    for directory, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(files):
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def key_of(run: str, asked: npt.NDArray[np.int32]) -> str:
    """Returns the key that a content is asked under: the same for the same content, in another run another."""
    return f"{run}-{hashlib.sha256(asked.tobytes()).hexdigest()}"


async def label(options: argparse.Namespace, mapping: Mapping, write: "Writer") -> Counts:
    """Asks about all files, at most `options.concurrency` at a time, and writes what is answered, in their order.

    Raises:
        Unreachable: The server went away; what it has accepted goes on there.
    """
    counts = Counts()
    numbers = itertools.count()
    asked: dict[int, Found] = {}  # those under way

    async def inputs() -> AsyncIterator[dict[str, Any]]:
        for path in paths_of(options.folder):
            try:
                found = await asyncio.to_thread(read, path, str(path.relative_to(options.folder)))
            except OSError as error:
                tell(f"{path}: {error.strerror}")
                found = None
            if found is None:
                counts.skipped += 1
                continue
            asked[next(numbers)] = found
            yield {"bytes": found.features}

    async with qinfer.AsyncClient(options.url) as client:
        stream = client.stream(
            mapping.model,
            inputs(),
            concurrency=options.concurrency,
            keys=lambda index, item: key_of(options.run, asked[index].features),
        )
        async with contextlib.aclosing(stream):  # type: ignore[type-var]  # it is a generator
            async for index, outcome in stream:
                found = asked.pop(index)
                if isinstance(outcome, InferResult):
                    write(index, found, outcome)
                    counts.labeled += 1
                elif isinstance(outcome, Unreachable):
                    raise outcome
                else:
                    tell(f"{found.name}: {outcome.message}")
                    counts.failed += 1
                if (counts.labeled + counts.failed) % TOLD_EVERY == 0:
                    tell(str(counts))
    return counts


class Writer:
    """Writes pre-annotations, as `qinfer label` does.

    Args:
        mapping: Which outputs are which labels.
        kind: The format.
        file: Where to.
    """

    def __init__(self, mapping: Mapping, kind: Format, file: IO[bytes]) -> None:
        self._mapping = mapping
        self._kind = kind
        self._file = file
        self._between = b""

    def __call__(self, index: int, found: Found, result: InferResult) -> None:
        """Writes a file's prediction."""
        data = {"path": found.name, "text": found.text}
        version = model_version(result.model, result.version)
        prediction = self._mapping.prediction_of({"id": found.name, "data": data}, dict(result), version)
        task = Task(index + 1, found.name, data, prediction)
        self._file.write(self._between + self._kind.encode(self._mapping, task))
        self._between = self._kind.separator


@contextlib.contextmanager
def written(path: Path, mapping: Mapping, kind: Format) -> Iterator[Writer]:
    """Makes a file that gets its name when it is whole."""
    start, end = kind.frame
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(start)
        yield Writer(mapping, kind, file)
        file.write(end)
    part.replace(path)


def tell(line: str) -> None:
    """Says something to who started the program."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Labels a folder; returns 1 when a file failed."""
    parser = argparse.ArgumentParser(description="Labels every file of a folder with its type.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help=".json = one array, else JSON lines")
    parser.add_argument("--mapping", type=Path, default=Path("demo/filetypes.yaml"))
    parser.add_argument("--format", choices=["label-studio", "argilla", "prodigy"], default="label-studio")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--concurrency", type=int, default=32, help="files that are asked about at a time")
    parser.add_argument("--run", default="1", help="another name scores everything again")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is no folder")
    mapping = load_mapping(options.mapping)
    kind = FORMATS[options.format]
    if options.out.suffix == ".json":
        kind = kind.as_array()
    try:
        with written(options.out, mapping, kind) as write:
            counts = asyncio.run(label(options, mapping, write))
    except QinferError as error:
        tell(f"{error.message}; start it again to go on")
        return 1
    except KeyboardInterrupt:
        tell("stopped; start it again to go on")
        return 130
    tell(f"{counts}; see {options.out}")
    return 1 if counts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
