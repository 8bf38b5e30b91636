"""A host process from the worker's side, and its restarts with growing pauses."""

import atexit
import logging
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec

from qinfer.backends.parameters import environments, model_variables, open_streams
from qinfer.backends.python_host.channel import Channel
from qinfer.backends.python_host.messages import Finalize
from qinfer.backends.python_host.telemetry import LINE_BYTES, MARK, MetricMemory
from qinfer.core.processes import signal_name
from qinfer.core.retry import pause_s
from qinfer.errors import BackendUnavailable, ModelLoadFailed
from qinfer.observe.exposition import ModelSeries
from qinfer.observe.host import MemoryUse, read_use
from qinfer.observe.logs import EXCEPTION, MODELS

logger = logging.getLogger("qinfer.backends.python")
said = logging.getLogger(MODELS)
"""The models' own lines."""

FINALIZE_S = 10.0
"""Limits `finalize`, before termination."""

TERMINATE_S = 2.0
"""The time from termination to the kill."""

_DEATH_S = 5.0
_TAIL_LINES = 20


class _Spawner:
    """Starts processes from one thread that never ends.

    The kernel ends a host process with the *thread* that started it (prctl(2), PR_SET_PDEATHSIG).
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]]
        self._jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_jobs, name="python-hosts", daemon=True)
                self._thread.start()
        started: Future[subprocess.Popen[bytes]] = Future()
        self._jobs.put((start, started))
        return started.result()

    def _run_jobs(self) -> None:
        while True:
            start, started = self._jobs.get()
            try:
                started.set_result(start())
            except BaseException as error:  # noqa: BLE001  it is raised where the process is wanted
                started.set_exception(error)


_spawner = _Spawner()


class HostProcess:
    """A host process, in the `environment` of its model, or in the environment of the worker (`None`).

    Args:
        ended: Called when the process is gone, from a thread of its own.
        variables: Environment variables beside those of all models' processes.

    Attributes:
        held: Returns the ids of the requests in the process, for the log line about its death.
    """

    def __init__(
        self,
        model: str,
        version: str = "",
        ended: Callable[["HostProcess"], None] = lambda _: None,
        environment: Path | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._model = model
        self.environment = environment
        self._of_model = {"model": model, "version": version}
        self._ended = ended
        self.held: Callable[[], list[str]] = list
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._is_expected_to_end = False
        self._has_ended = threading.Event()
        self._reaping = threading.Lock()
        if sys.platform != "linux":
            raise BackendUnavailable("backend 'python' needs Linux: it ends and feeds processes by means of its kernel")
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.asks, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.metrics = MetricMemory()
        with theirs, asked:
            descriptors = (theirs.fileno(), asked.fileno(), self.metrics.descriptor)
            # -B: byte code beside the model would look like a change.
            command = [sys.executable, "-P", "-B", "-u", "-m", *_program(environment)]
            command += [*map(str, descriptors), str(os.getpid())]
            try:
                self._process = _spawner.run(partial(_open, command, descriptors, {**model_variables(), **variables}))
            except BaseException:
                mine.close()
                self.asks.close()
                self.metrics.close()
                raise
        self.channel = Channel(mine)
        self._listener = threading.Thread(target=self._listen, name=f"output-{model}", daemon=True)
        self._listener.start()
        threading.Thread(target=self._await_end, name=f"end-{model}", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return not self._has_ended.is_set()

    def death(self) -> str:
        """Waits for the end; returns its cause, such as `signal 11: SIGSEGV`."""
        if not self._has_ended.wait(_DEATH_S):
            self.sweep()
            return "it closed its connection and did not end"
        code = self._process.returncode
        hint = ": out of memory?" if -code == signal.SIGKILL else ""
        return f"exit code {code}" if code >= 0 else f"signal {-code}: {signal_name(-code) or 'unknown'}{hint}"

    def stop(self, finalize_s: float | None = None) -> None:
        """Finalises the model, and ends the process."""
        finalize_s = FINALIZE_S if finalize_s is None else finalize_s
        self._is_expected_to_end = True
        with suppress(OSError):  # it is gone
            self.channel.send(Finalize())
        if not self._has_ended.wait(finalize_s):
            extra = {"model": self._model, "pid": self.pid, "after_s": finalize_s}
            logger.warning("the model's process does not end", extra=extra)
            self._signal(signal.SIGTERM)
            self._has_ended.wait(TERMINATE_S)
        self.sweep()

    def interrupt(self) -> None:
        """Kills the process without waiting."""
        self._is_expected_to_end = True
        self._signal(signal.SIGKILL)

    def kill(self) -> None:
        """Ends the process now."""
        self._is_expected_to_end = True
        self.sweep()

    def sweep(self) -> None:
        """Ends the process's children and its connection."""
        self._signal(signal.SIGKILL)
        self._has_ended.wait()
        self.channel.close()
        self.asks.close()
        self.metrics.close()

    def _signal(self, number: signal.Signals) -> None:
        """Signals the whole group, because the model may have started processes."""
        with self._reaping:
            if not self._has_ended.is_set():
                self._signal_group(number)

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _await_end(self) -> None:
        """Waits for the process itself: its children may keep the connection open."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            self._signal_group(signal.SIGKILL)
            self._process.wait()
            self._has_ended.set()
        self.channel.shutdown()
        self._listener.join(_DEATH_S)
        if not self._is_expected_to_end:
            extra = {**self._of_model, "pid": self.pid, "how": self.death(), "request_ids": self.held()}
            logger.error("the model's process died", extra={**extra, "output": "\n".join(self._tail)})
        self._ended(self)

    def _listen(self) -> None:
        output = self._process.stdout or self._process.stderr
        if output is not None:
            with output:
                while line := output.readline(LINE_BYTES):
                    self._heard(line)

    def _heard(self, line: bytes) -> None:
        text, mark, record = line.decode(errors="replace").rstrip("\n").partition(MARK)
        if text:
            self._tail.append(text)
            said.log(level_of(text), "model output", extra={**self._of_model, "text": text})
        if mark:
            level, message, extra = logged(record)
            said.log(level, message, extra={**self._of_model, **extra})


def _open(command: list[str], descriptors: Sequence[int], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # A process reads from a terminal that is not its session's, as if it were in the foreground.
    with open_streams() as (stdin, stdout, stderr):
        return subprocess.Popen(  # noqa: S603  our own interpreter and module
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=descriptors,
            env=variables,
            start_new_session=True,
        )


def _program(environment: Path | None) -> list[str]:
    if environment is None:
        return ["qinfer.backends.python_host"]
    store = environments()
    limits = (str(store.max_bytes), str(store.max_files))
    return ["qinfer.backends.python_host.packed", str(environment), str(store.directory), *limits]


_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL, "V": logging.DEBUG}
_OF_GLOG = re.compile(r"([IWEFV])\d{4} [\d:]+\.\d{6} +\d+ \S+:\d+\]")  # XLA writes Unix time behind 00:00


def level_of(text: str) -> int:
    """Returns the level of a line in glog's form, as of Triton's core, TensorFlow and XLA; of others INFO."""
    found = _OF_GLOG.match(text)
    return logging.INFO if found is None else _LEVELS[found[1]]


def logged(record: str) -> tuple[int, str, dict[str, str]]:
    """Reads a log record; any other text becomes a line of level INFO."""
    try:
        level, message, trace, ids = msgspec.json.decode(record, type=tuple[str, str, str, str])
    except msgspec.MsgspecError:  # the model printed the mark
        return logging.INFO, record, {}
    extra = {"request_id": ids, EXCEPTION: trace}
    return logging.getLevelNamesMapping().get(level, logging.INFO), message, {k: v for k, v in extra.items() if v}


FREE_CRASHES = 8
"""The deaths after which the next start waits: finding one bad request takes several deaths."""

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 30.0

LONGEST_WAIT_S = 60.0
"""A batch's longest wait for a start."""

