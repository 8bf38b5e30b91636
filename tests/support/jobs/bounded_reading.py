"""Plans and scores files as a server does, and tells how much memory each took: `python -m` this module.

Standard input has a `Case` a line, standard output gets a `Found` a line. Examiners read the files; this process does
the rest of a worker's work, with a model that takes no time and no memory.
"""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import numpy as np
import psutil
import pyarrow.parquet as pq

from qinfer.core.processes import ALLOW_INSPECTION
from qinfer.core.settings import Settings, StoreSettings
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import QinferError
from qinfer.jobs.examiner_pool import READ_SHARES, ExaminerPool
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.plan import Shard, UnplannedJob, decode_plan, decode_plan_head, encode_plan_head
from qinfer.jobs.shard_rows import ExaminedShard
from qinfer.jobs.shards import ShardPace
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer_workers.inference.bulk.arbiter import BatchSize
from qinfer_workers.inference.bulk.chunks import Chunks
from qinfer_workers.inference.bulk.shard_files import ScoringTask, ShardFiles

READ_BYTES = 64 * 2**20
LIBRARIES_BYTES = 160 * 2**20
"""Memory of an examiner that has read no file."""
GRANT = UrlGrant(("file:///",), ("file:///",))


class Case(msgspec.Struct):
    """A file to be scored: column `x` is the input.

    Attributes:
        path: The file.
        datatype: The datatype of the input `x`.
        dims: Its dimensions.
        copies: Whether all other columns are copied.
    """

    path: str
    datatype: str = "BYTES"
    dims: tuple[int, ...] = (1,)
    copies: bool = True


class Found(msgspec.Struct):
    """The outcome of a case.

    Attributes:
        rows: The rows of the part.
        failed: How many of them failed.
        message: The error of the first of those, or that of the file.
        scored: The rows that the model saw.
        seconds: How long it took.
        planned_bytes: The memory that an examiner took at most while the file was planned, beyond its libraries.
        read_bytes: The memory that an examiner took at most while the file was read, beyond its libraries.
        peak_bytes: By how much the worker grew at most.
    """

    rows: int = 0
    failed: int = 0
    message: str = ""
    scored: int = 0
    planned_bytes: int = 0
    read_bytes: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


def found_of(cases: Iterable[Case]) -> list[Found]:
    """Runs cases in other processes; returns what each came to."""
    lines = b"\n".join(map(msgspec.json.encode, cases))
    command = [sys.executable, "-m", "tests.support.jobs.bounded_reading"]
    done = subprocess.run(command, input=lines, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return [msgspec.json.decode(line, type=Found) for line in done.stdout.splitlines()]


class Server(NamedTuple):
    """Examiners that plan, and examiners that read."""

    plans: ExaminerPool
    reads: ExaminerPool


def main() -> None:
    """Serves the process that started it."""
    asyncio.run(_serve())


async def _serve() -> None:
    environment = dict(os.environ) | {ALLOW_INSPECTION: "true"}
    settings = Settings(stores=StoreSettings(allow=GRANT.read))
    server = Server(
        ExaminerPool(settings, environment, processes=1),
        ExaminerPool(settings, environment, processes=1, shares=READ_SHARES),
    )
    running = [asyncio.create_task(pool.run()) for pool in server]
    await asyncio.sleep(0)
    for line in sys.stdin.buffer.read().splitlines():
        found = await _score_bounded(msgspec.json.decode(line, type=Case), server)
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        sys.stdout.buffer.flush()
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def _score_bounded(case: Case, server: Server) -> Found:
    begin_s, found = time.monotonic(), Found()
    with TemporaryDirectory() as folder:
        try:
            await _score(case, Path(folder), found, server)
        except (QinferError, MemoryError) as error:
            found.message = f"{type(error).__name__}: {error}"
    found.seconds = time.monotonic() - begin_s
    return found


async def _score(case: Case, folder: Path, found: Found, server: Server) -> None:
    spec = JobSpec(
        model="m",
        inputs=(f"file://{case.path}",),
        output=Output(url=f"file://{folder}/out"),
        error_threshold=-1.0,
        passthrough=("*",) if case.copies else (),
        exclude=("x",) if case.copies else (),
    )
    model = ModelSpec(
        name="m",
        backend="stub",
        inputs=(TensorSpec(name="x", datatype=case.datatype, dims=case.dims),),
        outputs=(TensorSpec(name="y", datatype="FP32", dims=(1,)),),
        max_batch_size=1024,
    )
    _begin_peaks()
    try:
        job = UnplannedJob("job", spec, model, "", GRANT)
        plan = decode_plan(await server.plans.plan(job, ShardPace(0.0, 30.0, 10**9, 10**9), 1))
    finally:
        found.planned_bytes = _examined_bytes()
    ranges = tuple(one for shard in plan.shards for one in shard.ranges)
    shard = Shard(0, "part-00000.parquet", sum(one.rows for one in ranges), ranges)
    task = ScoringTask(
        job_id="job",
        spec=plan.spec,
        shard=shard,
        model=model,
        head=decode_plan_head(encode_plan_head(plan)),
        model_hash="",
        max_errors=-1,
        spool=folder,
        read_bytes=READ_BYTES,
        grant=GRANT,
        open_reader=partial(ExaminedShard, server.reads, asyncio.get_running_loop()),
        read_part=lambda _: "",
    )
    base = _begin_peaks()
    try:
        found.scored = await asyncio.to_thread(_run, ShardFiles(task))
    finally:
        found.read_bytes, found.peak_bytes = _examined_bytes(), _memory("self", "VmHWM") - base
    part = pq.read_table(folder / "out" / shard.part, columns=["error_message"])
    messages = part.column("error_message").drop_null()
    found.rows, found.failed = part.num_rows, len(messages)
    found.message = messages[0].as_py() if len(messages) else ""


def _run(files: ShardFiles) -> int:
    work = threading.Event()
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
    return sum(scored)


def _echo(chunks: Chunks, work: threading.Event, scored: list[int]) -> None:
    while not chunks.has_ended:
        work.wait()
        work.clear()
        while (part := chunks.next_batch()) is not None:
            scored.append(part.rows)
            chunks.done(part, {"y": np.zeros((part.rows, 1), np.float32)}, 0.001)


def _begin_peaks() -> int:
    """Returns the memory of this process."""
    for process in ("self", *(str(child.pid) for child in psutil.Process().children())):
        Path(f"/proc/{process}/clear_refs").write_text("5")
    return _memory("self", "VmRSS")


def _examined_bytes() -> int:
    peaks = [_memory(str(child.pid), "VmHWM") for child in psutil.Process().children()]
    return max(peaks, default=0) - LIBRARIES_BYTES


def _memory(process: str, name: str) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int((status.partition(f"{name}:")[2].split() or ["0"])[0]) * 1024


if __name__ == "__main__":
    main()
