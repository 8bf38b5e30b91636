"""The backend contract: `load`, `execute(batch, ctx)`, `unload`.

One thread at a time uses a backend instance, not always the same thread; a model has `instance_group.count` instances.
A backend knows nothing of queues: it gets assembled arrays and answers each item through `ctx`, or all of them by
`respond_rows`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from qinfer.core.messages import InferRequest, Response, Scalar
from qinfer.errors import InferenceFailed, ModelNotFound, OutputMismatch, QinferError, SequenceLost
from qinfer.models.spec import Device, ModelSpec
from qinfer.observe.exposition import ModelSeries
from qinfer.observe.host import MemoryUse
from qinfer.tensors import Bytes, Tensor, from_numpy

OTHER_ROWS = (
    "if outputs have other rows than inputs, as in a detector, write 'max_batch_size: 0' with 'input' and "
    "'output' into config.pbtxt"
)
"""The remedy for a model with a variable first dimension that is not the batch dimension."""

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


class Batch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The input of one execution.

    Attributes:
        requests: The items, in batch order.
        rows: The rows of the batch dimension of each item; all 1 when `max_batch_size` is 0.
        inputs: Name → array. With a batch dimension: the items' rows stacked, `[sum(rows), …]`. Without: the
            one item's own array. A ragged input of several items has their elements in one dimension, one item
            after the other. BYTES are object arrays of `bytes`, BF16 are float32. A model with sequences also
            gets its control inputs and its states; a row of padding is an item whose request has no inputs.
        states: Names of the state outputs, which every item returns after the outputs that it wants.
        shapes: Name → the shape of each item's tensor, for ragged inputs.
        cuts: Name → the shape of each item's part, for outputs that are not cut by rows; `respond_rows` reads
            it.
    """

    requests: Sequence[InferRequest]
    rows: Sequence[int]
    inputs: Mapping[str, Array] = {}
    states: tuple[str, ...] = ()
    shapes: Mapping[str, Sequence[Shape]] = {}
    cuts: Mapping[str, Sequence[Shape]] = {}

    @property
    def size(self) -> int:
        """All rows: Triton's batch size of the execution."""
        return sum(self.rows)


class AnsweredNotFound(ModelNotFound):
    """A called model exists, and answered with an error of Triton's code NOT_FOUND."""


class MemoryLost(SequenceLost):
    """The memory with the sequences' state was lost before it saw the batch, so that steps that begin may run again."""


