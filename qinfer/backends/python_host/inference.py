"""Requests as a model sees them: those of `execute`, and its calls to other models."""

import asyncio
import json
import threading
from collections.abc import Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING

from qinfer.backends.python_host.errors import TritonModelException, checked_parameters, text
from qinfer.backends.python_host.responses import (
    NO_RESPONSE,
    InferenceResponse,
    InferenceResponseSender,
    Reply,
    Stream,
)
from qinfer.backends.python_host.tensor import Tensor
from qinfer.core.messages import Scalar

if TYPE_CHECKING:
    from qinfer.backends.python_host.host import Host

RESCHEDULE = 2
"""TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"""

_host: "Host | None" = None
_making = threading.Lock()


def connect(host: "Host") -> None:
    """Says where calls go, once."""
    global _host  # noqa: PLW0603  a model makes requests out of nothing
    _host = host


def connected() -> "Host":
    """Returns the way to the worker.

    Raises:
        TritonModelException: This is no process of a worker's model.
    """
    if _host is None:
        raise TritonModelException("only the process that a worker has started for the model can ask the worker")
    return _host


class InferenceTrace:
    """The trace of a request.

    Args:
        context: W3C `traceparent`, with its `tracestate` behind a blank; empty = it is not traced.
        place: The number of the batch that the request is in, and its position; not part of Triton's interface.

    Attributes:
        place: The same.
    """

    def __init__(self, context: str = "", place: tuple[int, int] = (-1, -1)) -> None:
        self._context = context
        self.place = place

    def get_context(self) -> str | None:
        """Returns the trace context as JSON, as Triton's OpenTelemetry mode does; `None` without one."""
        if not self._context:
            return None
        parent, _, state = self._context.partition(" ")
        return json.dumps({"traceparent": parent, "tracestate": state} if state else {"traceparent": parent})


