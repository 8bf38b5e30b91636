"""Scores files in processes of their own, and tells how much memory each took: `python -m` this module.

Standard input has a `Case` a line, standard output gets a `Found` a line. Each case runs in a fork of a process that
has imported all it needs, so that its peak is that of the case. Address space is limited, so that a defect does not
take the machine's memory.
"""

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from qinfer.storage.store import Stat

GUARD_BYTES = 3 * 2**30
READ_BYTES = 64 * 2**20


class Case(msgspec.Struct):
    """A file to be scored: column `x` is the input, columns `k…`, where there are some, are copied.

    Attributes:
        path: The file.
        datatype: The datatype of the input `x`.
        dims: Its dimensions.
    """

    path: str
    datatype: str = "BYTES"
    dims: tuple[int, ...] = (1,)


class Planned(msgspec.Struct):
    """What an examiner tells of a file: its columns (`schemas.encode_schema`) and rows, or why it has none.

    Attributes:
        schema: The columns.
        rows: The rows.
        groups: The rows of each row group; `None` = the format has none.
        error: Why it can't be read; empty = it can.
        peak_bytes: By how much the process grew at most.
    """

    schema: str = ""
    rows: int = 0
    groups: tuple[int, ...] | None = None
    error: str = ""
    peak_bytes: int = 0


class Found(msgspec.Struct):
    """The outcome of a case.

    Attributes:
        rows: The rows of the part.
        failed: How many of them failed.
        message: The error of the first of those, or that of the file.
        scored: The rows that the model saw.
        seconds: How long it took.
        planned_bytes: By how much the process grew, at most, while the file was planned, which an examiner does.
        peak_bytes: By how much the process grew, at most, beyond what it had with everything imported.
    """

    rows: int = 0
    failed: int = 0
    message: str = ""
    scored: int = 0
    planned_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