DOWN_AFTER = 3
"""Failed starts in a row after which batches don't wait."""

_live: "weakref.WeakSet[HostInstance]" = weakref.WeakSet()
_live_lock = threading.Lock()


class HostInstance:
    """A host process, and its successors.

    `load` loads the model, or raises `ModelLoadFailed`. `reason` explains a missing process.
    """

    def __init__(
        self,
        model: str,
        version: str,
        load: Callable[[HostProcess], object],
        environment: Path | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.reason = ""
        self.is_busy = False
        self._busy_since_s = 0.0
        self._model = model
        self._version = version
        self._load = load
        self._environment = environment
        self._variables = variables
        self._changed = threading.Condition()
        self._stopping = threading.Lock()
        self._process: HostProcess | None = None
        self._starting: HostProcess | None = None
        self._crashes = 0
        self._failures = 0
        self._is_stopped = False

    def start(self) -> None:
        """Starts the first process."""
        self._process = self._started()
        with _live_lock:
            if not _live:  # so that it runs before what the program registered, such as an exit at once
                atexit.unregister(_stop_all)
                atexit.register(_stop_all)
            _live.add(self)
        if not self._process.is_alive:
            self.lost(self._process)

    def process(self) -> HostProcess | None:
        """Returns the process, perhaps started; `None` on failure."""
        if (process := self._process) is not None:
            return process
        with self._changed:
            self._changed.wait_for(
                lambda: self._process is not None or self._failures >= DOWN_AFTER or self._is_stopped, LONGEST_WAIT_S
            )
            return self._process

    @property
    def running(self) -> HostProcess | None:
        """The process, if any."""
        return self._process

    def memory(self) -> tuple[MemoryUse, ...]:
        """Returns the resident memory of the processes."""
        process = self._process
        use = None if process is None or not process.is_alive else read_use(pid=process.pid)
        return () if use is None else (MemoryUse("CPU", 0, use.memory_bytes),)

    def metrics(self) -> Sequence[ModelSeries]:
        """Returns a running model's own metrics."""
        process = self._process
        return () if process is None else process.metrics.read()

    def begins(self) -> None:
        """Records that the process gets a batch."""
        self.is_busy = True
        self._busy_since_s = time.monotonic()

    def interrupt(self, limit_s: float) -> bool:
        """Kills a process whose batch has run for `limit_s`."""
        process = self._process
        if process is None or not self.is_busy or time.monotonic() - self._busy_since_s < limit_s:
            return False
        process.interrupt()
        return True

    def well(self) -> None:
        """Records that a batch ended."""
        self._crashes = 0

    def lost(self, process: HostProcess) -> None:
        """Replaces a lost process; idempotent."""
        process.sweep()
        with self._changed:
            if self._process is not process or self._is_stopped:
                return
            self._process = None
            self._crashes += 1
            self.reason = "its process died"
            threading.Thread(target=self._revive, name=f"revive-{self._model}", daemon=True).start()

    def stop(self, finalize_s: float | None = None) -> None:
        """Finalises the model within `finalize_s`, and ends."""
        with self._stopping:
            with self._changed:
                self._is_stopped = True
                self.reason = "it was unloaded"
                process, self._process = self._process, None
                starting = self._starting
                self._changed.notify_all()
            if starting is not None:
                starting.kill()
            if process is not None:
                process.stop(finalize_s)
        with _live_lock:
            _live.discard(self)

    def _revive(self) -> None:
        failures = self._crashes - FREE_CRASHES
        while not self._waited(pause_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)):
            try:
                process = self._started()
            except ModelLoadFailed as error:
                self._note_failure(error.message)
            except Exception as error:  # no memory, no descriptors, …
                logger.exception("the model's process can't be started", extra={"model": self._model})
                self._note_failure(f"its process can't be started: {type(error).__name__}")
            else:
                if self._replaced(process):
                    return
                self._note_failure("its process died after it was loaded")
            failures = self._failures

    def _started(self) -> HostProcess:
        process = HostProcess(self._model, self._version, self.lost, self._environment, self._variables)
        with self._changed:
            self._starting = process
            is_stopped = self._is_stopped
        try:
            if is_stopped:
                raise ModelLoadFailed(f"model '{self._model}' was unloaded")
            self._load(process)
        except BaseException:
            process.kill()
            raise
        finally:
            self._starting = None
        return process

    def _replaced(self, process: HostProcess) -> bool:
        """Returns false if the new one died, too."""
        with self._changed:
            if not self._is_stopped and process.is_alive:
                self._process = process
                self._failures = 0
                self.reason = ""
                self._changed.notify_all()
                logger.warning(
                    "the model's process was started again", extra={"model": self._model, "pid": process.pid}
                )
                return True
        process.kill()
        return self._is_stopped

    def _note_failure(self, reason: str) -> None:
        with self._changed:
            if self._is_stopped:
                return
            self._failures += 1
            self.reason = reason
            self._changed.notify_all()
        extra = {"model": self._model, "reason": reason, "failures": self._failures}
        logger.error("the model's process failed to start again", extra=extra)

    def _waited(self, limit_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._is_stopped, limit_s)


def _stop_all() -> None:
    """Stops all instances before the kernel kills their processes."""
    with _live_lock:
        instances = list(_live)
    # Busy processes had the drain's time, and don't read `Finalize`.
    threads = [threading.Thread(target=i.stop, args=(0.0 if i.is_busy else None,), daemon=True) for i in instances]
    started = []
    for thread in threads:
        try:
            thread.start()
            started.append(thread)
        except RuntimeError:
            thread.run()
    for thread in started:
        thread.join(FINALIZE_S + TERMINATE_S)
