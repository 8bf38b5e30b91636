"""A pool of examiners (`qinfer.jobs.examiner`) that parse files for gateways and bulk workers.

A process serves one request at a time. The pool starts more examiners when several requests come at once, and replaces
dead examiners; while one lives, requests wait for it rather than for a start.
"""

import asyncio
import errno
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, BinaryIO, Self

import msgspec

from qinfer import errors
from qinfer.core.processes import packed, received, signal_name, without_settings
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import InvalidRequest, Overloaded, QinferError
from qinfer.jobs import examiner
from qinfer.jobs.job import JobSpec
from qinfer.jobs.plan import Estimate, ExpectedParts, PartInfo, UnplannedJob
from qinfer.jobs.shards import ShardPace
from qinfer.models.spec import ModelSpec
from qinfer.wire.bodies import JobPreview

if TYPE_CHECKING:  # keeps an examiner, which imports this module, small
    from qinfer.core.settings import Settings

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "qinfer.jobs.examiner")
GATEWAY_PROCESSES = 2
"""New jobs that a gateway checks at once."""
PLAN_SHARES = 4
"""A planning process keeps all files of a job in memory."""
READ_SHARES = 0
"""A process that reads shards is limited by each `OpenShard`."""
READERS = 64
"""Shards that a worker reads at once."""
READ_S = 600
"""The time after which the kernel kills a process that reads a batch of rows."""
ESTIMATE_THREADS = 16
CHECK_S = 120
"""The time after which the kernel kills a check; gateways give up before."""

DIED = "the process that read "

_PLAN_MARGIN_S = 60
_LONGEST_S = 2**31 - 1  # the limit of alarm(2)
_PARTS_AT_ONCE = 1000
# Idle examiners that are kept for the next request.
_IDLE = 2
_START_S = 60.0
_END_S = 5.0
_MAX_ANSWER_BYTES = 2**20
_MAX_RESULT_BYTES = 2**31
_TAIL_BYTES = 4096
_NAMED = 2

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**20),
}
"""Native libraries allocate by use, not by core, and return large buffers at once."""


class ExaminerDied(QinferError):
    """An examiner ended (`how`, such as `SIGSEGV`) while it read `files`."""

    retryable = True

    def __init__(self, how: str, files: Sequence[str]) -> None:
        named = " or ".join(f"'{url}'" for url in files[:_NAMED]) or "the files"
        more = f" or {len(files) - _NAMED} more" if len(files) > _NAMED else ""
        super().__init__(f"{DIED}{named}{more} died ({how})")
        self.how = how
        self.files = files


