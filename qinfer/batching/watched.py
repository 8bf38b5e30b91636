"""Time limits of executions: a wrapper around any backend records when an execution began, and when it must end.

    WatchedBackend.load, execute ──▶ ExecutionClock ◀── a watchdog reads it, warns, and ends overdue executions

The clock runs for all work of an instance, and stops during calls to other models. For a decoupled model, each response
restarts the clock, and it runs until the last stream has ended. All streams of an instance share the clock: a response
of one of them gives all of them more time.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from qinfer.backends.base import Backend, Batch, Context, Room, memory_of, metrics_of
from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.errors import Cancelled, ExecutionOverdue, InferenceFailed, LoadOverdue, QinferError, SequenceLost
from qinfer.models.config.to_spec import EXECUTE_TIMEOUT, LOAD_TIMEOUT, WARMUP_TIMEOUT
from qinfer.models.spec import Device, ModelSpec
from qinfer.observe.exposition import ModelSeries
from qinfer.observe.host import MemoryUse
from qinfer.tensors import Tensor

_Answer = tuple[Tensor, ...] | QinferError

NONE: float = 0.0
"""The instant that stands for an idle instance."""


class TimeLimit(NamedTuple):
    """The time limit of a kind of work: messages name the work `what`, and `parameter` sets the limit."""

    what: str
    parameter: str
    seconds: float

    def text(self, model: str) -> str:
        """Returns the client's message about overdue work."""
        return f"{self.what} of model '{model}' lasted longer than its limit of {self.seconds:g} s ({self.parameter})"


class TimeLimits(NamedTuple):
    """The limits of a model."""

    load: TimeLimit
    warm_up: TimeLimit
    execute: TimeLimit

    @classmethod
    def from_spec(cls, spec: ModelSpec) -> "TimeLimits":
        """Returns the limits of a model's configuration."""
        return cls(
            TimeLimit("the load", LOAD_TIMEOUT, spec.load_timeout_s or math.inf),
            TimeLimit("the warm-up", WARMUP_TIMEOUT, spec.warmup_timeout_s or math.inf),
            TimeLimit("an execution", EXECUTE_TIMEOUT, spec.execute_timeout_s or math.inf),
        )


class Lateness(Enum):
    """The used share of a limit."""

    FINE = "fine"
    HALF = "half"
    OVER = "over"


def lateness(elapsed_s: float, limit_s: float) -> Lateness:
    """Compares an execution's age with its limit."""
    if elapsed_s >= limit_s:
        return Lateness.OVER
    return Lateness.HALF if elapsed_s >= limit_s / 2 else Lateness.FINE