class Context(Protocol):
    """Takes a backend's answers to its batch, and its calls. Items are named by their position in the batch."""

    @property
    def is_decoupled(self) -> bool:
        """Whether an item may have 0, 1 or many responses, from any thread, also after `execute` has returned."""
        ...

    @property
    def window_bytes(self) -> int:
        """The most bytes of one item's outputs on their way to its caller; 0 where responses leave as a whole."""
        ...

    def respond(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        """Answers an item: with outputs and perhaps parameters, or with an error of its own.

        A decoupled model ends an item with one final response, which may be empty. Until then it may send others, which
        leave at once; the calling thread waits while the item's window is used up. A response larger than the window
        leaves when no other response of the item is on its way.

        Raises:
            OutputMismatch: The item has its final answer already.
            Cancelled: The item's caller has left; decoupled models only.
        """
        ...

    def offer(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        """Answers an item as `respond` does, without waiting: the backend keeps to the window by `on_taken`.

        Raises:
            OutputMismatch: The item has its final answer already.
            Cancelled: The item's caller has left; decoupled models only.
        """
        ...

    def reschedule(self, item: int, states: tuple[Tensor, ...] = ()) -> None:
        """Executes an item of an iterative model again with a later batch, in place of a final answer.

        Args:
            item: The item.
            states: The item's state outputs, in the order of `Batch.states`, for the next iteration.

        Raises:
            OutputMismatch: The item has its final answer already.
            InferenceFailed: The model is not iterative.
        """
        ...

    def on_taken(self, item: int, callback: Callable[[int], None]) -> None:
        """Calls `callback` with the bytes of outputs that an item's caller has taken since the last call.

        Args:
            item: The item, of a decoupled model; other models have no window, and no calls.
            callback: Called from any thread; it must not block. The last call, with 0 bytes, comes when the item's
                caller has left (`cancelled` is true by then), or at once if its final response was sent before.
        """
        ...

    def cancelled(self, item: int) -> bool:
        """Returns whether this item's caller has left, or wants no more responses."""
        ...

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        """Runs another model through the queue, and returns its answer; blocks the calling thread until then.

        Any worker may serve the model, this one included. The deadline is the earliest of the batch's items, because
        the call may be for any of them, or `request.timeout_s` seconds from now if that is sooner. An empty `tenant` or
        `trace` is taken from the first item. Other stamps of the request (`id`, `reply_to`, `generation`, …) have no
        effect, and the request is not changed.

        A model that calls itself, directly or through others, needs another instance: a call that all instances of its
        model wait for fails at once. Every call fails during warm-up, and where the event loop executes the batch, so a
        backend with `short_on_loop` must not call.

        Args:
            request: Model, version (0 = the highest ready version), inputs, wanted outputs, parameters, priority.
            made_for: The item whose traces show the call; -1 = those of all items may.

        Returns:
            The model's final response; it has no `failure`.

        Raises:
            ModelNotFound: The model or version does not exist, or the model answered so (`AnsweredNotFound`).
            ModelNotReady: The version is known and no live worker has loaded it; or this is a warm-up.
            InvalidRequest: The request does not fit the model.
            DeadlineExceeded: The deadline passed; the request is removed from the queue.
            Cancelled: All callers of the batch have left, or the worker ends.
            BrokerUnavailable: The queue can't be reached.
            InferenceFailed: The model failed, with its own message, or is decoupled: call it by `stream`.
            QinferError: Another refusal.
        """
        ...

    def stream(self, request: InferRequest, made_for: int = -1) -> Iterator[Response]:
        """Runs another model as `call` does, and returns its responses as they come.

        The last response is `final`, and may be empty. Earlier responses may have a `failure`: a decoupled model may
        report an error and go on. The called model waits while a window of responses is not taken from the iterator.
        Forgetting or closing (`close`) the iterator before its end cancels the request. The iterator may have a method
        `cancel`, for any thread, which the called model sees by `cancelled`: its further responses still come, or
        `Cancelled` is raised if it can't be informed.

        Returns:
            An iterator for one thread at a time. It waits for the next response, and raises as `call` does when the
            request fails.

        Raises:
            QinferError: The request is refused, as by `call`.
        """
        ...


class OneResponse:
    """The part of a `Context` about streams and iterations, for models with one response per item."""

    __slots__ = ()

    @property
    def is_decoupled(self) -> bool:
        """False, because each item has exactly one response."""
        return False

    @property
    def window_bytes(self) -> int:
        """0: there is no window."""
        return 0

    def on_taken(self, item: int, callback: Callable[[int], None]) -> None:
        """Does nothing, because there is no window."""

    def respond(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        """Takes an answer; implemented by each context. See `Context.respond`."""
        raise NotImplementedError

    def offer(
        self,
        item: int,
        outputs: tuple[Tensor, ...] | QinferError,
        *,
        final: bool = True,
        parameters: Mapping[str, Scalar] | None = None,
    ) -> None:
        """Takes an answer by `respond`, which does not wait either."""
        self.respond(item, outputs, final=final, parameters=parameters)

    def reschedule(self, item: int, states: tuple[Tensor, ...] = ()) -> None:
        """Refuses: the model is not iterative."""
        del item, states
        raise InferenceFailed("a request can't be rescheduled: set 'sequence_batching { iterative_sequence: true }'")

    def call(self, request: InferRequest, made_for: int = -1) -> Response:
        """Runs another model; implemented by each context. See `Context.call`."""
        raise NotImplementedError

    def stream(self, request: InferRequest, made_for: int = -1) -> Iterator[Response]:
        """Runs another model that has one response."""
        return iter((self.call(request, made_for),))


class Backend(Protocol):
    """One model instance on one device.

    Its optional method `room` is a `Room` for the next batch. It may have four without arguments, called from any
    thread: `memory` (see `memory_of`); `metrics`, which returns the model's own metrics; `unready`, which returns why
    the model says that it is not ready, or ""; and `interrupt`, which ends the present execution with an error, and
    returns whether it did. `metrics` and `unready` never wait. Without `interrupt`, an execution beyond its time limit
    ends the worker.

    Attributes:
        short_on_loop: Executions that take well under a millisecond may run on the worker's event loop. True
            only if an execution never waits for a lock, a device, or code of the model's author. Read after
            `load`, which may set it.
    """

    short_on_loop: bool

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Loads the model file of one version onto a device; called once, before any `execute`.

        Raises:
            ModelLoadFailed: The file or a setting is wrong; the message says which.
        """
        ...

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Runs a batch and gives every item exactly one final answer; a decoupled model may answer at any later time.

        An exception fails every item without an answer, with the exception's own text for `QinferError`s. The refusal
        of a call (`RequestError`) becomes `InferenceFailed`, because the client made no mistake.
        """
        ...

    def unload(self) -> None:
        """Frees the resources of `load`."""
        ...


class Wrapper:
    """A backend or a context around another, `inner`, which has all attributes that the wrapper lacks."""

    short_on_loop: bool

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # a copy has it later
            raise AttributeError(name)
        return getattr(self.inner, name)


class ManagesModels(Protocol):
    """Loads and unloads models for a model's code: Triton's Model Loading API. Every method blocks its thread."""

    def load(self, model: str, config: str, files: Mapping[str, bytes]) -> None:
        """Loads or reloads a model; returns when it is ready.

        Args:
            model: The name of the model.
            config: A configuration in JSON; empty = the model's own configuration.
            files: `<version>/<file>` → content, in place of the files of its repository.

        Raises:
            ControlDisabled: The repository is not in explicit mode.
            QinferError: The model can't be loaded.
        """
        ...

    def unload(self, model: str, *, unload_dependents: bool) -> None:
        """Unloads a model; returns when it accepts no more requests.

        Raises:
            ControlDisabled: The repository is not in explicit mode.
            QinferError: The repository can't be reached now.
        """
        ...

    def is_ready(self, model: str, version: int) -> bool:
        """Returns whether a version of a model is ready; 0 = any.

        Raises:
            QinferError: The models can't be read now.
        """
        ...


def memory_of(backend: Backend) -> tuple[MemoryUse, ...]:
    """Returns the memory of a loaded backend, by its method `memory`; empty without one.

    The method returns a tuple of `MemoryUse`. It is called from any thread, also while the backend executes or unloads,
    and must not wait for it.
    """
    measure: Callable[[], tuple[MemoryUse, ...]] | None = getattr(backend, "memory", None)
    return () if measure is None else measure()


def metrics_of(backend: Backend) -> Sequence[ModelSeries]:
    """Returns the metrics of a loaded backend's model, by its method `metrics`; empty without one."""
    read: Callable[[], Sequence[ModelSeries]] | None = getattr(backend, "metrics", None)
    return () if read is None else read()


Room = Callable[[Sequence[int]], Sequence[npt.NDArray[np.uint8]] | None]
"""Returns memory for inputs of these sizes, or `None`."""

BackendFactory = Callable[[], Backend]


def item_shapes(batch: Batch, name: str) -> list[Shape]:
    """Returns the shape of each item's tensor of an input, with the batch dimension.

    Requests without tensors, as in warm-up, have equal rows.
    """
    array = batch.inputs[name]
    if len(batch.requests) == 1:
        return [array.shape]
    found = [next((t.shape for t in request.inputs if t.name == name), None) for request in batch.requests]
    return [(rows, *array.shape[1:]) if shape is None else shape for shape, rows in zip(found, batch.rows, strict=True)]


def respond_rows(
    batch: Batch,
    ctx: Context,
    outputs: Mapping[str, Array],
    datatypes: Mapping[str, str],
    skip: Collection[int] = (),
    names: Sequence[str] = (),
) -> None:
    """Answers every item with its rows of the outputs.

    Args:
        batch: The batch that was executed.
        ctx: The context of that batch.
        outputs: Name → array, `[batch.size, …]` for a model with a batch dimension, including states.
        datatypes: Name → wire datatype of each output and state.
        skip: Positions of items that are answered already.
        names: The default outputs of a model with states; empty = all but states.

    Raises:
        OutputMismatch: An output's first dimension is not the batch's size, or a wanted output is missing.
    """
    columns = {name: _split(name, array, batch, datatypes.get(name)) for name, array in outputs.items()}
    states = batch.states
    if not (skip or states) and not [True for request in batch.requests if request.outputs]:
        for item, tensors in enumerate(zip(*columns.values(), strict=True)):
            ctx.respond(item, tensors)
        return
    names = names or [name for name in columns if name not in states]
    chosen: dict[tuple[str, ...], tuple[list[list[Tensor]], list[str]]] = {}
    """The outputs that requests ask for → their columns, and the names that the model did not return."""
    for item, request in enumerate(batch.requests):
        if item in skip:
            continue
        if request.outputs not in chosen:
            wanted = (*(request.outputs or names), *states)
            missing = [name for name in wanted if name not in columns]
            chosen[request.outputs] = [columns[name] for name in wanted if name in columns], missing
        given, missing = chosen[request.outputs]
        if missing and not request.spares_outputs:
            raise OutputMismatch(f"the model returned no output '{missing[0]}'")
        ctx.respond(item, tuple([column[item] for column in given]))


def _split(name: str, array: Array, batch: Batch, datatype: str | None) -> list[Tensor]:
    """Returns views of one buffer, because an array per item costs microseconds."""
    narrow = datatype if datatype == "BF16" else None
    if name in batch.cuts:
        return [from_numpy(name, part, narrow) for part in cut(name, array, batch.cuts[name])]
    if len(batch.requests) == 1:
        return [from_numpy(name, array, narrow)]
    rows_of, size = batch.rows, batch.size
    if array.ndim == 0 or array.shape[0] != size:
        raise OutputMismatch(
            f"output '{name}' has shape {list(array.shape)} for a batch of {size}; its first dimension must be {size}; "
            f"{OTHER_ROWS}"
        )
    ends = list(accumulate(rows_of))
    if array.dtype.kind in "OSU":
        return [from_numpy(name, array[end - rows : end]) for rows, end in zip(rows_of, ends, strict=True)]
    return cut_rows(from_numpy(name, array, narrow), rows_of)


def cut_rows(whole: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Returns views of rows."""
    name, wire, data, tail = whole.name, whole.datatype, whole.data, whole.shape[1:]
    stride = len(data) // max(whole.shape[0], 1)
    if stride and wire != "BYTES" and rows.count(1) == len(rows):
        shape = (1, *tail)  # quick to compare
        return [Tensor(name, wire, shape, data[at : at + stride]) for at in range(0, len(rows) * stride, stride)]
    ends = (0, *accumulate(rows))
    places = [end * stride for end in ends]
    if wire == "BYTES":
        starts, each = _string_starts(data), prod(tail)
        places = [starts[end * each] for end in ends]
    return [
        Tensor(name, wire, (count, *tail), data[begin:end])
        for count, (begin, end) in zip(rows, pairwise(places), strict=True)
    ]


def _string_starts(data: Bytes) -> list[int]:
    """Returns where the elements of a BYTES tensor begin, and the end of the last one."""
    starts = [0]
    while (begin := starts[-1]) < len(data):
        starts.append(begin + 4 + int.from_bytes(data[begin : begin + 4], "little"))
    return starts


def cut(name: str, array: Array, shapes: Sequence[Shape]) -> list[Array]:
    """Cuts a tensor's elements into views."""
    ends = list(accumulate(prod(shape) for shape in shapes))
    if array.size != ends[-1]:
        raise OutputMismatch(
            f"output '{name}' has {array.size} elements; the shapes of its batch's requests make {ends[-1]}"
        )
    flat = array.reshape(-1)
    return [flat[end - prod(shape) : end].reshape(shape) for shape, end in zip(shapes, ends, strict=True)]