def found_of(cases: Iterable[Case]) -> list[Found]:
    """Runs cases in other processes; returns what each came to."""
    lines = b"\n".join(map(msgspec.json.encode, cases))
    command = [sys.executable, "-m", "tests.support.jobs.bounded_reading"]
    done = subprocess.run(command, input=lines, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return [msgspec.json.decode(line, type=Found) for line in done.stdout.splitlines()]


def main() -> None:
    """Serves the process that started it."""
    import qinfer_workers.inference.bulk.shard_files  # noqa: F401  before the fork, so that its memory is the base

    for line in sys.stdin.buffer.read().splitlines():
        case = msgspec.json.decode(line, type=Case)
        told, status = _forked(partial(_score_bounded, case))
        sys.stdout.buffer.write((told or msgspec.json.encode(Found(message=f"died with status {status}"))) + b"\n")
        sys.stdout.buffer.flush()


def _forked(work: Callable[[], msgspec.Struct]) -> tuple[bytes, int]:
    """Does work in a fork; returns what it came to, as JSON, and the fork's status. Empty = it died."""
    inbox, outbox = os.pipe()
    child = os.fork()
    if not child:
        os.close(inbox)
        with open(outbox, "wb") as file:
            file.write(msgspec.json.encode(work()))
        os._exit(0)
    os.close(outbox)
    with open(inbox, "rb") as file:
        told = file.read()
    _, status = os.waitpid(child, 0)
    return told, status


def _score_bounded(case: Case) -> Found:
    from qinfer.errors import QinferError

    resource.setrlimit(resource.RLIMIT_AS, (GUARD_BYTES, GUARD_BYTES))
    _begin_peak()
    base, begin_s, found = _peak_bytes(), time.monotonic(), Found()
    try:
        with TemporaryDirectory() as folder:
            _score(case, Path(folder), found, base)
    except (QinferError, MemoryError) as error:
        found.message = f"{type(error).__name__}: {error}"
    found.seconds = time.monotonic() - begin_s
    found.peak_bytes = _peak_bytes() - base
    return found


def _begin_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _score(case: Case, folder: Path, found: Found, base: int) -> None:
    """Scores a file as a worker does, with a model that takes no time and no memory."""
    import pyarrow.parquet as pq

    from qinfer.core.store_urls import UrlGrant
    from qinfer.jobs.job import JobSpec, Output
    from qinfer.jobs.plan import JobPlan, Shard, decode_plan_head, encode_plan_head
    from qinfer.models.spec import ModelSpec, TensorSpec
    from qinfer.storage.open import store_for
    from qinfer.tabular.columns.schemas import decode_schema, encode_schema
    from qinfer.tabular.rows.source import ReadLimits
    from qinfer.tabular.spec import Range
    from qinfer_workers.inference.bulk.batch_size import BatchSize
    from qinfer_workers.inference.bulk.chunks import Chunks
    from qinfer_workers.inference.bulk.shard_files import ScoringTask, ShardFiles

    url = f"file://{case.path}"
    stat = store_for(url).stat(url)
    assert stat is not None
    told, status = _forked(lambda: _planned(stat, folder, base))
    planned = msgspec.json.decode(told, type=Planned) if told else Planned(error=f"died with status {status}")
    found.planned_bytes = planned.peak_bytes
    if planned.error:
        found.message = planned.error
        return
    schema = decode_schema(planned.schema)
    ranges, first = [], 0
    for number, rows in enumerate(planned.groups) if planned.groups is not None else [(-1, planned.rows)]:
        ranges.append(Range(url, stat.etag, number, first, rows, 0 if planned.groups is not None else first))
        first += rows
    shard = Shard(0, "part-00000.parquet", first, tuple(ranges))
    spec = JobSpec(
        model="m",
        inputs=(url,),
        output=Output(url=f"file://{folder}/out"),
        error_threshold=-1.0,
        passthrough=tuple(name for name in schema.names if name.startswith("k")),
    )
    model = ModelSpec(
        name="m",
        backend="stub",
        inputs=(TensorSpec(name="x", datatype=case.datatype, dims=case.dims),),
        outputs=(TensorSpec(name="y", datatype="FP32", dims=(1,)),),
        max_batch_size=1024,
    )
    plan = JobPlan(
        job_id="job", spec=spec, model_hash="", schema=encode_schema(schema), sources=(), shards=(), rows=first
    )
    task = ScoringTask(
        job_id="job", spec=spec, shard=shard, model=model, head=decode_plan_head(encode_plan_head(plan)), model_hash="",
        max_errors=-1, spool=folder, limits=ReadLimits.from_read_bytes(READ_BYTES), grant=UrlGrant(("file:///",), ("file:///",)),
    )  # fmt: skip
    files, work = ShardFiles(task), threading.Event()
    chunks = Chunks(BatchSize(1024, 0.02), work.set, lambda: None)
    scored: list[int] = []
    scorer = threading.Thread(target=_echo, args=(chunks, work, scored))
    writer = threading.Thread(target=lambda: files.write(chunks))
    scorer.start()
    writer.start()
    try:
        files.read(chunks)
    except BaseException:
        chunks.stop()
        raise
    finally:
        writer.join()
        scorer.join()
    part = pq.read_table(folder / "out" / shard.part, columns=["error_message"])
    messages = part.column("error_message").drop_null()
    found.rows, found.failed, found.scored = part.num_rows, len(messages), sum(scored)
    found.message = messages[0].as_py() if len(messages) else ""


def _planned(file: "Stat", folder: Path, base: int) -> Planned:
    """Reads a file as an examiner does, which is a process of its own."""
    from qinfer.errors import QinferError
    from qinfer.storage.open import store_for
    from qinfer.tabular.columns.schemas import encode_schema
    from qinfer.tabular.rows.source import format_of, read_footer
    from qinfer.tabular.rows.text_streams import PieceKeeper

    kept = PieceKeeper(store_for, f"file://{folder}/kept", file.url, file.etag)
    try:
        footer = read_footer(file, format_of(file.url, ""), on_block=kept.add)
    except (QinferError, MemoryError) as error:
        return Planned(error=f"{type(error).__name__}: {error}", peak_bytes=_peak_bytes() - base)
    return Planned(encode_schema(footer.schema), footer.rows, footer.groups, "", _peak_bytes() - base)


def _echo(chunks: "object", work: threading.Event, scored: list[int]) -> None:
    from qinfer_workers.inference.bulk.chunks import Chunks

    assert isinstance(chunks, Chunks)
    while not chunks.has_ended:
        work.wait()
        work.clear()
        while (part := chunks.next_batch()) is not None:
            scored.append(part.rows)
            chunks.done(part, {"y": np.zeros((part.rows, 1), np.float32)}, 0.001)


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
