"""Executed steps are committed in order, one of each sequence at a time; only what was committed is published."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager
from typing import Any

import pytest

from qinfer.batching.execution import WorkItem
from qinfer.batching.sequences.steps import PendingStep
from qinfer.core.messages import Failure, InferRequest, Response, SequenceFlags
from qinfer.errors import BrokerUnavailable, InferenceFailed, PayloadTooLarge, QinferError, QueueFull
from qinfer.queue.connection import CommandRefused
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.queue.sequences.records import CommittedStep, SequenceId, StepPlace, decode_states
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses
from qinfer_workers.inference.sequences import publisher as step_publisher
from qinfer_workers.inference.sequences.publisher import StepPublisher

Name = tuple[int, int]
"""A step: its sequence and its number."""

MAX_BYTES = 100


class Fakes:
    """Sequences and a publisher that note what they are asked; a commit waits for `go`.

    Attributes:
        events: What happened, in order.
        commits: The steps of each commit that was tried.
        committed: What was committed.
        failures: So many commits fail, as Redis is away.
        refusal: Why no step is committed together with one of a large state.
        lost: Sequences that another worker owns.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, Name]] = []
        self.commits: list[list[Name]] = []
        self.committed: dict[Name, CommittedStep] = {}
        self.published: list[Response] = []
        self.broken: list[tuple[Name, QinferError]] = []
        self.settled: list[tuple[Name, bool]] = []
        self.failures = 0
        self.refusal: QinferError = PayloadTooLarge("too large")
        self.lost: set[int] = set()
        self.go = asyncio.Event()
        self.go.set()
        self.tasks: list[asyncio.Task[None]] = []

    async def commit(self, steps: Items[CommittedStep]) -> list[bool]:
        """See `Sequences`."""
        self.commits.append([name_of(step.place) for step in steps])
        await self.go.wait()
        if self.failures:
            self.failures -= 1
            raise BrokerUnavailable("Redis is away")
        if any(len(step.state or b"") > MAX_BYTES for step in steps):
            raise self.refusal
        for step in steps:
            self.committed[name_of(step.place)] = step
            self.events.append(("commit", name_of(step.place)))
        return [name_of(step.place)[0] not in self.lost for step in steps]

    async def finish(self, answered: Iterable[tuple[StepPlace, Entry]]) -> None:
        """See `Sequences`."""
        self.events += [("finish", name_of(place)) for place, _ in answered]

    async def publish(self, steps: Items[PendingStep], responses: Items[Response], begin_ns: int) -> None:
        """See `Publisher`."""
        del begin_ns
        self.published += responses
        self.events += [("publish", name_of(step.place)) for step in steps]

    def recorded(self, items: Items[WorkItem], work: Callable[[], Any]) -> Callable[[], Any]:
        """See `Publisher`."""
        del items
        return work

    def spawn(self, work: Callable[[], Any]) -> "asyncio.Task[None]":
        """See `Publisher`."""
        self.tasks.append(asyncio.create_task(work()))
        return self.tasks[-1]

    def take_settled(self, step: PendingStep, is_committed: bool) -> None:  # noqa: FBT001  a callback
        """Notes what became of a step."""
        self.settled.append((name_of(step.place), is_committed))

    def take_broken(self, step: PendingStep, error: QinferError) -> None:
        """Notes a step that can't be committed."""
        self.broken.append((name_of(step.place), error))


def name_of(place: StepPlace) -> Name:
    return int(place.sequence.correlation_id), place.number


@asynccontextmanager
async def publishing(*, is_explicit: bool = False) -> AsyncIterator[tuple[StepPublisher, Fakes]]:
    """Runs a publisher of steps with fakes around it."""
    fakes = Fakes()
    settled, broken = fakes.take_settled, fakes.take_broken
    one = StepPublisher(fakes, fakes, 60.0, is_explicit, settled, broken)  # type: ignore[arg-type]  # fakes
    task = asyncio.create_task(one.run())
    yield one, fakes
    task.cancel()
    await asyncio.wait([task])
    await asyncio.gather(*fakes.tasks)


