"""Requests as a model sees them."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from qinfer.backends.python_host.errors import GivenParameters, TritonModelException, checked_parameters, text
from qinfer.backends.python_host.messages import Execute
from qinfer.backends.python_host.responses import (
    NO_RESPONSE,
    InferenceResponse,
    InferenceResponseSender,
    ResponseStream,
    SingleReply,
)
from qinfer.backends.python_host.tensor import Array, Tensor
from qinfer.core.messages import Scalar

if TYPE_CHECKING:
    import asyncio

    from qinfer.backends.python_host.host import ModelHost

RESCHEDULE = 2
"""TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"""

_host: "ModelHost | None" = None
_making = threading.Lock()


def connect(host: "ModelHost") -> None:
    """Sets the host for calls, once."""
    global _host  # noqa: PLW0603  a model makes requests out of nothing
    _host = host


def connected() -> "ModelHost":
    """Returns the host, or raises `TritonModelException`."""
    if _host is None:
        raise TritonModelException("only the process that a worker has started for the model can ask the worker")
    return _host


class InferenceTrace:
    """A request's trace: W3C `traceparent`, then `tracestate` after a blank; `place` is its batch and position."""

    def __init__(self, context: str = "", place: tuple[int, int] = (-1, -1)) -> None:
        self._context = context
        self.place = place

    def get_context(self) -> str | None:
        """Returns the context as JSON, as Triton's OpenTelemetry mode."""
        if not self._context:
            return None
        parent, _, state = self._context.partition(" ")
        return json.dumps({"traceparent": parent, "tracestate": state} if state else {"traceparent": parent})


class PreferredMemory:
    """No effect: outputs are in host memory."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class ReceivedBatch:
    """Makes requests, and their parts on demand."""

    __slots__ = ("columns", "message", "outputs")

    def __init__(self, message: Execute, columns: Sequence[Sequence[Array]], outputs: Sequence[str]) -> None:
        self.message = message
        self.columns = columns
        self.outputs = outputs

    def requests(self, senders: Sequence[InferenceResponseSender] = ()) -> "list[InferenceRequest]":
        """Returns the requests with their senders, which end with them."""
        requests = []
        for item in range(len(self.message.ids)):
            request: InferenceRequest = object.__new__(InferenceRequest)
            request._batch, request._item = self, item
            request._inputs = None
            request._release_flags = 0
            request._reply = None
            request._sender = senders[item] if senders else None
            request.model_name, request.model_version = "", -1
            requests.append(request)
        return requests

    def inputs(self, item: int) -> list[Tensor]:
        """Returns a request's inputs."""
        return [
            Tensor.received(meta.name, column[item], "BF16" if meta.datatype == "BF16" else None)
            for meta, column in zip(self.message.inputs, self.columns, strict=True)
        ]


class RowsModel:
    """A model of qinfer's own, which may execute a batch as a whole; a `model.py` gets requests."""

    def execute_rows(self, inputs: Mapping[str, Array], rows: Sequence[int], ids: Sequence[str]) -> Any:
        """Executes the requests with these rows and server ids, whose inputs are joined; may be `async`.

        Returns the joined outputs by name, or each request's response if one of them failed; `None` = nothing was
        executed, and `execute` is to be called.
        """
        raise NotImplementedError


_LATE: dict[str, Callable[[ReceivedBatch, int], object]] = {
    "_correlation_id": lambda batch, item: batch.message.asked(item).correlation_id,
    "_flags": lambda batch, item: batch.message.asked(item).flags,
    "_outputs": lambda batch, item: list(batch.message.asked(item).outputs or batch.outputs),
    "_parameters": lambda batch, item: GivenParameters(batch.message.asked(item).parameters),
    "_place": lambda batch, item: batch.message.asked(item).goes_on or (batch.message.number, item),
    "_request_id": lambda batch, item: batch.message.asked(item).client_id,
    "_server_id": lambda batch, item: batch.message.ids[item],
    "_timeout_us": lambda batch, item: batch.message.asked(item).timeout_us,
    "_trace": lambda batch, item: InferenceTrace(batch.message.asked(item).trace, (batch.message.number, item)),
}
"""Slots that are filled on demand."""


