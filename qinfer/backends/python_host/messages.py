"""The messages between worker and host process, as msgpack; tensors' bytes follow as buffers, in order."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from qinfer.core.messages import Scalar

SEQUENCE_START, SEQUENCE_END = 1, 2
"""The flags of a sequence's request: TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, …_END."""


class TensorMeta(msgspec.Struct, array_like=True, frozen=True):
    """A tensor of the buffer at its position; BF16 inputs are float32."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class LoadModel(msgspec.Struct, array_like=True, tag=True):
    """To the host: import a model file, and call `initialize(args)`.

    `adapter` is a module of qinfer with the class `TritonPythonModel`, in place of the file.
    """

    directory: str
    filename: str
    args: Mapping[str, str]
    adapter: str = ""


class ModelLoaded(msgspec.Struct, array_like=True, tag=True):
    """To the worker: the model is initialised, or finalised."""

    has_is_ready: bool = False


class Complete(msgspec.Struct, array_like=True, tag=True):
    """To the host: import the model, complete its configuration (JSON)."""

    directory: str
    filename: str
    config: str


class CompletedConfig(msgspec.Struct, array_like=True, tag=True):
    """To the worker: the completed configuration as JSON."""

    config: str


class LoadFramework(msgspec.Struct, array_like=True, tag=True):
    """To the host: load a version's file by an adapter of `qinfer.backends.frameworks`.

    Attributes:
        path: The model's file or directory.
        inputs: The configured tensors with the shapes of the file; empty = the configuration is to be completed.
        outputs: Likewise.
        graph_level: `optimization.graph.level`; `None` = the default.
    """

    framework: str
    model: str
    path: str
    parameters: Mapping[str, str]
    threads: int
    inputs: list[TensorMeta] = []
    outputs: list[TensorMeta] = []
    max_batch_size: int = 0
    graph_level: int | None = None


class DeclaredTensor(msgspec.Struct, array_like=True, frozen=True):
    """An input or output of a file; dims include the batch dimension; -1 is variable, `None` = even their number is.

    `others` are further datatypes that the adapter converts from and to.
    """

    name: str
    datatype: str
    dims: tuple[int, ...] | None
    others: tuple[str, ...] = ()


class FrameworkLoaded(msgspec.Struct, array_like=True, tag=True):
    """To the worker: the file is loaded, and has these tensors."""

    inputs: list[DeclaredTensor]
    outputs: list[DeclaredTensor]


class EnvironmentReady(msgspec.Struct, array_like=True, tag=True):
    """To the worker, first: the environment is ready."""


class HostFailure(msgspec.Struct, array_like=True, tag=True):
    """To the worker: the command raised an exception of this type and text; `missing` could not be imported."""

    message: str
    missing: str = ""


class HostRequest(msgspec.Struct, array_like=True, frozen=True):
    """One request of a batch.

    Attributes:
        outputs: The names of the wanted outputs; empty = all outputs.
        correlation_id: The correlation ID of the request's sequence; 0 = no sequence.
        flags: `SEQUENCE_START`, `SEQUENCE_END`, both, or 0.
        goes_on: Batch and item of the first execution, whose stream continues; `None` = a new stream.
    """

    client_id: str
    outputs: tuple[str, ...]
    parameters: Mapping[str, Scalar]
    timeout_us: int
    trace: str
    correlation_id: int | str = 0
    flags: int = 0
    goes_on: tuple[int, int] | None = None


class Execute(msgspec.Struct, array_like=True, tag=True):
    """To the host: execute a batch.

    Attributes:
        requests: One for all if they are equal.
        window_bytes: The most bytes of a request's responses on their way; 0 = unlimited.
        shapes: Position of a ragged input → each request's shape.
    """

    number: int
    inputs: list[TensorMeta]
    rows: list[int]
    ids: list[str]
    requests: list[HostRequest]
    window_bytes: int = 0
    shapes: Mapping[int, Sequence[tuple[int, ...]]] = {}

    def asked(self, item: int) -> HostRequest:
        """Returns a request."""
        return self.requests[item if len(self.requests) > 1 else 0]


class HostAnswer(msgspec.Struct, array_like=True, frozen=True):
    """The response to one request, whose tensors are the next buffers."""

    outputs: list[TensorMeta]
    parameters: Mapping[str, Scalar]
    error: str | None = None
    code: int = 0
    rescheduled: bool = False


class ExecutedAnswers(msgspec.Struct, array_like=True, tag=True):
    """To the worker: `execute` has ended; a decoupled model sends `StreamedResponse`."""

    answers: list[HostAnswer]


class ExecutedRows(msgspec.Struct, array_like=True, tag=True):
    """To the worker: the outputs of all answers, which have `rows`."""

    outputs: list[TensorMeta]
    rows: list[int]


class StreamedResponse(msgspec.Struct, array_like=True, tag=True):
    """To the worker: a decoupled model's response, perhaps after `ExecutedAnswers`."""

    batch: int
    item: int
    answer: HostAnswer
    final: bool


