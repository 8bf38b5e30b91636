"""Files of bulk jobs in every format, damaged: read or refused, in bounded time and memory, by a process of its own."""

import gzip
import json
import random
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.support.fuzzing import damaged, fuzz, within_limits

pytestmark = within_limits

ANSWER_S = 30.0
"""Seconds that a file of some kilobytes may take."""
ROWS = 60


def table() -> pa.Table:
    """Returns rows with columns of many kinds, the stub's input `x` among them."""
    numbers = range(ROWS)
    text = pa.array([f"word {number % 7}" for number in numbers])
    return pa.table(
        {
            "x": pa.array([[number, 0.5] for number in numbers], pa.list_(pa.float32())),
            "n": pa.array([None if number % 9 == 0 else number for number in numbers], pa.int64()),
            "t": text,
            "d": text.dictionary_encode(),
            "b": pa.array([bytes([number]) * number for number in numbers]),
            "s": pa.array([{"a": number, "b": ["c"] * (number % 3)} for number in numbers]),
            "at": pa.array(list(numbers), pa.timestamp("us")),
        }
    )


def whole_files() -> list[tuple[str, bytes]]:
    """Returns files as they should be: extension and content."""
    rows = table()
    files = []
    for compression in ("snappy", "zstd", "gzip", "none"):
        for version in ("1.0", "2.0"):
            sink = pa.BufferOutputStream()
            pq.write_table(rows, sink, row_group_size=25, compression=compression, data_page_version=version)
            files.append((".parquet", sink.getvalue().to_pybytes()))
    for codec in ("lz4", "zstd", None):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_table(rows, max_chunksize=25)
        files.append((".arrow", sink.getvalue().to_pybytes()))
    lines = b"".join(b'{"x": [%d, 0.5], "n": %d, "t": "w", "s": {"a": [1]}}\n' % (n, n) for n in range(ROWS))
    columns = b"x,n,t\n" + b"".join(b'1.5,%d,"a, ""b"""\n' % n for n in range(ROWS))
    files += [
        (".jsonl", lines),
        (".csv", columns),
        (".jsonl.gz", gzip.compress(lines)),
        (".csv.gz", gzip.compress(columns)),
    ]
    return files


class Reader:
    """The process, started again where a file has made it crash."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.file_reader"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def read(self, extension: str, content: bytes) -> dict[str, Any] | None:
        """Has a file read; returns what became of it, `None` where the process ended."""
        path = self._folder / f"file{extension}"
        path.write_bytes(content)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{path}\n".encode())
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(ANSWER_S), "no answer"
        line = self._process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self.close()
        self._start()
        return None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.close()


@pytest.mark.slow
def test_damaged_files(reader: Reader) -> None:
    """A crash of the parser, or a file that takes too much memory, ends a process that is there for it."""
    files = whole_files()
    outcomes = [reader.read(*file) for file in files]
    assert [outcome for outcome in outcomes if outcome is None or outcome["defect"]] == []

    def one(chance: random.Random) -> None:
        extension, content = chance.choice(files)
        for _ in range(5):
            sent = damaged(chance, content)
            if chance.random() < 0.3:
                sent = sent[: chance.randint(0, len(sent))]
            found = reader.read(extension, sent)
            if found is not None:
                assert not found["defect"], found["defect"]

    fuzz(0.15, one)
