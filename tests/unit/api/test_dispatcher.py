"""The dispatcher between a catalog, a queue and sinks, without HTTP."""

import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    InferenceFailed,
    InvalidRequest,
    InvalidStep,
    ModelNotFound,
    Overloaded,
    QinferError,
    QueueFull,
    QuotaExceeded,
)
from qinfer.models.catalog import Catalog, ServedVersion
from qinfer.models.readiness import Capacity
from qinfer.models.spec import ModelSpec, Routes, TensorSpec
from qinfer.observe.exposition import render
from qinfer.observe.stats import GatewayTally
from qinfer.queue.entries import Entry, Lane
from qinfer.queue.lanes import Queue
from qinfer.tensors import Bytes, Tensor
from qinfer.wire.frame import decode_request, encode_responses
from qinfer_api.auth import ANONYMOUS
from qinfer_api.dispatcher import Dispatcher
from qinfer_api.observe.metrics import MetricsSnapshot, shown_metrics

LANE = Lane("m", 3)
ENTRY = Entry(LANE, "1-0")
REQUEST = OutgoingRequest(model="m", client_id="c", inputs=(Tensor("x", "FP32", (1,), bytes(4)),))


class Models:
    """A catalog of one model."""

    def __init__(self) -> None:
        port = TensorSpec(name="x", datatype="FP32", dims=(1,))
        spec = ModelSpec(name="m", backend="stub", inputs=(port,), outputs=(port,))
        self.served = ServedVersion(spec=spec, version=3, generation=5, lane=LANE, routes=Routes(spec, 3))

    def asked(self, model: str, version: int) -> ServedVersion:
        if model != "m":
            raise ModelNotFound(f"Request for unknown model: '{model}' is not found")
        return self.served

    def named(self, model: str, version: int) -> tuple[str, int]:
        return ("m", 3) if model == "m" else ("", 0)

    def lanes(self, model: str, version: int) -> tuple[Lane, ...]:
        return (LANE,)

    def capacity(self, model: str, version: int) -> Capacity:
        return Capacity()


class StubQueue:
    """A delivery that keeps what it gets."""

    def __init__(self) -> None:
        self.frames: list[Bytes] = []
        self.receipts: list[Callable[[Entry | QinferError], None]] = []
        self.finished: list[Entry] = []
        self.down = False

    def submit(self, lane: Lane, frame: Bytes, done: Callable[[Entry | QinferError], None], **_: Any) -> None:
        if self.down:
            raise BrokerUnavailable("Redis can't be reached")
        self.frames.append(frame)
        self.receipts.append(done)

    async def cancel(self, entries: list[Entry]) -> None:
        if self.down:
            raise BrokerUnavailable("Redis can't be reached")
        self.finished += entries


class Sink:
    no_stream = ""

    def __init__(self) -> None:
        self.responses: list[Response] = []

    def deliver(self, response: Response) -> None:
        self.responses.append(response)


class Setup:
    def __init__(self) -> None:
        self.queue = StubQueue()
        self.tally = GatewayTally()
        self.sink = Sink()
        self.models = Models()
        self.dispatcher = Dispatcher(
            cast(Queue, self.queue), cast(Catalog, self.models), self.tally, LimitSettings(), "me"
        )
        self.waiting = self.dispatcher.submission.pending

    def submit(self, **changes: Any) -> Any:
        return self.dispatcher.submit(ANONYMOUS, REQUEST, changes.get("sink", self.sink))

    def metrics(self) -> str:
        return render(shown_metrics(self.tally, MetricsSnapshot())).decode()


async def test_a_request_is_refused_at_once_when_redis_is_away() -> None:
    """Nothing stays behind."""
    setup = Setup()
    setup.queue.down = True

    with pytest.raises(BrokerUnavailable):
        setup.submit()

    assert setup.dispatcher.in_flight == 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (QueueFull("Exceeds maximum queue size"), "[request id: c] Exceeds maximum queue size"),
        (InferenceFailed("the model's own text"), "the model's own text"),
        (DeadlineExceeded("Request timeout expired"), "Request timeout expired"),
        (InvalidStep("must specify the START flag"), "must specify the START flag"),
    ],
)
async def test_only_refusals_of_queues_begin_with_the_id(error: QinferError, text: str) -> None:
    setup = Setup()
    setup.submit()

    setup.queue.receipts[0](error)

    (response,) = setup.sink.responses
    assert response.failure is not None
    assert response.failure.message == text


