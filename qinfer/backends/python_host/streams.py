"""The worker's side of a model's process: its calls, its loads of models, and the responses of a decoupled model.

Each call has a thread. Responses are passed on, whenever they come:

    execute ─── Execute ──▶ process                        the instance's thread: until `execute` has returned
    _read_messages ◀── StreamedResponse, HostCall … ───    a thread for as long as the process lives
    _send_messages ── TakenAnswer, CallerLeft, … ──▶       a thread, because credit must not wait for a socket

A request's window is kept in the process, where a thread of the model waits; here only taken bytes are counted.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import msgspec

from qinfer.backends.base import Context, ManagesModels
from qinfer.backends.python_host.channel import Buffer, Channel, UnreadError
from qinfer.backends.python_host.errors import TritonError, code_of, code_of_failure, to_qinfer
from qinfer.backends.python_host.messages import (
    SEQUENCE_END,
    SEQUENCE_START,
    AwaitTaken,
    CallerLeft,
    CallReturned,
    CancelledAnswer,
    Close,
    Execute,
    ExecutedAnswers,
    HostAnswer,
    HostCall,
    HostFailure,
    IsCancelled,
    Manage,
    ManageReply,
    Message,
    ModelLoaded,
    More,
    StreamedResponse,
    TakenAnswer,
    TensorMeta,
)
from qinfer.backends.python_host.process import HostInstance, HostProcess
from qinfer.core import messages
from qinfer.core.messages import InferRequest, Response
from qinfer.errors import InferenceFailed, ModelNotFound, QinferError, RequestError, UnsupportedFeature
from qinfer.tensors import Bytes, Tensor

ENDED = "the batch that called has ended"

logger = logging.getLogger("qinfer.backends.python")


class _OpenCall:
    """An open call, and the numbers of its questions; `None` = no more."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._cancel: Callable[[], None] | None = None

    def began(self, responses: Iterator[Response]) -> None:
        with self._lock:
            self._cancel = getattr(responses, "cancel", lambda: None)
        if self._is_cancelled:
            self._cancel()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled, cancel = True, self._cancel
        if cancel is not None:
            cancel()


class Calls:
    """The calls of one process of a model."""

    def __init__(self, channel: Channel, model: str) -> None:
        self._channel = channel
        self._model = model
        self._lock = threading.Lock()
        self._open: dict[int, _OpenCall] = {}

    def hear(self, message: HostCall | More | Close, buffers: Sequence[Buffer], ctx: Context | None) -> None:
        """Handles a model's message; a `HostCall` without `ctx` is refused."""
        if isinstance(message, HostCall):
            if ctx is None:
                self._return(message.number, _error_answer(InferenceFailed(ENDED)))
                return
            self._serve_call(message, buffers, ctx)
            return
        with self._lock:
            call = self._open.get(message.call)
        if call is not None and isinstance(message, Close) and not message.is_dropped:
            call.cancel()
        elif call is not None:
            call.asked.put(message.number if isinstance(message, More) else None)
        elif isinstance(message, More):
            self._return(message.number, _error_answer(InferenceFailed(ENDED)))

    def end_streams(self) -> None:
        """Ends the streaming calls."""
        with self._lock:
            for call in self._open.values():
                call.asked.put(None)

    def _serve_call(self, call: HostCall, buffers: Sequence[Buffer], ctx: Context) -> None:
        request = InferRequest(
            model=call.model,
            version=call.version,
            client_id=call.client_id,
            inputs=tensors(call.inputs, buffers),
            outputs=call.outputs,
            parameters=call.parameters,
            timeout_s=call.timeout_us / 1e6,
            sequence=_sequence(call),
        )
        work = self._stream if call.streams else self._call_model
        if call.streams:
            with self._lock:
                self._open[call.number] = _OpenCall()
        threading.Thread(target=work, args=(call, request, ctx), name=f"call-{self._model}", daemon=True).start()

    def _call_model(self, call: HostCall, request: InferRequest, ctx: Context) -> None:
        try:
            response = ctx.call(request, call.made_for)
        except Exception as error:  # noqa: BLE001  the boundary: the model must get an answer
            self._return(call.number, _error_answer(error, request.model))
            return
        self._return(call.number, response)

    def _stream(self, call: HostCall, request: InferRequest, ctx: Context) -> None:
        open_call = self._open[call.number]
        number: int | None = call.number
        try:
            responses = ctx.stream(request, call.made_for)
            open_call.began(responses)
            while number is not None:
                response = next(responses)
                self._return(number, response, is_last=response.final)
                number = None if response.final else open_call.asked.get()
        except Exception as error:  # noqa: BLE001  as above
            if number is not None:
                self._return(number, _error_answer(error, request.model))
        with self._lock:
            del self._open[call.number]

    def _return(self, number: int, response: Response | HostAnswer, *, is_last: bool = True) -> None:
        if isinstance(response, HostAnswer):
            send(self._channel, CallReturned(number, response))
            return
        metas = [TensorMeta(t.name, t.datatype, t.shape) for t in response.outputs]
        failure = response.failure
        error, code = (None, 0) if failure is None else (failure.message, code_of_failure(failure))
        answer = HostAnswer(metas, response.parameters, error, code)
        send(self._channel, CallReturned(number, answer, is_last), [t.data for t in response.outputs])