class AwaitTaken(msgspec.Struct, array_like=True, tag=True):
    """To the worker: reply `TakenAnswer` after `taken_bytes`."""

    number: int
    batch: int
    item: int
    taken_bytes: int


class TakenAnswer(msgspec.Struct, array_like=True, tag=True):
    """To the host: the answer to `AwaitTaken`."""

    number: int
    taken_bytes: int
    cancelled: bool = False


class CallerLeft(msgspec.Struct, array_like=True, tag=True):
    """To the host: a request's caller has left."""

    batch: int
    item: int


class HostCall(msgspec.Struct, array_like=True, tag=True):
    """To the worker: run another model.

    Attributes:
        version: The version to run; 0 = the highest ready version.
        timeout_us: The time limit, in microseconds; 0 = the time limit of the batch.
        streams: `More` asks for each response but the first.
        made_for: The position of the request whose trace the call has; -1 = none.
    """

    number: int
    batch: int
    model: str
    version: int
    inputs: list[TensorMeta]
    outputs: tuple[str, ...]
    parameters: Mapping[str, Scalar]
    client_id: str
    timeout_us: int
    streams: bool = False
    correlation_id: int | str = 0
    flags: int = 0
    made_for: int = -1


class More(msgspec.Struct, array_like=True, tag=True):
    """To the worker: return a streaming call's next response."""

    number: int
    call: int


class Close(msgspec.Struct, array_like=True, tag=True):
    """To the worker: end a streaming call; unless `is_dropped`, responses that still come are taken."""

    call: int
    is_dropped: bool = True


class CallReturned(msgspec.Struct, array_like=True, tag=True):
    """To the host: a response to a call."""

    number: int
    answer: HostAnswer
    is_last: bool = True


class Manage(msgspec.Struct, array_like=True, tag=True):
    """To the worker: load or unload a model, or return whether it is ready.

    Attributes:
        version: The version that must be ready; 0 = any version.
        config: The configuration in JSON; empty = the model's own configuration.
        files: `<version>/<file>`; the buffers are their contents.
        unload_dependents: Also unload models that only this ensemble uses.
    """

    action: Literal["load", "unload", "ready"]
    model: str
    version: int = 0
    config: str = ""
    files: list[str] = []
    unload_dependents: bool = False
    number: int = 0


class ManageReply(msgspec.Struct, array_like=True, tag=True):
    """To the host: the answer to `Manage`."""

    number: int
    is_ready: bool = False
    error: str = ""


class IsCancelled(msgspec.Struct, array_like=True, tag=True):
    """To the worker: has a request's caller left?"""

    number: int
    batch: int
    item: int


class CancelledAnswer(msgspec.Struct, array_like=True, tag=True):
    """To the host: the answer to `IsCancelled`."""

    number: int
    cancelled: bool


class Finalize(msgspec.Struct, array_like=True, tag=True):
    """To the host: finalise the model and exit."""


Message = (
    LoadModel
    | ModelLoaded
    | Complete
    | CompletedConfig
    | LoadFramework
    | FrameworkLoaded
    | EnvironmentReady
    | HostFailure
    | Execute
    | ExecutedAnswers
    | ExecutedRows
    | StreamedResponse
    | AwaitTaken
    | TakenAnswer
    | CallerLeft
    | HostCall
    | More
    | Close
    | CallReturned
    | Manage
    | ManageReply
    | IsCancelled
    | CancelledAnswer
    | Finalize
)
