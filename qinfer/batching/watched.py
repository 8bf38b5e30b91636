"""Executions with a limit: a wrapper around any backend that notes what its instance executes, since when, until when.

    WatchedBackend.load, execute ──▶ ExecutionClock ◀── a watchdog asks how long, warns, and ends what lasts too long

Everything that runs on an instance passes here: batches of requests, of jobs and of shadows, warm-up and load. To call
another model stops the clock until the answer; each response of a decoupled model restarts it, and it runs until the
last of its streams has ended. A model's streams share the clock of their instance: while any of them goes on, the
instance is well.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from qinfer.backends.base import Backend, Batch, Context, memory_of, metrics_of
from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.errors import Cancelled, ExecutionOverdue, InferenceFailed, LoadOverdue, QinferError, SequenceLost
from qinfer.models.config.to_spec import EXECUTE_TIMEOUT, LOAD_TIMEOUT, WARMUP_TIMEOUT
from qinfer.models.spec import Device, ModelSpec
from qinfer.observe.host import MemoryUse
from qinfer.observe.model_metrics import ModelSeries
from qinfer.tensors import Tensor

_Answer = tuple[Tensor, ...] | QinferError

NONE: float = 0.0
"""The instant while an instance is idle."""


class TimeLimit(NamedTuple):
    """How long a kind of work on an instance may last.

    Attributes:
        what: The work, for messages.
        parameter: The parameter of the model's configuration that sets the limit.
        seconds: The limit; infinity means that there is no limit.
    """

    what: str
    parameter: str
    seconds: float

    def text(self, model: str) -> str:
        """Returns what a client is told of work that lasted too long."""
        return f"{self.what} of model '{model}' lasted longer than its limit of {self.seconds:g} s ({self.parameter})"


class TimeLimits(NamedTuple):
    """The limits of a model."""

    load: TimeLimit
    warm_up: TimeLimit
    execute: TimeLimit

    @classmethod
    def of(cls, spec: ModelSpec) -> "TimeLimits":
        """Returns the limits of a model's configuration."""
        return cls(
            TimeLimit("the load", LOAD_TIMEOUT, spec.load_timeout_s or math.inf),
            TimeLimit("the warm-up", WARMUP_TIMEOUT, spec.warmup_timeout_s or math.inf),
            TimeLimit("an execution", EXECUTE_TIMEOUT, spec.execute_timeout_s or math.inf),
        )


class Lateness(Enum):
    """How much of its limit an execution has used up."""

    FINE = "fine"
    HALF = "half"
    OVER = "over"


def lateness(elapsed_s: float, limit_s: float) -> Lateness:
    """Judges an execution that has lasted for a time; pure."""
    if elapsed_s >= limit_s:
        return Lateness.OVER
    return Lateness.HALF if elapsed_s >= limit_s / 2 else Lateness.FINE


