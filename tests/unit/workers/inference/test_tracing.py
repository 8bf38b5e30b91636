"""The worker's spans: what they are part of, and that requests which nobody records make none."""

import asyncio
import logging

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from qinfer.backends.base import Batch
from qinfer.backends.stub import StubBackend
from qinfer.batching.execution import Execution, WorkItem
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest
from qinfer.errors import BrokerUnavailable, DeadlineExceeded, InferenceFailed
from qinfer.jobs.plan import Shard, ShardTicket, encode_ticket
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord, ShardOutcome
from qinfer.observe.tracing import Tracer
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.queue.lanes import Queue
from qinfer.testing import FakeClock
from qinfer_workers.inference.bulk.shard_loop import Abandoned, JobRests, PutOff, ShardContext, ShardSlots, ShardTask
from qinfer_workers.inference.bulk.shard_run import ShardRun
from qinfer_workers.inference.publisher import LeaseKeeper
from qinfer_workers.inference.tracing import Spans
from tests.support.inline_workers import NoRenewals


def traceparent(number: int, flags: str = "01") -> str:
    return f"00-{number:032x}-{number:016x}-{flags}"


class Bench:
    """Spans, and what they made."""

    def __init__(self) -> None:
        self._made = InMemorySpanExporter()
        self.clock = FakeClock()
        self.spans = Spans(Tracer([SimpleSpanProcessor(self._made)]), ServerClock(self.clock, 0.0))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._made.get_finished_spans() if span.name == name]

    @property
    def count(self) -> int:
        return len(self._made.get_finished_spans())


def execution(*traces: str, error: InferenceFailed | None = None, apart: bool = False) -> Execution:
    requests = [
        InferRequest(model="m", version=3, id=f"r{i}", inputs=(), trace=trace) for i, trace in enumerate(traces)
    ]
    items = [
        WorkItem(
            rows=2,
            key=None,
            enqueued_s=1.0,
            deadline_s=60.0,
            lease=Lease(Entry(Lane("m", 3), f"1000-{position}"), "w", b"", deliveries=2),
            request=request,
        )
        for position, request in enumerate(requests)
    ]
    batch = Batch(requests=requests, rows=[2] * len(items), inputs={"x": np.ones((2 * len(items), 2))})
    run = Execution(items, batch, 500_000_000, apart=apart)
    run.begin_ns, run.end_ns, run.error = 0, 4_000_000_000, error
    run.answers = [() if error is None else None for _ in items]
    return run


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def test_a_batch_is_recorded_for_those_who_record() -> None:
    """Of three requests two are recorded: the batch has three, and is linked to these."""
    bench, run = Bench(), execution(traceparent(1), traceparent(2, "00"), traceparent(3))

    bench.spans.executed(run, 11.0)

    (batch,), (execute,), queues = bench.named("batch"), bench.named("execute"), bench.named("queue")
    assert [parent_of(span) for span in (batch, execute, *queues)] == [1, id_of(batch), 1, 3]
    assert [link.context.span_id for link in batch.links] == [1, 3]
    assert [[link.context.span_id for link in queue.links] for queue in queues] == [[id_of(batch)]] * 2
    assert [(span.start_time, span.end_time) for span in (queues[0], batch, execute)] == [
        (1_000_000_000, 10_500_000_000),
        (10_500_000_000, 15_000_000_000),
        (11_000_000_000, 15_000_000_000),
    ]
    about = {"qinfer.model": "m", "qinfer.version": 3, "qinfer.batch_id": run.batch_id, "qinfer.batch_size": 6}
    lane = {"messaging.system": "redis", "messaging.destination.name": "m/3/p1"}
    about |= {**lane, "messaging.operation.type": "process"}
    assert execute.attributes == about
    assert batch.attributes == about | {"qinfer.requests": 3, "messaging.batch.message_count": 3}
    own = {"qinfer.request_id": "r2", "qinfer.attempt": 2, "messaging.message.id": "r2"}
    assert queues[1].attributes == about | own | {"messaging.operation.type": "receive"}


def test_a_batch_never_begins_before_its_requests_came() -> None:
    """Gateways stamp requests by a clock that may be ahead of the worker's by milliseconds."""
    bench, run = Bench(), execution(traceparent(1), traceparent(2))
    run.items[1].enqueued_s = 10.75

    bench.spans.executed(run, 11.0)

    spans = [*bench.named("queue"), *bench.named("batch"), *bench.named("execute")]
    assert [(span.start_time, span.end_time) for span in spans] == [
        (1_000_000_000, 10_750_000_000),
        (10_750_000_000, 10_750_000_000),
        (10_750_000_000, 15_250_000_000),
        (11_250_000_000, 15_250_000_000),
    ]


@pytest.mark.parametrize("trace", ["", traceparent(1, "00"), "nonsense"])
async def test_what_nobody_records_makes_no_spans(trace: str) -> None:
    """Nor does it publish through anything else."""
    bench, run = Bench(), execution(trace)

    async def publish() -> None:
        return

    bench.spans.executed(run, 11.0)
    bench.spans.refused(run.items, DeadlineExceeded("too late"), 5.0)

    assert bench.spans.around(run.items, publish) is publish
    assert (bench.count, run.items[0].request.trace) == (0, trace)


