"""Streams: the requests of decoupled models, whose responses leave one by one, also after `execute` has returned.

    any thread of the model ── Stream.send ──▶ Streams ── event loop ──▶ StreamOutlet.send
          ▲ waits while the window is used up                                  │
          └────────────────── Streams.credit ◀── the gateway's credits ────────┘

A stream is open from the beginning of its execution to its final response; it holds its lease, and no instance once
`execute` has returned. `Window` is its arithmetic, `StreamedExecution` the `Context` of a batch of them. Ensembles have
no execution, and are another `Source`.
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
from qinfer.batching.execution import SHARED, Answer, Execution, Part, Pending, Responder
from qinfer.core.messages import RESPONSE_OVERHEAD_BYTES, Credit, Failure, Response, Scalar, Timing
from qinfer.errors import TIMED_OUT, Cancelled, DeadlineExceeded, InferenceFailed, OutputMismatch, QinferError
from qinfer.observe.responses import end_of
from qinfer.observe.stats import StatsTally

Sent = tuple[Pending, Response]
"""A response on its way, and the item that it answers."""

_GONE = "nobody waits for the responses any more"
_STALLED = "the caller took no response for {:g} s; read faster, or ask for less"
_LEFT = "the model stopped in the middle because another request of its batch was cancelled; send the request again"
_LOOK_S = 0.5  # between two looks for streams that are stalled or late

LEAST_RATE = 256 * 1024
"""Bytes a second that a caller takes at least of a window that is half full, or its stream is unread."""

_LEAST_S = 1.0  # a stream is unread for so long at least before it counts as such


def nbytes_of(answer: Answer | Failure) -> int:
    """Returns the bytes of an answer's outputs, which credits count."""
    return sum([tensor.nbytes for tensor in answer]) if isinstance(answer, tuple) else 0


class Window:
    """Bytes of one stream that are on their way to its caller. Pure arithmetic.

    Args:
        size_bytes: What may be on its way.

    Attributes:
        on_way_bytes: What is on its way, with `RESPONSE_OVERHEAD_BYTES` for each response.
        taken_bytes: Bytes of outputs that were taken.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.on_way_bytes = self.taken_bytes = self._sent_bytes = 0
        self._on_way: deque[tuple[int, int]] = deque()
        """The responses on their way: of each the bytes sent with it and before, and the bytes that it takes."""

    def fits(self, nbytes: int) -> bool:
        """Tells whether a response may leave now; without outputs, or while nothing is on its way, any may."""
        return not nbytes or not self._on_way or self.on_way_bytes + nbytes + RESPONSE_OVERHEAD_BYTES <= self.size_bytes

    @property
    def is_half_full(self) -> bool:
        """Whether half of the window is used up, or more."""
        return 2 * self.on_way_bytes >= self.size_bytes

    def sent(self, nbytes: int) -> None:
        """Takes note of a response that left."""
        if nbytes:
            self._sent_bytes += nbytes
            self.on_way_bytes += nbytes + RESPONSE_OVERHEAD_BYTES
            self._on_way.append((self._sent_bytes, nbytes + RESPONSE_OVERHEAD_BYTES))

    def took(self, taken_bytes: int) -> int:
        """Takes note that so many bytes were taken since the stream began; returns how many of them are new."""
        new = min(taken_bytes, self._sent_bytes) - self.taken_bytes
        if new <= 0:
            return 0
        self.taken_bytes += new
        while self._on_way and self._on_way[0][0] <= self.taken_bytes:
            self.on_way_bytes -= self._on_way.popleft()[1]
        return new


class StreamOutlet(Protocol):
    """Where responses of streams go; it does not block."""

    def send(self, sent: Sequence[Sent]) -> None:
        """Publishes responses in order, those of a request one after the other; finishes an entry after its final."""
        ...


class Source(Protocol):
    """The origin of a stream's responses."""

    @property
    def responder(self) -> Responder:
        """Makes the responses."""
        ...

    @property
    def can_ask(self) -> bool:
        """Whether it asks if its caller has cancelled, and ends in its own way."""
        ...

    def timing(self, item: Pending, now_s: float) -> Timing:
        """Returns the times of a response to an item that leaves now; from any thread."""
        ...

    def count(self, stream: "Stream", response: Response) -> None:
        """Counts a response that leaves, and with the final one its item; on the event loop."""
        ...


