"""The worker's side of a decoupled model's process: it passes responses on, whenever they come.

    execute ─── Execute ──▶ process                        the instance's thread: until `execute` has returned
    _read_messages ◀── StreamedResponse, HostCall … ───    a thread for as long as the process lives
    _send_messages ── TakenAnswer, CallerLeft, … ──▶       a thread, because credit must not wait for a socket

A request's window is kept in the process, where a thread of the model waits; here only taken bytes are counted.
"""

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import msgspec

from qinfer.backends.base import Context
from qinfer.backends.python_host.calls import Calls, Managing, send, tensors
from qinfer.backends.python_host.channel import Buffer, UnreadError
from qinfer.backends.python_host.errors import to_qinfer
from qinfer.backends.python_host.instance import HostInstance
from qinfer.backends.python_host.messages import (
    AwaitTaken,
    CallerLeft,
    CancelledAnswer,
    Close,
    Execute,
    ExecutedAnswers,
    HostAnswer,
    HostCall,
    HostFailure,
    IsCancelled,
    Manage,
    Message,
    ModelLoaded,
    More,
    StreamedResponse,
    TakenAnswer,
)
from qinfer.backends.python_host.process import HostProcess
from qinfer.errors import InferenceFailed, QinferError
from qinfer.tensors import Bytes, Tensor

logger = logging.getLogger("qinfer.backends.python")

OPEN_STREAMS = 512
"""The open requests with which an instance takes no batch."""

Outcome = ExecutedAnswers | HostFailure
Place = tuple[int, int]
"""Batch number and item."""


class _OpenStream:
    """A request without a final response; `ctx` and `item` are those of its latest execution."""

    __slots__ = ("ctx", "item", "question", "taken_bytes")

    def __init__(self, ctx: Context, item: int) -> None:
        self.ctx = ctx
        self.item = item
        self.taken_bytes = 0
        self.question: AwaitTaken | None = None


class _OpenBatch:
    """A batch with open requests, or whose `execute` has not returned."""

    __slots__ = ("ctx", "has_begun", "ids", "outcome", "refusal", "streams")

    def __init__(self, ctx: Context, ids: Sequence[str]) -> None:
        self.ctx = ctx
        self.ids = ids
        self.has_begun = False
        self.refusal: QinferError | None = None
        self.streams: dict[int, _OpenStream] = {}
        self.outcome: Future[Outcome] = Future()


