"""Instance threads: one thread for each model instance, all fed from one queue, or each from its own.

Lean on purpose: a `SimpleQueue` in and `call_soon_threadsafe` out cost a few microseconds a batch, a concurrent future
several times that. The runtimes release the GIL while they compute, so that the event loop runs beside them.
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
from qinfer.batching.streams import Stream, StreamedExecution
from qinfer.observe.host import MemoryUse, added_up
from qinfer.observe.model_metrics import ModelSeries

logger = logging.getLogger(__name__)

SHORT_S = 0.0005
"""An execution that is expected to take no longer runs on the event loop: two changes of thread, and the fight for the
GIL that comes with them, would cost more than they gain (decision 0006)."""

_LEAVE_S = 10.0
_threads: "WeakSet[threading.Thread]" = WeakSet()

_Done = Callable[[Execution], None]
T = TypeVar("T")


class Borrower(Protocol):
    """Uses a lent instance for a while; it is no execution of the batcher's."""

    def run(self, instance: Backend) -> None:
        """Uses the instance, in its thread; raises nothing."""
        ...


_Job = tuple[Execution | Borrower, Callable[..., None]]


async def in_thread(name: str, call: Callable[[], T]) -> T:
    """Runs a blocking call in a thread of its own, which a process that ends does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  it is raised where the call is awaited
            future.set_exception(error)

    _start(threading.Thread(target=run, name=name, daemon=True))
    return await asyncio.wrap_future(future)


def are_threads_left() -> bool:
    """Tells whether threads are left that load or execute, and that the interpreter would end wherever they are."""
    return any(thread.is_alive() for thread in _threads)


def _start(thread: threading.Thread) -> None:
    _threads.add(thread)
    thread.start()


class _End(Enum):
    """Ends the thread of the instance that takes it."""

    ALL = "all"
    """All of them end: nothing comes any more."""
    ONE = "one"
    """The others go on."""


_Jobs = queue.SimpleQueue[_Job | _End]


class ThreadExecutor:
    """Runs executions on loaded backends; the `Executor` of `qinfer.batching.batcher`.

    Args:
        instances: Loaded backends, each used by its own thread only.
        loop: Where `done` is called.
        name: What the threads are called.
        pinned: Each instance has a queue of its own, so that an execution runs on the instance that it is for.
    """

    def __init__(
        self, instances: Sequence[Backend], loop: asyncio.AbstractEventLoop, name: str, *, pinned: bool = False
    ) -> None:
        self.count = 0
        self._loop = loop
        self._name = name
        self._pinned = pinned
        self._instances: dict[int, Backend] = {}
        """By their numbers, which those that are pinned keep when others leave."""
        self._started = 0
        self._running = 0
        self._queues: list[_Jobs] = []
        """The queue of each instance; the same one, unless they are pinned."""
        self.grow(instances)

    def grow(self, instances: Sequence[Backend]) -> None:
        """Takes more instances."""
        self.count += len(instances)
        for instance in instances:
            name = f"{self._name}-{self._started}"
            self._instances[self._started if self._pinned else len(self._instances)] = instance
            self._started += 1
            jobs: _Jobs = queue.SimpleQueue() if self._pinned or not self._queues else self._queues[0]
            self._queues.append(jobs)
            # Daemons: a call that never returns must not keep a drained worker from exiting.
            _start(threading.Thread(target=self._serve, args=(instance, jobs), name=name, daemon=True))
        self._note_instances()

    def shrink(self, surplus: int) -> None:
        """Unloads so many instances, those that are idle first, or the last ones; at least one must be left."""
        self.count -= surplus
        for _ in range(surplus):
            self._queues.pop().put(_End.ONE)

    def end(self, instance: int) -> None:
        """Unloads a pinned instance, for which nothing comes any more, once it has executed what is queued."""
        self.count -= 1
        self._queues[instance].put(_End.ONE)

    def run_now(self, execution: Execution, expected_s: float, instance: int = 0) -> bool:
        """Executes at once if that is short and no instance is busy; returns whether it did."""
        if self._running or not self._on_loop or not 0 < expected_s <= SHORT_S:
            return False
        execution.run(self._instances[instance])
        return True

    def start(self, execution: Execution, done: _Done, instance: int = 0) -> None:
        """Queues an execution; the instance that is free first takes it, or the one that it is for."""
        self._running += 1
        self._queues[instance].put((execution, done))

    def lend(self, borrower: Borrower, done: Callable[[Borrower], None]) -> None:
        """Lends an instance as soon as one is free; `done` is called on the event loop when it is given back."""
        self._running += 1
        self._queues[0].put((borrower, done))

    def _ended(self, ended: Execution | Borrower, done: Callable[..., None]) -> None:
        self._running -= 1
        done(ended)

    def memory(self) -> tuple[MemoryUse, ...]:
        """Returns the memory that the instances hold; for any thread."""
        return added_up(use for instance in list(self._instances.values()) for use in memory_of(instance))

    def metrics(self) -> list[ModelSeries]:
        """Returns the metrics of the instances' models; for any thread."""
        return [one for instance in list(self._instances.values()) for one in metrics_of(instance)]

    def recall(self) -> list[Execution]:
        """Takes back the executions that no instance has taken; borrowers stay."""
        recalled: list[Execution] = []
        for jobs in dict.fromkeys(self._queues):
            recalled += self._recall(jobs)
        return recalled

    def retire(self) -> None:
        """Unloads every instance once it has executed its queued batches, and the streams of these have ended."""
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

    def _leave(self, instance: Backend, left: threading.Event) -> None:
        """Forgets an instance, so that nothing runs on it any more."""
        others = {number: one for number, one in self._instances.items() if one is not instance}
        self._instances = others if self._pinned else dict(enumerate(others.values()))
        self._note_instances()
        left.set()

    def _serve(self, instance: Backend, jobs: _Jobs) -> None:
        streams: list[Stream] = []
        while not isinstance(job := jobs.get(), _End):
            execution, done = job
            execution.run(instance)
            if isinstance(execution, StreamedExecution):
                # Once each: those of a request that is executed again and again are one.
                streams = [one for one in dict.fromkeys((*streams, *execution.streams)) if not one.closed.is_set()]
            try:
                self._loop.call_soon_threadsafe(self._ended, execution, done)
            except RuntimeError:
                return  # the loop is closed: the process is ending, and the leases pass to another worker
            del job, execution, done  # an idle instance must not keep its last batch's tensors alive
        if job is _End.ONE:
            left = threading.Event()
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._leave, instance, left)
                left.wait(_LEAVE_S)
        for stream in streams:
            stream.closed.wait()
        try:
            instance.unload()
        except Exception:  # the boundary to backends
            logger.exception("model instance not unloaded", extra={"instance": threading.current_thread().name})
