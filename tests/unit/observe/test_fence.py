"""Tracers and observers that raise: the answers are what they are without, and the log says so, not too often."""

import asyncio
import logging
from collections.abc import Sequence
from typing import NoReturn

import pytest

from qinfer.backends.base import Batch
from qinfer.batching import execution as responding
from qinfer.batching.execution import Execution, Responder, WorkItem
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, OutgoingRequest, Response
from qinfer.errors import BrokerUnavailable, DeadlineExceeded, QinferError
from qinfer.models.spec import ModelSpec
from qinfer.observe.logs import EVERY_S, ErrorLogger
from qinfer.observe.stats import StatsTally
from qinfer.observe.tracing import Span, Tracer
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.testing import FakeClock
from qinfer_api.observe import tracing as gateway_tracing
from qinfer_api.observe.trace_file import Sampling, SamplingRule
from qinfer_api.observe.tracing import TracedSink
from qinfer_workers.inference import tracing as worker_tracing
from qinfer_workers.inference.tracing import Spans

TRACE = f"00-{1:032x}-{1:016x}-01"
logger = logging.getLogger(__name__)


class Boom(Exception):
    """What the watchers of these tests raise."""


def boom(*_: object, **__: object) -> NoReturn:
    raise Boom


def raising(fence: ErrorLogger, error: BaseException | None = None) -> None:
    with fence:
        raise error or Boom


def test_errors_are_told_once_in_a_while(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The first one, with where it came from; then how many there were."""
    now_s = 1000.0
    monkeypatch.setattr("qinfer.observe.logs.time.monotonic", lambda: now_s)
    fence = ErrorLogger(logger, "watcher failed")
    for _ in range(5):
        raising(fence)
    now_s += EVERY_S
    raising(fence)

    assert [(line.message, vars(line)["errors"]) for line in caplog.records] == [
        ("watcher failed", 1),
        ("watcher failed", 5),
    ]
    assert caplog.records[0].exc_info is not None
    assert caplog.records[0].exc_info[0] is Boom


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError(), SystemExit()])
def test_what_ends_a_program_passes(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """A fence is for errors."""
    with pytest.raises(type(error)):
        raising(ErrorLogger(logger, "watcher failed"), error)

    assert caplog.records == []


def pending(number: int = 1) -> WorkItem:
    return WorkItem(
        rows=1,
        key=None,
        enqueued_s=1.0,
        deadline_s=60.0,
        lease=Lease(Entry(Lane("m", 1), f"1-{number}"), "w", b"", deliveries=1),
        request=InferRequest(model="m", version=1, id=f"r{number}", inputs=(), trace=TRACE),
    )


class BrokenObserver:
    """An observer that can't."""

    def executed(self, execution: Execution, begin_s: float) -> None:
        raise Boom

    def refused(self, items: Sequence[WorkItem], error: QinferError, now_s: float) -> None:
        raise Boom


@pytest.fixture
def responder(monkeypatch: pytest.MonkeyPatch) -> Responder:
    monkeypatch.setattr(responding, "_FENCE", ErrorLogger(logger, "observer failed"))
    spec = ModelSpec(name="m", backend="stub", inputs=(), outputs=(), max_batch_size=8)
    return Responder(spec, 1, BrokenObserver())


def test_an_observer_loses_no_answer(responder: Responder, caplog: pytest.LogCaptureFixture) -> None:
    """Nor its count."""
    item, tally = pending(), StatsTally()
    run = Execution([item], Batch(requests=[item.request], rows=[1], inputs={}), 0)
    run.answers = [()]

    items, responses = responder.build_responses(run, 2.0, tally)

    assert (items, [(one.request_id, one.failure, one.final) for one in responses]) == ([item], [("r1", None, True)])
    assert [line.message for line in caplog.records] == ["observer failed"]


def test_an_observer_loses_no_refusal(responder: Responder) -> None:
    """The request is answered with its own error."""
    (response,) = responder.failures([pending()], DeadlineExceeded("too late"), 2.0, StatsTally())

    assert response.failure is not None
    assert response.failure.message == "too late"


class BrokenSpan(Span):
    """A span that can't be ended."""

    def __init__(self) -> None:
        self.trace = TRACE

    def end(self, *_: object, **__: object) -> NoReturn:
        raise Boom


class BrokenTracer(Tracer):
    """A tracer whose spans can't be ended, or not even begun."""

    def __init__(self, *, begins: bool) -> None:
        self._begins = begins

    def start(self, *_: object, **__: object) -> Span:
        if not self._begins:
            raise Boom
        return BrokenSpan()


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("error", [None, BrokerUnavailable("the broker is away")])
async def test_spans_of_publishing_do_not_change_what_it_does(
    *, begins: bool, error: QinferError | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is done once, and its own error is the one that is raised: the publisher tries again for that only."""
    monkeypatch.setattr(worker_tracing, "_FENCE", ErrorLogger(logger, "spans lost"))
    done = 0

    async def publish() -> None:
        nonlocal done
        done += 1
        if error is not None:
            raise error

    spans = Spans(BrokenTracer(begins=begins), ServerClock(FakeClock(), 0.0))
    work = spans.around([pending()], publish)
    if error is None:
        await work()
    else:
        with pytest.raises(BrokerUnavailable, match="the broker is away"):
            await work()

    assert done == 1
    assert [line.message for line in caplog.records] == ["spans lost"]


class Kept:
    """A sink that keeps what it gets."""

    no_stream = ""

    def __init__(self) -> None:
        self.got: list[Response] = []

    def deliver(self, response: Response) -> None:
        self.got.append(response)


class BrokenSampling(Sampling):
    """Triton's trace of a request, which can't be added."""

    def __init__(self) -> None:
        self.rule = SamplingRule(has_stamps=True, has_tensors=False, rate=1, most=-1, frequency=0, change="")
        self.asked = 0

    def add(self, *_: object) -> NoReturn:
        self.asked += 1
        raise Boom


def test_a_sink_that_is_traced_gets_its_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever delivers has more to deliver: nothing is raised. Of two traces that are made, each is tried."""
    monkeypatch.setattr(gateway_tracing, "_FENCE", ErrorLogger(logger, "traces lost"))
    sink, sampling, request = Kept(), BrokenSampling(), OutgoingRequest(model="m", inputs=())
    traced = TracedSink(sink, request, ServerClock(FakeClock(), 0.0), BrokenSpan(), sampling)
    answer = Response(request_id="r1", model="m", version=1)

    traced.deliver(answer)

    assert sink.got == [answer]
    assert sampling.asked == 1
    assert [line.message for line in caplog.records] == ["traces lost"]