class Stream:
    """The responses of one item. Used from any thread; `took`, `ask_to_end`, `cancel` and `lose` by the event loop.

    Args:
        streams: The worker's open streams.
        item: The item.
        source: What makes its responses.

    Attributes:
        is_asked_to_end: Its caller wants no more, and still takes what comes.
    """

    def __init__(self, streams: "Streams", item: Pending, source: Source) -> None:
        self.item = item
        self.source = source
        self.closed = threading.Event()
        self.is_asked_to_end = False
        self.counted_ns = 0
        """Nanoseconds from the beginning of the execution to the last response that was counted."""
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
        """The request and the execution, as credits name them."""
        return self.item.request.id, self.item.lease.deliveries

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was sent, so that the item may be executed again."""
        return not self._count

    @property
    def holds_instance(self) -> bool:
        """Whether the execution that it is of has not returned."""
        return isinstance(self.source, StreamedExecution) and not self.source.end_ns

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for responses any more."""
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
        """Sends a response; with `wait` not before there is room in the window.

        Raises:
            OutputMismatch: The final response was sent before.
            Cancelled: Nobody waits for the responses any more.
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
        """Waits until half of the window is free, or nothing can be sent any more."""
        with self._changed:
            self._waiting += 1
            while self._window.is_half_full and not (self.is_over or self._has_ended):
                self._changed.wait()
            self._waiting -= 1

    def offer(self, answer: Answer, *, final: bool, parameters: Mapping[str, Scalar] | None = None) -> bool:
        """Sends a response if there is room in the window; returns whether it did.

        Raises:
            OutputMismatch: The final response was sent before.
            Cancelled: Nobody waits for the responses any more.
        """
        with self._changed:
            is_waiting = not (self.is_over or self._has_ended or self._window.fits(nbytes_of(answer)))
            self._waiting = int(is_waiting)
            if not is_waiting:
                self.send(answer, final=final, parameters=parameters, wait=False)
        return not is_waiting

    def on_taken(self, callback: Callable[[int], None]) -> None:
        """Has a callback told what was taken; see `Context.on_taken`."""
        with self._changed:
            self._taken, untold = callback, self._untold_bytes
            self._untold_bytes = 0
            is_over = self.is_over
        if untold or is_over:
            callback(0 if is_over else untold)

    def took(self, taken_bytes: int) -> None:
        """Takes note that the caller took so many bytes since the stream began."""
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
        """Takes note that the caller wants no more; a source that does not ask ends now."""
        self.is_asked_to_end = True
        if not self.source.can_ask:
            self.cancel(Cancelled(_GONE))

    def stored(self, nbytes: int) -> None:
        """Takes note that so many bytes more are where the caller finds them."""
        self.took(self._window.taken_bytes + nbytes)

    def is_stalled(self, since_s: float) -> bool:
        """Tells whether the window is used up, and nothing was taken since an instant of the monotonic clock."""
        with self._changed:
            is_full = self._window.is_half_full or (self._waiting and self._window.on_way_bytes)
            return bool(is_full) and self._idle_since_s < since_s

    def unread_s(self, now_s: float) -> float:
        """Returns for how long, at an instant of the monotonic clock, the window waits for a caller that is too slow.

        The time that `LEAST_RATE` allows for what is on its way does not count.
        """
        with self._changed:
            allowed_s = max(self._window.on_way_bytes / LEAST_RATE, _LEAST_S)
            return max(self._behind_s + now_s - self._full_since_s - allowed_s, 0.0)

    def cancel(self, error: QinferError) -> None:
        """Ends the stream with an error: its caller does not take it."""
        with self._changed:
            if not self._has_ended and not self.is_over:
                self._put(error, final=True, parameters={})
        self.lose()

    def lose(self) -> None:
        """Takes note that nobody waits for responses of this execution any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            callback, self._taken = self._taken, None
        if callback is not None:
            callback(0)

    def _put(self, answer: Answer | Failure, *, final: bool, parameters: Mapping[str, Scalar]) -> None:
        """Hands a response over; under the lock, so that responses are handed over in the order of their indexes."""
        credit_to = self._streams.credit_to if self.item.request.reply_to and not final else ""
        part = Part(self._count, final, parameters, self.source.timing(self.item, self._streams.now_s()), credit_to)
        response = self.source.responder.streamed(self.item, answer, part)
        self._count += 1
        self._has_ended = response.final
        self._streams.put(self, response)


