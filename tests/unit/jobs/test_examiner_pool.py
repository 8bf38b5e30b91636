"""Files are parsed in processes of their own: what comes back, and what becomes of those that die or hang."""

import asyncio
import contextlib
import gc
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvloop

from qinfer import errors
from qinfer.core.processes import packed
from qinfer.core.settings import BulkSettings, Settings, StoreSettings
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import InvalidRequest, Overloaded, QinferError, UnsupportedFeature
from qinfer.jobs.columns import ERROR_COLUMNS
from qinfer.jobs.examiner import ExaminerHello, PreviewJob
from qinfer.jobs.examiner_pool import COMMAND, ExaminerPool
from qinfer.jobs.examiner_pool import GATEWAY_PROCESSES as PROCESSES
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.parts import PartWriter, part_metadata, part_of
from qinfer.jobs.plan import ExpectedParts, Shard, UnplannedJob, decode_plan
from qinfer.jobs.planning import examine, make_plan
from qinfer.jobs.shards import ShardPace
from qinfer.storage.open import store_for
from qinfer.tabular.footers import FOOTER_BYTES
from qinfer.testing import eventually, stub_spec, wait_until
from tests.support.jobs.bulk_data import ANY_FILE
from tests.support.jobs.examiner_stub import STUB, looking

MODEL = stub_spec()
PACE = ShardPace(0.0, 30.0, 1000, 1000)
SMALLEST = 512 * 2**20
CLASSES = sorted(
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, QinferError)
)


@pytest.fixture
def lake(tmp_path: Path) -> str:
    rows = {"x": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32())), "id": [1, 2]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "old").write_text("old")
    return f"file://{tmp_path}"


def job(lake: str, *names: str, output: str = "out") -> JobSpec:
    return JobSpec(model="stub", inputs=tuple(f"{lake}/{name}" for name in names), output=Output(f"{lake}/{output}"))


def settings_for(lake: str) -> Settings:
    return Settings(stores=StoreSettings(allow=(lake,)), bulk=BulkSettings(max_examine_bytes=SMALLEST))


@contextlib.asynccontextmanager
async def examining(
    lake: str, command: Sequence[str] = STUB, environment: Mapping[str, str] = os.environ, *, ahead: bool = False
) -> AsyncIterator[ExaminerPool]:
    """Runs an examiner; `ahead` = a process is started before the first job."""
    examiner, up = ExaminerPool(settings_for(lake), environment, command), asyncio.Event()
    if ahead:
        up.set()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(examiner.run(up))
        await asyncio.sleep(0)
        yield examiner
        running.cancel()
    assert looking() == set()


async def told(examiner: ExaminerPool, spec: JobSpec, grant: UrlGrant = ANY_FILE) -> QinferError:
    with pytest.raises(QinferError) as caught:
        await examiner.check(spec, MODEL, grant)
    return caught.value


# --- what comes back ---


async def test_jobs_are_looked_at_by_one_process(lake: str) -> None:
    """Which is started ahead of them, with the real files and the least memory that can be set."""
    async with examining(lake, COMMAND, ahead=True) as examiner:
        await eventually(lambda: len(looking()) == 1, description="a process is started")
        before = looking()
        for _ in range(3):
            await examiner.check(job(lake, "*a.parquet"), MODEL, ANY_FILE)

        assert looking() == before


async def test_previews_are_read_by_such_a_process(lake: str) -> None:
    """With the least memory; a file that crashes it is an error with the file."""
    async with examining(lake, COMMAND) as examiner:
        found = await examiner.preview(PreviewJob("input", 1, job(lake, "a.parquet"), ANY_FILE))
    async with examining(lake) as examiner:
        with pytest.raises(InvalidRequest, match=r"'file:.*/crash': the process that read them died \(SIGSEGV\)"):
            await examiner.preview(PreviewJob("input", 1, job(lake, "crash"), ANY_FILE))

    assert found.rows == (("[1,2]", "1"),)


async def test_many_folders_are_looked_at_at_once(lake: str, tmp_path: Path) -> None:
    """By threads, for which there is memory, too."""
    for number in range(40):
        (tmp_path / f"day-{number}").mkdir()
        shutil.copy(tmp_path / "a.parquet", tmp_path / f"day-{number}")
    async with examining(lake, COMMAND) as examiner:
        await examiner.check(job(lake, *(f"day-{number}/*.parquet" for number in range(40))), MODEL, ANY_FILE)