class ExecutionClock:
    """The present work of an instance; the instance's thread writes it, and the watchdog's thread reads it.

    Attributes:
        began: The number of executions, so that a watchdog warns once of each.
        due: The array and index for the end of the limit (monotonic clock).
    """

    def __init__(
        self, model: str, version: int, limits: TimeLimits, left: "Callable[[ExecutionClock], None]" = lambda _: None
    ) -> None:
        self.model, self.version, self.limits = model, version, limits
        self.limit = limits.load
        self.ctx: Context | None = None
        self.began = 0
        self.due: tuple[MutableSequence[float], int] = ([NONE], 0)
        self._limit_s = self.limit.seconds
        self._left = left
        self._lock = threading.Lock()
        self._since_s = NONE
        self._calls = 0
        self._called_s = NONE
        self._streaming: set[_Streaming] = set()

    def set_limit(self, limit: TimeLimit) -> None:
        """Switches the limit, while idle."""
        self.limit, self._limit_s = limit, limit.seconds

    def start_clock(self, ctx: Context | None) -> None:
        """Starts the clock, without a lock: every batch does it."""
        now_s = time.monotonic()
        self.ctx = ctx
        self.began += 1
        due, place = self.due
        due[place] = now_s + self._limit_s
        self._since_s = now_s

    def stop_clock(self) -> None:
        """Stops the clock, unless streams are open."""
        with self._lock:
            self.ctx = None
            self._since_s = since_s = time.monotonic() if self._streaming else NONE
            due, place = self.due
            due[place] = since_s + self._limit_s if since_s else NONE

    def restart(self) -> None:
        """Restarts the clock after a sign of life."""
        with self._lock:
            if not self._calls:
                is_idle = self.ctx is None and not self._streaming
                self._set(NONE if is_idle else time.monotonic())

    def opened(self, streaming: "_Streaming") -> None:
        """Adds a batch whose streams are open."""
        with self._lock:
            self._streaming.add(streaming)

    def closed(self, streaming: "_Streaming") -> None:
        """Removes a batch whose last stream has ended."""
        with self._lock:
            self._streaming.discard(streaming)
        self.restart()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the clock during a call, which may overlap others."""
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                self._called_s = time.monotonic()
                self._write_due(math.inf)
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls and self._since_s:
                    # An execution that began during a call waited less.
                    waited_s = time.monotonic() - max(self._called_s, self._since_s)
                    self._set(self._since_s + waited_s)

    def elapsed_s(self) -> float:
        """Returns seconds since the last sign of life; 0 = idle."""
        for streaming in list(self._streaming):
            if streaming.drop_abandoned():
                self.restart()
        with self._lock:
            return self._elapsed_s()

    def expire(self, interrupt: Callable[[], bool]) -> bool:
        """Interrupts an overdue execution, under the lock, so that the interruption can't hit a later one."""
        with self._lock:
            if self._elapsed_s() < self._limit_s:
                return False
            error = ExecutionOverdue(self.limit.text(self.model))
            overdue = [self.ctx, *self._streaming]
            if not interrupt():
                return False
            for timed in overdue:
                if isinstance(timed, _TimedContext):
                    timed.overdue = error
            return True

    def release_place(self) -> None:
        """Frees the instance's place in `due` after an unload."""
        self._write_due(NONE)
        self._left(self)
        self.due = ([NONE], 0)

    @property
    def items(self) -> Sequence[Any]:
        """The executing items, and those of open streams."""
        found = dict.fromkeys([self.ctx, *self._streaming])
        return [item for ctx in found if ctx is not None for item in _items_of(ctx)]

    def alone(self) -> Any:
        """Returns the executing item, if there is only one and its lease is not lost."""
        items = self.items
        return items[0] if len(items) == 1 and not items[0].lost else None

    def _elapsed_s(self) -> float:
        if not self._since_s:
            return 0.0
        return (self._called_s if self._calls else time.monotonic()) - self._since_s

    def _set(self, since_s: float) -> None:
        self._since_s = since_s
        self._write_due(since_s + self._limit_s if since_s else NONE)

    def _write_due(self, due_s: float) -> None:
        due, place = self.due
        due[place] = due_s


class WatchedBackend:
    """Records its work on a clock; `unready` returns why the model is not ready.

    `interrupt` is `None` if only the worker's end can interrupt an execution.
    """

    def __init__(self, backend: Backend, clock: ExecutionClock) -> None:
        self.backend, self.clock = backend, clock
        self.interrupt: Callable[[], bool] | None = getattr(backend, "interrupt", None)
        self.unready: Callable[[], str] | None = getattr(backend, "unready", None)
        self.room: Room | None = getattr(backend, "room", None)
        self.short_on_loop = backend.short_on_loop

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Loads the model."""
        self.clock.start_clock(None)
        try:
            self.backend.load(spec, version_dir, device)
        finally:
            self.clock.stop_clock()
        self.short_on_loop = self.backend.short_on_loop  # perhaps known only after the load

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Runs the batch; raises `ExecutionOverdue` if it was ended."""
        if self.short_on_loop:  # no calls, no streams
            self.clock.start_clock(ctx)
            try:
                self.backend.execute(batch, ctx)
            finally:
                self.clock.stop_clock()
            return
        timed = _Streaming(ctx, self.clock, len(batch.requests)) if ctx.is_decoupled else _TimedContext(ctx, self.clock)
        self.clock.start_clock(timed)
        try:
            self.backend.execute(batch, timed)
        except BaseException as error:
            timed.abandon()
            if timed.overdue is not None:
                raise timed.overdue_error(error) from None
            raise
        finally:
            self.clock.stop_clock()

    def memory(self) -> tuple[MemoryUse, ...]:
        """Returns the memory that the model holds."""
        return memory_of(self.backend)

    def metrics(self) -> Sequence[ModelSeries]:
        """Returns the model's own metrics."""
        return metrics_of(self.backend)

    def unload(self) -> None:
        """Unloads the model."""
        self.backend.unload()
        self.clock.release_place()


