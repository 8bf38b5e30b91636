"""The requests of this process that wait for their answers: a table by id with deadlines, and the cleanup behind it.

Gateways wait for their clients here, and workers for the models that their models call. Adding and removing are O(1).
Deadlines fall into buckets of 10 ms, and one timer is set for the earliest bucket: 100,000 waiting requests cost one
timer. A deadline fires at most one bucket late, and never early. On the good path nothing is awaited, no task is made
and nothing is logged. `run` does the rest in the background:

- abandoned requests (cancelled, expired) are taken out of the queue, executing or not;
- workers are told what was taken of their streams;
- requests that waited too long are taken out of the queue if they still wait;
- outputs beside the reply stream are fetched.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec

from qinfer.core.clock import Clock
from qinfer.core.messages import Failure, Response
from qinfer.core.retry import Backoff
from qinfer.errors import (
    LEFT,
    TIMED_OUT,
    BrokerUnavailable,
    Cancelled,
    CorruptEntry,
    DeadlineExceeded,
    DeliveryError,
    InferenceFailed,
    QinferError,
)
from qinfer.queue.entries import Entry, Lane, by_lane
from qinfer.queue.lanes import Queue
from qinfer.queue.sequence_answers import answer_rest
from qinfer.queue.sequence_records import NOBODYS, Place
from qinfer.queue.sequences import Sequences
from qinfer.submission.overtaking import Overtaking
from qinfer.submission.streams import Credits, StreamReader, Verdict
from qinfer.wire.frame import decode_responses

logger = logging.getLogger(__name__)

_BUCKETS_PER_S = 100
_LOST = "the answer may be lost, with data of the queue; send the request again"
_GONE = "the outputs were stored and are gone; send the request again"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_MOST_LEFT = 4096
_Outputs = tuple[Lane, str, str]  # of a request: its lane, its id, its tenant


class Sink(Protocol):
    """Receiver of the responses of one request: a future, an HTTP connection, a gRPC stream.

    Attributes:
        no_stream: Why it takes no request to a decoupled model, whose responses may be several; empty = it takes one.
    """

    no_stream: str

    def deliver(self, response: Response) -> None:
        """Takes a response; called on the event loop, for the last time with `response.final`."""
        ...


class Inner:
    """Base of the sinks within a submission: of executions that no caller has asked for as they are, such as parts."""

    __slots__ = ()
    no_stream = ""

    def deliver(self, response: Response) -> None:
        """Takes a response."""

    def fail(self, error: Exception) -> None:
        """Takes the reason why there is no response."""

    def is_behind(self) -> bool:
        """Tells whether the response waits for that of another request, on whose memory it may not wait."""
        return False


class Counter(Protocol):
    """Counts the requests in flight of a tenant, the owner of a quota."""

    in_flight: int
    tenant: str


class Load(msgspec.Struct, eq=False):
    """Number of entries in one lane, or in a share of one.

    Attributes:
        lane: Its stream.
        own: This process's requests in it: submitted, and not yet answered.
        left: This process's requests that were answered or given up since the last look.
        executed: This process's requests that a model answered since the last look.
        others: Those of others, at the last look.
        most: Up to so many entries nothing needs to be judged, for a request of the default timeout.
        overtaking: Tells the part of the speed that it takes from the lanes below it.
        beside: Those in the other shares of its lane, at the last look.
        part: Its share of the lane by weight, among those that hold something; 1 where the lane is not divided.
    """

    lane: Lane
    most: int
    own: int = 0
    left: int = 0
    executed: int = 0
    others: int = 0
    overtaking: Overtaking = msgspec.field(default_factory=Overtaking)
    beside: int = 0
    part: float = 1.0

    @property
    def waiting(self) -> int:
        """Number of entries in it."""
        return self.own + self.others

    @property
    def ahead(self) -> float:
        """Number of entries that are fetched before one that is submitted now: each share has its turn."""
        waiting = self.own + self.others
        return waiting + min(self.beside, (waiting + 1) * (1 - self.part) / self.part) if self.beside else waiting

    @property
    def all(self) -> int:
        """Number of entries in all shares of its lane."""
        return self.own + self.others + self.beside


class OfStep(msgspec.Struct, eq=False):
    """The part of a pending request that only a step of a sequence has.

    Attributes:
        sequences: The sequences of its model.
        is_numbered: Its caller may send it again: that nobody waits for it ends nothing.
        place: Its place in its sequence, once the broker confirmed it.
        failure: Its sequence is to end by this.
    """

    sequences: Sequences
    is_numbered: bool
    place: Place | None = None
    failure: Failure | None = None


class Shared(Protocol):
    """An execution that belongs to no caller: several requests wait for it."""

    def left(self, caller: "Pending") -> None:
        """Takes note of a request that waits for it no more."""
        ...


class Memory(Protocol):
    """The memory of an answer."""

    def become(self, size: int) -> None:
        """Makes it as large as the answer has become."""
        ...

    def watch(self, arrived: Callable[[], int], late: Callable[[], None]) -> None:
        """Has the answer given up that is read too slowly: `arrived` tells how many bytes were, `late` gives it up."""
        ...

    def release(self) -> None:
        """Gives it back; a second time changes nothing."""
        ...


class Holder(Protocol):
    """Keeper of the memory of an answer until it is sent."""

    def is_behind(self) -> bool:
        """Tells whether the answer is to be sent behind another, on whose memory it may not wait."""
        ...


class Pending(msgspec.Struct, eq=False):
    """A request that was submitted and not yet answered in full.

    Attributes:
        request_id: qinfer's id of it.
        client_id: The id its client gave; may be empty.
        model: The model it is for.
        version: The version it is for, or by which it was answered.
        sink: Who gets its responses.
        started_s: When it was submitted, on the monotonic clock.
        entry: Its place in the queue, once the broker confirmed it.
        abandoned: Nobody waits for it any more: its entry is to be finished as soon as it is known.
        attempt: The execution whose responses are followed; 0 before the first response. A stream has its own.
        bucket: The table's own: the bucket of its deadline.
        load: The lane it was sent to, which counts it until it leaves the table.
        quota: Its tenant's, which counts it too.
        deadline_s: While the table has its queue timeout, or how long it waits for a worker, for a deadline: the
            deadline that comes after it.
        untaken: Called at that first deadline: why it fails if no worker has taken it, `None` = it waits on. Unset
            where the first deadline is its queue timeout.
        late: Why it fails if no worker has taken it, once its first deadline is over.
        is_fetched: Its outputs, which are beside the reply stream, are being fetched.
        stream: What came of it and was taken, where its model is decoupled.
        step: Where it is in its sequence, where its model is stateful.
        shared: The execution that it waits for, where that is not its own; it has no entry then.
        memory: The memory of its answer, where that is large.
        holder: Gives that memory back, once the answer is sent; without one it is given back when the answer is taken.
        turn: Set once no answer is to be sent before it; there is none unless the fetch of its answer waits for that.
    """

    request_id: str
    client_id: str
    model: str
    version: int
    sink: Sink
    started_s: float
    entry: Entry | None = None
    abandoned: bool = False
    attempt: int = 0
    bucket: int = 0
    load: Load | None = None
    quota: Counter | None = None
    deadline_s: float = 0.0
    untaken: Callable[[], QinferError | None] | None = None
    late: QinferError | None = None
    is_fetched: bool = False
    stream: StreamReader | None = None
    step: OfStep | None = None
    shared: Shared | None = None
    memory: Memory | None = None
    holder: Holder | None = None
    turn: asyncio.Event | None = None

    def forget_memory(self) -> None:
        """Gives the memory of its answer back."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.release()

    def comes_first(self) -> None:
        """Takes note that its answer is the next one to be sent."""
        if self.turn is not None:
            self.turn.set()