def test_a_batch_that_raised_runs_again_as_part_of_its_requests() -> None:
    """It has the error; its halves are batches of the same requests, which waited once."""
    bench, error = Bench(), InferenceFailed("boom")
    bench.spans.executed(execution(traceparent(1), traceparent(2), error=error), 11.0)
    bench.spans.executed(execution(traceparent(1), apart=True), 16.0)

    first, second = bench.named("batch")
    assert [(span.status.is_ok, span.status.description) for span in (first, second)] == [(False, "boom"), (True, None)]
    assert (parent_of(first), parent_of(second)) == (1, 1)
    assert len(bench.named("queue")) == 2


async def test_each_try_to_publish_is_part_of_the_batch() -> None:
    """That of a broker that is away has the error."""
    bench, run = Bench(), execution(traceparent(1), traceparent(2))
    bench.spans.executed(run, 11.0)
    tries = 0

    async def publish() -> None:
        nonlocal tries
        tries += 1
        bench.clock.advance(1.0)
        if tries == 1:
            raise BrokerUnavailable("away")

    work = bench.spans.around(run.items, publish)
    with pytest.raises(BrokerUnavailable):
        await work()
    await work()

    failed, done = bench.named("publish")
    assert [parent_of(span) for span in (failed, done)] == [id_of(bench.named("batch")[0])] * 2
    assert (failed.status.description, done.status.description) == ("away", None)
    assert [(span.end_time or 0) - (span.start_time or 0) for span in (failed, done)] == [1_000_000_000] * 2


def test_what_expires_has_waited() -> None:
    """Its wait ends with the error."""
    bench, run = Bench(), execution(traceparent(1))

    bench.spans.refused(run.items, DeadlineExceeded("too late"), 5.0)

    (queue,) = bench.named("queue")
    assert (queue.end_time, queue.status.description) == (5_000_000_000, "too late")


def test_a_batch_that_raises_names_itself_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """By the id that its spans have, and its requests."""

    class Raising(StubBackend):
        def execute(self, *_: object) -> None:
            raise ValueError("odd")

    run, other = execution("", ""), execution("")
    with caplog.at_level(logging.ERROR):
        run.run(Raising())

    said = vars(caplog.records[0])
    assert (said["model"], said["version"], said["items"], said["request_ids"]) == ("m", 3, 2, ["r0", "r1"])
    assert said["batch_id"] == run.batch_id != other.batch_id


class Ran(ShardRun):
    """The run of a shard that ends at once."""

    is_stuck = False

    def __init__(self, end: ShardOutcome | BaseException) -> None:
        self._end = end

    async def run(self) -> ShardOutcome:
        if isinstance(self._end, BaseException):
            raise self._end
        return self._end

    def stop(self) -> None:
        """Nothing is to be stopped."""


async def run_shard(
    bench: Bench, delivery: Queue, end: ShardOutcome | BaseException, trace: str
) -> ShardOutcome | None:
    """Runs a shard of three rows of a job, of which it is the second execution."""
    keeper = LeaseKeeper(NoRenewals(), delivery.clock, 10.0, list, lambda _: None)
    context = ShardContext(
        delivery=delivery,
        jobs=Jobs(delivery),
        keeper=keeper,
        worker_id="w",
        slots=ShardSlots(),
        lease_s=10.0,
        max_wait_s=1.0,
        spans=bench.spans,
    )
    record = JobRecord(id="j", model="m", version=3, state="running", trace=trace)
    await Jobs(delivery).create(record)
    ticket = ShardTicket("j", Shard(1, "part-1", 3, ()))
    lease = Lease(Entry(record.lane, "1000-0"), "w", encode_ticket(ticket), deliveries=2)

    async def begin(*_: object) -> Ran:
        return Ran(end)

    task = ShardTask(context, lease, begin, JobRests())
    return await task._recorded(Ran(end), ticket, record)


@pytest.mark.parametrize(
    ("end", "error", "failed_rows"),
    [
        (ShardOutcome(1, 3, 2), None, 2),
        (ShardOutcome(1, 3, 3, "the file was replaced"), "inference_failed", 3),
        (Abandoned(), "abandoned", None),
        (PutOff("the store is away"), "put_off", None),
        (asyncio.CancelledError(), "cancelled", None),
        (RuntimeError("a defect"), "internal", None),
    ],
)
async def test_each_execution_of_a_shard_is_part_of_its_job_s_trace(
    delivery: Queue, end: ShardOutcome | BaseException, error: str | None, failed_rows: int | None
) -> None:
    """However it ends; what it ends with goes on."""
    bench = Bench()

    (outcome,) = await asyncio.gather(run_shard(bench, delivery, end, traceparent(1)), return_exceptions=True)

    assert type(outcome) is (type(None) if isinstance(end, Abandoned) else type(end))
    (shard,) = bench.named("shard")
    assert parent_of(shard) == 1
    assert shard.attributes is not None
    assert {name: shard.attributes[f"qinfer.{name}"] for name in ("job_id", "shard", "rows", "attempt")} == {
        "job_id": "j",
        "shard": 1,
        "rows": 3,
        "attempt": 2,
    }
    assert (shard.attributes.get("error.type"), shard.attributes.get("qinfer.failed_rows")) == (error, failed_rows)


async def test_a_job_that_nobody_records_makes_no_spans(delivery: Queue) -> None:
    """Its shards are run all the same."""
    bench = Bench()

    assert await run_shard(bench, delivery, ShardOutcome(1, 3), "") == ShardOutcome(1, 3)
    assert bench.count == 0
