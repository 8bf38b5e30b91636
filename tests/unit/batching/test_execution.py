"""One batch: what its calls to other models inherit, and whose mistake a refused one is."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from qinfer.backends.base import Batch, Context
from qinfer.backends.stub import StubBackend
from qinfer.batching.execution import Execution, WorkItem
from qinfer.core.messages import CallTraces, InferRequest, OutgoingRequest, ResourceHolder, Response
from qinfer.errors import (
    BrokerUnavailable,
    Cancelled,
    InferenceFailed,
    InvalidRequest,
    ModelNotFound,
    OutputMismatch,
    QinferError,
    QueueFull,
)
from qinfer.queue.entries import Entry, Lane, Lease


class Called:
    """A caller that remembers, and answers or refuses."""

    def __init__(self, error: QinferError | None = None) -> None:
        self.error = error
        self.calls: list[tuple[OutgoingRequest, float]] = []

    def call(self, request: OutgoingRequest, deadline_s: float) -> Response:
        self.calls.append((request, deadline_s))
        if self.error is not None:
            raise self.error
        return Response(request_id="1")

    def stream(self, request: OutgoingRequest, deadline_s: float) -> Iterator[Response]:
        return iter((self.call(request, deadline_s),))


class Lenient(StubBackend):
    """Answers its second item by itself where a call is refused."""

    def execute(self, batch: Batch, ctx: Context) -> None:
        try:
            ctx.call(InferRequest(model="back", inputs=()))
        except QinferError as error:
            ctx.respond(0, error, final=False)
            ctx.respond(0, error)
            ctx.respond(1, InvalidRequest("this row is wrong"))


class Strict(StubBackend):
    """Lets the refusal of a call pass."""

    def execute(self, batch: Batch, ctx: Context) -> None:
        ctx.call(InferRequest(model="back", inputs=()))


def execution(caller: Called | None, deadlines_s: Sequence[float] = (61.0, 31.0)) -> Execution:
    requests = [InferRequest(model="front", inputs=(), tenant=f"t{i}", trace=f"r{i}") for i in range(len(deadlines_s))]
    items = [
        WorkItem(
            rows=1,
            key=None,
            enqueued_s=1.0,
            deadline_s=deadline_s,
            lease=Lease(Entry(Lane("front", 1), f"1000-{position}"), "w", b""),
            request=request,
        )
        for position, (request, deadline_s) in enumerate(zip(requests, deadlines_s, strict=True))
    ]
    rows = len(items)
    return Execution(items, Batch(requests=requests, rows=[1] * rows, inputs={"x": np.ones((rows, 2))}), 0, caller)


def test_a_call_inherits_from_the_batch() -> None:
    """The earliest deadline; tenant and trace of the first item, where the call has none of its own."""
    caller = Called()
    request = InferRequest(model="back", inputs=(), trace="own")

    execution(caller).call(request)

    ((called, deadline_s),) = caller.calls
    assert deadline_s == 31.0
    assert (called.model, called.tenant, called.trace) == ("back", "t0", "own")
    assert request.tenant == ""


@pytest.mark.parametrize(("made_for", "traced", "trace"), [(-1, 1, "r0"), (0, None, "r0"), (1, 1, "r1"), (2, 2, "r2")])
def test_a_call_is_part_of_the_trace_of_its_request(made_for: int, traced: int | None, trace: str) -> None:
    """Of the one that the model says, or else of the first that is traced."""
    caller = Called()
    run = execution(caller, (61.0, 61.0, 61.0))
    traces = {position: CallTraces(has_tensors=False) for position in (1, 2)}
    for position, calls in traces.items():
        run.items[position].request.calls = calls

    run.call(InferRequest(model="back", inputs=()), made_for)

    ((called, _),) = caller.calls
    assert called.calls is (None if traced is None else traces[traced])
    assert (called.trace, called.tenant) == (trace, "t0")


def test_an_item_that_nobody_waits_for_leaves_nothing_behind() -> None:
    """Neither its deadline nor its tenant; without any other item the call is refused."""
    caller = Called()
    run = execution(caller, (61.0, 31.0))
    run.items[1].lost = True

    run.call(InferRequest(model="back", inputs=()))
    run.items[0].lost = True
    with pytest.raises(Cancelled):
        run.call(InferRequest(model="back", inputs=()))

    assert [deadline_s for _, deadline_s in caller.calls] == [61.0]


def test_a_call_has_all_who_wait_for_its_batch() -> None:
    """Those of each item that somebody waits for, and the batch itself for as long as it has its instance."""
    caller = Called()
    run = execution(caller, (61.0, 31.0, 61.0))
    for item, depth in zip(run.items, (1, 2, 1), strict=True):
        item.request.version = 3
        item.request.holders = (ResourceHolder(f"w{depth}", "first", {}, 1, depth),)
    run.items[2].request.holders = (ResourceHolder("gone", "first", {}, 1, 1),)
    run.items[2].lost = True

    run.call(InferRequest(model="back", inputs=()))
    run.end_ns = 1
    run.call(InferRequest(model="back", inputs=()))

    first, later = [request.holders for request, _ in caller.calls]
    assert [holder.token for holder in first] == ["w2", "w1", run.batch_id]
    assert first[-1] == ResourceHolder(run.batch_id, "front", {}, 3, 3)
    assert later[-1] == ResourceHolder("", "front", {}, 3, 3)


def test_a_batch_without_a_caller_can_not_call() -> None:
    """Such as one that is made in a test, or in a notebook."""
    with pytest.raises(InferenceFailed):
        execution(None).call(InferRequest(model="back", inputs=()))


def test_a_refused_call_is_not_the_clients_mistake() -> None:
    """Whether the backend lets it pass or answers with it; its own verdict on an item stays."""
    passed = execution(Called(ModelNotFound("no 'back'")), deadlines_s=(61.0,))
    answered = execution(Called(ModelNotFound("no 'back'")))

    passed.run(Strict())
    answered.run(Lenient())

    failures = [*passed.answers, *answered.answers, *(answer for _, answer, _ in answered.earlier)]
    assert [(type(f), f.message) for f in failures if isinstance(f, QinferError)] == [
        (InferenceFailed, "a call failed: no 'back'"),
        (InferenceFailed, "a call failed: no 'back'"),
        (InvalidRequest, "this row is wrong"),
        (InferenceFailed, "a call failed: no 'back'"),
    ]


class Halting(StubBackend):
    """Answers its first item, and raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def execute(self, batch: Batch, ctx: Context) -> None:
        ctx.respond(0, ())
        raise self.error