class InferenceRequest:
    """A request that `execute` got, or that the model makes to call another.

    Args:
        request_id: The client's id.
        correlation_id: The id of the request's sequence; 0 or empty = no sequence.
        inputs: Input tensors.
        requested_output_names: The wanted outputs.
        model_name: The model to call.
        model_version: The version to call; -1 = the highest ready version.
        flags: The sum of `TRITONSERVER_REQUEST_FLAG_SEQUENCE_START` and `…_END`.
        timeout: The time limit, in microseconds; 0 = the time limit of the batch.
        preferred_memory: Ignored.
        trace: The trace of the request that the call is for; by default, of the first of the batch.
        parameters: Custom parameters.
    """

    __slots__ = (
        "_batch",
        "_correlation_id",
        "_flags",
        "_inputs",
        "_item",
        "_outputs",
        "_parameters",
        "_place",
        "_release_flags",
        "_reply",
        "_request_id",
        "_sender",
        "_server_id",
        "_timeout_us",
        "_trace",
        "model_name",
        "model_version",
    )
    _batch: ReceivedBatch
    _item: int

    def __init__(  # noqa: PLR0913, PLR0917  the parameters are Triton's
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | bytes | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: dict[str, Scalar] | None = None,
    ) -> None:
        del preferred_memory
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("an InferenceRequest needs inputs, requested_output_names and model_name")
        if not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        if isinstance(correlation_id, int) and not 0 <= correlation_id < 2**64:
            raise TypeError(f"correlation_id is a number of 64 bits, 0 or more, or a text, got {correlation_id}")
        self._request_id = text(request_id, "request_id")
        self._correlation_id = correlation_id
        self._inputs: list[Tensor] | None = list(inputs)
        of = f"for request with id '{request_id}' and model name '{model_name!s}'"
        for tensor in self._inputs or ():
            if tensor is None:
                raise TritonModelException(f"Input tensor {of} should not be empty.")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"inputs are pb_utils.Tensor objects, got {type(tensor).__name__}")
        self._outputs = [text(name, "an output's name") for name in requested_output_names]
        if "" in self._outputs:
            raise TritonModelException(f"Requested output name {of} should not be empty.")
        self.model_name = text(model_name, "model_name")
        self.model_version = int(model_version)
        self._flags = int(flags)
        self._timeout_us = int(timeout)
        if not 0 <= self._timeout_us < 2**64:
            raise TypeError(f"timeout is a number of microseconds, 0 or more, got {timeout}")
        self._trace = trace
        self._parameters = checked_parameters(parameters)
        self._release_flags = 0
        self._server_id = ""
        self._place: tuple[int, int] | None = None
        self._reply: SingleReply | None = None
        self._sender: InferenceResponseSender | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"'InferenceRequest' object has no attribute '{name}'")
        value = _LATE[name](self._batch, self._item)
        setattr(self, name, value)
        return value

    def inputs(self) -> list[Tensor]:
        """Returns the inputs of the request."""
        if self._inputs is None:
            self._inputs = self._batch.inputs(self._item)
        return self._inputs

    def request_id(self) -> str:
        """Returns the client's id; may be empty."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Returns the id of the request's sequence; 0 = no sequence."""
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        """Returns the names of the wanted outputs."""
        return self._outputs

    def parameters(self) -> str:
        """Returns the custom parameters as JSON."""
        return json.dumps(self._parameters)

    def parameters_dict(self) -> dict[str, Scalar]:
        """Returns the custom parameters; Triton has no such method."""
        return self._parameters

    def timeout(self) -> int:
        """Returns the answer's time limit, in microseconds."""
        return self._timeout_us

    def flags(self) -> int:
        """Returns START and END, summed."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Sets the sequence flags."""
        self._flags = int(flags)

    def trace(self) -> InferenceTrace:
        """Returns the trace of the request."""
        return self._trace or InferenceTrace()

    def is_cancelled(self) -> bool:
        """Asks the worker whether the request is cancelled."""
        return self._place is not None and _host is not None and _host.is_cancelled(*self._place)

    def set_release_flags(self, flags: int) -> None:
        """Sets whether `execute` answers the request, or has it executed again with a later batch.

        `flags` is `TRITONSERVER_REQUEST_RELEASE_ALL`, or `…_RESCHEDULE`, for iterative models and a `None` response.
        """
        if flags == RESCHEDULE and not (_host is not None and _host.is_iterative):
            raise TritonModelException(
                "a request can't be rescheduled: set 'sequence_batching { iterative_sequence: true }'"
            )
        self._release_flags = int(flags)

    def is_rescheduled(self) -> bool:
        """Returns whether the request runs again; Triton has no such method."""
        return self._release_flags == RESCHEDULE

    def get_response_sender(self) -> InferenceResponseSender:
        """Returns the sender of the responses to the request."""
        with _making:
            if self._sender is None:
                place = self._place
                asks = lambda: place is not None and _host is not None and _host.is_cancelled(*place)  # noqa: E731
                self._reply = SingleReply(asks, self._server_id)
                self._sender = InferenceResponseSender(self._reply)
            return self._sender

    def responses(self) -> "SingleReply | ResponseStream | None":
        """Returns the `SingleReply` or `ResponseStream` of the request's sender; Triton has no such method."""
        return None if self._sender is None else self._sender.responses()

    def reply(self) -> SingleReply:
        """Returns the single reply; Triton has no such method."""
        is_asked_for = self._sender is not None
        self.get_response_sender()
        assert self._reply is not None
        if not is_asked_for:
            self._reply.missing = NO_RESPONSE
        return self._reply

    def exec(self, decoupled: bool = False) -> "InferenceResponse | ResponseIterator":  # noqa: FBT001, FBT002  (Triton's)
        """Runs the named model; returns the response, or, if `decoupled`, an iterator."""
        if not self.model_name:
            raise TritonModelException("a request needs a model_name to be executed")
        if _host is None:
            raise TritonModelException("other models can be called within `execute` only")
        if decoupled:
            return ResponseIterator(_host, _host.open_call(self))
        return _host.call(self)

    def async_exec(
        self,
        decoupled: bool = False,  # noqa: FBT001, FBT002
    ) -> "asyncio.Future[InferenceResponse | ResponseIterator]":
        """Runs `exec` in a thread, for an `async` `execute`."""
        from asyncio import get_running_loop

        return get_running_loop().run_in_executor(None, copy_context().run, self.exec, decoupled)


