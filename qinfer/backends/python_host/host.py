"""The program of a host process: it runs one `model.py` until the worker is gone."""

import gc
import importlib
import inspect
import json
import math
import os
import queue
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from qinfer.backends.python_host import inference, utils
from qinfer.backends.python_host.channel import Buffer, Channel, ChannelInbox, Joined, Received
from qinfer.backends.python_host.errors import GivenParameters, TritonError, TritonModelException, message_of
from qinfer.backends.python_host.inference import InferenceRequest, ReceivedBatch, RowsModel
from qinfer.backends.python_host.messages import (
    AwaitTaken,
    CallerLeft,
    CallReturned,
    CancelledAnswer,
    Close,
    Complete,
    CompletedConfig,
    Execute,
    ExecutedAnswers,
    ExecutedRows,
    Finalize,
    FrameworkLoaded,
    HostAnswer,
    HostCall,
    HostFailure,
    IsCancelled,
    LoadFramework,
    LoadModel,
    Manage,
    ManageReply,
    Message,
    ModelLoaded,
    More,
    StreamedResponse,
    TakenAnswer,
    TensorMeta,
)
from qinfer.backends.python_host.readiness import answer_readiness
from qinfer.backends.python_host.responses import (
    Cause,
    InferenceResponse,
    InferenceResponseSender,
    ResponseStream,
    held,
    joined_rows,
    watch,
    watch_loop,
)
from qinfer.backends.python_host.telemetry import emit
from qinfer.backends.python_host.tensor import Array, Tensor
from qinfer.errors import InferenceFailed, ModelLoadFailed, QinferError
from qinfer.tensors import DATATYPES, Bytes, to_numpy
from qinfer.tensors import Tensor as WireTensor

if TYPE_CHECKING:
    import asyncio

    from qinfer.backends.frameworks.base import LoadedFramework

T = TypeVar("T")

CALLS_AT_ONCE = 64
"""Concurrent calls by `async_exec`."""

_batch: ContextVar[int] = ContextVar("batch", default=0)
"""The batch of a decoupled model's call; 0 = unknown."""

_OURS = (Path(__file__).parent, Path(__file__).parents[2] / "functions")
_WITHIN_EXECUTE = "other models can be called within `execute` only"


