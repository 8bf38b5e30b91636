"""The messages between worker and host process, as msgpack; the tensors' bytes follow as buffers, in the same order."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from qinfer.core.messages import Scalar

SEQUENCE_START, SEQUENCE_END = 1, 2
"""The flags of a request of a sequence: TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, …_END."""


class TensorMeta(msgspec.Struct, array_like=True, frozen=True):
    """A tensor whose bytes are the buffer at the same position.

    Attributes:
        name: Its name.
        datatype: Its wire datatype. A batch's BF16 inputs come as float32, which numpy can hold.
        shape: All its dimensions.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


class Load(msgspec.Struct, array_like=True, tag=True):
    """To the host: import the model and initialise it.

    Attributes:
        directory: The version's directory.
        filename: The file in it, such as `model.py`.
        args: What `initialize` is given.
    """

    directory: str
    filename: str
    args: Mapping[str, str]


class Loaded(msgspec.Struct, array_like=True, tag=True):
    """To the worker: the model is initialised, or finalised.

    Attributes:
        has_is_ready: The model has a method `is_ready`, which the process answers for; see `readiness`.
    """

    has_is_ready: bool = False


class Complete(msgspec.Struct, array_like=True, tag=True):
    """To the host: import the model and have it complete its configuration.

    Attributes:
        directory: As in `Load`.
        filename: As in `Load`.
        config: The configuration as JSON.
    """

    directory: str
    filename: str
    config: str


class Completed(msgspec.Struct, array_like=True, tag=True):
    """To the worker: the completed configuration as JSON."""

    config: str


class EnvironmentReady(msgspec.Struct, array_like=True, tag=True):
    """To the worker, before anything else: the model's own environment is there, and its Python starts."""


class Failed(msgspec.Struct, array_like=True, tag=True):
    """To the worker: the command raised an exception; the traceback is in the log.

    Attributes:
        message: The exception's type and text.
        missing: The module that could not be imported, if that was it.
    """

    message: str
    missing: str = ""


class Asked(msgspec.Struct, array_like=True, frozen=True):
    """One request of a batch.

    Attributes:
        client_id: The id that the client gave.
        outputs: Names of the outputs wanted; empty = all.
        parameters: Custom parameters.
        timeout_us: How long the answer is worth waiting for, in microseconds.
        trace: W3C `traceparent`.
        correlation_id: Names its sequence; 0 = it has none, or is a row of padding.
        flags: `SEQUENCE_START`, `SEQUENCE_END`, both, or 0.
        request_id: The server's id of it.
        goes_on: Batch and item of an earlier execution of it, whose stream goes on; `None` = it has one of its own.
    """

    client_id: str
    outputs: tuple[str, ...]
    parameters: Mapping[str, Scalar]
    timeout_us: int
    trace: str
    correlation_id: int | str = 0
    flags: int = 0
    request_id: str = ""
    goes_on: tuple[int, int] | None = None


class Execute(msgspec.Struct, array_like=True, tag=True):
    """To the host: execute a batch.

    Attributes:
        number: Counts the batches of this process.
        inputs: The batch's inputs, their rows stacked.
        rows: Rows of each request.
        requests: The requests.
        window_bytes: Bytes of responses to one request that may be on their way; 0 = any number.
        shapes: Position of an input → the shape of each request's tensor, of ragged inputs: their elements follow one
            another.
    """

    number: int
    inputs: list[TensorMeta]
    rows: list[int]
    requests: list[Asked]
    window_bytes: int = 0
    shapes: Mapping[int, Sequence[tuple[int, ...]]] = {}


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """The response to one request of a batch.

    Attributes:
        outputs: Its tensors; their bytes are the message's next buffers.
        parameters: What the model says besides.
        error: Why there are no outputs; `None` = there are.
        code: Triton's number of the kind of error.
        rescheduled: There is no response yet: the request is to be executed again with a later batch.
    """

    outputs: list[TensorMeta]
    parameters: Mapping[str, Scalar]
    error: str | None = None
    code: int = 0
    rescheduled: bool = False


class Executed(msgspec.Struct, array_like=True, tag=True):
    """To the worker: `execute` has ended.

    Attributes:
        answers: The batch's answers, in order; none if the model is decoupled, whose answers are `Sent`.
    """

    answers: list[Answer]


