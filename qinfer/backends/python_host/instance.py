"""Restarts an instance's dead host process, with growing pauses."""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from qinfer.backends.python_host.process import FINALIZE_S, TERMINATE_S, HostProcess
from qinfer.core.retry import pause_s
from qinfer.errors import ModelLoadFailed
from qinfer.observe.host import MemoryUse, read_use
from qinfer.observe.model_metrics import ModelSeries

logger = logging.getLogger("qinfer.backends.python")

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
        self, model: str, version: str, load: Callable[[HostProcess], object], environment: Path | None = None
    ) -> None:
        self.reason = ""
        self.is_busy = False
        self._busy_since_s = 0.0
        self._model = model
        self._version = version
        self._load = load
        self._environment = environment
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
        process = HostProcess(self._model, self._version, self.lost, self._environment)
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
