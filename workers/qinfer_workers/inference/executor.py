"""Instance threads, one for each model instance, fed from a common queue or each from its own.

A `SimpleQueue` in and `call_soon_threadsafe` out cost a few microseconds a batch, a future several times that.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum
from typing import Protocol, TypeVar
from weakref import WeakSet

from qinfer.backends.base import Backend, memory_of, metrics_of
from qinfer.batching.execution import Execution
from qinfer.batching.streams import ItemStream, StreamedExecution
from qinfer.observe.exposition import ModelSeries
from qinfer.observe.host import MemoryUse, added_up

logger = logging.getLogger(__name__)

SHORT_S = 0.0005
"""Shorter executions run on the event loop (decision 0006)."""

_LEAVE_S = 10.0
_threads: "WeakSet[threading.Thread]" = WeakSet()

T = TypeVar("T")


class InstanceBorrower(Protocol):
    """Uses a lent instance."""

    def run(self, instance: Backend) -> None:
        """Uses the instance, in its thread; raises nothing."""
        ...


_Job = tuple[Execution | InstanceBorrower, Callable[..., None]]


async def in_thread(name: str, call: Callable[[], T]) -> T:
    """Runs a blocking call in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised where the call is awaited
            future.set_exception(error)

    _start_thread(threading.Thread(target=run, name=name, daemon=True))
    return await asyncio.wrap_future(future)


def are_threads_left() -> bool:
    """Returns whether threads still load or execute."""
    return any(thread.is_alive() for thread in _threads)


def _start_thread(thread: threading.Thread) -> None:
    _threads.add(thread)
    thread.start()


class _End(Enum):
    ALL = "all"
    ONE = "one"


_Jobs = queue.SimpleQueue[_Job | _End]


class ThreadExecutor:
    """Runs executions on loaded backends; `pinned` instances have a queue each."""

    def __init__(
        self, instances: Sequence[Backend], loop: asyncio.AbstractEventLoop, name: str, *, pinned: bool = False
    ) -> None:
        self.count = 0
        self._loop = loop
        self._name = name
        self._pinned = pinned
        self._instances: dict[int, Backend] = {}
        self._started = 0
        self._running = 0
        self._queues: list[_Jobs] = []
        self.grow(instances)

    def grow(self, instances: Sequence[Backend]) -> None:
        """Adds instances."""
        self.count += len(instances)
        for instance in instances:
            name = f"{self._name}-{self._started}"
            self._instances[self._started if self._pinned else len(self._instances)] = instance
            self._started += 1
            jobs: _Jobs = queue.SimpleQueue() if self._pinned or not self._queues else self._queues[0]
            self._queues.append(jobs)
            # a hanging call must not keep the process alive
            _start_thread(threading.Thread(target=self._run_jobs, args=(instance, jobs), name=name, daemon=True))
        self._note_instances()

    def shrink(self, surplus: int) -> None:
        """Unloads surplus instances; at least one must remain."""
        self.count -= surplus
        for _ in range(surplus):
            self._queues.pop().put(_End.ONE)

    def end(self, instance: int) -> None:
        """Unloads a pinned instance after its queued executions."""
        self.count -= 1
        self._queues[instance].put(_End.ONE)

    def run_now(self, execution: Execution, expected_s: float, instance: int = 0) -> bool:
        """Executes at once if short and no instance is busy."""
        if self._running or not self._on_loop or not 0 < expected_s <= SHORT_S:
            return False
        execution.run(self._instances[instance])
        return True

    def start(self, execution: Execution | InstanceBorrower, done: Callable[..., None], instance: int = 0) -> None:
        """Queues an execution for any instance, or its own if pinned; calls `done` on the loop afterwards."""
        self._running += 1
        self._queues[instance].put((execution, done))

    def lend(self, borrower: InstanceBorrower, done: Callable[[InstanceBorrower], None]) -> None:
        """Lends the next free instance."""
        self.start(borrower, done)

    def _on_job_end(self, ended: Execution | InstanceBorrower, done: Callable[..., None]) -> None:
        self._running -= 1
        done(ended)

    def memory(self) -> tuple[MemoryUse, ...]:
        """Returns the memory that the instances hold; for any thread."""
        return added_up(use for instance in list(self._instances.values()) for use in memory_of(instance))

    def metrics(self) -> list[ModelSeries]:
        """Returns the metrics of the models; for any thread."""
        return [one for instance in list(self._instances.values()) for one in metrics_of(instance)]

    def recall(self) -> list[Execution]:
        """Takes back executions that have not begun."""
        recalled: list[Execution] = []
        for jobs in dict.fromkeys(self._queues):
            recalled += self._recall(jobs)
        return recalled

    def retire(self) -> None:
        """Unloads each instance after its queued executions and streams have ended."""
        for jobs in self._queues:
            jobs.put(_End.ALL)

    def _recall(self, jobs: _Jobs) -> list[Execution]:
        recalled: list[Execution] = []
        others: list[_Job | _End] = []
        with suppress(queue.Empty):
            while True:
                job = jobs.get_nowait()
                if isinstance(job, tuple) and isinstance(job[0], Execution):
                    self._running -= 1
                    recalled.append(job[0])
                else:
                    others.append(job)
        for other in others:
            jobs.put(other)
        return recalled

    def _note_instances(self) -> None:
        self._on_loop = all(instance.short_on_loop for instance in self._instances.values())

    def _remove_instance(self, instance: Backend, left: threading.Event) -> None:
        others = {number: one for number, one in self._instances.items() if one is not instance}
        self._instances = others if self._pinned else dict(enumerate(others.values()))
        self._note_instances()
        left.set()

    def _run_jobs(self, instance: Backend, jobs: _Jobs) -> None:
        streams: list[ItemStream] = []
        while not isinstance(job := jobs.get(), _End):
            execution, done = job
            execution.run(instance)
            if isinstance(execution, StreamedExecution):
                # A rescheduled request has one stream.
                streams = [one for one in dict.fromkeys((*streams, *execution.streams)) if not one.closed.is_set()]
            try:
                self._loop.call_soon_threadsafe(self._on_job_end, execution, done)
            except RuntimeError:
                return  # the process is ending
            del job, execution, done  # frees the last batch's tensors
        if job is _End.ONE:
            left = threading.Event()
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._remove_instance, instance, left)
                left.wait(_LEAVE_S)
        for stream in streams:
            stream.closed.wait()
        try:
            instance.unload()
        except Exception:  # the boundary to backends
            logger.exception("model instance not unloaded", extra={"instance": threading.current_thread().name})
