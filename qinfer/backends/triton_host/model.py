"""The model of a host process whose code is a backend of Triton's: passes requests on to the core.

Each request of a batch is one request of the core, so that errors, responses and correlation IDs stay those of its
caller.
"""

import json
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from qinfer.backends.python_host.errors import GivenParameters, TritonError, TritonModelException
from qinfer.backends.python_host.inference import InferenceRequest
from qinfer.backends.python_host.responses import FINAL, InferenceResponse, InferenceResponseSender, ResponseStream
from qinfer.backends.python_host.telemetry import emit
from qinfer.backends.python_host.tensor import Tensor
from qinfer.backends.triton_host.core import Core, CoreError, CoreRequest, CoreResponse
from qinfer.backends.triton_host.metrics import BackendMetrics
from qinfer.tensors import DATATYPES
from qinfer.tensors import Tensor as WireTensor

LIBRARY, REPOSITORY, BACKENDS = "triton_library", "triton_repository", "triton_backends"
"""The arguments of `initialize` beside those of a `model.py`: paths."""


class _WireOutput(Tensor):
    """An output that stays bytes, because numpy has no type for its elements."""

    __slots__ = ("_wire",)
    _wire: WireTensor

    def to_wire(self, datatype: str | None) -> WireTensor:
        """Returns the bytes as they came."""
        del datatype
        return self._wire


class TritonPythonModel:
    """One model in Triton's core."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Starts the core and loads the model."""
        config = json.loads(args["model_config"])
        self._inputs = frozenset(each["name"] for each in config["input"])
        self._is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._has_sequences = "sequence_batching" in config
        try:
            self._core = Core(args[LIBRARY], args[REPOSITORY], args[BACKENDS], _log_failure)
            self._core.load(args["model_name"])
        except (CoreError, OSError) as error:
            # Clients read it.
            text = str(error).replace(args[REPOSITORY], "").replace(args[BACKENDS], "backends")
            raise TritonModelException(text) from None
        self._metrics = BackendMetrics(self._core.metrics)

    def execute(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse] | None:
        """Passes a batch on; waits for the responses of a model that is not decoupled."""
        if self._is_decoupled:
            for request in requests:
                self._stream(request)
            self._metrics.update()
            return None
        replies = _Replies(len(requests))
        for item, request in enumerate(requests):
            if self._is_padding(request):
                replies.take(item, CoreResponse(), True)
                continue
            try:
                self._core.start_request(self._asked(request), partial(replies.take, item))
            except CoreError as error:
                replies.take(item, CoreResponse(error=error), True)
        responses = replies.wait()
        self._metrics.update()
        return responses

    def finalize(self) -> None:
        """Unloads the model."""
        self._core.close()

    def _stream(self, request: InferenceRequest) -> None:
        sender = request.get_response_sender()
        stream = sender.responses()
        if self._is_padding(request):
            sender.send(flags=FINAL)
            return
        passing = _Passing(sender)
        try:
            number = self._core.start_request(self._asked(request), passing.take)
        except CoreError as error:
            passing.take(CoreResponse(error=error), True)
            return
        passing.cancel = partial(self._core.cancel, number)
        if isinstance(stream, ResponseStream):
            stream.on_unwanted = passing.end_unwanted
            if stream.is_unwanted:
                passing.end_unwanted()

    def _is_padding(self, request: InferenceRequest) -> bool:
        """Rows without a sequence fill a batch of sequences up; the core does that itself."""
        return self._has_sequences and not request.correlation_id()

    def _asked(self, request: InferenceRequest) -> CoreRequest:
        """Returns the core's request; control inputs and inputs made of the batch are the core's own work."""
        return CoreRequest(
            [tensor.to_wire(tensor._datatype) for tensor in request.inputs() if tensor._name in self._inputs],
            request.requested_output_names(),
            request.request_id(),
            request.parameters_dict(),
            request.correlation_id(),
            request.flags(),
            request.timeout(),
        )


class _Replies:
    """The responses of a batch, one for each request."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._open = count
        self._replies: list[InferenceResponse | None] = [None] * count

    def take(self, item: int, response: CoreResponse | None, is_final: bool) -> None:  # noqa: FBT001
        """Takes a response of the core, from any thread."""
        reply = None if response is None else _reply(response)
        with self._changed:
            if reply is not None:
                self._replies[item] = reply
            if is_final:
                self._open -= 1
                self._changed.notify()

    def wait(self) -> list[InferenceResponse]:
        """Waits for all; the worker limits the time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open)
        nothing = TritonError("the backend ended the request without a response")
        return [InferenceResponse(error=nothing) if reply is None else reply for reply in self._replies]


class _Passing:
    """Passes the responses to a decoupled request on, and a cancellation back."""

    def __init__(self, sender: InferenceResponseSender) -> None:
        self._sender = sender
        self.cancel: Callable[[], None] = lambda: None

    def take(self, response: CoreResponse | None, is_final: bool) -> None:  # noqa: FBT001
        """Sends a response of the core; waits while the caller's window is full, and so does the backend."""
        try:
            if response is not None:
                self._sender.send(_reply(response), FINAL * is_final)
            elif is_final:
                self._sender.send(flags=FINAL)
        except TritonModelException:  # the caller has left
            self.end_unwanted()

    def end_unwanted(self) -> None:
        """Tells the backend that the caller has left."""
        with suppress(CoreError):
            self.cancel()


def _reply(response: CoreResponse) -> InferenceResponse:
    if response.error is not None:
        return InferenceResponse(error=TritonError(str(response.error), response.error.code))
    outputs = [_output(tensor) for tensor in response.outputs]
    return InferenceResponse(outputs, parameters=GivenParameters(response.parameters))


def _output(tensor: WireTensor) -> Tensor:
    dtype = DATATYPES[tensor.datatype].numpy
    data: np.ndarray[Any, Any] = np.frombuffer(tensor.data, dtype or np.uint8)
    if dtype is not None:
        return Tensor.received(tensor.name, data.reshape(tensor.shape), None)
    output = _WireOutput(tensor.name, data, tensor.datatype)
    output._wire = tensor
    return output


def _log_failure(error: BaseException) -> None:
    emit("ERROR", "a response of the backend was lost", "".join(traceback.format_exception(error)))