def test_what_a_raising_batch_has_not_answered_runs_again() -> None:
    """An answer that was given counts; who does not wait any more is left out."""
    run = execution(None, (61.0, 61.0, 61.0))
    run.items[2].lost = True

    run.run(Halting(ValueError("row 1 is odd")))

    assert run.answers[0] == ()
    assert run.unanswered == [run.items[1]]


def test_a_batch_that_raises_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its halves mostly raise the same: 64 requests must not make 127 tracebacks."""
    whole, half = execution(None), execution(None, (61.0,))
    half.apart = True

    with caplog.at_level("INFO"):
        whole.run(Halting(ValueError("odd")))
        half.run(Halting(ValueError("odd")))

    (record,) = caplog.records
    assert (record.message, record.exc_info is not None) == ("execution failed", True)
    assert vars(record)["items"] == 2


@pytest.mark.parametrize(
    "error",
    [
        OutputMismatch("one row too few"),
        Cancelled("the worker ends"),
        BrokerUnavailable("no broker"),
        QueueFull("full"),
    ],
)
def test_what_is_no_single_items_fault_is_not_tried_again(error: QinferError) -> None:
    """Smaller batches would end in the same way."""
    run = execution(None)

    run.run(Halting(error))

    assert run.answers == [(), error]
    assert run.unanswered == []


def test_a_model_that_answers_too_few_is_not_run_again() -> None:
    """It did not raise: it is wrong, and says so to those it left out."""

    class Forgetful(StubBackend):
        def execute(self, batch: Batch, ctx: Context) -> None:
            ctx.respond(0, ())

    run = execution(None)

    run.run(Forgetful())

    assert isinstance(run.answers[1], OutputMismatch)
    assert run.unanswered == []


def test_what_was_overwritten_while_an_instance_copied_it_is_not_executed() -> None:
    """The others run again without it: the batcher leaves out what has ended."""
    run = execution(None)
    whole, run.items[1].is_current = run.batch, lambda: False
    run.assemble = lambda _: whole

    run.run(Halting(AssertionError("it was executed")))

    assert run.gives_way
    assert run.error is None
    assert run.unanswered == run.items


def test_memory_of_an_ended_request_is_not_copied_for_an_instance_nor_left_there() -> None:
    """Others may have it: while the batch waited for its instance, or while it was copied."""
    run, looks, copied = execution(None), [True, False], np.ones((2, 2), np.float32)
    run.items[1].is_current = lambda: looks.pop(0)
    run.assemble = lambda _: Batch(requests=run.batch.requests, rows=run.batch.rows, inputs={"x": copied})

    run.run(Halting(AssertionError("it was executed")))

    assert run.gives_way
    assert not copied.any()
    again = execution(None)
    again.items[0].is_current, again.assemble = lambda: False, lambda _: pytest.fail("it was copied")
    again.run(Halting(AssertionError("it was executed")))
    assert again.gives_way
