"""The pending requests of this process: a table by id with deadlines, and background cleanup.

Gateways use it for clients, workers for models that call other models. Deadlines fall into buckets of 10 ms with one
timer, and fire at most one bucket late, never early. The good path is O(1), awaits nothing, makes no task and logs
nothing; `run` does the other work.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec

from qinfer.core.clock import Clock
from qinfer.core.messages import Failure, KeptTensors, MemoryReference, Response
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
from qinfer.queue.entries import Entry, Lane, Payload, by_lane
from qinfer.queue.lanes import Queue
from qinfer.queue.sequences.answers import answer_rest
from qinfer.queue.sequences.ownership import Sequences
from qinfer.queue.sequences.records import NOBODYS, StepPlace
from qinfer.submission.backlog import LaneLoad
from qinfer.submission.memory import PAYLOAD_MARGIN_S
from qinfer.submission.streams import Credits, ResponseFate, StreamReader
from qinfer.tensors import Bytes
from qinfer.wire.frame import decode_responses

logger = logging.getLogger(__name__)

_BUCKETS_PER_S = 100
_LOST = "the answer may be lost, with data of the queue; send the request again"
_GONE = "the outputs were stored and are gone; send the request again"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_MOST_LEFT = 4096
_Outputs = tuple[Lane, str, str]  # lane, id, tenant


class ResponseSink(Protocol):
    """The receiver of a request's responses: a future, an HTTP connection, a gRPC stream.

    `no_stream` says why it can't take several responses; empty = it can.
    """

    no_stream: str

    def deliver(self, response: Response) -> None:
        """Takes a response on the event loop; the last is `final`."""
        ...


class Inner:
    """The base of sinks within a submission, such as those of parts."""

    __slots__ = ()
    no_stream = ""

    def deliver(self, response: Response) -> None:
        """Takes a response."""

    def fail(self, error: Exception) -> None:
        """Takes the error instead of a response."""

    def is_behind(self) -> bool:
        """Tells whether it may not wait for memory, behind another response."""
        return False


class Counter(Protocol):
    """Counts a tenant's requests in flight."""

    in_flight: int
    tenant: str


class OfStep(msgspec.Struct, eq=False):
    """A pending step of a sequence.

    The caller of an `is_numbered` step may send it again, so its leaving does not end the sequence. `failure` is the
    failure that is to end the sequence.
    """

    sequences: Sequences
    is_numbered: bool
    place: StepPlace | None = None
    failure: Failure | None = None
    entry: Entry | None = None


class SharedExecution(Protocol):
    """An execution that several requests wait for."""

    def left(self, caller: "PendingCall") -> None:
        """Removes a request that no longer waits."""
        ...


class Memory(Protocol):
    """The memory of an answer."""

    def become(self, size: int) -> None:
        """Adjusts to the answer's size."""
        ...

    def watch(self, arrived: Callable[[], int], late: Callable[[], None]) -> None:
        """Calls `late` if the bytes that have `arrived` grow too slowly."""
        ...

    def release(self) -> None:
        """Returns the memory; may be repeated."""
        ...


class KeptOutputs(Protocol):
    """The memory of workers of this machine."""

    def read(self, reference: MemoryReference) -> Bytes:
        """Returns a copy, or raises `DeliveryError`."""
        ...

    def confirm(self, reference: MemoryReference) -> None:
        """Lets the worker use the memory again."""
        ...


class MemoryHolder(Protocol):
    """Keeps an answer's memory until it is sent."""

    def is_behind(self) -> bool:
        """Tells whether the answer is behind another, so that it may not wait for memory."""
        ...