class ExaminerPool:
    """Runs work in examiners, for a process with an event loop.

    The processes inherit `environment`, with the stores' credentials, but not qinfer's secret settings. An examiner
    gets `shares` of `bulk.max_examine_bytes`.
    """

    def __init__(
        self,
        settings: "Settings",
        environment: Mapping[str, str],
        command: Sequence[str] = (),
        *,
        processes: int = GATEWAY_PROCESSES,
        shares: int = 1,
    ) -> None:
        self._allow = settings.stores.allow
        self._max_bytes = shares * settings.bulk.max_examine_bytes
        self._footer_bytes = settings.bulk.max_footer_bytes
        self._bound = f"{shares} times " * (shares > 1) + "QINFER_BULK__MAX_EXAMINE_BYTES"
        if not shares:
            self._bound = "four times QINFER_BULK__MAX_READ_BYTES"
        self._plan_s = min(int(settings.bulk.plan_timeout_s) + _PLAN_MARGIN_S, _LONGEST_S)
        self._is_wanted = settings.bulk.enabled and bool(settings.stores.allow)
        self._inherited = without_settings(environment)
        self._command = command or COMMAND
        self._processes = processes
        # including examiners that start or end
        self._count = 0
        self._is_starting = False
        self._idle: list[_ExaminerChild] = []
        self._line: deque[asyncio.Future[_ExaminerChild]] = deque()
        self._tasks = asyncio.TaskGroup()
        self._is_over = False

    async def run(self, up: asyncio.Event | None = None) -> None:
        """Manages the processes until cancelled; starts one after `up`, if jobs are enabled."""
        async with self._tasks:
            try:
                if up is not None:
                    await up.wait()
                if self._is_wanted:
                    self._prepare()
                await asyncio.Event().wait()
            finally:
                self._is_over = True
                self._turn_away("Server exiting")

    async def check(self, spec: JobSpec, model: ModelSpec, grant: UrlGrant) -> None:
        """Checks whether a job can run; cancellation kills the process."""
        await self._ask_gateway(examiner.CheckJob(spec, model, grant), _named_inputs(spec))

    async def estimate(self, job: UnplannedJob, pace: ShardPace) -> Estimate:
        """Checks a job and returns its size."""
        work = examiner.PlanJob(job, pace, ESTIMATE_THREADS, is_estimate=True)
        return msgspec.msgpack.decode(await self._ask_gateway(work, _named_inputs(job.spec)), type=Estimate)

    async def preview(self, work: examiner.PreviewJob) -> JobPreview:
        """Reads the first rows of a job's files; cancellation kills the process."""
        what = _named_inputs(work.spec) if work.of == "input" else f"the parts can't be read, '{work.spec.output.url}'"
        return msgspec.msgpack.decode(await self._ask_gateway(work, what), type=JobPreview)

    async def _ask_gateway(self, work: examiner.Work, what: str) -> bytes:
        try:
            return await self._run_work(work, CHECK_S)
        except ExaminerDied as died:
            raise InvalidRequest(f"{what}: the process that read them died ({died.how}); is a file damaged?") from None

    async def plan(self, job: UnplannedJob, pace: ShardPace, threads: int) -> bytes:
        """Returns a job's plan as JSON."""
        return await self._run_work(examiner.PlanJob(job, pace, threads), self._plan_s)

    async def read_parts(self, parts: ExpectedParts, threads: int) -> list[PartInfo | str]:
        """Validates parts; returns each part, or a message."""
        found: list[PartInfo | str] = []
        for some in _pieces(parts):
            found += examiner.parts_found(await self._run_work(examiner.ReadParts(some, threads), self._plan_s))
        return found

    async def set_aside(self, parts: ExpectedParts, threads: int) -> None:
        """Runs `qinfer.jobs.parts.set_aside`."""
        for some in _pieces(parts):
            await self._run_work(examiner.ReadParts(some, threads, sets_aside=True), self._plan_s)

    async def borrow(self, work: examiner.OpenShard) -> "BorrowedExaminer":
        """Opens a shard in an examiner, which is the caller's until it is returned."""
        child, answer = await self._answered(work, READ_S)
        borrowed = BorrowedExaminer(child, self._free)
        try:
            _raise(answer)
        except BaseException:
            await borrowed.give_back()
            raise
        return borrowed

    async def _run_work(self, work: examiner.Work, limit_s: int) -> bytes:
        child, answer = await self._answered(work, limit_s)
        self._free(child)
        _raise(answer)
        return answer.result

    async def _answered(self, work: examiner.Work, limit_s: int) -> "tuple[_ExaminerChild, examiner.ExaminerReply]":
        request, answer = packed(examiner.ExaminerRequest(work, limit_s)), None
        while answer is None:
            child = await self._next()
            try:
                answer = await child.ask(request)
            except _ExaminerEnded as ended:
                if self._is_over:
                    raise Overloaded("Server exiting") from None
                raise ExaminerDied(ended.how, child.files) from None
            except BaseException:
                child.kill()
                raise
        return child, answer

    async def _next(self) -> "_ExaminerChild":
        if self._is_over:
            raise Overloaded("Server exiting")
        if self._idle:
            return self._idle.pop()
        self._prepare()
        place: asyncio.Future[_ExaminerChild] = asyncio.get_running_loop().create_future()
        self._line.append(place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._free(place.result())
            raise

    def _free(self, child: "_ExaminerChild") -> None:
        if child.has_ended:
            return
        while self._line:
            place = self._line.popleft()
            if not place.done():
                place.set_result(child)
                return
        if len(self._idle) < _IDLE:
            self._idle.append(child)
        else:
            child.is_surplus = True
            child.kill()

    def _turn_away(self, reason: str) -> None:
        while self._line:
            place = self._line.popleft()
            if not place.done():
                place.set_exception(Overloaded(reason))

    def _prepare(self) -> None:
        if not (self._idle or self._is_starting or self._count == self._processes or self._is_over):
            self._count += 1
            self._is_starting = True
            self._tasks.create_task(self._live())

    async def _live(self) -> None:
        child, reason = None, ""
        try:
            child = await _ExaminerChild.start(self._command, self._inherited | _ENVIRONMENT, self._bound)
            await child.greet(self._allow, self._max_bytes, self._footer_bytes)
            self._is_starting = False
            self._free(child)
            if self._line:
                self._prepare()
            await child.wait()
        except OSError as error:
            reason = str(error.strerror)
        except _ExaminerEnded as ended:
            reason = ended.how
        finally:
            if child is not None:
                await child.shut_down()
            self._count -= 1
            self._is_starting = self._is_starting and not reason
        output = child.output if child is not None else ""
        if reason:
            logger.error("the process that checks jobs can't be started", extra={"how": reason, "output": output})
            if not self._count:
                self._turn_away(f"the process that checks jobs can't be started now ({reason}); try again")
        elif child in self._idle:
            self._idle.remove(child)
        elif child is not None and not child.is_surplus:
            logger.warning("an examiner ended", extra={"how": child.how, "output": output})
            self._prepare()


class BorrowedExaminer:
    """An examiner with an open shard."""

    def __init__(self, child: "_ExaminerChild", free: Callable[["_ExaminerChild"], None]) -> None:
        self._child, self._free = child, free
        # The child's own ends with it, perhaps while a thread reads.
        self._rows = os.fdopen(os.dup(child.rows.fileno()), "rb", buffering=0)

    async def ask(self, work: examiner.ReadShard) -> bytes:
        """Has rows read."""
        try:
            answer = await self._child.ask(packed(examiner.ExaminerRequest(work, READ_S)))
        except _ExaminerEnded:
            answer = None
        if answer is None:
            self._rows.close()
            raise ExaminerDied(self._child.how, self._child.files)
        _raise(answer)
        return answer.result

    def read_rows(self, memory: mmap.mmap, begin: int) -> None:
        """Copies a part of the rows that were read last."""
        os.preadv(self._rows.fileno(), [memory], begin)

    async def give_back(self) -> None:
        """Closes the shard."""
        self._rows.close()
        with suppress(_ExaminerEnded):
            if await self._child.ask(packed(examiner.ExaminerRequest(examiner.CloseShard(), READ_S))) is not None:
                self._free(self._child)


def _named_inputs(spec: JobSpec) -> str:
    more = f" and {len(spec.inputs) - 1} more" if len(spec.inputs) > 1 else ""
    return f"the inputs can't be read, '{spec.inputs[0]}'{more}"


def _pieces(parts: ExpectedParts) -> Iterator[ExpectedParts]:
    for begin in range(0, len(parts.shards), _PARTS_AT_ONCE):
        yield msgspec.structs.replace(parts, shards=parts.shards[begin : begin + _PARTS_AT_ONCE])


def _raise(answer: examiner.ExaminerReply) -> None:
    if answer.error == examiner.DEFECT:
        raise RuntimeError(f"a defect in the process that parses files\n{answer.message}")
    if answer.error:
        raise getattr(errors, answer.error)(answer.message)


class _ExaminerEnded(Exception):
    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class _ExaminerChild:
    """`output` is the end of stderr."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        notes: BinaryIO,
        rows: BinaryIO,
        bound: str,
    ) -> None:
        self._process, self._reader, self._writer, self._notes, self.rows = process, reader, writer, notes, rows
        self._bound = bound
        self._is_gone = asyncio.Event()
        self.files: list[str] = []
        self.output = ""
        self.has_ended = False
        self.is_surplus = False
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name="examiner-end", daemon=True).start()

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], bound: str) -> Self:
        """Starts a process by vfork(2); asyncio with uvloop forks, which blocks large gateways."""
        with ExitStack() as failed:
            notes, rows = (
                failed.enter_context(open(os.memfd_create(name), "rb"))  # noqa: ASYNC230  closed by `_on_exit`
                for name in ("examiner-notes", "examiner-rows")
            )
            mine, theirs = socket.socketpair()
            with theirs:
                reader, writer = await asyncio.open_connection(sock=mine)
                failed.callback(writer.transport.abort)
                process = subprocess.Popen(  # noqa: ASYNC220, S603  see above; our own interpreter and module
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.PIPE,
                    env=environment,
                    pass_fds=(notes.fileno(), rows.fileno()),
                    start_new_session=True,  # Ctrl-C in a terminal is for the gateway, which drains
                )
            failed.callback(process.communicate)
            failed.callback(process.kill)
            try:
                child = cls(process, reader, writer, notes, rows, bound)
            except RuntimeError:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
            failed.pop_all()
            return child

    @property
    def how(self) -> str:
        code = self._process.returncode or 0
        if code == examiner.NO_MEMORY:
            return f"it needs more memory than {self._bound}"
        return signal_name(-code) or f"exit code {code}"

    async def greet(self, allow: tuple[str, ...], max_bytes: int, footer_bytes: int) -> None:
        try:
            async with asyncio.timeout(_START_S):
                notes, rows = self._notes.fileno(), self.rows.fileno()
                await self._say(packed(examiner.ExaminerHello(allow, max_bytes, notes, rows, footer_bytes)))
                await self._receive_answer()
        except TimeoutError:
            raise _ExaminerEnded(f"it is not ready after {_START_S:g} s") from None

    async def ask(self, request: bytes) -> examiner.ExaminerReply | None:
        """Sends a request; `None` = the process had ended before it took it."""
        try:
            await self._say(request)
            await self._receive_answer()
        except _ExaminerEnded:
            return None
        return await self._receive_answer(_MAX_RESULT_BYTES)

    async def wait(self) -> None:
        await self._is_gone.wait()

    def kill(self) -> None:
        if not self._is_gone.is_set():  # another process may have its number by now
            os.kill(self._process.pid, signal.SIGKILL)

    async def shut_down(self) -> None:
        self.kill()
        with suppress(TimeoutError):  # a hanging store may hold it in the kernel
            async with asyncio.timeout(_END_S):
                await self.wait()
        self._writer.transport.abort()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        self.has_ended = True

    async def _say(self, message: bytes) -> None:
        with suppress(ConnectionError):
            self._writer.write(message)
            await self._writer.drain()

    async def _receive_answer(self, max_bytes: int = _MAX_ANSWER_BYTES) -> examiner.ExaminerReply:
        try:
            return msgspec.msgpack.decode(await received(self._reader, max_bytes), type=examiner.ExaminerReply)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, msgspec.MsgspecError):
            self.kill()
            await self.wait()
            raise _ExaminerEnded(self.how) from None

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keeps the end of stderr, where C++ explains an abort.

        The loop reaps the process, so that `kill` never hits another one with its number.
        """
        assert self._process.stderr is not None
        tail = b""
        with self._process.stderr as stderr:
            while text := os.read(stderr.fileno(), _TAIL_BYTES):
                tail = (tail + text)[-_TAIL_BYTES:]
        self.output = tail.decode(errors="replace").strip()
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        try:
            loop.call_soon_threadsafe(self._on_exit)
        except RuntimeError:  # the loop is closed
            self._process.wait()

    def _on_exit(self) -> None:
        self._process.wait()
        with self._notes, self.rows:
            self.files = examiner.notes_of(self._notes.fileno())
        self._is_gone.set()
