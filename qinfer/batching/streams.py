"""Streams: the responses of decoupled models leave one by one, even after `execute` has returned.

    any thread of the model ── ItemStream.send ──▶ WorkerStreams ── event loop ──▶ StreamOutlet.send
          ▲ waits while the window is used up                                            │
          └────────────────── WorkerStreams.credit ◀── the gateway's credits ────────────┘

A stream is open from the beginning of its execution to its final response. It holds its lease until then, and the
instance only until `execute` returns. Ensembles have no execution and are another `StreamSource`.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from qinfer.backends.base import Backend
from qinfer.batching.execution import SHARED, Answer, Execution, Responder, ResponsePart, WorkItem
from qinfer.core.messages import RESPONSE_OVERHEAD_BYTES, Credit, Failure, Response, Scalar, Timing
from qinfer.errors import TIMED_OUT, Cancelled, DeadlineExceeded, InferenceFailed, OutputMismatch, QinferError
from qinfer.observe.stats import StatsTally, end_of

Sent = tuple[WorkItem, Response]
"""A response, and its item."""

_GONE = "the caller has left"
_STALLED = "the caller took no response for {:g} s; read faster, or ask for less"
_LEFT = "the model stopped in the middle because another request of its batch was cancelled; send the request again"
# The pause between two checks for stalled and late streams.
_LOOK_S = 0.5

LEAST_RATE = 256 * 1024
"""The least bytes a second that a caller with a half-full window has to take."""

# The shortest time after which a stream counts as unread.
_LEAST_S = 1.0


def nbytes_of(answer: Answer | Failure) -> int:
    """Returns the bytes that credits count."""
    return sum([tensor.nbytes for tensor in answer]) if isinstance(answer, tuple) else 0


class Window:
    """Counts the bytes of one stream that its caller has not taken, with `RESPONSE_OVERHEAD_BYTES` per response."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.on_way_bytes = self.taken_bytes = self._sent_bytes = 0
        self._on_way: deque[tuple[int, int]] = deque()
        """Per response: the bytes sent up to its end, and its share of the window."""

    def fits(self, nbytes: int) -> bool:
        """Returns whether a response may leave; an empty response, or one without others on their way, always may."""
        return not nbytes or not self._on_way or self.on_way_bytes + nbytes + RESPONSE_OVERHEAD_BYTES <= self.size_bytes

    @property
    def is_half_full(self) -> bool:
        """Whether at least half of the window is used."""
        return 2 * self.on_way_bytes >= self.size_bytes

    def sent(self, nbytes: int) -> None:
        """Adds a response that left."""
        if nbytes:
            self._sent_bytes += nbytes
            self.on_way_bytes += nbytes + RESPONSE_OVERHEAD_BYTES
            self._on_way.append((self._sent_bytes, nbytes + RESPONSE_OVERHEAD_BYTES))

    def took(self, taken_bytes: int) -> int:
        """Removes taken responses; returns the new bytes."""
        new = min(taken_bytes, self._sent_bytes) - self.taken_bytes
        if new <= 0:
            return 0
        self.taken_bytes += new
        while self._on_way and self._on_way[0][0] <= self.taken_bytes:
            self.on_way_bytes -= self._on_way.popleft()[1]
        return new


class StreamOutlet(Protocol):
    """Publishes responses of streams; does not block."""

    def send(self, sent: Sequence[Sent]) -> None:
        """Publishes responses in order; finishes an entry after its final one."""
        ...


class StreamSource(Protocol):
    """The origin of a stream's responses."""

    @property
    def responder(self) -> Responder:
        """Makes the responses."""
        ...

    @property
    def can_ask(self) -> bool:
        """Whether the source polls for cancellation and ends its streams itself."""
        ...

    def timing(self, item: WorkItem, now_s: float) -> Timing:
        """Returns a response's times; from any thread."""
        ...

    def count(self, stream: "ItemStream", response: Response) -> None:
        """Counts a response, on the event loop."""
        ...