class PendingCall(msgspec.Struct, eq=False):
    """A submitted request without a complete answer.

    Attributes:
        version: The requested version, and later the version that executed the request.
        entry: The place of the request in the queue, once Redis has confirmed it.
        abandoned: Whether the entry is to be removed once it is known.
        attempt: The followed execution; 0 before the first response.
        deadline_s: The last deadline, if a first one precedes it: a queue timeout, or the wait for a worker.
        untaken: Called at the first deadline, for the error; `None` from it = the request waits on.
        shared: The execution for which the request waits instead of an entry.
        holder: The object that returns `memory` once the answer is sent, instead of when the answer is taken.
        turn: Set when the answer of this request is the next to be sent.
        tensors: Its tensors, if they are in this process's memory; given back when the request ends.
    """

    request_id: str
    client_id: str
    model: str
    version: int
    sink: ResponseSink
    started_s: float
    entry: Entry | None = None
    abandoned: bool = False
    attempt: int = 0
    bucket: int = 0
    load: LaneLoad | None = None
    quota: Counter | None = None
    deadline_s: float = 0.0
    untaken: Callable[[], QinferError | None] | None = None
    late: QinferError | None = None
    is_fetched: bool = False
    stream: StreamReader | None = None
    step: OfStep | None = None
    shared: SharedExecution | None = None
    memory: Memory | None = None
    holder: MemoryHolder | None = None
    turn: asyncio.Event | None = None
    tensors: KeptTensors | None = None

    def forget_memory(self) -> None:
        """Returns the memory of its answer."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.release()

    def comes_first(self) -> None:
        """Lets the request fetch its answer, which is next to be sent."""
        if self.turn is not None:
            self.turn.set()


class Timer(Protocol):
    """A timer of `call_later`."""

    def cancel(self) -> None:
        """Cancels the timer."""
        ...


class PendingRequests:
    """The table of pending requests.

    `answered` and `failed` get callers' responses and failed requests. `unclaimed` gets the id of a response without a
    pending request, because a stored request may have ended. `lend` waits for the memory of an answer; `None` = memory
    is not counted. `kept` reads outputs in the memory of workers.
    """

    def __init__(
        self,
        queue: Queue,
        clock: Clock,
        call_later: Callable[[float, Callable[[], None]], Timer],
        answered: Callable[[PendingCall, Response], None],
        failed: Callable[[PendingCall, Exception], None],
        window_bytes: int = 2**20,
    ) -> None:
        self._queue = queue
        self._clock = clock
        self._call_later = call_later
        self._answered = answered
        self._failed = failed
        self.unclaimed: Callable[[str], None] = lambda _: None
        self.load_of: Callable[[Lane], LaneLoad] = lambda lane: LaneLoad(lane, 0)
        self.lend: Callable[[PendingCall, int], Awaitable[Memory]] | None = None
        self.kept: KeptOutputs | None = None
        self.unread: Callable[[str], None] = lambda _: None
        """Gets the model of a request whose tensors a worker can't read."""

        self.by_id: dict[str, PendingCall] = {}
        """Changed only here."""
        self._buckets: dict[int, dict[str, PendingCall]] = {}
        self._timer: Timer | None = None
        self._timer_bucket = 0
        self._abandoned: list[Entry] = []
        self._left: dict[str, _Outputs] = {}
        """Where outputs of the latest abandoned requests may be stored."""
        self._unread: list[_Outputs] = []
        self._broken: list[OfStep] = []
        self._ending = asyncio.Lock()
        self._late: list[PendingCall] = []
        self._stored: list[PendingCall] = []
        self._apart: list[PendingCall] = []
        self._storing: set[str] = set()
        """Requests whose tensors are being stored."""
        self._work = asyncio.Event()
        self._credits = Credits(queue, window_bytes, self.by_id.__contains__)

    def __len__(self) -> int:
        return len(self.by_id)

    def __contains__(self, pending: PendingCall) -> bool:
        return pending.request_id in self.by_id

    def has_any_of(self, model: str, version: int) -> bool:
        """Tells whether a model version has pending requests; scans all pending requests."""
        return any(each.model == model and each.version == version for each in self.by_id.values())

    def add(self, pending: PendingCall, deadline_s: float) -> None:
        """Adds and counts a request; a stream's deadline is that of its first response."""
        if pending.load is not None:
            pending.load.own += 1
        if pending.quota is not None:
            pending.quota.in_flight += 1
        number = pending.bucket = int(deadline_s * _BUCKETS_PER_S) + 1
        self.by_id[pending.request_id] = pending
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
            if self._timer is None or number < self._timer_bucket:
                self._set_timer(number)
        bucket[pending.request_id] = pending

    def count(self, pending: PendingCall, load: LaneLoad) -> None:
        """Counts a pending request in the lane that it has entered."""
        pending.load = load
        load.own += 1

    def open_stream(self, pending: PendingCall, *, resumes: bool, pause_s: float, timeout_s: float) -> None:
        """Lets a request have many responses, `pause_s` apart at most, `timeout_s` for all; call before `add`."""
        ends_s, now_s, owe = pending.started_s + timeout_s, self._clock.monotonic_s, self._credits.owe
        pending.stream = StreamReader(pending.request_id, resumes, pause_s, ends_s, now_s, owe)

    def remove(self, pending: PendingCall, *, unanswered: bool = True) -> bool:
        """Removes a request; returns whether it was pending."""
        if not self._take_out(pending):
            return False
        _give_back(pending, unanswered=unanswered)
        return True

    def submitted(self, pending: PendingCall, outcome: Entry | QinferError) -> None:
        """Records a request's place in the queue, or fails it."""
        if isinstance(outcome, QinferError):
            if self.remove(pending):
                self.fail(pending, outcome)
            return
        pending.entry, load = outcome, pending.load
        if (
            load is not None
            and load.lane is not outcome.lane
            and pending.step is None  # steps count nowhere
            and load.lane != outcome.lane
            and pending in self
        ):
            load.own -= 1
            self.count(pending, self.load_of(outcome.lane))
        if pending.abandoned:
            self._abandon(pending, None)
        elif pending.late is not None:
            self._late.append(pending)
            self._work.set()

    def receive(self, blob: Bytes) -> None:
        """Delivers a reply blob's responses."""
        try:
            responses = decode_responses(blob, self._read_kept)
        except CorruptEntry:
            logger.exception("reply dropped: it can't be decoded")
            return
        for response in responses:
            self.deliver(response)

    def _read_kept(self, request_id: str, memory: MemoryReference) -> Bytes | None:
        """Copies outputs from a worker's memory, which the worker may then use again."""
        if not memory.size:
            self._note_unread(request_id, memory)
            return None
        if self.kept is None:
            return None
        outputs: Bytes | None = None
        if request_id in self.by_id:
            try:
                outputs = self.kept.read(memory)
            except DeliveryError as error:  # the worker sends them through Redis
                logger.debug("outputs not read in memory", extra={"request_id": request_id, "reason": error.message})
                return None
        self.kept.confirm(memory)
        return outputs

    def _note_unread(self, request_id: str, memory: MemoryReference) -> None:
        """Stores tensors in Redis that a worker of another machine could not read, for the next try."""
        pending = self.by_id.get(request_id)
        if pending is None or pending.tensors is None or pending.tensors.reference.generation != memory.generation:
            return
        self.unread(pending.model)
        self._apart.append(pending)
        self._work.set()

    async def _store_tensors(self, pending: PendingCall) -> None:
        if pending.tensors is None or pending.entry is None or pending.request_id in self._storing:
            return  # the worker asks again
        kept = pending.tensors.hold()
        self._storing.add(pending.request_id)
        try:
            left_s = pending.bucket / _BUCKETS_PER_S - self._clock.monotonic_s()
            payload = Payload(pending.request_id, kept.view(), max(left_s, 0.0) + PAYLOAD_MARGIN_S)
            await self._queue.put_payload(pending.entry, payload, kept.tenant)
        except DeliveryError as error:
            extra = {"request_id": pending.request_id, "error": error.message}
            logger.warning("tensors that a worker can't read are not stored", extra=extra)
        finally:
            self._storing.discard(pending.request_id)
            kept.release()

    def request_of(self, response: Response) -> PendingCall | None:
        """Returns a response's request, removed with the last response unless outputs are yet to be fetched.

        `None` for an unknown id, another attempt than the followed one, and a stream's response out of order.
        """
        pending = self.by_id.get(response.request_id)
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
            del self.by_id[response.request_id]
            self._remove_entry(pending)
            tensors, pending.tensors = pending.tensors, None
            if tensors is not None:
                tensors.release(unanswered=response.attempt > 1)  # an earlier worker may still read them
        return pending

    def cancel(self, pending: PendingCall) -> bool:
        """Abandons a request; returns whether it was pending."""
        if not self.remove(pending):
            return False
        self._abandon(pending, Cancelled(LEFT))
        return True

    def fail_all(self, error: QinferError) -> None:
        """Fails all requests and removes them from the queue; steps of sequences are still executed."""
        for pending in self.clear():
            self._abandon(pending, None)
            self.fail(pending, error)

    def lose_all(self) -> None:
        """Fails all requests, because their answers may be lost with the reply stream."""
        if self.by_id:
            logger.warning("the reply stream was gone", extra={"failed": len(self.by_id)})
        self.fail_all(BrokerUnavailable(_LOST))

    def clear(self) -> list[PendingCall]:
        """Removes and returns all requests, and cancels the timer."""
        everyone = list(self.by_id.values())
        self.by_id.clear()
        for pending in everyone:
            self._remove_entry(pending)
            _give_back(pending)
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
                apart, self._apart = self._apart, []
                for pending in apart:
                    group.create_task(self._store_tensors(pending), name="tensors that a worker can't read")
                unread, self._unread = self._unread, []
                for outputs in unread:
                    await self._drop(*outputs)
                await self.discard()
                await self._withdraw()

    async def discard(self) -> None:
        """Cancels abandoned entries, and sequences of abandoned steps; may be cancelled and repeated."""
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
        """Ends the broken sequences; a second caller waits for the first."""
        async with self._ending:
            while self._broken:
                step = self._broken[0]
                assert step.place is not None, "only steps with a place are in the list"
                assert step.failure is not None, "and only steps with a failure"
                try:
                    if step.place.number == 0 and step.entry is not None:
                        await step.sequences.cancel(step.place, step.entry, step.failure)
                    elif await step.sequences.fail(step.place, step.failure):
                        await answer_rest(self._queue, step.sequences)
                except QinferError as error:
                    logger.warning("a sequence goes on until its step expires", extra={"error": error.message})
                del self._broken[0]

    def _follows(self, pending: PendingCall, stream: StreamReader, response: Response) -> bool:
        verdict = stream.judge(response)
        if verdict is ResponseFate.BREAK and self.cancel(pending):
            self.fail(pending, stream.broken())
        return verdict is ResponseFate.DELIVER

    def _take_out(self, pending: PendingCall) -> bool:
        """Removes a request that may be added again."""
        if self.by_id.pop(pending.request_id, None) is None:
            return False
        self._remove_entry(pending)
        return True

    def _remove_entry(self, pending: PendingCall) -> None:
        if pending.turn is not None:  # it waits to fetch outputs
            pending.turn.set()
        bucket = self._buckets[pending.bucket]
        del bucket[pending.request_id]
        if not bucket:
            del self._buckets[pending.bucket]
        if pending.load is not None:
            pending.load.own -= 1
            pending.load.left += 1
        if pending.quota is not None:
            pending.quota.in_flight -= 1

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
                if self._take_out(pending):
                    self._expired(pending)
        # A request added again has set the timer to its later bucket.
        if self._buckets and (self._timer is None or self._timer_bucket > min(self._buckets)):
            self._set_timer(min(self._buckets))

    def _expired(self, pending: PendingCall) -> None:
        if not pending.deadline_s:
            if pending.stream is not None and pending.stream.until_s > self._clock.monotonic_s():
                self.add(pending, pending.stream.until_s)
                return
            _give_back(pending)
            error = DeadlineExceeded(TIMED_OUT)
            self._abandon(pending, error)
            self.fail(pending, error)
            return
        # The first deadline concerns only waiting requests.
        deadline_s, pending.deadline_s = pending.deadline_s, 0.0
        self.add(pending, deadline_s)
        pending.late = DeadlineExceeded(TIMED_OUT) if pending.untaken is None else pending.untaken()
        if pending.late is not None and pending.entry is not None:
            self._late.append(pending)
            self._work.set()

    def deliver(self, response: Response) -> None:
        """Delivers a response, after fetching stored outputs."""
        pending = self.request_of(response)
        if pending is None:
            if response.stored and response.request_id in self._left:
                self._unread.append(self._left.pop(response.request_id))
                self._work.set()
            self.unclaimed(response.request_id)
            return
        if response.stored:
            # It may come twice after a reconnect.
            if not pending.is_fetched:
                pending.is_fetched = True
                self._stored.append(pending)
                self._work.set()
            return
        self.answer_caller(pending, response)

    def answer_caller(self, pending: PendingCall, response: Response) -> None:
        """Passes on the response of a request, which has left the table if it is final."""
        if response.version != pending.version and response.version:
            pending.version = response.version  # it was moved while it waited
        if response.failure is None and response.final and pending.load is not None:
            pending.load.executed += 1
        try:
            if isinstance(pending.sink, Inner):
                pending.sink.deliver(response)
            else:
                self._answered(pending, response)
        except Exception as error:  # one bad answer may not end the loop that answers everyone
            extra = {"request_id": response.request_id, "model": pending.model, "version": pending.version}
            logger.exception("a response can't be delivered", extra=extra)
            self.fail(pending, error)

    def fail(self, pending: PendingCall, error: Exception) -> None:
        """Passes on the error of a removed request."""
        if isinstance(pending.sink, Inner):
            pending.sink.fail(error)
        else:
            self._failed(pending, error)

    def _abandon(self, pending: PendingCall, error: QinferError | None) -> None:
        pending.abandoned = True
        self._remember(pending)
        step = pending.step
        if step is not None:
            if error is not None and not (step.is_numbered and isinstance(error, Cancelled)):
                step.failure = Failure.from_error(error)
            if step.failure is not None and step.place is not None:
                self._broken.append(step)
                self._work.set()
        elif pending.shared is not None:
            pending.shared.left(pending)
        elif pending.entry is not None:
            self._abandoned.append(pending.entry)
            self._work.set()

    def _remember(self, pending: PendingCall) -> None:
        if pending.load is None:
            return
        if len(self._left) >= _MOST_LEFT:
            del self._left[next(iter(self._left))]
        self._left[pending.request_id] = _outputs_of(pending)

    async def _withdraw(self) -> None:
        """Withdraws late requests from the queue; a request that a worker holds ends at its last deadline."""
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

    async def _withdraw_step(self, pending: PendingCall) -> None:
        step, error = pending.step, pending.late or DeadlineExceeded(TIMED_OUT)
        if pending not in self or step is None or step.place is None:
            return
        try:
            if await step.sequences.fail(step.place, Failure.from_error(error), NOBODYS):
                if self.remove(pending):
                    self.fail(pending, error)
                await answer_rest(self._queue, step.sequences)
        except QinferError as problem:
            logger.warning("a late step stays in its sequence", extra={"error": problem.message})

    async def _fetch(self, pending: PendingCall) -> None:
        try:
            blob = await self._stored_outputs(pending)
            if blob is None:
                raise InferenceFailed(_GONE)
            (response,) = decode_responses(blob)
        except Exception as error:  # the boundary of a request
            pending.forget_memory()
            if self.remove(pending):
                logger.exception("outputs can't be fetched", extra={"request_id": pending.request_id})
                self.fail(pending, error)
            else:
                await self._drop(*_outputs_of(pending))
            return
        is_awaited = self.remove(pending, unanswered=pending.attempt > 1)  # another attempt's outputs are as good
        if is_awaited:
            self.answer_caller(pending, msgspec.structs.replace(response, stored=False))
        if not is_awaited or pending.holder is None:
            pending.forget_memory()

    async def _borrow(self, pending: PendingCall, nbytes: int) -> None:
        """Raises `Cancelled` if the request ends while it waits."""
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
        with suppress(DeliveryError):
            await self._queue.drop_result(lane, request_id, tenant)

    async def _stored_outputs(self, pending: PendingCall) -> bytes | None:
        backoff, (lane, request_id, tenant) = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), _outputs_of(pending)
        while True:
            try:
                return await self._queue.take_result(lane, request_id, tenant, partial(self._borrow, pending))
            except BrokerUnavailable as error:
                await asyncio.sleep(backoff.next_s())
                if pending not in self:
                    raise
                logger.info("outputs are read again", extra={"request_id": pending.request_id, "reason": error.message})


def _is_behind(pending: PendingCall) -> bool:
    sink, holder = pending.sink, pending.holder
    return (holder is not None and holder.is_behind()) or (isinstance(sink, Inner) and sink.is_behind())


def _outputs_of(pending: PendingCall) -> _Outputs:
    assert pending.load is not None
    return pending.load.lane, pending.request_id, pending.quota.tenant if pending.quota is not None else ""


def _give_back(pending: PendingCall, *, unanswered: bool = True) -> None:
    tensors, pending.tensors = pending.tensors, None
    if tensors is not None:
        tensors.release(unanswered=unanswered)