def executed(
    sequence: int, number: int, *, state: bytes = b"", failure: Failure | None = None, end: bool = False, told: int = 0
) -> tuple[list[PendingStep], list[Response]]:
    """Returns a step that was executed, with its response."""
    entry = Entry(Lane("m", 0, "steps"), f"{sequence}-{number}")
    flags = SequenceFlags(sequence, end=end, step=told)
    request = InferRequest(model="m", inputs=(), id=f"r{sequence}.{number}", sequence=flags)
    step = PendingStep(
        rows=1,
        key=None,
        enqueued_s=0.0,
        deadline_s=60.0,
        lease=Lease(entry, "w1", b"", 1),
        request=request,
        place=StepPlace(SequenceId("", sequence), 1, number),
        token=7,
        end=end,
        state=(Tensor("s", "UINT8", (1, len(state)), state),) if state else (),
    )
    output = Tensor("y", "UINT8", (1, 1), bytes([number]))
    response = Response(
        request_id=request.id, model="m", version=1, outputs=() if failure else (output,), failure=failure
    )
    return [step], [response]


def put(one: StepPublisher, *steps: tuple[list[PendingStep], list[Response]]) -> None:
    """Hands steps over as one execution has left them."""
    one.put([step for of, _ in steps for step in of], [response for _, of in steps for response in of])


async def test_a_step_is_committed_then_published_then_finished() -> None:
    async with publishing() as (one, fakes):
        put(one, executed(1, 1, state=b"abc"))
        await one.flush()
        await asyncio.gather(*fakes.tasks)

        assert fakes.events == [(what, (1, 1)) for what in ("commit", "publish", "finish")]
        committed = fakes.committed[1, 1]
        assert (committed.token, committed.idle_s) == (7, 60.0)
        assert [bytes(state.data) for state in decode_states(bytes(committed.state or b""))] == [b"abc"]
        assert decode_responses(bytes(committed.response)) == fakes.published
        assert fakes.settled == [((1, 1), True)]


async def test_steps_of_different_sequences_are_committed_together() -> None:
    async with publishing() as (one, fakes):
        put(one, *[executed(n, 1) for n in range(1, 6)])
        await one.flush()

        assert fakes.commits == [[(n, 1) for n in range(1, 6)]]


async def test_a_commit_has_one_step_of_each_sequence_and_their_order_stays() -> None:
    """What is executed while a commit is under way waits for it, and is committed together."""
    async with publishing() as (one, fakes):
        fakes.go.clear()
        put(one, executed(1, 1), executed(2, 1))
        await eventually(lambda: len(fakes.commits) == 1, description="a commit under way")
        put(one, executed(1, 2), executed(3, 1))
        put(one, executed(1, 3), executed(3, 2))
        fakes.go.set()
        await one.flush()

        assert fakes.commits == [[(1, 1), (2, 1)], [(1, 2), (3, 1)], [(1, 3), (3, 2)]]
        assert [name for name, _ in fakes.settled] == [name for group in fakes.commits for name in group]


async def test_a_commit_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_publisher, "_TOGETHER", 2)
    async with publishing() as (one, fakes):
        put(one, *[executed(n, 1) for n in range(1, 6)])
        await one.flush()

        assert fakes.commits == [[(1, 1), (2, 1)], [(3, 1), (4, 1)], [(5, 1)]]