async def test_a_submit_that_fails_later_fails_the_request() -> None:
    setup = Setup()
    setup.submit()

    setup.queue.receipts[0](BrokerUnavailable("Redis can't be reached"))

    (response,) = setup.sink.responses
    assert response.failure is not None
    assert (response.failure.code, response.failure.message) == ("broker_unavailable", "Redis can't be reached")
    assert (
        'qinfer_request_failures_total{model="m",process="",reason="broker_unavailable",version="3"} 1.0'
        in setup.metrics()
    )


async def test_a_request_cancelled_before_its_receipt_is_finished_after_it() -> None:
    """The entry's address is known only then."""
    setup = Setup()
    setup.dispatcher.cancel(setup.submit())
    await setup.waiting.discard()
    before = list(setup.queue.finished)

    setup.queue.receipts[0](ENTRY)
    await setup.waiting.discard()

    assert (before, setup.queue.finished) == ([], [ENTRY])


async def test_a_reply_that_overtakes_its_receipt_is_delivered() -> None:
    """The two come over different connections."""
    setup = Setup()
    pending = setup.submit()

    setup.waiting.receive(encode_responses([Response(request_id=pending.request_id, model="m", version=3)]))
    setup.queue.receipts[0](ENTRY)
    await setup.waiting.discard()

    assert len(setup.sink.responses) == 1
    assert setup.queue.finished == []


async def test_replies_nobody_waits_for_are_dropped() -> None:
    """They come twice after a reconnect, and for requests that expired."""
    setup = Setup()
    pending = setup.submit()
    blob = encode_responses([Response(request_id=pending.request_id), Response(request_id="unknown")])

    setup.waiting.receive(blob)
    setup.waiting.receive(blob)

    assert len(setup.sink.responses) == 1


async def test_a_reply_that_cannot_be_decoded_harms_nobody() -> None:
    """The listener lives on."""
    setup = Setup()

    setup.waiting.receive(b"\xff garbage")

    assert setup.sink.responses == []


async def test_a_sink_that_raises_harms_no_other() -> None:
    """It is told of an internal error, and its neighbours get their responses."""

    class Broken(Sink):
        def deliver(self, response: Response) -> None:
            super().deliver(response)
            if response.failure is None:
                raise RuntimeError("a defect")

    setup, broken = Setup(), Broken()
    first, second = setup.submit(sink=broken), setup.submit()

    setup.waiting.receive(
        encode_responses([Response(request_id=first.request_id), Response(request_id=second.request_id)])
    )

    assert broken.responses[-1].failure is not None
    assert broken.responses[-1].failure.code == "internal"
    assert len(setup.sink.responses) == 1


async def test_discarding_survives_an_outage() -> None:
    """The worker's own deadline ends what Redis can't be told."""
    setup = Setup()
    pending = setup.submit()
    setup.queue.receipts[0](ENTRY)
    setup.dispatcher.cancel(pending)
    setup.queue.down = True

    await setup.waiting.discard()

    assert setup.queue.finished == []


async def test_fail_all_answers_and_discards() -> None:
    """At the end of a drain nobody is left without an answer, and nothing is executed for nobody."""
    setup = Setup()
    setup.submit()
    setup.queue.receipts[0](ENTRY)

    setup.waiting.fail_all(Overloaded("Server exiting"))
    await setup.waiting.discard()

    assert setup.sink.responses[0].failure is not None
    assert setup.queue.finished == [ENTRY]
    assert setup.dispatcher.in_flight == 0


async def test_unknown_models_make_no_series() -> None:
    """A refusal is counted, and the model's state is told before the request's fault."""
    setup = Setup()

    told = setup.dispatcher.refuse("thought up", 1, Overloaded("something else"))

    assert isinstance(told, ModelNotFound)
    assert 'reason="model_not_found"' in setup.metrics()
    assert "thought up" not in setup.metrics()