async def test_jobs_are_refused_as_before(lake: str) -> None:
    """With the same class and text as in this process."""
    refused = {
        "missing": job(lake, "none.parquet"),
        "torn": job(lake, "torn.parquet"),
        "not empty": job(lake, "a.parquet", output="full"),
        "unclear": job(f"{lake}/..", "a.parquet"),
        "forbidden": job("file:///etc", "passwd"),
        "no store": job("s4://bucket", "a.parquet"),
    }
    async with examining(lake, COMMAND) as examiner:
        for name, spec in refused.items():
            with pytest.raises(QinferError) as here:
                examine(spec, MODEL, UrlGrant((lake,), (lake,)))

            there = await told(examiner, spec, UrlGrant((lake,), (lake,)))

            assert (type(there), there.message) == (type(here.value), here.value.message), name


async def test_every_error_comes_through(lake: str) -> None:
    """Of whatever class; what qinfer has none for is a defect, whose traceback the log has."""
    async with examining(lake) as examiner:
        for name in CLASSES:
            error = await told(examiner, job(lake, name))
            assert (type(error), error.message) == (vars(errors)[name], f"'{lake}/{name}' is wrong: größe")
        with pytest.raises(RuntimeError, match=r"in divide\n(.|\n)*ZeroDivisionError"):
            await examiner.check(job(lake, "divide"), MODEL, ANY_FILE)
        assert len(looking()) == 1


async def test_what_is_printed_is_no_answer(lake: str) -> None:
    """Nor is what is logged; neither is what ends it when there is much of it."""
    async with examining(lake) as examiner:
        for _ in range(2):
            await examiner.check(job(lake, "chatter"), MODEL, ANY_FILE)


async def test_a_library_that_is_missing(lake: str) -> None:
    """How to install it is told."""
    async with examining(lake, (*STUB, "pyarrow")) as examiner:
        error = await told(examiner, job(lake, "a.parquet"))

    assert isinstance(error, UnsupportedFeature)
    assert error.message == "bulk jobs need pyarrow: pip install 'qinfer-ml[bulk]'"


async def test_plans_and_parts_are_those_of_this_process(lake: str, tmp_path: Path) -> None:
    """Whole parts, broken ones and those that are gone; a broken one is set aside."""
    unplanned = UnplannedJob("job", job(lake, "a.parquet"), MODEL, "hash", ANY_FILE)
    output = pa.table({"y": [1.0, 2.0], **dict.fromkeys(ERROR_COLUMNS, pa.nulls(2, pa.string()))})
    shards = tuple(Shard(number, f"part-{number}.parquet", 2, ()) for number in range(4))
    (tmp_path / "out").mkdir()
    for shard in shards[:2]:
        with PartWriter(
            tmp_path / "out" / shard.part, output.schema, Output(""), part_metadata("job", shard, "hash")
        ) as part:
            part.write(output.to_batches()[0])
    (tmp_path / "out" / shards[2].part).write_bytes(b"PAR1")
    parts = ExpectedParts("job", "hash", f"{lake}/out", shards, ANY_FILE)
    store = store_for(lake)
    here = [part_of(store, parts, shard) for shard in shards]

    async with examining(lake, COMMAND) as examiner:
        plan = await examiner.plan(unplanned, PACE, 2)
        found = await examiner.read_parts(parts, 2)
        await examiner.set_aside(parts, 2)
        with pytest.raises(InvalidRequest, match="none' does not exist"):
            await examiner.plan(unplanned._replace(spec=job(lake, "none")), PACE, 2)

    assert decode_plan(plan) == make_plan(unplanned, PACE)
    assert found == here
    assert [isinstance(part, str) for part in found] == [False, False, True, True]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["_broken", "part-0.parquet", "part-1.parquet"]


async def test_processes_that_many_requests_needed_are_ended(lake: str, tmp_path: Path) -> None:
    """Two are kept for the next ones."""
    examiner = ExaminerPool(settings_for(lake), os.environ, STUB, processes=4)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(examiner.run())
        await asyncio.sleep(0)
        hanging = [tasks.create_task(examiner.check(job(lake, f"wait-{n}"), MODEL, ANY_FILE)) for n in range(4)]
        await eventually(lambda: all((tmp_path / f"wait-{n}").exists() for n in range(4)), 40.0, "all wait")
        assert len(looking()) == 4
        for n in range(4):
            (tmp_path / f"wait-{n}").unlink()
        await asyncio.wait(hanging)
        await eventually(lambda: len(looking()) == 2, description="two are kept")
        running.cancel()


# --- what dies, and what hangs ---


DEATHS = {
    "crash": "SIGSEGV",
    "abort": "SIGABRT",
    "leave": "exit code 7",
    "grow": "it needs more memory than QINFER_BULK__MAX_EXAMINE_BYTES",
    "babble": "SIGKILL",
    "lock": "SIGALRM",
}


