"""Clocks of executions: when they run, stand, begin again, and what becomes of an execution that is over its limit."""

import math
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from qinfer.backends.base import Batch, Context, OneResponse
from qinfer.batching.watched import (
    ExecutionClock,
    Lateness,
    TimeLimit,
    TimeLimits,
    WatchedBackend,
    lateness,
    within,
)
from qinfer.core.messages import InferRequest, Response
from qinfer.errors import ExecutionOverdue, InferenceFailed, LoadOverdue, SequenceLost

BATCH = Batch(requests=[InferRequest(model="m", inputs=())], rows=[1], inputs={"x": np.zeros((1, 1), "<f4")})
TEXT = "an execution of model 'm' lasted longer than its limit of 5 s (qinfer.execute_timeout_s)"


class Time:
    """The monotonic clock, moved by hand."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr("qinfer.batching.watched.time", time)
    return time


class Ctx(OneResponse):
    def cancelled(self, item: int) -> bool:
        return False

    def respond(self, *_: object, **__: object) -> None:
        return

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        TIMES[0]()
        return Response(request_id="", model="other", version=1)


class StreamCtx(Ctx):
    @property
    def is_decoupled(self) -> bool:
        return True

    lost = False
    waiting = False

    def cancelled(self, item: int) -> bool:
        return self.lost

    def waits(self, item: int) -> bool:
        return self.waiting

    def reschedule(self, *_: object) -> None:
        return


TIMES = [lambda: None]


class Scripted:
    """A backend whose `execute` is a function."""

    short_on_loop = False

    def __init__(self, work: object) -> None:
        self.work = work

    def load(self, *_: object) -> None:
        return

    def execute(self, batch: Batch, ctx: Context) -> None:
        self.work(ctx)  # type: ignore[operator]

    def unload(self) -> None:
        return


def clock(execute_s: float = 5.0) -> ExecutionClock:
    limits = TimeLimits(
        TimeLimit("the load", "qinfer.load_timeout_s", math.inf),
        TimeLimit("the warm-up", "qinfer.warmup_timeout_s", math.inf),
        TimeLimit("an execution", "qinfer.execute_timeout_s", execute_s),
    )
    one = ExecutionClock("m", 1, limits)
    one.set_limit(limits.execute)
    return one


@pytest.mark.parametrize(
    ("elapsed_s", "late"), [(0, Lateness.FINE), (2.4, Lateness.FINE), (2.5, Lateness.HALF), (5, Lateness.OVER)]
)
def test_half_of_the_limit_is_late(elapsed_s: float, late: Lateness) -> None:
    assert lateness(elapsed_s, 5.0) is late


def test_without_a_limit_nothing_is_late() -> None:
    assert lateness(1e9, math.inf) is Lateness.FINE


def test_an_execution_notes_until_when_it_may_last(now: Time) -> None:
    one, seen = clock(), []
    one.due = due, _ = ([0.0, 0.0], 1)

    WatchedBackend(Scripted(lambda _: seen.append(list(due))), one).execute(BATCH, Ctx())

    assert seen == [[0.0, 105.0]]
    assert due == [0.0, 0.0]
    assert one.elapsed_s() == 0.0


def test_a_call_stops_the_clock(now: Time) -> None:
    one, seen = clock(), []

    def advance() -> None:
        now.now_s += 60.0

    def work(ctx: Context) -> None:
        now.now_s += 1.0
        ctx.call(BATCH.requests[0])
        seen.append(one.elapsed_s())

    TIMES[0] = advance
    WatchedBackend(Scripted(work), one).execute(BATCH, Ctx())

    assert seen == [1.0]


def test_waiting_for_the_next_response_of_a_called_model_stops_the_clock(now: Time) -> None:
    one, seen = clock(), []

    class Streams(Ctx):
        def stream(self, request: InferRequest, made_for: int = -1) -> Iterator[Response]:
            for _ in range(2):
                now.now_s += 60.0
                yield Response(request_id="", model="other", version=1)

    def work(ctx: Context) -> None:
        for _ in ctx.stream(BATCH.requests[0]):
            now.now_s += 1.0
        seen.append(one.elapsed_s())

    WatchedBackend(Scripted(work), one).execute(BATCH, Streams())

    assert seen == [2.0]


def test_a_call_is_cancelled_by_its_iterator() -> None:
    class Called:
        is_cancelled = False

        def cancel(self) -> None:
            self.is_cancelled = True

        def __iter__(self) -> Iterator[Response]:
            return self

        def __next__(self) -> Response:
            raise StopIteration

    called = Called()

    class Streams(Ctx):
        def stream(self, request: InferRequest, made_for: int = -1) -> Iterator[Response]:
            return called

    def work(ctx: Context) -> None:
        responses: Any = ctx.stream(BATCH.requests[0])
        responses.cancel()
        assert list(responses) == []

    WatchedBackend(Scripted(work), clock()).execute(BATCH, Streams())

    assert called.is_cancelled


def test_what_is_ended_fails_with_the_limit(now: Time) -> None:
    one = clock()

    def work(_: Context) -> None:
        now.now_s += 5.0
        assert one.expire(lambda: True)
        raise InferenceFailed("the process died")

    with pytest.raises(ExecutionOverdue, match=r"qinfer\.execute_timeout_s") as raised:
        WatchedBackend(Scripted(work), one).execute(BATCH, Ctx())

    assert raised.value.message == TEXT


def test_state_that_is_lost_with_the_process_stays_lost(now: Time) -> None:
    one = clock()

    def work(_: Context) -> None:
        now.now_s += 5.0
        one.expire(lambda: True)
        raise SequenceLost("the process died")

    with pytest.raises(SequenceLost, match="limit of 5 s"):
        WatchedBackend(Scripted(work), one).execute(BATCH, Ctx())


def test_what_is_not_over_its_limit_is_not_ended(now: Time) -> None:
    """A look may come just when another execution has begun."""
    one, ended = clock(), []

    def work(_: Context) -> None:
        now.now_s += 4.0
        ended.append(one.expire(lambda: True))

    WatchedBackend(Scripted(work), one).execute(BATCH, Ctx())

    assert ended == [False]


def test_what_could_not_be_ended_is_tried_again_at_the_next_look(now: Time) -> None:
    """The model has not had the batch for that long, because its process was being started; it gets no second limit."""
    one = clock()
    seen: list[object] = []

    def work(_: Context) -> None:
        now.now_s += 6.0
        seen.append(one.expire(lambda: False))
        now.now_s += 0.25
        seen.append(one.expire(lambda: True))

    with suppress(ExecutionOverdue):
        WatchedBackend(Scripted(work), one).execute(BATCH, Ctx())

    assert seen == [False, True]


class Streamed:
    """A batch of one stream whose `execute` has returned."""

    def __init__(self) -> None:
        self.clock, self.inner = clock(), StreamCtx()
        WatchedBackend(Scripted(lambda ctx: setattr(self, "ctx", ctx)), self.clock).execute(BATCH, self.inner)

    ctx: Context


def test_the_clock_of_a_stream_runs_on_and_restarts_with_each_response(now: Time) -> None:
    one = Streamed()
    now.now_s += 4.0
    assert one.clock.elapsed_s() == 4.0

    one.ctx.offer(0, (), final=False)
    now.now_s += 3.0

    assert one.clock.elapsed_s() == 3.0


def test_the_clock_stops_with_the_final_response(now: Time) -> None:
    one = Streamed()

    one.ctx.offer(0, ())
    now.now_s += 60.0

    assert one.clock.elapsed_s() == 0.0


def test_a_stream_that_waits_for_its_caller_does_not_count(now: Time) -> None:
    one = Streamed()
    one.inner.waiting = True

    now.now_s += 60.0

    assert one.clock.elapsed_s() == 0.0


def test_a_request_that_waits_for_its_next_execution_does_not_count(now: Time) -> None:
    """The clock stops even if a thread of the model sends its responses."""
    one = Streamed()
    one.ctx.reschedule(0)
    one.ctx.offer(0, (), final=False)

    now.now_s += 60.0

    assert one.clock.elapsed_s() == 0.0


def test_a_stream_that_nobody_waits_for_does_not_count(now: Time) -> None:
    one = Streamed()
    one.inner.lost = True

    now.now_s += 60.0

    assert one.clock.elapsed_s() == 0.0


def test_work_within_a_limit_raises_its_own_error() -> None:
    def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        within(TimeLimit("the load", "qinfer.load_timeout_s", 60.0), "m", work, lambda: None)


def test_work_that_is_late_is_left_and_cleaned_up_when_it_ends() -> None:
    go, cleaned = threading.Event(), threading.Event()

    def wait() -> None:
        go.wait(60)

    with pytest.raises(LoadOverdue, match=r"the load of model 'm' lasted longer than its limit of 0.01 s"):
        within(TimeLimit("the load", "qinfer.load_timeout_s", 0.01), "m", wait, cleaned.set)

    go.set()
    assert cleaned.wait(60)
