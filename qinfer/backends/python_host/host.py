"""The program of a host process: runs one `model.py` as the worker commands, until the worker is gone."""

import asyncio
import importlib
import inspect
import json
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from qinfer.backends.python_host import inference, services, utils
from qinfer.backends.python_host.channel import Buffer, Channel
from qinfer.backends.python_host.errors import TritonError, TritonModelException, message_of
from qinfer.backends.python_host.inference import InferenceRequest, InferenceResponse, InferenceTrace
from qinfer.backends.python_host.messages import (
    Answer,
    Call,
    Cancelled,
    Complete,
    Completed,
    Execute,
    Executed,
    Failed,
    Finalize,
    IsCancelled,
    Load,
    Loaded,
    Message,
    Returned,
    TensorMeta,
)
from qinfer.backends.python_host.tensor import Array, Tensor
from qinfer.errors import QinferError
from qinfer.tensors import DATATYPES, Bytes, to_numpy
from qinfer.tensors import Tensor as WireTensor

CALLS_AT_ONCE = 64
"""So many calls to other models run at once; further ones wait for these."""

_HERE = Path(__file__).parent


Received = tuple[Message, list[Buffer]]


class Inbox:
    """Reads a channel for several threads: commands for the main thread, answers for the calling threads.

    There is no thread for reading: of the threads that wait, one reads for all.

    Args:
        channel: The way to the worker.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._is_read = False
        self._commands: deque[Received] = deque()
        self._answers: dict[int, Received | None] = {}
        self._count = 0

    def expect(self) -> int:
        """Returns a number for a question, whose answer is kept from now on."""
        with self._changed:
            self._count += 1
            self._answers[self._count] = None
            return self._count

    def command(self) -> Received:
        """Waits for the next command.

        Raises:
            EOFError: The worker is gone.
        """
        with self._changed:
            while not self._commands:
                self._step()
            return self._commands.popleft()

    def answer(self, number: int) -> Received:
        """Waits for the answer to a question.

        Raises:
            EOFError: The worker is gone.
        """
        with self._changed:
            while (received := self._answers[number]) is None:
                self._step()
            del self._answers[number]
            return received

    def _step(self) -> None:
        """Waits while another thread reads, or reads one message."""
        if self._is_read:
            self._changed.wait()
            return
        self._is_read = True
        self._changed.release()
        received = None
        try:
            received = self._channel.receive()
        finally:
            self._changed.acquire()
            self._is_read = False
            if received is not None:
                self._sort(received)
            self._changed.notify_all()

    def _sort(self, received: Received) -> None:
        message, _ = received
        if not isinstance(message, Returned | Cancelled):
            self._commands.append(received)
        elif message.number in self._answers:
            self._answers[message.number] = received


class Host:
    """The process's whole work; also the way of the model's requests to the worker.

    Args:
        channel: The way to the worker.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._inbox = Inbox(channel)
        self._model: Any = None
        self._directory = ""
        self._datatypes: Mapping[str, str] = {}
        """Output → its wire datatype, in the order of the configuration."""
        self._batch = 0
        self._is_executing = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def serve(self) -> None:
        """Obeys until the worker says `Finalize`, or is gone."""
        inference.connect(self)
        while True:
            try:
                message, buffers = self._inbox.command()
            except EOFError:
                return
            if isinstance(message, Execute):
                self._execute(message, buffers)
            elif isinstance(message, Load):
                self._guarded(self._load, message)
            elif isinstance(message, Complete):
                self._guarded(self._complete, message)
            elif isinstance(message, Finalize):
                self._finalize()
                return
            del message, buffers  # an idle host must not keep its last batch's memory

    def call(self, request: InferenceRequest) -> InferenceResponse:
        """Runs another model; blocks. A failure of the call is in the response."""
        if not self._is_executing:
            raise TritonModelException("other models can be called within `execute` only")
        wires = [tensor.to_wire(None) for tensor in request.inputs()]
        number = self._inbox.expect()
        asked = Call(
            number,
            self._batch,
            request.model_name,
            max(request.model_version, 0),
            _metas(wires),
            tuple(request.requested_output_names()),
            request.parameters_dict(),
            request.request_id(),
            request.timeout(),
        )
        self._channel.send(asked, [wire.data for wire in wires])
        message, buffers = self._inbox.answer(number)
        assert isinstance(message, Returned)
        answer = message.answer
        if answer.error is not None:
            return InferenceResponse(error=TritonError(answer.error, answer.code))
        outputs = [_tensor(meta, _array(meta, data)) for meta, data in zip(answer.outputs, buffers, strict=True)]
        return InferenceResponse(outputs, parameters=dict(answer.parameters))

    def is_cancelled(self, batch: int, item: int) -> bool:
        """Returns whether a request of a batch is cancelled."""
        if not self._is_executing or batch != self._batch:
            return False
        number = self._inbox.expect()
        self._channel.send(IsCancelled(number, batch, item))
        message, _ = self._inbox.answer(number)
        return isinstance(message, Cancelled) and message.cancelled

    def _guarded(self, work: Any, message: Load | Complete) -> None:
        try:
            answer = work(message)
        except BaseException as error:  # noqa: BLE001  the boundary to the model's code, which may even call `sys.exit`
            missing = str(error.name or "") if isinstance(error, ModuleNotFoundError) else ""
            self._channel.send(Failed(self._told(error, "model failed to load"), missing))
            return
        self._channel.send(answer)

    def _load(self, message: Load) -> Loaded:
        kind = self._imported(message.directory, message.filename)
        config = json.loads(message.args["model_config"])
        names = {d.config: d.name for d in DATATYPES.values()}
        self._datatypes = {o["name"]: names.get(o["data_type"], "") for o in config.get("output", ())}
        self._model = kind()
        if not hasattr(self._model, "execute"):
            raise TritonModelException(f"Python model {message.filename} does not implement `execute` method.")
        if hasattr(self._model, "initialize"):
            self._model.initialize(dict(message.args))
        return Loaded()

    def _complete(self, message: Complete) -> Completed:
        kind = self._imported(message.directory, message.filename)
        config = utils.ModelConfig(message.config)
        if hasattr(kind, "auto_complete_config"):
            config = kind.auto_complete_config(config)
        if not isinstance(config, utils.ModelConfig):
            name = json.loads(message.config).get("name", "")
            raise TritonModelException(
                f"auto_complete_config function in model '{name}' must return a valid pb.ModelConfig object."
            )
        return Completed(json.dumps(config.as_dict()))

    def _imported(self, directory: str, filename: str) -> Any:
        """Imports the model as Triton does: as a module of a package that is named for the version."""
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

    def _execute(self, message: Execute, buffers: Sequence[Buffer]) -> None:
        self._batch = message.number
        self._is_executing = True
        try:
            requests = _requests(message, buffers, tuple(self._datatypes))
            answers, sent = self._answers(requests, self._returned(requests))
        except BaseException as error:  # noqa: BLE001  as in `_guarded`
            self._is_executing = False
            self._channel.send(Failed(self._told(error, "execute failed")))
            return
        self._is_executing = False
        try:
            self._channel.send(Executed(answers), sent)
        except MemoryError as error:
            self._channel.send(Failed(self._told(error, "no memory for the outputs")))

    def _returned(self, requests: list[InferenceRequest]) -> list[InferenceResponse | None]:
        """Executes a batch; checks the responses as Triton does."""
        returned = self._model.execute(requests)
        if inspect.iscoroutine(returned):
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(ThreadPoolExecutor(CALLS_AT_ONCE, "call"))
            returned = self._loop.run_until_complete(returned)
        if returned is None:
            return [None] * len(requests)
        if not isinstance(returned, list):
            raise TritonModelException(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(requests):
            raise TritonModelException(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(returned)}"
            )
        for response in returned:
            if response is not None and not isinstance(response, InferenceResponse):
                raise TritonModelException(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )
        return returned

    def _answers(
        self, requests: Sequence[InferenceRequest], responses: Sequence[InferenceResponse | None]
    ) -> tuple[list[Answer], list[Bytes]]:
        answers: list[Answer] = []
        buffers: list[Bytes] = []
        for request, returned in zip(requests, responses, strict=True):
            response = returned or request.sent()
            if response is None:
                answers.append(_failed(TritonError("the model returned no response to the request")))
                continue
            error = response.error()
            if error is None:
                try:
                    wires = self._wires(request, response)
                except QinferError as refused:
                    error = TritonError(refused.message)
            if error is not None:
                answers.append(_failed(error))
                continue
            buffers.extend(wire.data for wire in wires)
            answers.append(Answer(_metas(wires), response.parameters_dict()))
        return answers, buffers

    def _wires(self, request: InferenceRequest, response: InferenceResponse) -> list[WireTensor]:
        """Returns the requested outputs."""
        wanted = request.requested_output_names()
        outputs = [tensor for tensor in response.output_tensors() if not wanted or tensor.name() in wanted]
        return [tensor.to_wire(self._datatypes.get(tensor.name())) for tensor in outputs]

    def _finalize(self) -> None:
        if hasattr(self._model, "finalize"):
            try:
                self._model.finalize()
            except BaseException as error:  # noqa: BLE001  as in `_guarded`
                self._told(error, "finalize failed")
        self._channel.send(Loaded())

    def _told(self, error: BaseException, event: str) -> str:
        """Logs the traceback; returns what a client may see: the type and text, without the path of the model."""
        services.emit("ERROR", f"{event}\n{''.join(traceback.format_exception(error.with_traceback(_models(error))))}")
        text = message_of(error)
        if self._directory:
            text = text.replace(f"{self._directory}/", "")
        return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _models(error: BaseException) -> types.TracebackType | None:
    """Returns an exception's traceback without the frames of this package before the model's."""
    frame = error.__traceback__
    while frame is not None and Path(frame.tb_frame.f_code.co_filename).parent == _HERE:
        frame = frame.tb_next
    return frame