async def test_it_commits_again_while_redis_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps; those that come meanwhile wait behind them, and nothing is published before."""
    monkeypatch.setattr(step_publisher, "_FIRST_RETRY_S", 0.001)
    async with publishing() as (one, fakes):
        fakes.failures = 2
        put(one, executed(1, 1))
        put(one, executed(1, 2))
        await eventually(lambda: fakes.failures == 0, description="two failures")
        await one.flush()
        await asyncio.gather(*fakes.tasks)

        assert fakes.commits == [[(1, 1)], [(1, 1)], [(1, 1)], [(1, 2)]]
        assert fakes.events[0] == ("commit", (1, 1))
        assert [bytes(response.outputs[0].data) for response in fakes.published] == [b"\x01", b"\x02"]


@pytest.mark.parametrize("is_answered", [False, True])
async def test_the_response_to_a_former_owners_step_is_kept_until_it_is_answered(*, is_answered: bool) -> None:
    """Redis may be away while it is read."""
    place = StepPlace(SequenceId("", 1), 1, 1)
    async with publishing() as (publisher, fakes):
        publisher.keep(place)
        if is_answered:
            publisher.answered(place)
        publisher.put(*executed(1, 2))
        await eventually(lambda: (1, 2) in fakes.committed, description="a commit")

    assert fakes.committed[1, 2].keeps_previous is not is_answered


async def test_what_another_worker_owns_is_not_published() -> None:
    """Others of the same commit are."""
    async with publishing() as (one, fakes):
        fakes.lost = {2}
        put(one, executed(1, 1), executed(2, 1), executed(3, 1))
        await one.flush()
        await asyncio.gather(*fakes.tasks)

        assert fakes.settled == [((1, 1), True), ((2, 1), False), ((3, 1), True)]
        assert [name for what, name in fakes.events if what != "commit"] == [(1, 1), (3, 1)] * 2


@pytest.mark.parametrize(
    "refusal", [PayloadTooLarge("too large"), QueueFull("full"), CommandRefused("WRONGTYPE", "damaged")]
)
async def test_a_step_that_is_refused_breaks_its_sequence(refusal: QinferError) -> None:
    """Those that were to be committed with it are, and those behind it."""
    async with publishing() as (one, fakes):
        fakes.refusal = refusal
        put(one, executed(1, 1, state=b"a"), executed(2, 1, state=b"b" * 200), executed(3, 1))
        put(one, executed(1, 2))
        await one.flush()
        await asyncio.gather(*fakes.tasks)

        assert fakes.broken == [((2, 1), refusal)]
        assert [name for name, _ in fakes.settled] == [(1, 1), (3, 1), (1, 2)]
        assert {name for _, name in fakes.events} == {(1, 1), (3, 1), (1, 2)}


async def test_a_failure_is_committed_and_leaves_the_state() -> None:
    """As in Triton, the sequence goes on from the state before the step."""
    failure = Failure.from_error(InferenceFailed("no"))
    async with publishing() as (one, fakes):
        put(one, executed(1, 1, state=b"abc", failure=failure))
        await one.flush()
        await asyncio.gather(*fakes.tasks)

        assert fakes.committed[1, 1].state is None
        assert [response.failure for response in fakes.published] == [failure]


async def test_explicit_steps_are_published_without_a_commit() -> None:
    """But the last one, and those that may be sent again."""
    async with publishing(is_explicit=True) as (one, fakes):
        put(one, executed(1, 1), executed(2, 1, told=1), executed(3, 1, end=True))
        await one.flush()
        await asyncio.gather(*fakes.tasks)

        assert list(fakes.committed) == [(2, 1), (3, 1)]
        assert sorted(fakes.settled) == [((n, 1), True) for n in (1, 2, 3)]
        assert {name for what, name in fakes.events if what == "finish"} == {(1, 1), (2, 1), (3, 1)}


async def test_a_flush_waits_for_what_is_published_without_a_commit() -> None:
    async with publishing(is_explicit=True) as (one, fakes):
        put(one, executed(1, 1))
        await one.flush()

        assert [what for what, _ in fakes.events] == ["publish", "finish"]


async def test_a_flush_waits_for_what_was_put() -> None:
    async with publishing() as (one, fakes):
        fakes.go.clear()
        put(one, executed(1, 1), executed(1, 2))
        flush = asyncio.create_task(one.flush())
        await eventually(lambda: len(fakes.commits) == 1, description="a commit under way")
        is_early = flush.done()
        fakes.go.set()
        await flush

        assert not is_early
        assert list(fakes.committed) == [(1, 1), (1, 2)]