async def test_a_quota_that_is_used_up_counts_for_the_model() -> None:
    """As every refusal does, where the model is one that is served; what it says of models is told to nobody."""
    setup = Setup()

    for model in ("m", "thought up"):
        told = setup.dispatcher.refuse(model, 0, QuotaExceeded("too many"))
        assert isinstance(told, QuotaExceeded)

    assert setup.tally.failures == {("m", 3, "quota_exceeded"): 1, ("", 0, "quota_exceeded"): 1}
    assert setup.tally.refusals.drain() == {("m", 3): {"refusals:quota_exceeded": 1, "fail_ns": 0}}
    assert 'qinfer_requests_total{model="m",process="",version="3"} 1.0' in setup.metrics()
    assert 'qinfer_requests_total{model="",process="",version=""} 1.0' in setup.metrics()


@pytest.mark.parametrize(("within_s", "timeout_s"), [(2.5, 2.5), (1000.0, 60.0), (0.0, 0.001)])
async def test_a_caller_can_shorten_the_timeout(within_s: float, timeout_s: float) -> None:
    """To what it will wait, and never to none at all; it can't lengthen it."""
    setup, request = Setup(), OutgoingRequest(model="m", inputs=REQUEST.inputs)

    setup.dispatcher.submit(ANONYMOUS, request, setup.sink, within_s)

    assert request.timeout_s == timeout_s


def submit_alike(setup: Setup, count: int) -> list[OutgoingRequest]:
    """Submits requests that differ in their elements only."""
    requests = [request_of(Tensor("x", "FP32", (1,), struct.pack("<f", number))) for number in range(count)]
    for request in requests:
        setup.dispatcher.submit(ANONYMOUS, request, setup.sink)
    return requests


def request_of(tensor: Tensor) -> OutgoingRequest:
    return OutgoingRequest(model="m", inputs=(tensor,))


async def test_requests_that_are_alike_reach_the_queue_as_the_first_did() -> None:
    """Stamped alike, each with its own id and elements."""
    setup = Setup()

    requests = submit_alike(setup, 4)

    first, *others = [decode_request(frame) for frame in setup.queue.frames]
    assert (first.timeout_s, first.reply_to, first.generation) == (60.0, "reply:me", 5)
    assert [request.id for request in (first, *others)] == [request.id for request in requests]
    assert len({request.id for request in requests}) == 4
    assert [bytes(request.inputs[0].data) for request in (first, *others)] == [r.inputs[0].data for r in requests]
    plain = msgspec.structs.replace(first, id="", inputs=())
    assert all(msgspec.structs.replace(other, id="", inputs=()) == plain for other in others)


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("y", "FP32", (1,), bytes(4)),
        Tensor("x", "INT32", (1,), bytes(4)),
        Tensor("x", "FP32", (2,), bytes(8)),
        Tensor("x", "FP32", (1, 1), bytes(4)),
    ],
)
async def test_what_is_not_alike_is_checked_all_the_same(tensor: Tensor) -> None:
    """However many came before it that fitted, and as often as it comes."""
    setup = Setup()
    submit_alike(setup, 3)

    for _ in range(3):
        with pytest.raises(InvalidRequest):
            setup.dispatcher.submit(ANONYMOUS, request_of(tensor), setup.sink)

    assert len(setup.queue.frames) == setup.dispatcher.in_flight == 3


async def test_a_model_that_changed_is_asked_again() -> None:
    """What fitted the old one may not fit the new one."""
    setup = Setup()
    submit_alike(setup, 3)
    port = TensorSpec(name="x", datatype="FP32", dims=(2,))
    spec = ModelSpec(name="m", backend="stub", inputs=(port,), outputs=(port,))
    setup.models.served = ServedVersion(spec=spec, version=3, generation=6, lane=LANE, routes=Routes(spec, 3))

    with pytest.raises(InvalidRequest):
        submit_alike(setup, 1)

    assert len(setup.queue.frames) == 3


async def test_a_request_that_was_checked_for_one_target_of_an_endpoint_is_checked_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup()
    monkeypatch.setattr(setup.dispatcher.endpoints, "choose", lambda *_: True)
    request = msgspec.structs.replace(REQUEST, inputs=(), endpoint="e", generation=setup.models.served.generation)

    setup.dispatcher.aim(ANONYMOUS, request)

    with pytest.raises(InvalidRequest, match="expected 1 inputs"):
        setup.dispatcher.submit(ANONYMOUS, request, setup.sink)