class Streams:
    """The open streams of a worker; used on the event loop, but `open` and `put`, which any thread may call.

    Args:
        outlet: Where responses go.
        credit_to: The reply address of the worker, for credits.
        window_bytes: What may be on its way of one stream.
        stall_s: How long a caller may take nothing while its window is used up.
        now_s: The broker's time.

    Attributes:
        unread: Told every half second which streams are unread, where there are any.
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
        self.unread: Callable[[list[Stream]], None] = lambda _: None
        self._open: dict[tuple[str, int], Stream] = {}
        self._ready: deque[tuple[Stream, Response]] = deque()
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = asyncio.Event()

    async def ended(self) -> None:
        """Waits until no stream is open."""
        while self._open:
            await self._closed.wait()

    def open(self, item: Pending, source: Source) -> Stream:
        """Opens the stream of an item whose execution begins; one that was lost before is over, and closed at once."""
        stream = Stream(self, item, source)
        self._open[stream.key] = stream
        if item.lost:  # `lose` may have come before the stream was in the table
            with suppress(RuntimeError):  # as in `put`
                self._loop.call_soon_threadsafe(self.lose, item)
        return stream

    def resume(self, item: Pending, source: Source) -> Stream:
        """Returns the stream of an item that is executed again, once its window has room, or one that is over."""
        stream = self._open.get((item.request.id, item.lease.deliveries))
        if stream is None or stream.item is not item:
            stream = Stream(self, item, source)
            stream.lose()
            stream.closed.set()
        stream.source = source
        stream.await_room()
        return stream

    def is_open(self, stream: Stream) -> bool:
        """Tells whether a stream's final response has not left yet."""
        return self._open.get(stream.key) is stream

    def is_open_of(self, item: Pending) -> bool:
        """Tells whether an item has an open stream."""
        stream = self._open.get((item.request.id, item.lease.deliveries))
        return stream is not None and stream.item is item

    def put(self, stream: Stream, response: Response) -> None:
        """Takes a response, which leaves with the others of this event-loop tick."""
        self._ready.append((stream, response))
        if not self._is_due:
            self._is_due = True
            # When the loop is closed the process is ending, and the lease passes to another worker.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def credit(self, credits_: Sequence[Credit]) -> None:
        """Makes room in the windows of streams, and asks cancelled ones to end; credits for others are dropped."""
        for credit in credits_:
            stream = self._open.get((credit.request_id, credit.attempt))
            if stream is not None:
                stream.took(credit.taken_bytes)
                if credit.cancelled:
                    stream.ask_to_end()

    def lose(self, item: Pending) -> None:
        """Closes the stream of an item that is lost or cancelled, if there is one."""
        if self.is_open_of(item):
            stream = self._open[item.request.id, item.lease.deliveries]
            stream.lose()
            self.close(stream)

    def cancel(self, item: Pending, error: QinferError) -> None:
        """Ends the stream of an item with an error, if it is open."""
        stream = self._open.get((item.request.id, item.lease.deliveries))
        if stream is not None:
            stream.cancel(error)

    def leave(self, reply_to: str) -> None:
        """Cancels the streams to a process that is gone."""
        for stream in list(self._open.values()):
            if stream.item.request.reply_to == reply_to:
                stream.cancel(Cancelled(_GONE))

    def stored(self, item: Pending, nbytes: int) -> None:
        """Takes note that so many bytes more of an item are where its caller finds them, and not on their way."""
        stream = self._open.get((item.request.id, item.lease.deliveries))
        if stream is not None:
            stream.stored(nbytes)

    def close(self, stream: Stream) -> None:
        """Forgets a stream; nothing of it leaves from now on."""
        if self._open.get(stream.key) is not stream:
            return
        del self._open[stream.key]
        stream.closed.set()
        self._closed.set()  # wakes those that wait now
        self._closed.clear()

    def watch(self) -> None:
        """Begins to look for callers who take nothing, and for deadlines, for as long as any stream is open."""
        if self._timer is None and self._open:
            self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        time_s, now_s = time.monotonic(), self.now_s()
        unread: list[Stream] = []
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
        """Hands over what is ready."""
        self._is_due = False  # before anything is taken: what comes later has a call of its own
        sent: list[Sent] = []
        ended: list[Stream] = []
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
    """A batch of a decoupled model; its streams may be open after it has ended.

    Attributes:
        table: The worker's open streams.
        responder: Makes the responses.
        tally: Where requests are counted when they end.
        streams: The stream of each item; made when it begins.
    """

    table: Streams
    responder: Responder
    tally: StatsTally
    streams: list[Stream] = msgspec.field(default_factory=list)

    @property
    def is_decoupled(self) -> bool:
        """True: an item may have 0, 1 or many responses."""
        return True

    @property
    def can_ask(self) -> bool:
        """True: a model asks by `Context.cancelled`."""
        return True

    @property
    def window_bytes(self) -> int:
        """Bytes of one item on their way; see `Context.window_bytes`."""
        return self.table.window_bytes

    def respond(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        """Sends a response when there is room in the window; see `Context.respond`."""
        self.streams[item].send(self._own(outputs), final=final, parameters=parameters)

    def offer(
        self, item: int, outputs: Answer, *, final: bool = True, parameters: Mapping[str, Scalar] | None = None
    ) -> None:
        """Sends a response at once; see `Context.offer`."""
        self.streams[item].send(self._own(outputs), final=final, parameters=parameters, wait=False)

    def on_taken(self, item: int, callback: Callable[[int], None]) -> None:
        """Has a callback told what the item's caller took; see `Context.on_taken`."""
        self.streams[item].on_taken(callback)

    def cancelled(self, item: int) -> bool:
        """Tells whether nobody waits for this item any more, or its caller wants no more."""
        stream = self.streams[item]
        return stream.is_over or stream.is_asked_to_end

    def waits(self, item: int) -> bool:
        """Tells whether an item's caller has to take something before the model can go on."""
        return self.streams[item].is_stalled(math.inf)

    def run(self, backend: Backend) -> None:
        """Executes the batch; an error ends the streams that it is told to, and those that have begun."""
        self.streams = self._open()
        super().run(backend)
        error = self.error
        if error is None:
            return
        if isinstance(error, Cancelled) and any(stream.is_over for stream in self.streams):
            # One caller's end is not that of the others in the batch.
            error = self.error = InferenceFailed(_LEFT)
        for stream in self.streams:
            if told := self._ended_by(error, stream):
                with suppress(OutputMismatch, Cancelled):
                    stream.send(told, final=True, wait=False)

    def _open(self) -> list[Stream]:
        """Opens the stream of each item."""
        return [self.table.open(item, self) for item in self.items]

    def _ended_by(self, error: QinferError, stream: Stream) -> QinferError | None:
        """Returns the error that a stream ends with after that of its batch; `None` = its item runs again."""
        ends = isinstance(error, SHARED) or len(self.items) == 1 or not stream.is_untouched
        return error if ends else None

    @property
    def unanswered(self) -> list[Pending]:
        """The items that sent nothing before their batch raised: run them again."""
        return [stream.item for stream in self.streams if stream.is_untouched and not stream.is_over]

    def leave_open(self) -> None:
        """Leaves the streams that are open to themselves; those that run again are closed."""
        if self.error is not None:
            for stream in self.streams:
                if stream.is_untouched:
                    self.table.close(stream)
        self.table.watch()

    def timing(self, item: Pending, now_s: float) -> Timing:
        """Returns the times of a response that leaves now: its inference began with its batch's."""
        infer_ns = time.perf_counter_ns() - self.begin_ns
        waited_ns = int((now_s - item.enqueued_s) * 1e9) - infer_ns - self.input_ns
        return Timing(max(waited_ns, 0), self.input_ns, infer_ns, 0, self.batch.size)

    def count(self, stream: Stream, response: Response) -> None:
        """Counts a response that leaves, and with the final one its item."""
        timing = response.timing or Timing()
        infer_ns, counted_ns, stream.counted_ns = timing.infer_ns, stream.counted_ns, timing.infer_ns
        if infer_ns >= counted_ns:  # else it was counted in an execution before this one
            infer_ns -= counted_ns
        self.tally.responses.responded(response.index, end_of(response), infer_ns)
        if not response.index and response.failure is None:
            self.tally.first_response(timing.queue_ns + timing.input_ns + timing.infer_ns)
        if response.final:
            self.responder.count(stream.item, response, self.table.now_s(), self.tally)

    def _missing(self) -> QinferError | None:
        """Misses nothing: responses may come later."""
        return None
