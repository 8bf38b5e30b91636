"""The worker's side of a model's calls, and of the Model Loading API: each request has a thread."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from qinfer.backends.base import Context, ManagesModels
from qinfer.backends.python_host.channel import Buffer, Channel
from qinfer.backends.python_host.errors import TritonError, code_of, code_of_failure
from qinfer.backends.python_host.messages import (
    SEQUENCE_END,
    SEQUENCE_START,
    CallReturned,
    Close,
    HostAnswer,
    HostCall,
    Manage,
    ManageReply,
    Message,
    More,
    TensorMeta,
)
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
        with suppress(OSError):
            channel.send(answer)

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