def tensors(metas: Sequence[TensorMeta], data: Sequence[Buffer]) -> tuple[Tensor, ...]:
    """Returns the tensors of a message."""
    return tuple(
        Tensor(meta.name, meta.datatype, tuple(meta.shape), buffer.data)
        for meta, buffer in zip(metas, data, strict=True)
    )


def _sequence(call: HostCall) -> messages.SequenceFlags | None:
    if not (call.correlation_id or call.flags):
        return None
    start, end = bool(call.flags & SEQUENCE_START), bool(call.flags & SEQUENCE_END)
    return messages.SequenceFlags(call.correlation_id, start, end)


def send(channel: Channel, message: Message, buffers: Sequence[Bytes] = ()) -> None:
    """Sends, unless the process is gone."""
    with suppress(OSError):
        channel.send(message, buffers)


def _error_answer(error: Exception, model: str = "") -> HostAnswer:
    if isinstance(error.__cause__, RequestError):  # made the model's own failure before
        error = error.__cause__
    if model and type(error) is ModelNotFound:
        told = f"Failed for execute the inference request. Model '{model}' is not ready. {error.message}"
        return HostAnswer([], {}, told, code_of(error))
    if isinstance(error, QinferError):
        return HostAnswer([], {}, error.message, code_of(error))
    return HostAnswer([], {}, type(error).__name__, TritonError.INTERNAL)


class Managing:
    """Executes one instance's requests; refuses all without `models`."""

    def __init__(self, models: ManagesModels | None, model: str) -> None:
        self._models = models
        self._model = model

    def hear(self, channel: Channel, message: Manage, buffers: Sequence[Buffer]) -> None:
        """Starts a request, which answers by the channel."""
        files = {name: bytes(buffer.data) for name, buffer in zip(message.files, buffers, strict=True)}
        threading.Thread(
            target=self._answer_request, args=(channel, message, files), name=f"manage-{self._model}", daemon=True
        ).start()

    def _answer_request(self, channel: Channel, message: Manage, files: dict[str, bytes]) -> None:
        try:
            answer = ManageReply(message.number, self._done(message, files))
        except QinferError as error:
            answer = ManageReply(message.number, error=error.message)
        except Exception:  # the model must get an answer
            logger.exception("model management failed", extra={"model": self._model})
            answer = ManageReply(message.number, error="it failed; the worker's log says why")
        send(channel, answer)

    def _done(self, message: Manage, files: dict[str, bytes]) -> bool:
        if self._models is None:
            raise UnsupportedFeature("models can't be loaded, unloaded or looked at from here")
        if message.action == "ready":
            return self._models.is_ready(message.model, message.version)
        logger.info(
            "a model asks for another", extra={"model": self._model, "action": message.action, "other": message.model}
        )
        if message.action == "load":
            self._models.load(message.model, message.config, files)
        else:
            self._models.unload(message.model, unload_dependents=message.unload_dependents)
        return False


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