class PreferredMemory:
    """Where a called model should leave its outputs; accepted, and without effect: they are in host memory."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceRequest:
    """A request: one that `execute` got, or one that the model makes to call another.

    Args:
        request_id: The client's id.
        correlation_id: Names the sequence that it belongs to; 0 or empty = none.
        inputs: Input tensors.
        requested_output_names: Outputs wanted.
        model_name: The model to call.
        model_version: Its version; -1 = the highest ready one.
        flags: The sum of `TRITONSERVER_REQUEST_FLAG_SEQUENCE_START` and `…_END`, as they hold.
        timeout: How long the answer is worth waiting for, in microseconds; 0 = as long as the batch may take.
        preferred_memory: Without effect.
        trace: The trace of the request that a call is made for; without it, that of the first request of the batch.
        parameters: Custom parameters.
    """

    __slots__ = (
        "_correlation_id",
        "_flags",
        "_inputs",
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
        self._inputs = list(inputs)
        of = f"for request with id '{request_id}' and model name '{model_name!s}'"
        for tensor in self._inputs:
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
        self._reply: Reply | None = None
        self._sender: InferenceResponseSender | None = None

    def placed(
        self, place: tuple[int, int], server_id: str, sender: InferenceResponseSender | None, trace: InferenceTrace
    ) -> "InferenceRequest":
        """Notes its place in a batch, its trace, and what sends responses of a decoupled model; returns itself.

        Such a sender is there before it is asked for: dropping the request without asking abandons it.
        """
        self._place, self._server_id, self._sender, self._trace = place, server_id, sender, trace
        return self

    def inputs(self) -> list[Tensor]:
        """Returns its inputs."""
        return self._inputs

    def request_id(self) -> str:
        """Returns the client's id; may be empty."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Returns what names its sequence; 0 = it has none, or is a row of padding."""
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        """Returns the names of the outputs wanted."""
        return self._outputs

    def parameters(self) -> str:
        """Returns the custom parameters as JSON."""
        return json.dumps(self._parameters)

    def parameters_dict(self) -> dict[str, Scalar]:
        """Returns the custom parameters; not part of Triton's interface."""
        return self._parameters

    def timeout(self) -> int:
        """Returns how long the answer is worth waiting for, in microseconds."""
        return self._timeout_us

    def flags(self) -> int:
        """Returns the sequence flags: the sum of START and END, as they hold."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Sets the sequence flags."""
        self._flags = int(flags)

    def trace(self) -> InferenceTrace:
        """Returns its trace."""
        return self._trace or InferenceTrace()

    def is_cancelled(self) -> bool:
        """Returns whether the request is cancelled; asks the worker each time."""
        return self._place is not None and _host is not None and _host.is_cancelled(*self._place)

    def set_release_flags(self, flags: int) -> None:
        """Says how `execute` leaves the request: with a response, or to be executed again with a later batch.

        Args:
            flags: `TRITONSERVER_REQUEST_RELEASE_ALL`, or `…_RESCHEDULE`, whose response has to be `None`.

        Raises:
            TritonModelException: The flags ask for another execution, and the model is not iterative.
        """
        if flags == RESCHEDULE and not (_host is not None and _host.is_iterative):
            raise TritonModelException(
                "a request can't be rescheduled: set 'sequence_batching { iterative_sequence: true }'"
            )
        self._release_flags = int(flags)

    def is_rescheduled(self) -> bool:
        """Tells whether it has to be executed again; not part of Triton's interface."""
        return self._release_flags == RESCHEDULE

    def get_response_sender(self) -> InferenceResponseSender:
        """Returns the sender of its responses."""
        with _making:
            if self._sender is None:
                place = self._place
                asks = lambda: place is not None and _host is not None and _host.is_cancelled(*place)  # noqa: E731
                self._reply = Reply(asks, self._server_id)
                self._sender = InferenceResponseSender(self._reply)
            return self._sender

    def responses(self) -> "Reply | Stream | None":
        """Returns what takes its responses, where it has a sender; not part of Triton's interface."""
        return None if self._sender is None else self._sender.responses()

    def reply(self) -> Reply:
        """Returns what the sender of a model that is not decoupled has filled, or will; not part of Triton's interface.

        A thread or task may ask for the sender only later, for as long as the model has the request.
        """
        is_asked_for = self._sender is not None
        self.get_response_sender()
        assert self._reply is not None
        if not is_asked_for:
            self._reply.missing = NO_RESPONSE
        return self._reply

    def exec(self, decoupled: bool = False) -> "InferenceResponse | ResponseIterator":  # noqa: FBT001, FBT002  (Triton's)
        """Runs the model that it names.

        Args:
            decoupled: The model may give any number of responses.

        Returns:
            The response, after waiting for it; of a decoupled model at once an iterator over its responses.

        Raises:
            TritonModelException: This is not within `execute`, nor has the model open streams.
        """
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
        """Does the same in a thread, for an `async` `execute`: several calls run at once."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(None, copy_context().run, self.exec, decoupled)


class ResponseIterator:
    """The responses to a call of a decoupled model, in order: `for` and `async for`. The last one may be empty.

    The next response is fetched when the model asks for it, so that the called model is no faster than its caller. A
    failure of the call is the last response. Dropping the iterator cancels the call. After the end it can be run
    through again, as Triton's: it keeps the responses.

    Args:
        host: The way to the worker.
        call: The number of the call.
    """

    def __init__(self, host: "Host", call: int) -> None:
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
        response = await asyncio.get_running_loop().run_in_executor(None, self._next)
        if response is None:
            raise StopAsyncIteration
        return response

    def cancel(self) -> None:
        """Asks the called model to end; the iterator goes on to its last response, which may be the error CANCELLED."""
        if not self._is_done:
            self._host.cancel_call(self._call)

    def _next(self) -> InferenceResponse | None:
        if self._position < len(self._kept):
            self._position += 1
            return self._kept[self._position - 1]
        if self._is_done:
            return None
        # The call asks for its first response itself.
        question = self._question or self._host.ask_more(self._call)
        self._question = 0
        response, self._is_done = self._host.returned(question)
        self._kept.append(response)
        self._position += 1
        return response

    def __del__(self) -> None:
        if not self._is_done:
            self._host.close_call(self._call)