class ExecutionClock:
    """Since when an instance executes, and until when it may; its thread writes, a watchdog's reads.

    Args:
        model: The model's name.
        version: The version.
        limits: Its limits.
        left: Called when it is not used any more.

    Attributes:
        limit: The limit that holds now; at first that of loads.
        ctx: The context of the batch that `execute` runs now.
        began: How many times `execute` has begun, so that a watchdog warns once of each.
        due: Where it writes the instant of the monotonic clock at which the limit is over, and at which place.
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

    def use(self, limit: TimeLimit) -> None:
        """Goes on with another limit; while nothing executes."""
        self.limit, self._limit_s = limit, limit.seconds

    def begin(self, ctx: Context | None) -> None:
        """Starts the clock: on the way of every batch, and so without a lock."""
        now_s = time.monotonic()
        self.ctx = ctx
        self.began += 1
        due, place = self.due
        due[place] = now_s + self._limit_s
        self._since_s = now_s

    def end(self) -> None:
        """Stops the clock, unless streams are open; it calls nothing, as `begin`."""
        with self._lock:
            self.ctx = None
            self._since_s = since_s = time.monotonic() if self._streaming else NONE
            due, place = self.due
            due[place] = since_s + self._limit_s if since_s else NONE

    def restart(self) -> None:
        """Begins again to count: the model gave a sign of life."""
        with self._lock:
            if not self._calls:
                is_idle = self.ctx is None and not self._streaming
                self._set(NONE if is_idle else time.monotonic())

    def opened(self, streaming: "_Streaming") -> None:
        """Takes note of a batch whose streams are open."""
        with self._lock:
            self._streaming.add(streaming)

    def closed(self, streaming: "_Streaming") -> None:
        """Takes note that the last stream of a batch has ended."""
        with self._lock:
            self._streaming.discard(streaming)
        self.restart()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the clock for a call of another model; calls may overlap."""
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                self._called_s = time.monotonic()
                self._write(math.inf)
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls and self._since_s:
                    # An execution that began during a call has not waited for the whole call.
                    waited_s = time.monotonic() - max(self._called_s, self._since_s)
                    self._set(self._since_s + waited_s)

    def elapsed_s(self) -> float:
        """Returns how long the instance has been executing without a sign of life; 0 = it executes nothing."""
        for streaming in list(self._streaming):
            if streaming.look():
                self.restart()
        with self._lock:
            return self._elapsed_s()

    def expire(self, interrupt: Callable[[], bool]) -> bool:
        """Ends what has lasted too long; returns whether it was ended.

        Args:
            interrupt: Ends what the instance executes, and returns whether it did; called under the lock, so that it
                ends nothing that has begun since. If it did not, the next look asks it again.
        """
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

    def leave(self) -> None:
        """Gives up its place in `due`: the instance is unloaded, or was given up."""
        self._write(NONE)
        self._left(self)
        self.due = ([NONE], 0)

    @property
    def items(self) -> Sequence[Any]:
        """The items that execute now, and those of open streams; empty for a job's batch, a warm-up and a load."""
        found = dict.fromkeys([self.ctx, *self._streaming])
        return [item for ctx in found if ctx is not None for item in _items_of(ctx)]

    def alone(self) -> Any:
        """Returns the item that executes alone; `None` where there are more, or none that somebody waits for."""
        items = self.items
        return items[0] if len(items) == 1 and not items[0].lost else None

    def _elapsed_s(self) -> float:
        if not self._since_s:
            return 0.0
        return (self._called_s if self._calls else time.monotonic()) - self._since_s

    def _set(self, since_s: float) -> None:
        self._since_s = since_s
        self._write(since_s + self._limit_s if since_s else NONE)

    def _write(self, due_s: float) -> None:
        due, place = self.due
        due[place] = due_s


class WatchedBackend:
    """Notes on a clock what a backend's instance executes; see the module docstring.

    Args:
        backend: The backend.
        clock: Its clock.

    Attributes:
        backend: The same.
        clock: The same.
        interrupt: Ends what the instance executes, and returns whether it did; `None` = only the end of the worker
            does.
        unready: Returns why the model says that it is not ready; `None` = it says nothing.
    """

    def __init__(self, backend: Backend, clock: ExecutionClock) -> None:
        self.backend, self.clock = backend, clock
        self.interrupt: Callable[[], bool] | None = getattr(backend, "interrupt", None)
        self.unready: Callable[[], str] | None = getattr(backend, "unready", None)
        self.short_on_loop = backend.short_on_loop

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Loads the model."""
        self.clock.begin(None)
        try:
            self.backend.load(spec, version_dir, device)
        finally:
            self.clock.end()
        self.short_on_loop = self.backend.short_on_loop  # some know it only by then

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Runs the batch.

        Raises:
            ExecutionOverdue: It was ended, because it lasted too long.
        """
        if self.short_on_loop:  # such a backend calls no other model, and has no streams
            self.clock.begin(ctx)
            try:
                self.backend.execute(batch, ctx)
            finally:
                self.clock.end()
            return
        timed = _Streaming(ctx, self.clock, len(batch.requests)) if ctx.is_decoupled else _TimedContext(ctx, self.clock)
        self.clock.begin(timed)
        try:
            self.backend.execute(batch, timed)
        except BaseException as error:
            timed.abandon()
            if timed.overdue is not None:
                raise timed.ended(error) from None
            raise
        finally:
            self.clock.end()

    def memory(self) -> tuple[MemoryUse, ...]:
        """Returns what the model holds."""
        return memory_of(self.backend)

    def metrics(self) -> Sequence[ModelSeries]:
        """Returns the model's own metrics."""
        return metrics_of(self.backend)

    def unload(self) -> None:
        """Unloads the model."""
        self.backend.unload()
        self.clock.leave()