def _requests(message: Execute, buffers: Sequence[Buffer], outputs: Sequence[str]) -> list[InferenceRequest]:
    """Cuts a batch into its requests; their tensors are views of the batch's.

    A request that names no outputs asks for all of them, and as in Triton the model sees their names.
    """
    arrays = [_array(meta, data) for meta, data in zip(message.inputs, buffers, strict=True)]
    alone = len(message.requests) == 1
    requests = []
    for item, (asked, rows, end) in enumerate(
        zip(message.requests, message.rows, accumulate(message.rows), strict=True)
    ):
        inputs = [
            _tensor(meta, array if alone else array[end - rows : end])
            for meta, array in zip(message.inputs, arrays, strict=True)
        ]
        request = InferenceRequest(
            request_id=asked.client_id,
            inputs=inputs,
            requested_output_names=asked.outputs or outputs,
            timeout=asked.timeout_us,
            trace=InferenceTrace(asked.trace) if asked.trace else None,
            parameters=dict(asked.parameters),
        )
        requests.append(request.placed(message.number, item))
    return requests


def _tensor(meta: TensorMeta, array: Array) -> Tensor:
    return Tensor(meta.name, array, "BF16" if meta.datatype == "BF16" else None)


def _array(meta: TensorMeta, data: Buffer) -> Array:
    dtype = DATATYPES[meta.datatype].numpy
    if dtype is not None:
        return data.view(dtype).reshape(meta.shape)
    if meta.datatype == "BF16" and data.nbytes == 4 * int(np.prod(meta.shape, dtype=np.int64)):
        return data.view("<f4").reshape(meta.shape)
    return to_numpy(WireTensor(meta.name, meta.datatype, meta.shape, data.data))


def _metas(wires: Sequence[WireTensor]) -> list[TensorMeta]:
    return [TensorMeta(wire.name, wire.datatype, wire.shape) for wire in wires]


def _failed(error: TritonError) -> Answer:
    return Answer([], {}, error.message(), error.code())