async def test_processes_that_die(lake: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each job is refused with its inputs, another process looks at the next one, and the log has what it said."""

    def warnings() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno >= logging.WARNING]

    async with examining(lake) as examiner:
        for how, text in DEATHS.items():
            caplog.clear()
            error = await told(examiner, job(lake, how, "b", "c"))

            assert isinstance(error, InvalidRequest), how
            assert error.message == (
                f"the inputs can't be read, '{lake}/{how}' and 2 more: the process that read them died ({text}); "
                "is a file damaged?"
            )
            await eventually(lambda: warnings() != [], description="a line of the log")
            (record,) = warnings()
            assert (record.message, vars(record)["how"]) == ("an examiner ended", text)
            assert ("in crash" in vars(record)["output"]) == (how == "crash")
        await examiner.check(job(lake, "fine"), MODEL, ANY_FILE)
        await eventually(lambda: len(looking()) == 1, description="what died is replaced")


async def test_a_huge_allocation_of_arrow(lake: str) -> None:
    """Arrow says itself that there is no memory; the process lives on, as it does when a file is damaged."""
    async with examining(lake) as examiner:
        await examiner.check(job(lake, "arrow"), MODEL, ANY_FILE)


async def test_who_gives_up_ends_the_process(lake: str, tmp_path: Path) -> None:
    """The next job has another, and waits for nothing."""
    async with examining(lake) as examiner:
        first = asyncio.create_task(examiner.check(job(lake, "hang"), MODEL, ANY_FILE))
        await eventually((tmp_path / "hang").exists, description="it is looked at")
        held = looking()
        first.cancel()
        await asyncio.wait([first])
        await examiner.check(job(lake, "fine"), MODEL, ANY_FILE)
        await eventually(lambda: not looking() & held, description="it is ended")

    assert first.cancelled()


async def test_some_at_once_and_others_in_line(lake: str, tmp_path: Path) -> None:
    """In the order in which they came; who leaves the line takes no place, and what hangs takes one."""
    async with examining(lake) as examiner, asyncio.TaskGroup() as tasks:
        hanging = [tasks.create_task(examiner.check(job(lake, f"hang-{n}"), MODEL, ANY_FILE)) for n in range(PROCESSES)]
        await eventually(
            lambda: all((tmp_path / f"hang-{n}").exists() for n in range(PROCESSES)), description="all hang"
        )
        waiting = [tasks.create_task(examiner.check(job(lake, f"mark-{n}"), MODEL, ANY_FILE)) for n in range(6)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        assert len(looking()) == PROCESSES
        assert not any((tmp_path / f"mark-{n}").exists() for n in range(6))

        hanging[0].cancel()
        await asyncio.wait(waiting)

        marked = [(tmp_path / f"mark-{n}") for n in range(1, 6)]
        assert not (tmp_path / "mark-0").exists()
        assert [mark.stat().st_mtime_ns for mark in marked] == sorted(mark.stat().st_mtime_ns for mark in marked)
        hanging[1].cancel()


@pytest.mark.parametrize("late", [False, True])
async def test_a_process_that_dies_idle_is_not_missed(lake: str, *, late: bool) -> None:
    """Such as by lack of memory on the machine: the next job starts one."""
    async with examining(lake) as examiner:
        await examiner.check(job(lake, "fine"), MODEL, ANY_FILE)
        (pid,) = looking()
        os.kill(pid, signal.SIGKILL)
        if late:
            await eventually(lambda: not looking(), description="it is gone")
        await examiner.check(job(lake, "fine"), MODEL, ANY_FILE)

        assert looking() not in ({pid}, set())


async def test_a_terminal_and_a_process_manager_mean_the_gateway(lake: str) -> None:
    """Ctrl-C does not reach the process, and it heeds neither signal."""
    async with examining(lake) as examiner:
        await examiner.check(job(lake, "fine"), MODEL, ANY_FILE)
        (pid,) = looking()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        await examiner.check(job(lake, "fine"), MODEL, ANY_FILE)

        assert (looking(), os.getpgid(pid) != os.getpgrp()) == ({pid}, True)


# --- its start and its end ---


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/nowhere/python"], "No such file or directory"),
        ([sys.executable, "-c", "raise SystemExit('no such thing')"], "exit code 1"),
        ([sys.executable, "-c", "print('hello, this is not it'); input()"], "SIGKILL"),
    ],
    ids=["missing", "fails", "another program"],
)
async def test_a_process_that_can_not_be_started(
    lake: str, command: Sequence[str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All who wait are told to try again; it is not tried on and on."""
    async with examining(lake, command) as examiner:
        found = await asyncio.gather(*(told(examiner, job(lake, "a")) for _ in range(4)))

    assert {type(error) for error in found} == {Overloaded}
    assert found[0].message == f"the process that checks jobs can't be started now ({reason}); try again"
    assert 1 <= len(caplog.records) <= 4
    assert "no such thing" in str([vars(record)["output"] for record in caplog.records]) or reason != "exit code 1"


async def test_secrets_stay_with_the_gateway(lake: str) -> None:
    """The drivers' variables are handed on, and qinfer's own are not; none is an argument."""
    environment = {**os.environ, "QINFER_REDIS__URL": "redis://:hidden@h", "AWS_SECRET_ACCESS_KEY": "needed"}
    environment["QINFER_ALLOW_INSPECTION"] = "true"
    async with examining(lake, COMMAND, environment) as examiner:
        await examiner.check(job(lake, "a.parquet"), MODEL, ANY_FILE)
        (pid,) = looking()
        seen = psutil.Process(pid)
        variables, arguments = seen.environ(), seen.cmdline()

    assert variables["AWS_SECRET_ACCESS_KEY"] == "needed"
    assert [name for name in variables if name.startswith("QINFER_")] == ["QINFER_ALLOW_INSPECTION"]
    assert arguments == list(COMMAND)


async def test_the_end_of_the_gateway_is_theirs(lake: str, tmp_path: Path) -> None:
    """Who waits is told so, whether looked at, in line, or too late."""
    async with examining(lake) as examiner:
        jobs = [asyncio.create_task(told(examiner, job(lake, f"hang-{n}"))) for n in range(PROCESSES + 1)]
        await eventually(
            lambda: all((tmp_path / f"hang-{n}").exists() for n in range(PROCESSES)), description="all hang"
        )
    found = [await waiting for waiting in jobs]
    found.append(await told(examiner, job(lake, "a")))

    assert {(type(error), error.message) for error in found} == {(Overloaded, "Server exiting")}


GATEWAY = """
import asyncio, os, sys
from qinfer.jobs.job import JobSpec, Output
from qinfer.core.settings import Settings
from qinfer.core.store_urls import UrlGrant
from qinfer.testing import stub_spec
from qinfer.jobs.examiner_pool import ExaminerPool

async def main(url, *command):
    examiner = ExaminerPool(Settings(), os.environ, command)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(examiner.run(asyncio.Event()))
        await asyncio.sleep(0)
        spec = JobSpec(model="stub", inputs=("file:///fine",), output=Output("file:///out"))
        await examiner.check(spec, stub_spec(), UrlGrant())
        spec = JobSpec(model="stub", inputs=(url,), output=Output("file:///out"))
        tasks.create_task(examiner.check(spec, stub_spec(), UrlGrant()))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["mark", "hang"])
def test_a_gateway_that_is_killed_leaves_none(lake: str, tmp_path: Path, name: str) -> None:
    """Idle or at work: it ends with its standard input."""
    command = [sys.executable, "-c", GATEWAY, f"{lake}/{name}", *STUB]
    with subprocess.Popen(command) as gateway:
        try:
            wait_until((tmp_path / name).exists, description="it looks at a job")
            (child,) = psutil.Process(gateway.pid).children()
        finally:
            gateway.kill()

    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, description="it ends")


def test_a_parent_that_dies_before_it_reads_leaves_none() -> None:
    """The connection is reset then, and does not just end, since an answer lies in it unread."""
    mine, theirs = socket.socketpair()
    with open(os.memfd_create("notes"), "rb") as notes, theirs:
        process = subprocess.Popen(COMMAND, stdin=theirs.fileno(), stdout=theirs.fileno(), pass_fds=[notes.fileno()])
        mine.sendall(packed(ExaminerHello((), SMALLEST, notes.fileno(), notes.fileno(), FOOTER_BYTES)))
    try:
        select.select([mine], [], [])
        mine.close()

        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def open_files() -> Counter[str]:
    """Returns what this process has open, each pipe and socket by its own name, and how often."""
    names: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            names[os.readlink(f"/proc/self/fd/{number}")] += 1
    return names


def test_the_gateways_event_loop_leaves_nothing_open(lake: str) -> None:
    """A gateway runs on uvloop: processes that live, die and are given up are all closed."""

    async def use(names: Iterable[str]) -> None:
        async with examining(lake) as examiner:
            for name in names:
                with contextlib.suppress(QinferError, TimeoutError):
                    async with asyncio.timeout(5.0 if name != "hang" else 0.0):
                        await examiner.check(job(lake, name), MODEL, ANY_FILE)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(use(["fine"]))
        before = open_files()
        runner.run(use(["fine", "crash", "fine", "hang", "fine"]))
        gc.collect()
        assert not open_files() - before  # what other tests have left may go meanwhile