class _TimedContext:
    """A context that stops the clock during calls; all else is the batch's own."""

    def __init__(self, ctx: Context, clock: ExecutionClock) -> None:
        self.inner = ctx
        self.overdue: ExecutionOverdue | None = None
        self.is_decoupled, self.window_bytes = ctx.is_decoupled, ctx.window_bytes
        self.respond, self.offer = ctx.respond, ctx.offer
        self.reschedule, self.on_taken, self.cancelled = ctx.reschedule, ctx.on_taken, ctx.cancelled
        self._clock = clock

    def call(self, request: InferRequest) -> Response:
        """Calls through the batch's own context."""
        with self._clock.stopped():
            return self.inner.call(request)

    def stream(self, request: InferRequest) -> Iterator[Response]:
        """Calls through the batch's own context; the clock stands while a response is waited for."""
        with self._clock.stopped():
            responses = self.inner.stream(request)
        return _TimedResponses(responses, self._clock)

    def abandon(self) -> None:
        """Takes note that `execute` has raised."""

    def ended(self, error: BaseException) -> QinferError:
        """Returns the error of an execution that lasted too long, in place of what the model's end looked like."""
        assert self.overdue is not None
        if isinstance(error, SequenceLost):
            return SequenceLost(f"{self.overdue.message}, and its process had the state in memory")
        return self.overdue


class _TimedResponses:
    """The responses to a call; the clock stands while one is waited for.

    Attributes:
        cancel: Cancels the call, where that can be done.
    """

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
    """A context of a decoupled model: its responses restart the clock."""

    def __init__(self, ctx: Context, clock: ExecutionClock, items: int) -> None:
        super().__init__(ctx, clock)
        self.open = set(range(items))
        self._waits: Callable[[int], bool] = getattr(ctx, "waits", lambda _: False)
        self.respond, self.offer, self.reschedule = self._respond, self._offer, self._reschedule
        clock.opened(self)

    def look(self) -> bool:
        """Forgets streams that were abandoned; tells whether one waits for its caller to take something."""
        for item in [item for item in tuple(self.open) if self.cancelled(item)]:
            self._end(item)
        return any(self._waits(item) for item in tuple(self.open))

    def abandon(self) -> None:
        """See the base; what runs again runs with another context."""
        self.open.clear()
        self._clock.closed(self)

    def _respond(
        self, item: int, outputs: _Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        self._send(self.inner.respond, item, outputs, final=final, parameters=parameters)

    def _offer(
        self, item: int, outputs: _Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        self._send(self.inner.offer, item, outputs, final=final, parameters=parameters)

    def _reschedule(self, item: int, states: tuple[Tensor, ...] = ()) -> None:
        """The next execution of the item has a context of its own; until then the instance does nothing for it."""
        self.inner.reschedule(item, states)
        self._end(item)

    def _send(self, way: Callable[..., None], item: int, outputs: _Answer, *, final: bool, parameters: Any) -> None:
        if self.overdue is not None and isinstance(outputs, InferenceFailed):
            outputs = self.overdue  # the end of the model's process
        try:
            way(item, outputs, final=final, parameters=parameters)
        except Cancelled:
            self._end(item)
            raise
        if final:
            self._end(item)
        self._clock.restart()

    def _end(self, item: int) -> None:
        self.open.discard(item)
        if not self.open:
            self._clock.closed(self)


def within(limit: TimeLimit, model: str, work: Callable[[], None], late: Callable[[], None]) -> None:
    """Does a part of a load, in a thread of its own that is left to itself when the limit is over.

    Args:
        limit: How long it may take.
        model: The model's name.
        work: The work; blocking.
        late: Called after work that has ended too late, in its thread.

    Raises:
        LoadOverdue: It took too long.
    """
    if limit.seconds == math.inf:
        work()
        return
    lock, ended, is_left = threading.Lock(), threading.Event(), False
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  it is raised where the work is waited for
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