class _TimedContext:
    def __init__(self, ctx: Context, clock: ExecutionClock) -> None:
        self.inner = ctx
        self.overdue: ExecutionOverdue | None = None
        self.is_decoupled, self.window_bytes = ctx.is_decoupled, ctx.window_bytes
        self.respond, self.offer = ctx.respond, ctx.offer
        self.reschedule, self.on_taken, self.cancelled = ctx.reschedule, ctx.on_taken, ctx.cancelled
        self._clock = clock

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        with self._clock.stopped():
            return self.inner.call(request, made_for)

    def stream(self, request: InferRequest, made_for: int = -1) -> Iterator[Response]:
        with self._clock.stopped():
            responses = self.inner.stream(request, made_for)
        return _TimedResponses(responses, self._clock)

    def abandon(self) -> None:
        """Does nothing."""

    def overdue_error(self, error: BaseException) -> QinferError:
        """Returns the error of the passed limit in place of the error that the interruption raised."""
        assert self.overdue is not None
        if isinstance(error, SequenceLost):
            return SequenceLost(f"{self.overdue.message}, and its process had the state in memory")
        return self.overdue


class _TimedResponses:
    """Responses to a call; waiting stops the clock."""

    def __init__(self, responses: Iterator[Response], clock: ExecutionClock) -> None:
        self.cancel: Callable[[], None] = getattr(responses, "cancel", lambda: None)
        self._responses = responses
        self._clock = clock

    def __iter__(self) -> "_TimedResponses":
        return self

    def __next__(self) -> Response:
        with self._clock.stopped():
            return next(self._responses)


def _items_of(ctx: Context) -> Sequence[Any]:
    items: Sequence[Any] = getattr(ctx.inner if isinstance(ctx, _TimedContext) else ctx, "items", ())
    return [items[place] for place in sorted(ctx.open)] if items and isinstance(ctx, _Streaming) else items


class _Streaming(_TimedContext):
    """A decoupled model's context; responses restart the clock."""

    def __init__(self, ctx: Context, clock: ExecutionClock, items: int) -> None:
        super().__init__(ctx, clock)
        self.open = set(range(items))
        self._waits: Callable[[int], bool] = getattr(ctx, "waits", lambda _: False)
        self.respond, self.offer, self.reschedule = self._respond, self._offer, self._reschedule
        clock.opened(self)

    def drop_abandoned(self) -> bool:
        """Closes the streams whose callers have left; returns whether another stream waits for its caller."""
        for item in [item for item in tuple(self.open) if self.cancelled(item)]:
            self._close_item(item)
        return any(self._waits(item) for item in tuple(self.open))

    def abandon(self) -> None:
        self.open.clear()
        self._clock.closed(self)

    def _respond(
        self, item: int, outputs: _Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        self._send_outputs(self.inner.respond, item, outputs, final=final, parameters=parameters)

    def _offer(
        self, item: int, outputs: _Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        self._send_outputs(self.inner.offer, item, outputs, final=final, parameters=parameters)

    def _reschedule(self, item: int, states: tuple[Tensor, ...] = ()) -> None:
        """Closes the item here; its next execution has a context of its own."""
        self.inner.reschedule(item, states)
        self._close_item(item)

    def _send_outputs(
        self, way: Callable[..., None], item: int, outputs: _Answer, *, final: bool, parameters: Any
    ) -> None:
        if self.overdue is not None and isinstance(outputs, InferenceFailed):
            outputs = self.overdue
        try:
            way(item, outputs, final=final, parameters=parameters)
        except Cancelled:
            self._close_item(item)
            raise
        if final:
            self._close_item(item)
        self._clock.restart()

    def _close_item(self, item: int) -> None:
        self.open.discard(item)
        if not self.open:
            self._clock.closed(self)


def within(limit: TimeLimit, model: str, work: Callable[[], None], late: Callable[[], None]) -> None:
    """Runs part of a load in a thread, and abandons it at the limit; calls `late` if it succeeds after that."""
    if limit.seconds == math.inf:
        work()
        return
    lock, ended, is_left = threading.Lock(), threading.Event(), False
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  the waiting thread raises it
            errors.append(error)
        with lock:
            ended.set()
            is_late = is_left
        if is_late and not errors:
            late()

    threading.Thread(target=run, name=f"{limit.what.split()[-1]}-{model}", daemon=True).start()
    ended.wait(limit.seconds)
    with lock:
        is_left = not ended.is_set()
    if is_left:
        raise LoadOverdue(limit.text(model))
    if errors:
        raise errors[0]