class HostStreams:
    """The open streams of one process; only they receive from it."""

    def __init__(self, process: HostProcess, instance: HostInstance, managing: Managing, model: str) -> None:
        self.process = process
        self._instance = instance
        self._managing = managing
        self._model = model
        self._calls = Calls(process.channel, model)
        self._changed = threading.Condition()
        """Guards the three below; never held while a context is called."""
        self._batches: dict[int, _OpenBatch] = {}
        self._rescheduled: dict[str, Place] = {}
        """Places of the streams of rescheduled requests, by request id."""
        self._is_lost = False
        self._lost: list[str] = []
        process.held = self._held
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._read_messages, name=f"streams-{model}", daemon=True).start()
        threading.Thread(target=self._send_messages, name=f"credit-{model}", daemon=True).start()

    def execute(self, message: Execute, buffers: Sequence[Bytes], ctx: Context) -> Outcome:
        """Executes a batch; responses may come after `execute` has returned.

        Waits while too many earlier requests are open.

        Raises:
            UnreadError: The process is gone, and has not seen the batch.
            EOFError: The process is gone.
            OSError: The process is gone, and the batch was not sent.
            QinferError: The context is not decoupled, and refused a response.
        """
        batch = _OpenBatch(ctx, message.ids)
        with self._changed:
            self._changed.wait_for(lambda: self._is_lost or self._count_open() - len(self._rescheduled) < OPEN_STREAMS)
            if self._is_lost:
                raise UnreadError
            places = [self._goes_on(message, item, ctx) for item in range(len(message.ids))]
            batch.streams = {item: _OpenStream(ctx, item) for number, item in places if number == message.number}
            self._batches[message.number] = batch
            self._instance.begins()
        try:
            self.process.channel.send(message, buffers)
        except BaseException:
            self._drop_batch(message.number)
            for place in places:
                self._unwant(*place)
            raise
        # After the batch: a callback may report a cancelled request.
        for item in list(batch.streams):
            ctx.on_taken(item, partial(self._on_taken, message.number, item))
        outcome = batch.outcome.result()
        for position, place in enumerate(places):
            if isinstance(outcome, HostFailure):
                self._close(*place)
            elif outcome.answers[position].rescheduled:
                self._reschedule(message.ids[position] if ctx.is_decoupled else "", place)
        self._forget_ended(message.number)
        if not ctx.is_decoupled:
            self._await_streams(batch)
        return outcome

    def _goes_on(self, message: Execute, item: int, ctx: Context) -> Place:
        """Returns the place of an item's stream and notes it in the message."""
        place = self._rescheduled.pop(message.ids[item], None)
        stream = None if place is None else self._stream(*place)
        if stream is not None:
            stream.ctx, stream.item = ctx, item
        message.requests[item] = msgspec.structs.replace(message.requests[item], goes_on=place)
        return place or (message.number, item)

    def _reschedule(self, request_id: str, place: Place) -> None:
        """Keeps a stream for the next execution of its request; a stream without a request (padding) is closed."""
        with self._changed:
            if request_id and self._stream(*place) is not None:
                self._rescheduled[request_id] = place
            else:
                self._messages.put(CallerLeft(*place))
                self._close(*place)

    def _await_streams(self, batch: _OpenBatch) -> None:
        """Waits for the batch's streams, since a warm-up's context takes no responses after `execute`."""
        with self._changed:
            self._changed.wait_for(lambda: not batch.streams or batch.refusal is not None)
        if batch.refusal is not None:
            raise batch.refusal

    def drain(self, timeout_s: float) -> None:
        """Waits for a time until no stream is open."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_lost or not self._batches, timeout_s)

    def _held(self) -> list[str]:
        with self._changed:
            return self._lost if self._is_lost else self._open_request_ids()

    def _open_request_ids(self) -> list[str]:
        return [batch.ids[item] for batch in self._batches.values() for item in batch.streams]

    def _count_open(self) -> int:
        return sum(len(batch.streams) for batch in self._batches.values())

    def _read_messages(self) -> None:
        lost: EOFError | None = None
        while lost is None:
            try:
                message, buffers = self.process.channel.receive()
            except EOFError as error:
                lost = error
                break
            try:
                self._hear(message, buffers)
            except Exception:
                logger.exception("a message of the model's process failed", extra={"model": self._model})
            # They are shared memory.
            del message, buffers
        self._calls.end_streams()
        self._messages.put(None)
        self._end_batches(lost)

    def _send_messages(self) -> None:
        while (message := self._messages.get()) is not None:
            send(self.process.channel, message)

    def _hear(self, message: Message, buffers: list[Buffer]) -> None:
        if isinstance(message, StreamedResponse):
            self._respond(message, buffers)
        elif isinstance(message, ExecutedAnswers | HostFailure):
            self._on_execute_end(message)
        elif isinstance(message, AwaitTaken):
            self._await_taken(message)
        elif isinstance(message, IsCancelled):
            self._is_cancelled(message)
        elif isinstance(message, HostCall | More | Close):
            self._calls.hear(message, buffers, self._context(message) if isinstance(message, HostCall) else None)
        elif isinstance(message, Manage):
            self._managing.hear(self.process.channel, message, buffers)
        elif not isinstance(message, ModelLoaded):  # finalised
            logger.error("the model's process sent an unexpected message", extra={"model": self._model})

    def _respond(self, message: StreamedResponse, buffers: Sequence[Buffer]) -> None:
        with self._changed:
            batch = self._batches.get(message.batch)
            stream = None if batch is None else batch.streams.get(message.item)
            if batch is None or stream is None:
                return
            batch.has_begun = True
            ctx, item = stream.ctx, stream.item
        answer = _decode_answer(message.answer, buffers)
        try:
            ctx.offer(item, answer, final=message.final, parameters=message.answer.parameters or None)
        except QinferError as error:
            batch.refusal = error
            self._unwant(message.batch, message.item)
        if message.final:
            self._close(message.batch, message.item)

    def _on_execute_end(self, outcome: Outcome) -> None:
        with self._changed:
            number = next(n for n, batch in self._batches.items() if not batch.outcome.done())
            batch = self._batches[number]
        if isinstance(outcome, HostFailure):
            self._drop_batch(number)
        batch.outcome.set_result(outcome)

    def _end_batches(self, lost: EOFError) -> None:
        with self._changed:
            self._lost, self._is_lost = self._open_request_ids(), True
            batches, self._batches = list(self._batches.values()), {}
            executing = next((batch.ctx for batch in batches if not batch.outcome.done()), None)
            self._rescheduled.clear()
            self._instance.is_busy = False
            self._changed.notify_all()
        for batch in batches:
            if not batch.outcome.done():
                is_unread = isinstance(lost, UnreadError) and not batch.has_begun
                batch.outcome.set_exception(UnreadError() if is_unread else EOFError())
                continue
            error = InferenceFailed(f"the process of model '{self._model}' died ({self.process.death()})")
            for stream in batch.streams.values():
                with suppress(QinferError):  # the caller has left, or `execute` raises it
                    if stream.ctx is not executing:
                        stream.ctx.offer(stream.item, error, final=True)
            with self._changed:
                batch.refusal = error
                self._changed.notify_all()

    def _await_taken(self, message: AwaitTaken) -> None:
        with self._changed:
            stream = self._stream(message.batch, message.item)
            if stream is None:
                self._messages.put(TakenAnswer(message.number, 0, cancelled=True))
                return
            stream.question = message
            self._tell_taken(stream)

    def _on_taken(self, number: int, item: int, taken_bytes: int) -> None:
        """Reports taken bytes, from any thread; 0 = the caller has left."""
        if not taken_bytes:
            self._unwant(number, item)
            return
        with self._changed:
            stream = self._stream(number, item)
            if stream is not None:
                stream.taken_bytes += taken_bytes
                self._tell_taken(stream)

    def _tell_taken(self, stream: _OpenStream) -> None:
        question = stream.question
        if question is not None and stream.taken_bytes >= question.taken_bytes:
            stream.question = None
            self._messages.put(TakenAnswer(question.number, stream.taken_bytes))

    def _unwant(self, number: int, item: int) -> None:
        with self._changed:
            stream = self._stream(number, item)
            if stream is None:
                return
            self._tell_end(stream)
            self._messages.put(CallerLeft(number, item))
            self._close(number, item)

    def _tell_end(self, stream: _OpenStream) -> None:
        if stream.question is not None:
            self._messages.put(TakenAnswer(stream.question.number, stream.taken_bytes, cancelled=True))

    def _is_cancelled(self, message: IsCancelled) -> None:
        with self._changed:
            stream = self._stream(message.batch, message.item)
        cancelled = stream is None or stream.ctx.cancelled(stream.item)
        self._messages.put(CancelledAnswer(message.number, cancelled))

    def _context(self, call: HostCall) -> Context | None:
        """Returns the context of the call's batch, or of the latest batch if the call has no number."""
        with self._changed:
            latest = next(reversed(self._batches), 0)
            batch = self._batches.get(call.batch or latest)
        return None if batch is None else batch.ctx

    def _stream(self, number: int, item: int) -> _OpenStream | None:
        batch = self._batches.get(number)
        return None if batch is None else batch.streams.get(item)

    def _close(self, number: int, item: int) -> None:
        with self._changed:
            batch = self._batches.get(number)
            if batch is None or batch.streams.pop(item, None) is None:
                return
            request_id = batch.ids[item]
            if self._rescheduled.get(request_id) == (number, item):
                del self._rescheduled[request_id]
            if not batch.streams and batch.outcome.done():
                self._drop_batch(number)
            self._changed.notify_all()

    def _forget_ended(self, number: int) -> None:
        with self._changed:
            batch = self._batches.get(number)
            if batch is not None and not batch.streams:
                self._drop_batch(number)

    def _drop_batch(self, number: int) -> None:
        with self._changed:
            batch = self._batches.pop(number, None)
            if batch is not None:
                for stream in batch.streams.values():
                    self._tell_end(stream)
                batch.streams.clear()
            self._instance.is_busy = bool(self._batches)
            self._changed.notify_all()


def _decode_answer(answer: HostAnswer, buffers: Sequence[Buffer]) -> tuple[Tensor, ...] | QinferError:
    if answer.error is not None:
        return to_qinfer(answer.error, answer.code)
    return tensors(answer.outputs, buffers)


def failed_text(model: str, failed: HostFailure) -> str:
    """Returns a client's text of a raising `execute`."""
    return f"Failed to process the request(s) for model '{model}', message: {failed.message}"