class Sent(msgspec.Struct, array_like=True, tag=True):
    """To the worker: a response of a decoupled model; it may come after `Executed`.

    Attributes:
        batch: The batch of the request.
        item: The request's position in it.
        answer: The response; without outputs, parameters and error if the final flag came alone.
        final: Whether it is the last one.
    """

    batch: int
    item: int
    answer: Answer
    final: bool


class AwaitTaken(msgspec.Struct, array_like=True, tag=True):
    """To the worker: say when so much of the responses to a request of a decoupled model has been taken.

    Attributes:
        number: Names the question in its `Taken`.
        batch: The batch of the request.
        item: The request's position in it.
        taken_bytes: How many bytes the caller must have taken, of all responses to the request together.
    """

    number: int
    batch: int
    item: int
    taken_bytes: int


class Taken(msgspec.Struct, array_like=True, tag=True):
    """To the host: the answer to `AwaitTaken`.

    Attributes:
        number: The question's.
        taken_bytes: How many bytes have been taken by now.
        cancelled: Nobody will take more.
    """

    number: int
    taken_bytes: int
    cancelled: bool = False


class Unwanted(msgspec.Struct, array_like=True, tag=True):
    """To the host: nobody waits for the responses to a request any more; sent when one has come all the same."""

    batch: int
    item: int


class Call(msgspec.Struct, array_like=True, tag=True):
    """To the worker: run another model.

    Attributes:
        number: Names the call in its `Returned`.
        batch: The batch that makes it.
        model: The model to run.
        version: Its version; 0 = the highest ready one.
        inputs: Its inputs.
        outputs: Names of the outputs wanted.
        parameters: Custom parameters.
        client_id: The id that the caller gives the request.
        timeout_us: How long to wait at most; 0 = as long as the batch may.
        streams: The model may give any number of responses. This asks for the first of them, `More` for each other.
        correlation_id: Names the sequence that the call is a request of; 0 = it has none.
        flags: As in `Asked`.
        made_for: The position in the batch of the request whose trace the call has; -1 = it has none.
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
    """To the worker: the next response to a call that streams.

    Attributes:
        number: Names the question in its `Returned`.
        call: The number of the call.
    """

    number: int
    call: int


class Close(msgspec.Struct, array_like=True, tag=True):
    """To the worker: no more responses to a call that streams are wanted.

    Attributes:
        call: The number of the call.
        is_dropped: Its iterator is gone. Else the called model is told, and its responses are still asked for.
    """

    call: int
    is_dropped: bool = True


class Returned(msgspec.Struct, array_like=True, tag=True):
    """To the host: the outcome of a call, or the next response to one that streams.

    Attributes:
        number: The number of the `Call` or `More`.
        answer: The response.
        is_last: Whether no other follows.
    """

    number: int
    answer: Answer
    is_last: bool = True


class Manage(msgspec.Struct, array_like=True, tag=True):
    """To the worker: load or unload a model, or say whether one is ready.

    Attributes:
        action: Which of these.
        model: The model.
        version: The version that may be ready; 0 = any.
        config: The configuration in JSON to load it with; empty = its own.
        files: Names of the files to load it with, `<version>/<file>`; their contents are the message's buffers.
        unload_dependents: Unload the models too that only this ensemble uses.
        number: Names the question in its `Managed`.
    """

    action: Literal["load", "unload", "ready"]
    model: str
    version: int = 0
    config: str = ""
    files: list[str] = []
    unload_dependents: bool = False
    number: int = 0


class Managed(msgspec.Struct, array_like=True, tag=True):
    """To the host: the answer to `Manage`.

    Attributes:
        number: The question's.
        is_ready: Whether the model is ready, where that was asked.
        error: Why it was not done; empty = it was.
    """

    number: int
    is_ready: bool = False
    error: str = ""


class IsCancelled(msgspec.Struct, array_like=True, tag=True):
    """To the worker: does anybody still wait for this request of the batch?"""

    number: int
    batch: int
    item: int


class Cancelled(msgspec.Struct, array_like=True, tag=True):
    """To the host: the answer to `IsCancelled`."""

    number: int
    cancelled: bool


class Finalize(msgspec.Struct, array_like=True, tag=True):
    """To the host: finalise the model and exit."""


Message = (
    Load
    | Loaded
    | Complete
    | Completed
    | EnvironmentReady
    | Failed
    | Execute
    | Executed
    | Sent
    | AwaitTaken
    | Taken
    | Unwanted
    | Call
    | More
    | Close
    | Returned
    | Manage
    | Managed
    | IsCancelled
    | Cancelled
    | Finalize
)
