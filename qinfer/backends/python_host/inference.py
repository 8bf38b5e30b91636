"""Requests and responses as a model sees them: of `execute`, and of its calls to other models."""

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qinfer.backends.python_host.errors import TritonError, TritonModelException, checked_parameters, text
from qinfer.backends.python_host.tensor import Tensor
from qinfer.core.messages import Scalar

if TYPE_CHECKING:
    from qinfer.backends.python_host.host import Host

FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL
_RESCHEDULE = 2  # TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


_host: "Host | None" = None


def connect(host: "Host") -> None:
    """Says where calls go, once."""
    global _host  # noqa: PLW0603  a model makes requests out of nothing
    _host = host


class InferenceTrace:
    """The trace of a request.

    Args:
        context: W3C `traceparent`; empty = it is not traced.
    """

    def __init__(self, context: str = "") -> None:
        self._context = context

    def get_context(self) -> str | None:
        """Returns the trace context as JSON, as Triton's OpenTelemetry mode does; `None` without one."""
        return json.dumps({"traceparent": self._context}) if self._context else None


class PreferredMemory:
    """Where a called model should leave its outputs; accepted, and without effect: they are in host memory."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceResponse:
    """A response.

    Args:
        output_tensors: Its outputs.
        error: Why there are none.
        parameters: What the model says besides; bools, ints, floats and strings.

    Raises:
        TritonModelException: A parameter is of another type.
        TypeError: An output is no `Tensor`, or the error no `TritonError`.
    """

    __slots__ = ("_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Scalar] | None = None,
    ) -> None:
        outputs = list(output_tensors)
        for tensor in outputs:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"output_tensors are pb_utils.Tensor objects, got {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"error is a pb_utils.TritonError, got {type(error).__name__}")
        self._outputs = outputs
        self._error = error
        self._parameters = checked_parameters(parameters)

    def output_tensors(self) -> list[Tensor]:
        """Returns its outputs."""
        return self._outputs

    def has_error(self) -> bool:
        """Tells whether it is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Returns the error."""
        return self._error

    def parameters(self) -> str:
        """Returns the parameters as JSON."""
        return json.dumps(self._parameters)

    def parameters_dict(self) -> dict[str, Scalar]:
        """Returns the parameters; not part of Triton's interface."""
        return self._parameters


class InferenceResponseSender:
    """Answers a request before `execute` returns `None` for it: with one final response."""

    def __init__(self) -> None:
        self.response: InferenceResponse | None = None
        self._is_closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Takes the response.

        Raises:
            TritonModelException: It is not one final response: only decoupled models, which are not supported, send
                none or several.
        """
        if flags not in (0, FINAL):
            raise TritonModelException(f"Unable to send response. Unsupported flag: {flags}")
        if self._is_closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if response is not None:
            if self.response is not None:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
            self.response = response
        elif self.response is None:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )
        self._is_closed = flags == FINAL

    def is_cancelled(self) -> bool:
        """Returns false: the request is not cancelled."""
        return False


class InferenceRequest:
    """A request: one that `execute` got, or one that the model makes to call another.

    Args:
        request_id: The client's id.
        correlation_id: Names a sequence; sequences are not supported, so 0.
        inputs: Input tensors.
        requested_output_names: Outputs wanted.
        model_name: The model to call.
        model_version: Its version; -1 = the highest ready one.
        flags: Without effect.
        timeout: How long the answer is worth waiting for, in microseconds; 0 = as long as the batch may take.
        preferred_memory: Without effect.
        trace: Without effect: a call is part of the trace of the first request of the batch.
        parameters: Custom parameters.
    """

    __slots__ = (
        "_correlation_id",
        "_flags",
        "_inputs",
        "_outputs",
        "_parameters",
        "_place",
        "_request_id",
        "_sender",
        "_timeout_us",
        "_trace",
        "model_name",
        "model_version",
    )

    def __init__(  # noqa: PLR0913, PLR0917  the parameters are Triton's
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str | bytes = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: dict[str, Scalar] | None = None,
    ) -> None:
        del preferred_memory
        if not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        self._request_id = text(request_id, "request_id")
        self._correlation_id = correlation_id
        self._inputs = list(inputs)
        for tensor in self._inputs:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"inputs are pb_utils.Tensor objects, got {type(tensor).__name__}")
        self._outputs = [text(name, "an output's name") for name in requested_output_names]
        self.model_name = text(model_name, "model_name")
        self.model_version = int(model_version)
        self._flags = int(flags)
        self._timeout_us = int(timeout)
        if not 0 <= self._timeout_us < 2**64:
            raise TypeError(f"timeout is a number of microseconds, 0 or more, got {timeout}")
        self._trace = trace
        self._parameters = checked_parameters(parameters)
        self._place: tuple[int, int] | None = None
        self._sender: InferenceResponseSender | None = None

    def placed(self, batch: int, item: int) -> "InferenceRequest":
        """Notes that it is an item of a batch; returns itself."""
        self._place = (batch, item)
        return self

    def inputs(self) -> list[Tensor]:
        """Returns its inputs."""
        return self._inputs

    def request_id(self) -> str:
        """Returns the client's id; may be empty."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Returns 0."""
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
        """Returns the sequence flags: 0."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Sets the sequence flags, which have no effect."""
        self._flags = int(flags)

    def trace(self) -> InferenceTrace:
        """Returns its trace."""
        return self._trace or InferenceTrace()

    def is_cancelled(self) -> bool:
        """Returns whether the request is cancelled; asks the worker each time."""
        return self._place is not None and _host is not None and _host.is_cancelled(*self._place)

    def set_release_flags(self, flags: int) -> None:
        """Refuses to reschedule.

        Raises:
            TritonModelException: The flags ask for it.
        """
        if flags == _RESCHEDULE:
            raise TritonModelException("a request can't be rescheduled: iterative sequences are not supported")

    def get_response_sender(self) -> InferenceResponseSender:
        """Returns the sender of its one response."""
        if self._sender is None:
            self._sender = InferenceResponseSender()
        return self._sender

    def sent(self) -> InferenceResponse | None:
        """Returns the argument of the sender; not part of Triton's interface."""
        return None if self._sender is None else self._sender.response

    def exec(self, decoupled: bool = False) -> InferenceResponse:  # noqa: FBT001, FBT002  (Triton's parameter)
        """Runs the model that it names, and waits for the response.

        Raises:
            TritonModelException: `decoupled` is set, or this is not within `execute`.
        """
        if decoupled:
            raise TritonModelException("calls to decoupled models are not supported; call without decoupled=True")
        if not self.model_name:
            raise TritonModelException("a request needs a model_name to be executed")
        if _host is None:
            raise TritonModelException("other models can be called within `execute` only")
        return _host.call(self)

    def async_exec(self, decoupled: bool = False) -> "asyncio.Future[InferenceResponse]":  # noqa: FBT001, FBT002
        """Does the same in a thread, for an `async` `execute`: several calls run at once."""
        return asyncio.get_running_loop().run_in_executor(None, self.exec, decoupled)