class ModelHost:
    """The host process and its requests to the worker."""

    def __init__(self, channel: Channel, asks: socket.socket) -> None:
        self._channel = channel
        self._asks = asks
        self._turn = threading.Lock()
        """Held while `execute` or `is_ready` runs."""
        self._inbox = ChannelInbox(channel, self._unwanted)
        self._model: Any = None
        self._framework: LoadedFramework | None = None
        self._name = ""
        self._directory = ""
        self._datatypes: Mapping[str, str] = {}
        self._narrow: frozenset[str] = frozenset()
        self._batch = 0
        self._is_executing = False
        self._is_loading = False
        self._is_decoupled = False
        self._is_forked = False
        self.is_iterative = False
        """Requests may be rescheduled."""
        self._streams: dict[tuple[int, int], ResponseStream] = {}
        self._rescheduled: dict[tuple[int, int], InferenceResponseSender] = {}
        """Senders of rescheduled requests, by batch and item of the first execution."""
        self._preparing = threading.Lock()
        self._later: queue.SimpleQueue[Message | Callable[[], None]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def serve(self) -> None:
        """Handles commands until `Finalize` or end of file."""
        inference.connect(self)
        watch(self._noted)
        serve_forks(self)
        while True:
            try:
                message, buffers = self._inbox.command()
            except EOFError:
                return
            if isinstance(message, Execute):
                self._execute_any(message, buffers)
            elif isinstance(message, LoadModel):
                self._guarded(self._load, message)
            elif isinstance(message, Complete):
                self._guarded(self._complete, message)
            elif isinstance(message, LoadFramework):
                self._guarded(self._load_framework, message)
            elif isinstance(message, Finalize):
                self._finalize()
                return
            del message, buffers  # an idle host must free them

    def call(self, request: InferenceRequest) -> InferenceResponse:
        """Runs another model; blocks. The response may be an error."""
        response, _ = self.returned(self._send_call(request, streams=False))
        return response

    def open_call(self, request: InferenceRequest) -> int:
        """Runs another model; returns the first question's number."""
        self._check_not_forked()
        self._prepare_later()
        return self._send_call(request, streams=True)

    def call_for(self, asked: HostCall, buffers: Sequence[Buffer]) -> Received:
        """Runs another model for a forked process."""
        theirs = asked.number
        if not (self._is_executing or self._streams):
            return CallReturned(theirs, _error_answer(TritonError(_WITHIN_EXECUTE))), []
        asked.number, asked.batch, asked.made_for = self._inbox.expect(), self._batch, -1
        self._channel.send(asked, [buffer.data for buffer in buffers])
        answer, data = self._inbox.wait_answer(asked.number)
        assert isinstance(answer, CallReturned)
        answer.number = theirs
        return answer, data

    def forked(self, channel: Channel) -> None:
        """Continues in a forked process with another channel."""
        self._channel.disown()
        self._channel, self._inbox = channel, ChannelInbox(channel, self._unwanted)
        self._turn, self._preparing = threading.Lock(), threading.Lock()
        self._later = self._loop = None
        self._is_forked = True

    def ask_more(self, call: int) -> int:
        """Asks for the next response; returns the question's number."""
        self._check_serving()
        number = self._inbox.expect()
        self._channel.send(More(number, call))
        return number

    def cancel_call(self, call: int) -> None:
        """Tells the called model to stop."""
        self._channel.send(Close(call, is_dropped=False))

    def close_call(self, call: int) -> None:
        """Ends a call; never waits, for the garbage collector."""
        self._inbox.drop_question(call)
        if self._later is not None:
            self._later.put(Close(call))

    def returned(self, question: int) -> tuple[InferenceResponse, bool]:
        """Returns a response, and whether it is the last."""
        message, buffers = self._inbox.wait_answer(question)
        assert isinstance(message, CallReturned)
        answer = message.answer
        if answer.error is not None:
            return InferenceResponse(error=TritonError(answer.error, answer.code)), message.is_last
        outputs = [
            Tensor(meta.name, _array(meta, data), "BF16" if meta.datatype == "BF16" else None)
            for meta, data in zip(answer.outputs, buffers, strict=True)
        ]
        return InferenceResponse(outputs, parameters=GivenParameters(answer.parameters)), message.is_last

    def manage(self, asked: Manage, contents: Sequence[bytes] = ()) -> bool:
        """Manages a model; blocks."""
        self._check_not_forked()
        if not (self._is_loading or self._is_executing or self._streams):
            raise TritonModelException(
                "models can be loaded, unloaded and looked at in `initialize` and `execute` only"
            )
        if self._is_loading and asked.action == "load" and asked.model == self._name:
            raise TritonModelException(f"model '{self._name}' can't load itself while it is being loaded")
        asked.number = self._inbox.expect()
        self._channel.send(asked, contents)
        answer, _ = self._inbox.wait_answer(asked.number)
        assert isinstance(answer, ManageReply)
        if answer.error:
            raise TritonModelException(answer.error)
        return answer.is_ready

    def is_cancelled(self, batch: int, item: int) -> bool:
        """Returns whether an unanswered request is cancelled."""
        if self._is_decoupled:
            stream = self._streams.get((batch, item))
            if stream is None or stream.is_unwanted:
                return stream is not None
        elif not self._is_executing or batch != self._batch:
            return False
        number = self._inbox.expect()
        self._channel.send(IsCancelled(number, batch, item))
        message, _ = self._inbox.wait_answer(number)
        return isinstance(message, CancelledAnswer) and message.cancelled

    def poll(self) -> None:
        """Reads the worker's messages."""
        self._inbox.poll()

    def encoded(self, response: InferenceResponse, outputs: Sequence[str]) -> tuple[HostAnswer, list[Bytes]]:
        """Encodes a response with the wanted outputs; empty = all."""
        error = response.error()
        if error is not None:
            return _error_answer(error), []
        wanted = outputs or self._datatypes
        wires = [t.to_wire(self._datatypes.get(t.name())) for t in response.output_tensors() if t.name() in wanted]
        return HostAnswer(_metas(wires), response.parameters_dict()), [wire.data for wire in wires]

    def send(self, message: StreamedResponse, buffers: Sequence[Bytes]) -> None:
        """Sends a response of a decoupled model."""
        self._channel.send(message, buffers)

    def await_taken(self, stream: ResponseStream, taken_bytes: int) -> tuple[int, bool]:
        """Waits for `taken_bytes`; returns them, and whether the request is cancelled."""
        number = self._inbox.expect()
        self._channel.send(AwaitTaken(number, stream.batch, stream.item, taken_bytes))
        message, _ = self._inbox.wait_answer(number)
        assert isinstance(message, TakenAnswer)
        return message.taken_bytes, message.cancelled

    def end_stream(self, stream: ResponseStream, error: str | None, trace: str) -> None:
        """Forgets a stream; never waits, for the garbage collector."""
        self._streams.pop((stream.batch, stream.item), None)
        self._rescheduled.pop((stream.batch, stream.item), None)
        if self._later is None:
            return
        if trace:
            self._later.put(partial(emit, "ERROR", "a request was left by an exception", trace, [stream.request_id]))
        if error is not None:
            self._later.put(StreamedResponse(stream.batch, stream.item, _error_answer(TritonError(error)), final=True))

    def _send_call(self, request: InferenceRequest, *, streams: bool) -> int:
        self._check_serving()
        wires = [tensor.to_wire(None) for tensor in request.inputs()]
        number = self._inbox.expect()
        batch, (traced_batch, item) = _batch.get() if self._is_decoupled else self._batch, request.trace().place
        asked = HostCall(
            number,
            batch,
            request.model_name,
            max(request.model_version, 0),
            _metas(wires),
            tuple(request.requested_output_names()),
            request.parameters_dict(),
            request.request_id(),
            request.timeout(),
            streams,
            request.correlation_id(),
            request.flags(),
            item if traced_batch == batch else -1,
        )
        self._channel.send(asked, [wire.data for wire in wires])
        return number

    def _check_serving(self) -> None:
        if not (self._is_executing or self._streams):
            raise TritonModelException(_WITHIN_EXECUTE)

    def _check_not_forked(self) -> None:
        if self._is_forked:
            raise TritonModelException(
                "a process that the model has forked can call models that give one response only"
            )

    def _unwanted(self, message: CallerLeft) -> None:
        if stream := self._streams.get((message.batch, message.item)):
            stream.is_unwanted = True
            stream.on_unwanted()
        self._rescheduled.pop((message.batch, message.item), None)

    def _prepare_later(self) -> None:
        with self._preparing:
            if self._later is None:
                self._later = queue.SimpleQueue()
                threading.Thread(target=self._send_later, args=(self._later,), name="later", daemon=True).start()

    def _send_later(self, messages: "queue.SimpleQueue[Message | Callable[[], None]]") -> None:
        with suppress(OSError):
            while True:
                message = messages.get()
                if callable(message):
                    message()
                else:
                    self._channel.send(message)

    def _guarded(self, work: Any, message: LoadModel | Complete | LoadFramework) -> None:
        try:
            answer = work(message)
        except BaseException as error:  # noqa: BLE001  the boundary to the model's code, which may even call `sys.exit`
            missing = str(error.name or "") if isinstance(error, ModuleNotFoundError) else ""
            self._channel.send(HostFailure(self._log_error(error, "model failed to load"), missing))
            return
        self._channel.send(answer)

    def _load(self, message: LoadModel) -> ModelLoaded:
        if message.adapter:
            self._directory = message.directory
            kind = importlib.import_module(message.adapter).TritonPythonModel
        else:
            kind = self._imported(message.directory, message.filename)
        config = json.loads(message.args["model_config"])
        names = {d.config: d.name for d in DATATYPES.values()}
        self._datatypes = {o["name"]: names.get(o["data_type"], "") for o in config.get("output", ())}
        self._narrow = frozenset(name for name, datatype in self._datatypes.items() if datatype == "BF16")
        self._name = message.args["model_name"]
        self._is_decoupled = utils.using_decoupled_model_transaction_policy(config)
        self.is_iterative = bool(config.get("sequence_batching", {}).get("iterative_sequence"))
        if self._is_decoupled:
            self._prepare_later()
        self._is_loading = True
        try:
            self._model = kind()
            if not hasattr(self._model, "execute"):
                raise TritonModelException(f"Python model {message.filename} does not implement `execute` method.")
            if hasattr(self._model, "initialize"):
                self._model.initialize(dict(message.args))
        finally:
            self._is_loading = False
        is_ready = getattr(self._model, "is_ready", None)
        if is_ready is not None:
            told = partial(self._log_error, event="is_ready failed")
            asked = (self._asks, is_ready, self._turn, told)
            threading.Thread(target=answer_readiness, args=asked, name="readiness", daemon=True).start()
        return ModelLoaded(is_ready is not None)

    def _complete(self, message: Complete) -> CompletedConfig:
        kind = self._imported(message.directory, message.filename)
        config = utils.ModelConfig(message.config)
        if hasattr(kind, "auto_complete_config"):
            config = kind.auto_complete_config(config)
        if not isinstance(config, utils.ModelConfig):
            name = json.loads(message.config).get("name", "")
            raise TritonModelException(
                f"auto_complete_config function in model '{name}' must return a valid pb.ModelConfig object."
            )
        return CompletedConfig(json.dumps(config.as_dict()))

    def _imported(self, directory: str, filename: str) -> Any:
        """Imports the model as a module of the version's package, as Triton does."""
        path = Path(directory)
        self._directory = directory
        utils.set_model_dir(directory)
        sys.path.extend((directory, str(path.parent)))
        package = types.ModuleType(path.name)
        package.__path__ = [directory]
        sys.modules.setdefault(path.name, package)
        module = importlib.import_module(f"{path.name}.{filename.removesuffix('.py')}")
        if not hasattr(module, "TritonPythonModel"):
            raise TritonModelException(f"{filename} has no class TritonPythonModel")
        return module.TritonPythonModel

    def _load_framework(self, message: LoadFramework) -> FrameworkLoaded:
        from qinfer.backends.frameworks.base import LoadedFramework

        self._name, self._directory = message.model, str(Path(message.path).parent)
        self._framework = LoadedFramework(message)
        return self._framework.declared

    def _execute_any(self, message: Execute, buffers: Sequence[Buffer]) -> None:
        if self._framework is not None:
            self._execute_framework(self._framework, message, buffers)
        elif self._is_decoupled:
            self._execute_decoupled(message, buffers)
        else:
            self._execute(message, buffers)

    def _execute_framework(self, model: "LoadedFramework", message: Execute, buffers: Sequence[Buffer]) -> None:
        try:
            arrays = {meta.name: _array(meta, data) for meta, data in zip(message.inputs, buffers, strict=True)}
            self._channel.send(*model.execute(arrays, message.asked(0).outputs))
        except OSError:
            raise
        except BaseException as error:  # noqa: BLE001  as in `_guarded`
            self._channel.send(HostFailure(self._log_error(error, "execute failed", message.ids)))

    def _execute(self, message: Execute, buffers: Sequence[Buffer]) -> None:
        self._batch = message.number
        self._is_executing = True
        try:
            answers, sent = self._execute_rows(message, buffers) or self._execute_requests(message, buffers)
        except BaseException as error:  # noqa: BLE001  as in `_guarded`
            self._is_executing = False
            self._channel.send(HostFailure(self._log_error(error, "execute failed", message.ids)))
            return
        self._is_executing = False
        try:
            self._channel.send(answers, sent)
        except MemoryError as error:
            self._channel.send(HostFailure(self._log_error(error, "no memory for the outputs", message.ids)))

    def _execute_rows(
        self, message: Execute, buffers: Sequence[Buffer]
    ) -> tuple[ExecutedRows | ExecutedAnswers, Sequence[Bytes | Joined]] | None:
        """Executes a batch as a whole if its model can, and its requests are alike."""
        if not isinstance(self._model, RowsModel) or len(message.requests) > 1 or message.shapes:
            return None
        inputs = {meta.name: _array(meta, data) for meta, data in zip(message.inputs, buffers, strict=True)}
        with self._turn:
            found = self._ended(self._model.execute_rows(inputs, message.rows, message.ids))
        if not isinstance(found, dict):
            return None if found is None else self._answers(message, found, None)
        wanted, kinds = message.asked(0).outputs or self._datatypes, self._datatypes
        wires = [Tensor(name, array).to_wire(kinds[name]) for name, array in found.items() if name in wanted]
        return ExecutedRows(_metas(wires), message.rows), [wire.data for wire in wires]

    def _execute_requests(
        self, message: Execute, buffers: Sequence[Buffer]
    ) -> tuple[ExecutedRows | ExecutedAnswers, Sequence[Bytes | Joined]]:
        requests = _batch_of(message, buffers, tuple(self._datatypes)).requests()
        responses = self._returned(requests)
        rescheduled = [request.is_rescheduled() for request in requests] if self.is_iterative else None
        if None in responses:
            replies = [
                request.reply() if response is None and not request.is_rescheduled() else None
                for request, response in zip(requests, responses, strict=True)
            ]
            # A dropped sender is gone with its request.
            del requests
            responses = [
                response if reply is None else reply.response()
                for response, reply in zip(responses, replies, strict=True)
            ]
        return self._answers(message, responses, rescheduled)

    def _execute_decoupled(self, message: Execute, buffers: Sequence[Buffer]) -> None:
        senders = [self._sender(message, item) for item in range(len(message.ids))]
        streams = [stream for sender in senders if isinstance(stream := sender.responses(), ResponseStream)]
        _batch.set(message.number)
        try:
            # The requests live until the end, so that a failed batch closes their senders.
            requests = _batch_of(message, buffers, tuple(self._datatypes)).requests(senders)
            with self._turn:
                returned = self._model.execute(requests)
            if inspect.iscoroutine(returned):
                ended = self._on_loop(self._awaited(returned, streams))
                if self.is_iterative:  # known only then
                    ended.result()
            elif returned is not None:
                raise TritonModelException(self._must_return_none)
            rescheduled = [
                request.is_rescheduled() and not stream.is_closed
                for request, stream in zip(requests, streams, strict=True)
            ]
            for sender, stream, again in zip(senders, streams, rescheduled, strict=True):
                if again:
                    self._rescheduled[stream.batch, stream.item] = sender
                if stream.is_closed:  # by a thread
                    self._rescheduled.pop((stream.batch, stream.item), None)
        except BaseException as error:  # noqa: BLE001  as in `_guarded`
            for stream in streams:
                stream.close()
            self._channel.send(HostFailure(self._log_error(error, "execute failed", message.ids)))
            return
        self._channel.send(ExecutedAnswers([HostAnswer([], {}, rescheduled=again) for again in rescheduled]))

    def _sender(self, message: Execute, item: int) -> InferenceResponseSender:
        """Returns a request's sender, which all its executions share."""
        goes_on = message.asked(item).goes_on
        if goes_on is None:
            stream = ResponseStream(self, (message.number, item), message, item)
            self._streams[message.number, item] = stream
            return InferenceResponseSender(stream)
        sender = self._rescheduled.pop(goes_on, None)
        if sender is None:  # a thread has sent the final flag
            stream = ResponseStream(self, goes_on, message, item)
            stream.is_closed = True
            sender = InferenceResponseSender(stream)
        return sender

    async def _awaited(self, coroutine: Coroutine[Any, Any, object], streams: Sequence[ResponseStream]) -> None:
        try:
            if await coroutine is not None:
                raise TritonModelException(self._must_return_none)
        except BaseException as error:  # noqa: BLE001  as in `_guarded`
            self._log_error(error, "execute failed", [stream.request_id for stream in streams])
            text = self._failure_message(error)
            for stream in streams:
                if not stream.is_closed:
                    stream.close(text)

    @property
    def _must_return_none(self) -> str:
        return f"Python model '{self._name}' is using the decoupled mode and the execute function must return None."

    def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Uses the model's loop, which outlives `execute`: tasks may answer later."""
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(ThreadPoolExecutor(CALLS_AT_ONCE, "call"))
            watch_loop(self._loop, self._noted)
            threading.Thread(target=self._run_loop, args=(self._loop,), name="loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run_loop(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Runs the loop, and goes on after a task has called `sys.exit`."""
        while True:
            try:
                loop.run_forever()
            except BaseException as error:  # noqa: BLE001  as in `_guarded`
                self._noted(error, "a task of the model raised")
            gc.collect()  # task and exception are a cycle

    def _ended(self, returned: Any) -> Any:
        """Waits for an `async` model."""
        if inspect.iscoroutine(returned):
            returned, error = self._on_loop(_outcome(returned)).result()
            if error is not None:
                raise error
        return returned

    def _returned(self, requests: list[InferenceRequest]) -> list[InferenceResponse | None]:
        """Checks the responses as Triton does."""
        with self._turn:
            returned = self._ended(self._model.execute(requests))
        if returned is None:
            return [None] * len(requests)
        if not isinstance(returned, list):
            raise TritonModelException(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(requests):
            raise TritonModelException(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(returned)}"
            )
        if not self.is_iterative and {*map(type, returned)} == {InferenceResponse}:
            return returned
        for request, response in zip(requests, returned, strict=True):
            if response is not None and request.is_rescheduled():
                raise TritonModelException(
                    "Expected a None object in the execute function return list for reschduled request, "
                    f"found type '{type(response)}'."
                )
            if response is not None and not isinstance(response, InferenceResponse):
                raise TritonModelException(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )
        return returned

    def _answers(
        self,
        message: Execute,
        responses: Sequence[InferenceResponse | None],
        rescheduled: Sequence[bool] | None,
    ) -> tuple[ExecutedRows | ExecutedAnswers, Sequence[Bytes | Joined]]:
        wanted = {asked.outputs for asked in message.requests}
        if rescheduled is None and len(wanted) == 1:
            joined = joined_rows(responses, wanted.pop() or self._datatypes, self._narrow)
            if joined is not None:
                return joined
        answers: list[HostAnswer] = []
        buffers: list[Bytes] = []
        for item, response in enumerate(responses):
            if rescheduled is not None and rescheduled[item]:
                answers.append(HostAnswer([], {}, rescheduled=True))
                continue
            assert response is not None, "a sender has waited for it"
            try:
                answer, data = self.encoded(response, message.asked(item).outputs)
            except QinferError as refused:
                answers.append(_error_answer(TritonError(refused.message)))
                continue
            buffers.extend(data)
            answers.append(answer)
        return ExecutedAnswers(answers), buffers

    def _finalize(self) -> None:
        if hasattr(self._model, "finalize"):
            try:
                self._model.finalize()
            except BaseException as error:  # noqa: BLE001  as in `_guarded`
                self._log_error(error, "finalize failed")
        self._channel.send(ModelLoaded())

    def _noted(self, error: BaseException, event: str) -> Cause:
        """Records a cause for the senders in its frames."""
        found = {
            id(responses): responses
            for value in held(error)
            if isinstance(value, InferenceRequest | InferenceResponseSender)
            and (responses := value.responses()) is not None
        }.values()
        if event:
            self._log_error(error, event, [responses.request_id for responses in found])
        cause = Cause(self._failure_message(error), "" if event or not found else _trace(error))
        for responses in found:
            responses.cause = cause
        return cause

    def _failure_message(self, error: BaseException) -> str:
        return f"Failed to process the request(s) for model '{self._name}', message: {self._visible_message(error)}"

    def _log_error(self, error: BaseException, event: str, requests: Sequence[str] = ()) -> str:
        """Logs the traceback; returns the text for clients."""
        emit("ERROR", event, _trace(error), requests)
        return self._visible_message(error)

    def _visible_message(self, error: BaseException) -> str:
        text = message_of(error)
        if self._directory:
            text = text.replace(f"{self._directory}/", "")
        if isinstance(error, ModelLoadFailed | InferenceFailed):  # of a framework's adapter
            return text
        return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def _outcome(coroutine: Coroutine[Any, Any, object]) -> tuple[Any, BaseException | None]:
    """Returns the result or the exception, since a raised `SystemExit` would end asyncio's loop."""
    try:
        return await coroutine, None
    except BaseException as error:  # noqa: BLE001  as in `ModelHost._guarded`
        return None, error


def _trace(error: BaseException) -> str:
    """Returns the traceback from the model's first frame on."""
    frame = error.__traceback__
    while frame is not None and Path(frame.tb_frame.f_code.co_filename).parent in _OURS:
        frame = frame.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frame)))