class Timer(Protocol):
    """A timer, as `call_later` returns it."""

    def cancel(self) -> None:
        """Unsets the timer."""
        ...


class PendingRequests:
    """See the module docstring.

    Args:
        queue: The queue.
        clock: The monotonic clock of the deadlines.
        call_later: Sets a timer: (delay in seconds, callback); an event loop's `call_later`.
        answered: Called with each response that a caller waits for.
        failed: Called with each request of a caller that ends without one, out of the table already, and why.
        window_bytes: Outputs of one stream that may be on their way.

    Attributes:
        unclaimed: Called with the id of a response that nobody waits for: the hint that a stored request has ended.
        load_of: Returns the load of a lane that a request has come to, or of a share of one.
        lend: Waits for the memory of a request's answer of so many bytes, which is to be fetched; `None` = it is not
            counted.
    """

    def __init__(
        self,
        queue: Queue,
        clock: Clock,
        call_later: Callable[[float, Callable[[], None]], Timer],
        answered: Callable[[Pending, Response], None],
        failed: Callable[[Pending, Exception], None],
        window_bytes: int = 2**20,
    ) -> None:
        self._queue = queue
        self._clock = clock
        self._call_later = call_later
        self._answered = answered
        self._failed = failed
        self.unclaimed: Callable[[str], None] = lambda _: None
        self.load_of: Callable[[Lane], Load] = lambda lane: Load(lane, 0)
        self.lend: Callable[[Pending, int], Awaitable[Memory]] | None = None
        self._pending: dict[str, Pending] = {}
        self._buckets: dict[int, dict[str, Pending]] = {}
        self._timer: Timer | None = None
        self._timer_bucket = 0
        self._abandoned: list[Entry] = []
        self._left: dict[str, _Outputs] = {}
        """Where outputs of the requests that were abandoned last may still be stored."""
        self._unread: list[_Outputs] = []
        self._broken: list[OfStep] = []
        self._ending = asyncio.Lock()
        self._late: list[Pending] = []
        self._stored: list[Pending] = []
        self._work = asyncio.Event()
        self._credits = Credits(queue, window_bytes, self._pending.__contains__)

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, pending: Pending) -> bool:
        return pending.request_id in self._pending

    def has_any_of(self, model: str, version: int) -> bool:
        """Tells whether a request to a model version waits here; looks at all."""
        return any(each.model == model and each.version == version for each in self._pending.values())

    def add(self, pending: Pending, deadline_s: float) -> None:
        """Adds a request that is to be answered before `deadline_s` on the monotonic clock; it is counted from now.

        The deadline of a stream is that of its first response: each one that comes moves it.
        """
        if pending.load is not None:
            pending.load.own += 1
        if pending.quota is not None:
            pending.quota.in_flight += 1
        number = pending.bucket = int(deadline_s * _BUCKETS_PER_S) + 1
        self._pending[pending.request_id] = pending
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            if self._timer is None or number < self._timer_bucket:
                self._set_timer(number)
        bucket[pending.request_id] = pending

    def count(self, pending: Pending, load: Load) -> None:
        """Counts a pending request in a lane from now on, into which it did not go at first."""
        pending.load = load
        load.own += 1

    def open_stream(self, pending: Pending, *, resumes: bool, pause_s: float, timeout_s: float) -> None:
        """Makes a request, not added yet, one of any number of responses.

        Args:
            pending: The request.
            resumes: Its model gives the same responses each time.
            pause_s: The longest wait for a response; the first one is waited for as long as `add` is told.
            timeout_s: From when it was submitted to the end of the whole stream.
        """
        ends_s = pending.started_s + timeout_s
        now_s, owe = self._clock.monotonic_s, self._credits.owe
        pending.stream = StreamReader(pending.request_id, resumes, pause_s, ends_s, now_s, owe)

    def remove(self, pending: Pending) -> bool:
        """Removes a request; returns whether it was pending."""
        if self._pending.pop(pending.request_id, None) is None:
            return False
        self._forget(pending)
        return True

    def submitted(self, pending: Pending, outcome: Entry | QinferError) -> None:
        """Takes note of a request's place in the queue, or of why it has none."""
        if isinstance(outcome, QinferError):
            if self.remove(pending):
                self.fail(pending, outcome)
            return
        pending.entry, load = outcome, pending.load
        if load is not None and load.lane is not outcome.lane and load.lane != outcome.lane:
            self._recount(pending, load, self.load_of(outcome.lane))
        if pending.abandoned:
            self._abandon(pending, None)
        elif pending.late is not None:
            self._withdraw_soon(pending)

    def receive(self, blob: bytes) -> None:
        """Delivers the responses of one reply blob; responses without a pending request are dropped."""
        try:
            responses = decode_responses(blob)
        except CorruptEntry:
            logger.exception("reply dropped: it can't be decoded")
            return
        for response in responses:
            self.deliver(response)

    def take(self, response: Response) -> Pending | None:
        """Returns the request that a response belongs to, and removes it if the response is its last.

        `None` for an id that is unknown (answered, expired, cancelled), for another attempt than the one followed, and
        for what is not the next response of a stream. One whose outputs are yet to be fetched stays.
        """
        pending = self._pending.get(response.request_id)
        if pending is None:
            return None
        if pending.stream is not None:
            if not self._follows(pending, pending.stream, response):
                return None
        elif not pending.attempt:
            pending.attempt = response.attempt
        elif pending.attempt != response.attempt:
            return None
        if response.final and not response.stored:
            del self._pending[response.request_id]
            self._forget(pending)
        return pending

    def cancel(self, pending: Pending) -> bool:
        """Abandons a request and removes its entry if it is still waiting; returns whether it was pending."""
        if not self.remove(pending):
            return False
        self._abandon(pending, Cancelled(LEFT))
        return True

    def fail_all(self, error: QinferError) -> None:
        """Fails every request that waits, and takes them out of the queue; steps of sequences are executed."""
        for pending in self.clear():
            self._abandon(pending, None)
            self.fail(pending, error)

    def lose_all(self) -> None:
        """Fails every request that waits: its answer may have been lost with the reply stream."""
        if self._pending:
            logger.warning("the reply stream was gone", extra={"failed": len(self._pending)})
        self.fail_all(BrokerUnavailable(_LOST))

    def clear(self) -> list[Pending]:
        """Removes and returns all requests, and unsets the timer."""
        everyone = list(self._pending.values())
        self._pending.clear()
        self._buckets.clear()
        for pending in everyone:
            pending.comes_first()  # what waits to fetch its outputs ends
            _uncount(pending)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return everyone

    async def run(self) -> None:
        """Cleans up until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._credits.run(), name="credits")
            while True:
                await self._work.wait()
                self._work.clear()
                stored, self._stored = self._stored, []
                for pending in stored:
                    group.create_task(self._fetch(pending), name="stored outputs")
                unread, self._unread = self._unread, []
                for outputs in unread:
                    await self._drop(*outputs)
                await self.discard()
                await self._withdraw()

    async def discard(self) -> None:
        """Cancels the entries of abandoned requests now; if Redis is away, their deadlines end them in a worker.

        Sequences end with their abandoned steps. What it was cancelled with is left to the next call: to cancel entries
        twice does no harm.
        """
        await self._end_sequences()
        entries, self._abandoned = self._abandoned, []
        try:
            for _, group in by_lane(entries):
                try:
                    await self._queue.cancel(group)
                except DeliveryError as error:
                    extra = {"count": len(group), "error": error.message}
                    logger.warning("abandoned requests stay queued", extra=extra)
        except asyncio.CancelledError:
            self._abandoned += entries
            raise

    async def _end_sequences(self) -> None:
        """Ends the sequences of abandoned steps; to end one twice does no harm. A second caller waits for the first."""
        async with self._ending:
            while self._broken:
                step = self._broken[0]
                assert step.place is not None, "only steps with a place are in the list"
                assert step.failure is not None, "and with a failure"
                try:
                    if await step.sequences.fail(step.place, step.failure):
                        await answer_rest(self._queue, step.sequences)
                except QinferError as error:
                    logger.warning("a sequence goes on until its step expires", extra={"error": error.message})
                del self._broken[0]

    def _follows(self, pending: Pending, stream: StreamReader, response: Response) -> bool:
        """Returns whether a response is for the caller of a stream; ends a stream that can't go on."""
        verdict = stream.judge(response)
        if verdict is Verdict.BREAK and self.cancel(pending):
            self.fail(pending, stream.broken())
        return verdict is Verdict.DELIVER

    def _recount(self, pending: Pending, before: Load, load: Load) -> None:
        """Counts a request where it is, which a tenant's place has told; not one that has left the table."""
        if pending in self:
            before.own -= 1
            self.count(pending, load)

    def _forget(self, pending: Pending) -> None:
        if pending.turn is not None:
            pending.turn.set()
        bucket = self._buckets[pending.bucket]
        del bucket[pending.request_id]
        if not bucket:
            del self._buckets[pending.bucket]
        _uncount(pending)

    def _set_timer(self, number: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_bucket = number
        self._timer = self._call_later(max(0.0, number / _BUCKETS_PER_S - self._clock.monotonic_s()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        due = int(self._clock.monotonic_s() * _BUCKETS_PER_S + 1e-6)  # rounding may not make a bucket miss its timer
        for number in sorted(n for n in self._buckets if n <= due):
            for pending in list(self._buckets.get(number, {}).values()):
                if self.remove(pending):
                    self._expired(pending)
        # A request that was added again has set the timer to its own, later bucket.
        if self._buckets and (self._timer is None or self._timer_bucket > min(self._buckets)):
            self._set_timer(min(self._buckets))

    def _expired(self, pending: Pending) -> None:
        if not pending.deadline_s:
            if pending.stream is not None and pending.stream.until_s > self._clock.monotonic_s():
                self.add(pending, pending.stream.until_s)
                return
            error = DeadlineExceeded(TIMED_OUT)
            self._abandon(pending, error)
            self.fail(pending, error)
            return
        # Its first deadline is over: that concerns it only while it waits. Otherwise it has until its deadline.
        deadline_s, pending.deadline_s = pending.deadline_s, 0.0
        self.add(pending, deadline_s)
        pending.late = DeadlineExceeded(TIMED_OUT) if pending.untaken is None else pending.untaken()
        if pending.late is not None and pending.entry is not None:
            self._withdraw_soon(pending)

    def deliver(self, response: Response) -> None:
        """Delivers a response, or has its outputs fetched first; one without a pending request is dropped."""
        pending = self.take(response)
        if pending is None:
            if response.stored and response.request_id in self._left:
                self._unread.append(self._left.pop(response.request_id))
                self._work.set()
            self.unclaimed(response.request_id)
            return
        if response.stored:
            # A response may come twice, after a reconnect.
            if not pending.is_fetched:
                pending.is_fetched = True
                self._stored.append(pending)
                self._work.set()
            return
        self.answer(pending, response)

    def answer(self, pending: Pending, response: Response) -> None:
        """Hands on the response of a request, which is not in the table any more if it is the last."""
        if response.version != pending.version and response.version:
            pending.version = response.version  # that one executed it: it was moved while it waited
        if response.failure is None and response.final and pending.load is not None:
            pending.load.executed += 1
        try:
            if isinstance(pending.sink, Inner):
                pending.sink.deliver(response)
            else:
                self._answered(pending, response)
        except Exception as error:  # the loop that answers everyone: one bad answer may not end it
            extra = {"request_id": response.request_id, "model": pending.model, "version": pending.version}
            logger.exception("answer failed", extra=extra)
            self.fail(pending, error)

    def fail(self, pending: Pending, error: Exception) -> None:
        """Tells a request, which is out of the table already, why it ends without a response."""
        if isinstance(pending.sink, Inner):
            pending.sink.fail(error)
        else:
            self._failed(pending, error)

    def _abandon(self, pending: Pending, error: QinferError | None) -> None:
        """Finishes the entry of an abandoned request once the entry is known; a step ends its sequence by the error."""
        pending.abandoned = True
        self._remember(pending)
        step = pending.step
        if step is not None:
            if error is not None and not (step.is_numbered and isinstance(error, Cancelled)):
                step.failure = Failure.of(error)
            if step.failure is not None and step.place is not None:
                self._broken.append(step)
                self._work.set()
        elif pending.shared is not None:
            pending.shared.left(pending)
        elif pending.entry is not None:
            self._abandoned.append(pending.entry)
            self._work.set()

    def _remember(self, pending: Pending) -> None:
        """Keeps in mind where outputs of an abandoned request may be stored: its worker does not know of it yet."""
        if pending.load is None:
            return
        if len(self._left) >= _MOST_LEFT:
            del self._left[next(iter(self._left))]
        self._left[pending.request_id] = _outputs_of(pending)

    def _withdraw_soon(self, pending: Pending) -> None:
        """Has a request taken out of the queue, if it still waits there."""
        self._late.append(pending)
        self._work.set()

    async def _withdraw(self) -> None:
        """Removes late requests from the queue; requests that a worker holds end with their deadline."""
        late = {p.entry: p for p in self._late if p.entry is not None and p.step is None}
        steps = [pending for pending in self._late if pending.step is not None]
        self._late.clear()
        for pending in steps:
            await self._withdraw_step(pending)
        for _, entries in by_lane(list(late)):
            try:
                removed = await self._queue.withdraw(entries)
            except DeliveryError as error:
                logger.warning("late requests stay queued", extra={"count": len(entries), "error": error.message})
                continue
            for entry, is_removed in zip(entries, removed, strict=True):
                if is_removed and self.remove(pending := late[entry]):
                    self.fail(pending, pending.late or DeadlineExceeded(TIMED_OUT))

    async def _withdraw_step(self, pending: Pending) -> None:
        """Ends the sequence of a step that waits for a worker in vain; one that a worker owns goes on."""
        step, error = pending.step, pending.late or DeadlineExceeded(TIMED_OUT)
        if pending not in self or step is None or step.place is None:
            return
        try:
            if await step.sequences.fail(step.place, Failure.of(error), NOBODYS):
                if self.remove(pending):
                    self.fail(pending, error)
                await answer_rest(self._queue, step.sequences)
        except QinferError as problem:
            logger.warning("a late step stays in its sequence", extra={"error": problem.message})

    async def _fetch(self, pending: Pending) -> None:
        """Fetches the outputs of a request, and delivers them."""
        try:
            blob = await self._stored_outputs(pending)
            if blob is None:
                raise InferenceFailed(_GONE)
            (response,) = decode_responses(blob)
        except Exception as error:  # the boundary of a request: its caller gets every error
            pending.forget_memory()
            if self.remove(pending):
                logger.exception("outputs can't be fetched", extra={"request_id": pending.request_id})
                self.fail(pending, error)
            else:
                await self._drop(*_outputs_of(pending))
            return
        # Another attempt may have stored its outputs over those that were announced: they are as good.
        is_awaited = self.remove(pending)
        if is_awaited:
            self.answer(pending, msgspec.structs.replace(response, stored=False))
        if not is_awaited or pending.holder is None:
            pending.forget_memory()

    async def _borrow(self, pending: Pending, nbytes: int) -> None:
        """Waits for the memory of an answer.

        Raises:
            Cancelled: Nobody waits for the answer any more.
        """
        if self.lend is None or pending.memory is not None:
            return
        while pending in self and _is_behind(pending):
            pending.turn = asyncio.Event()
            await pending.turn.wait()
        if pending in self:
            pending.memory = await self.lend(pending, nbytes)
        if pending not in self:
            raise Cancelled(LEFT)

    async def _drop(self, lane: Lane, request_id: str, tenant: str) -> None:
        """Removes stored outputs that nobody waits for; their time to live ends them otherwise."""
        with suppress(DeliveryError):
            await self._queue.drop_result(lane, request_id, tenant)

    async def _stored_outputs(self, pending: Pending) -> bytes | None:
        """Reads stored outputs; while the queue is away, retries as long as the request is pending."""
        lane, request_id, tenant = _outputs_of(pending)
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                return await self._queue.take_result(lane, request_id, tenant, partial(self._borrow, pending))
            except BrokerUnavailable as error:
                await asyncio.sleep(backoff.next_s())
                if pending not in self:
                    raise
                logger.info("outputs are read again", extra={"request_id": pending.request_id, "reason": error.message})


def _is_behind(pending: Pending) -> bool:
    """Tells whether the answer of a request is to be sent behind another."""
    sink, holder = pending.sink, pending.holder
    return (holder is not None and holder.is_behind()) or (isinstance(sink, Inner) and sink.is_behind())


def _outputs_of(pending: Pending) -> _Outputs:
    assert pending.load is not None
    return pending.load.lane, pending.request_id, pending.quota.tenant if pending.quota is not None else ""


def _uncount(pending: Pending) -> None:
    if pending.load is not None:
        pending.load.own -= 1
        pending.load.left += 1
    if pending.quota is not None:
        pending.quota.in_flight -= 1