class ItemStream:
    """One item's responses, from any thread; the event loop controls them."""

    def __init__(self, streams: "WorkerStreams", item: WorkItem, source: StreamSource) -> None:
        self.item = item
        self.source = source
        self.closed = threading.Event()
        self.is_asked_to_end = False
        self.counted_ns = 0
        """The execution's age at the last counted response."""
        self._streams = streams
        self._window = Window(streams.window_bytes)
        self._changed = threading.Condition()
        self._count = self._waiting = self._untold_bytes = 0
        self._has_ended = self._is_over = False
        self._taken: Callable[[int], None] | None = None
        self._idle_since_s = 0.0
        self._full_since_s = math.inf
        self._behind_s = 0.0

    @property
    def key(self) -> tuple[str, int]:
        """The request and its delivery, as in credits."""
        return self.item.request.id, self.item.lease.deliveries

    @property
    def is_untouched(self) -> bool:
        """Whether the item may run again."""
        return not self._count

    @property
    def holds_instance(self) -> bool:
        """Whether the execution has not returned."""
        return isinstance(self.source, StreamedExecution) and not self.source.end_ns

    @property
    def is_over(self) -> bool:
        """Whether caller or lease is lost."""
        return self._is_over or self.item.lost

    @property
    def has_ended(self) -> bool:
        """Whether the final response was sent."""
        return self._has_ended

    def send(
        self,
        answer: Answer | Failure,
        *,
        final: bool,
        parameters: Mapping[str, Scalar] | None = None,
        wait: bool = True,
    ) -> None:
        """Sends a response, with `wait` when the window has room.

        Raises:
            OutputMismatch: The final response was sent before.
            Cancelled: The caller has left.
        """
        nbytes = nbytes_of(answer)
        with self._changed:
            if not self._window.is_half_full:
                self._idle_since_s = time.monotonic()
            self._waiting += 1
            while wait and not (self.is_over or self._has_ended or self._window.fits(nbytes)):
                self._changed.wait()
            self._waiting -= 1
            if self.is_over:
                raise Cancelled(_GONE)
            if self._has_ended:
                raise OutputMismatch("the model answered a request after its final response")
            self._window.sent(nbytes)
            if self._full_since_s == math.inf and self._window.is_half_full:
                self._full_since_s = time.monotonic()
            self._put(answer, final=final, parameters=parameters or {})

    def await_room(self) -> None:
        """Waits until the window is half free, or the stream's end."""
        with self._changed:
            self._waiting += 1
            while self._window.is_half_full and not (self.is_over or self._has_ended):
                self._changed.wait()
            self._waiting -= 1

    def offer(self, answer: Answer, *, final: bool, parameters: Mapping[str, Scalar] | None = None) -> bool:
        """Sends a response if the window has room."""
        with self._changed:
            is_waiting = not (self.is_over or self._has_ended or self._window.fits(nbytes_of(answer)))
            self._waiting = int(is_waiting)
            if not is_waiting:
                self.send(answer, final=final, parameters=parameters, wait=False)
        return not is_waiting

    def on_taken(self, callback: Callable[[int], None]) -> None:
        """Calls back; see `Context.on_taken`."""
        with self._changed:
            self._taken, untold = callback, self._untold_bytes
            self._untold_bytes = 0
            is_over = self.is_over or self._has_ended  # an execution may begin just when a thread sends the last one
        if untold or is_over:
            callback(0 if is_over else untold)

    def took(self, taken_bytes: int) -> None:
        """Makes room for bytes taken since the beginning."""
        with self._changed:
            new = self._window.took(taken_bytes)
            if not new:
                return
            self._idle_since_s = now_s = time.monotonic()
            behind_s = self._behind_s + max(now_s - self._full_since_s, 0.0) - new / LEAST_RATE
            self._behind_s = max(behind_s, 0.0)
            self._full_since_s = now_s if self._window.is_half_full else math.inf
            self._changed.notify_all()
            callback = self._taken
            if callback is None:
                self._untold_bytes += new
        if callback is not None:
            callback(new)

    def ask_to_end(self) -> None:
        """Cancels the stream; a source that does not poll for cancellation ends it at once."""
        self.is_asked_to_end = True
        if not self.source.can_ask:
            self.cancel(Cancelled(_GONE))

    def stored(self, nbytes: int) -> None:
        """Makes room for bytes stored for the caller."""
        self.took(self._window.taken_bytes + nbytes)

    def is_stalled(self, since_s: float) -> bool:
        """Returns whether a full window was not read since `since_s` (monotonic clock)."""
        with self._changed:
            is_full = self._window.is_half_full or (self._waiting and self._window.on_way_bytes)
            return bool(is_full) and self._idle_since_s < since_s

    def unread_s(self, now_s: float) -> float:
        """Returns how long the window waits beyond the time of `LEAST_RATE`."""
        with self._changed:
            allowed_s = max(self._window.on_way_bytes / LEAST_RATE, _LEAST_S)
            return max(self._behind_s + now_s - self._full_since_s - allowed_s, 0.0)

    def cancel(self, error: QinferError) -> None:
        """Ends the stream with an error."""
        with self._changed:
            if not self._has_ended and not self.is_over:
                self._put(error, final=True, parameters={})
        self.lose()

    def lose(self) -> None:
        """Ends the stream silently, and wakes its senders."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            callback, self._taken = self._taken, None
        if callback is not None:
            callback(0)

    def _put(self, answer: Answer | Failure, *, final: bool, parameters: Mapping[str, Scalar]) -> None:
        """Puts a response in order; the caller holds the lock."""
        credit_to = self._streams.credit_to if self.item.request.reply_to and not final else ""
        part = ResponsePart(
            self._count, final, parameters, self.source.timing(self.item, self._streams.now_s()), credit_to
        )
        response = self.source.responder.streamed(self.item, answer, part)
        self._count += 1
        self._has_ended = response.final
        self._streams.put(self, response)


class WorkerStreams:
    """A worker's open streams; any thread may call `open` and `put`.

    Args:
        outlet: Publishes the responses.
        credit_to: The worker's reply address for credits.
        window_bytes: The most bytes of a stream on their way.
        stall_s: The longest time that a caller may leave its window full.
        now_s: The time of Redis' clock.

    Attributes:
        unread: Called twice a second with the unread streams.
    """

    def __init__(
        self, outlet: StreamOutlet, credit_to: str, window_bytes: int, stall_s: float, now_s: Callable[[], float]
    ) -> None:
        self.credit_to = credit_to
        self.window_bytes = window_bytes
        self.now_s = now_s
        self._outlet = outlet
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self.unread: Callable[[list[ItemStream]], None] = lambda _: None
        self._open: dict[tuple[str, int], ItemStream] = {}
        self._ready: deque[tuple[ItemStream, Response]] = deque()
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = asyncio.Event()

    async def wait_closed(self) -> None:
        """Waits until no stream is open."""
        while self._open:
            await self._closed.wait()

    def open(self, item: WorkItem, source: StreamSource) -> ItemStream:
        """Opens an item's stream; a lost item's stream is closed at once."""
        stream = ItemStream(self, item, source)
        self._open[stream.key] = stream
        if item.lost:  # `lose` may have come before the stream was in the table
            with suppress(RuntimeError):  # as in `put`
                self._loop.call_soon_threadsafe(self.lose, item)
        return stream

    def reopen_stream(self, item: WorkItem, source: StreamSource) -> ItemStream:
        """Returns an item's stream, once its window has room."""
        stream = self._open.get((item.request.id, item.lease.deliveries))
        if stream is None or stream.item is not item:
            stream = ItemStream(self, item, source)
            stream.lose()
            stream.closed.set()
        stream.source = source
        stream.await_room()
        return stream

    def is_open(self, stream: ItemStream) -> bool:
        """Returns whether a stream is open."""
        return self._open.get(stream.key) is stream

    def is_open_of(self, item: WorkItem) -> bool:
        """Returns whether an item has an open stream."""
        stream = self._open.get((item.request.id, item.lease.deliveries))
        return stream is not None and stream.item is item

    def put(self, stream: ItemStream, response: Response) -> None:
        """Sends a response with others of this tick."""
        self._ready.append((stream, response))
        if not self._is_due:
            self._is_due = True
            # Another worker gets the lease.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def credit(self, credits_: Sequence[Credit]) -> None:
        """Makes room in windows, and ends cancelled streams."""
        for credit in credits_:
            stream = self._open.get((credit.request_id, credit.attempt))
            if stream is not None:
                stream.took(credit.taken_bytes)
                if credit.cancelled:
                    stream.ask_to_end()

    def lose(self, item: WorkItem) -> None:
        """Closes a lost item's stream."""
        if self.is_open_of(item):
            stream = self._open[item.request.id, item.lease.deliveries]
            stream.lose()
            self.close(stream)

    def cancel(self, item: WorkItem, error: QinferError) -> None:
        """Ends an item's stream with an error."""
        stream = self._open.get((item.request.id, item.lease.deliveries))
        if stream is not None:
            stream.cancel(error)

    def cancel_streams_to(self, reply_to: str) -> None:
        """Cancels the streams of an ended process."""
        for stream in list(self._open.values()):
            if stream.item.request.reply_to == reply_to:
                stream.cancel(Cancelled(_GONE))

    def stored(self, item: WorkItem, nbytes: int) -> None:
        """Makes room for bytes stored for the caller."""
        stream = self._open.get((item.request.id, item.lease.deliveries))
        if stream is not None:
            stream.stored(nbytes)

    def close(self, stream: ItemStream) -> None:
        """Removes a stream; drops its further responses."""
        if self._open.get(stream.key) is not stream:
            return
        del self._open[stream.key]
        stream.closed.set()
        self._closed.set()  # wakes present waiters only
        self._closed.clear()

    def watch(self) -> None:
        """Checks for late and stalled streams."""
        if self._timer is None and self._open:
            self._timer = self._loop.call_later(_LOOK_S, self._check_streams)

    def _check_streams(self) -> None:
        self._timer = None
        time_s, now_s = time.monotonic(), self.now_s()
        unread: list[ItemStream] = []
        for stream in list(self._open.values()):
            if stream.is_stalled(time_s - self._stall_s):
                stream.cancel(Cancelled(_STALLED.format(self._stall_s)))
            elif stream.item.deadline_s <= now_s:
                stream.cancel(DeadlineExceeded(TIMED_OUT))
            elif stream.unread_s(time_s):
                unread.append(stream)
        if unread:
            self.unread(unread)
        self.watch()

    def _deliver(self) -> None:
        self._is_due = False  # first: a later response schedules its own call
        sent: list[Sent] = []
        ended: list[ItemStream] = []
        while self._ready:
            stream, response = self._ready.popleft()
            if stream.item.lost or not self.is_open(stream):
                continue
            sent.append((stream.item, response))
            stream.source.count(stream, response)
            if response.final:
                ended.append(stream)
        if sent:
            self._outlet.send(sent)
        for stream in ended:
            self.close(stream)
        self.watch()