class ResponseIterator:
    """The responses to a decoupled model's call; the last may be empty.

    Each is fetched on demand, so the called model is no faster than its caller. A failure is the last response.
    Dropping the iterator cancels the call. As in Triton, it can be iterated again.
    """

    def __init__(self, host: "ModelHost", call: int) -> None:
        self._host = host
        self._call = call
        self._question = call
        self._is_done = False
        self._kept: list[InferenceResponse] = []
        self._position = 0

    def __iter__(self) -> "ResponseIterator":
        if self._is_done and self._position >= len(self._kept):
            self._position = 0
        return self

    def __next__(self) -> InferenceResponse:
        response = self._next()
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self) -> "ResponseIterator":
        return iter(self)

    async def __anext__(self) -> InferenceResponse:
        from asyncio import get_running_loop

        response = await get_running_loop().run_in_executor(None, self._next)
        if response is None:
            raise StopAsyncIteration
        return response

    def cancel(self) -> None:
        """Asks the called model to end; its last response still comes."""
        if not self._is_done:
            self._host.cancel_call(self._call)

    def _next(self) -> InferenceResponse | None:
        if self._position < len(self._kept):
            self._position += 1
            return self._kept[self._position - 1]
        if self._is_done:
            return None
        # The call asks for the first itself.
        question = self._question or self._host.ask_more(self._call)
        self._question = 0
        response, self._is_done = self._host.returned(question)
        self._kept.append(response)
        self._position += 1
        return response

    def __del__(self) -> None:
        if not self._is_done:
            self._host.close_call(self._call)