def _batch_of(message: Execute, buffers: Sequence[Buffer], outputs: Sequence[str]) -> ReceivedBatch:
    """Returns the batch of a message; a request that names no outputs gets all, as in Triton."""
    arrays = [_array(meta, data) for meta, data in zip(message.inputs, buffers, strict=True)]
    return ReceivedBatch(message, [_parts(array, message, position) for position, array in enumerate(arrays)], outputs)


def _parts(array: Array, message: Execute, position: int) -> list[Array]:
    count = len(message.ids)
    if count == 1:
        return [array]
    shapes = message.shapes.get(position)
    if shapes is None:
        if message.rows.count(1) == count:
            return list(array.reshape(count, 1, *array.shape[1:]))
        return [array[end - rows : end] for rows, end in zip(message.rows, accumulate(message.rows), strict=True)]
    flat, sizes = array.reshape(-1), [math.prod(shape) for shape in shapes]
    return [
        flat[end - size : end].reshape(shape) for shape, size, end in zip(shapes, sizes, accumulate(sizes), strict=True)
    ]


def _array(meta: TensorMeta, data: Buffer) -> Array:
    dtype = DATATYPES[meta.datatype].numpy
    if dtype is not None:
        return data.view(dtype).reshape(meta.shape)
    if meta.datatype == "BF16" and data.nbytes == 4 * int(np.prod(meta.shape, dtype=np.int64)):
        return data.view("<f4").reshape(meta.shape)
    return to_numpy(WireTensor(meta.name, meta.datatype, meta.shape, data.data))


def _metas(wires: Sequence[WireTensor]) -> list[TensorMeta]:
    return [TensorMeta(wire.name, wire.datatype, wire.shape) for wire in wires]


def _error_answer(error: TritonError) -> HostAnswer:
    return HostAnswer([], {}, error.message(), error.code())


def serve_forks(host: ModelHost) -> None:
    """Serves the calls of forked processes, such as those of a `multiprocessing.Pool`.

    Each fork makes a channel to this process.
    """
    here = threading.local()

    def before() -> None:
        here.pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def in_parent() -> None:
        mine, theirs = here.pair
        theirs.close()
        threading.Thread(target=_serve_fork, args=(host, Channel(mine)), name="fork", daemon=True).start()

    def in_child() -> None:
        mine, theirs = here.pair
        mine.close()
        host.forked(Channel(theirs))

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def _serve_fork(host: ModelHost, channel: Channel) -> None:
    with suppress(OSError, EOFError):
        while True:
            message, buffers = channel.receive()
            if isinstance(message, HostCall):
                answer, data = host.call_for(message, buffers)
                channel.send(answer, [each.data for each in data])
            elif isinstance(message, IsCancelled):
                channel.send(CancelledAnswer(message.number, host.is_cancelled(message.batch, message.item)))