class StreamedExecution(Execution, kw_only=True, eq=False):
    """A decoupled model's batch; its streams may outlive it."""

    table: WorkerStreams
    responder: Responder
    tally: StatsTally
    streams: list[ItemStream] = msgspec.field(default_factory=list)

    @property
    def is_decoupled(self) -> bool:
        """True."""
        return True

    @property
    def can_ask(self) -> bool:
        """True: a model polls `Context.cancelled`."""
        return True

    @property
    def window_bytes(self) -> int:
        """The window's size; see `Context.window_bytes`."""
        return self.table.window_bytes

    def respond(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        """Sends a response; see `Context.respond`."""
        self.streams[item].send(self._own(outputs), final=final, parameters=parameters)

    def offer(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        """Sends a response at once; see `Context.offer`."""
        self.streams[item].send(self._own(outputs), final=final, parameters=parameters, wait=False)

    def on_taken(self, item: int, callback: Callable[[int], None]) -> None:
        """Calls back; see `Context.on_taken`."""
        self.streams[item].on_taken(callback)

    def cancelled(self, item: int) -> bool:
        """Returns whether the caller wants no more."""
        stream = self.streams[item]
        return stream.is_over or stream.is_asked_to_end

    def waits(self, item: int) -> bool:
        """Returns whether the model waits for this caller."""
        return self.streams[item].is_stalled(math.inf)

    def run(self, backend: Backend) -> None:
        """Executes the batch; an error ends streams that can't run again."""
        self.streams = self._open_streams()
        super().run(backend)
        error = self.error
        if error is None:
            return
        if isinstance(error, Cancelled) and any(stream.is_over for stream in self.streams):
            # One caller's cancellation must not cancel other callers.
            error = self.error = InferenceFailed(_LEFT)
        for stream in self.streams:
            if told := self._ended_by(error, stream):
                with suppress(OutputMismatch, Cancelled):
                    stream.send(told, final=True, wait=False)

    def _open_streams(self) -> list[ItemStream]:
        return [self.table.open(item, self) for item in self.items]

    def _ended_by(self, error: QinferError, stream: ItemStream) -> QinferError | None:
        ends = isinstance(error, SHARED) or len(self.items) == 1 or not stream.is_untouched
        return error if ends else None

    @property
    def unanswered(self) -> list[WorkItem]:
        """The items without a response."""
        return [stream.item for stream in self.streams if stream.is_untouched and not stream.is_over]

    def leave_open(self) -> None:
        """Closes the streams whose items run again."""
        if self.error is not None:
            for stream in self.streams:
                if stream.is_untouched:
                    self.table.close(stream)
        self.table.watch()

    def timing(self, item: WorkItem, now_s: float) -> Timing:
        """Returns the times of a response."""
        infer_ns = time.perf_counter_ns() - self.begin_ns
        waited_ns = int((now_s - item.enqueued_s) * 1e9) - infer_ns - self.input_ns
        return Timing(max(waited_ns, 0), self.input_ns, infer_ns, 0, self.batch.size)

    def count(self, stream: ItemStream, response: Response) -> None:
        """Counts a response, and at the end its item."""
        timing = response.timing or Timing()
        infer_ns, counted_ns, stream.counted_ns = timing.infer_ns, stream.counted_ns, timing.infer_ns
        if infer_ns >= counted_ns:
            infer_ns -= counted_ns
        self.tally.responses.responded(response.index, end_of(response), infer_ns)
        if not response.index and response.failure is None:
            self.tally.first_response(timing.queue_ns + timing.input_ns + timing.infer_ns)
        if response.final:
            self.responder.count(stream.item, response, self.table.now_s(), self.tally)

    def _missing(self) -> QinferError | None:
        return None
