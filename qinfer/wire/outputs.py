"""Output options of a request: binary or JSON form, ranking into classes, shared memory (reference §1.6 to §1.15).

A request's parameters become an `OutputPlan`, `bind` adds the names of classes, and `prepare` executes the plan.

Each element of a ranked output is `value:index` or `value:index:label`, with the value as C++'s `std::to_string` prints
it: integers plain, floats with six decimals (reference §1.9).
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, NoReturn, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from qinfer.core.messages import Response
from qinfer.errors import InvalidRequest, OutputMismatch, QinferError, RegionUnavailable, UnsupportedFeature
from qinfer.tensors import DATATYPES, Bytes, Tensor, pack_bytes, to_numpy

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

MAX_ELEMENTS = 1_000_000
"""The most elements of a ranked row (reference §1.9)."""

_BLOCK = 2**18
_FLOATS = ("FP32", "FP64")
_CLASSIFIABLE = frozenset(d.name for d in DATATYPES.values() if d.name[:3] in ("INT", "UIN")) | frozenset(_FLOATS)


def classify(tensor: Tensor, count: int, labels: Sequence[str] = (), *, batched: bool) -> Tensor:
    """Replaces an output by its best classes: BYTES `[rows, classes]`, or `[classes]` if not batched.

    Equal values keep the order of their indices; NaN comes last.
    """
    if tensor.datatype not in _CLASSIFIABLE:
        raise InvalidRequest(f"class result not available for output due to unsupported type '{tensor.datatype}'")
    is_batched = batched and len(tensor.shape) > 0
    rows = tensor.shape[0] if is_batched else 1
    elements = prod(tensor.shape[1:] if is_batched else tensor.shape)
    if elements > MAX_ELEMENTS:
        raise InvalidRequest(
            f"classification of output '{tensor.name}' ranks at most {MAX_ELEMENTS} elements, got {elements}; "
            "ask for its values instead"
        )
    if tensor.nbytes != rows * elements * DATATYPES[tensor.datatype].itemsize:
        raise OutputMismatch(f"output tensor shape does not match size of output for '{tensor.name}'")
    kept = min(count, elements)
    texts: list[bytes] = []
    if kept:
        plain = tensor.datatype not in _FLOATS
        values = to_numpy(tensor).reshape(rows, elements)
        best = greatest(values, kept)
        ranked = zip(np.take_along_axis(values, best, 1).flat, best.flat, strict=True)
        texts = [_format_class(value.item(), int(index), labels, plain=plain) for value, index in ranked]
    shape = (rows, kept) if is_batched else (kept,)
    return Tensor(tensor.name, "BYTES", shape, pack_bytes(texts))


def greatest(values: Array, count: int) -> Indices:
    """Ranks rows, the greatest first, equal rows by index, NaN last."""
    rows, elements = values.shape
    best = np.empty((rows, count), np.int64)
    # fits the cache
    step = max(1, _BLOCK // max(elements, 1))
    for begin in range(0, rows, step):
        best[begin : begin + step] = _greatest(values[begin : begin + step], count)
    return best


def _greatest(values: Array, count: int) -> Indices:
    best: Indices
    if count == 1:
        best = values.argmax(axis=1)[:, np.newaxis]  # NaN before all
    elif count * 8 < values.shape[1]:
        best = _partitioned(values, count)
    else:
        best = _sorted(values, count)
    if values.dtype.kind == "f" and (nan := np.isnan(values).any(axis=1)).any():
        behind = np.isnan(values[nan, ::-1])
        order = np.lexsort((~behind, np.where(behind, -np.inf, values[nan, ::-1])), axis=1)
        best[nan] = values.shape[1] - 1 - order[:, ::-1][:, :count]
    return best


def _sorted(values: Array, count: int) -> Indices:
    """Returns the places of the largest values; negating would overflow unsigned integers."""
    order = values[:, ::-1].argsort(axis=1, kind="stable")[:, ::-1]
    best: Indices = values.shape[1] - 1 - order[:, :count]
    return best


def _partitioned(values: Array, count: int) -> Indices:
    """Sorts only the greatest, except rows with ties."""
    found = values.argpartition(values.shape[1] - count, axis=1)[:, -count:]
    found.sort(axis=1)
    chosen = np.take_along_axis(values, found, 1)
    best: Indices = np.take_along_axis(found, _sorted(chosen, count), 1)
    tied = (values >= chosen.min(axis=1, keepdims=True)).sum(axis=1) > count
    if tied.any():
        best[tied] = _sorted(values[tied], count)
    return best


def _format_class(value: float, index: int, labels: Sequence[str], *, plain: bool) -> bytes:
    text = f"{value}:{index}" if plain else f"{value:.6f}:{index}"
    return (f"{text}:{labels[index]}" if index < len(labels) and labels[index] else text).encode()


_NO_SHARED_MEMORY = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."


class Regions(Protocol):
    """Registered shared memory; where off, methods raise `UnsupportedFeature`."""

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        """Copies a part of a region."""
        ...

    def check(self, name: str, offset: int, byte_size: int) -> None:
        """Raises unless a region has this part."""
        ...

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Writes into a region."""
        ...


class NoRegions:
    """The `Regions` of a server or message without shared memory; methods raise the error that `refusal` makes."""

    def __init__(self, refusal: Callable[[], QinferError]) -> None:
        self._refusal = refusal

    def view(self, name: str, offset: int, byte_size: int) -> NoReturn:
        """Refuses."""
        raise self._refusal()

    check = view

    def write(self, name: str, offset: int, data: Bytes) -> NoReturn:
        """Refuses."""
        raise self._refusal()


def no_shared_memory() -> UnsupportedFeature:
    """Returns Triton's error for disabled shared memory."""
    return UnsupportedFeature(_NO_SHARED_MEMORY)


NO_REGIONS = NoRegions(no_shared_memory)


class Special(msgspec.Struct, frozen=True):
    """A ranked output or one in shared memory; unless 0, `classes` best replace its elements."""

    classes: int = 0
    region: str = ""
    offset: int = 0
    byte_size: int = 0
    labels: tuple[str, ...] = ()
    batched: bool = False


class OutputPlan(msgspec.Struct, frozen=True):
    """The form of a response's outputs.

    Attributes:
        special: Output name → ranking or shared memory; mostly `None`.
        held: The request's shared memory, kept as long as the plan.
        strict: JSON has null for NaN and infinities, not Triton's words.
    """

    binary: bool = False
    overrides: Mapping[str, bool] = {}
    special: Mapping[str, Special] | None = None
    held: object = None
    endpoint: str = ""
    strict: bool = False

    def is_binary(self, output: str) -> bool:
        """Returns whether an output travels as binary data."""
        return self.overrides.get(output, self.binary)

    @property
    def ranks(self) -> bool:
        """Whether outputs are ranked."""
        return self.special is not None and any(output.classes for output in self.special.values())


class PreparedOutputs(NamedTuple):
    """Outputs for a reply; `placed` are in shared memory."""

    outputs: tuple[Tensor, ...]
    placed: frozenset[str]


def read_special(parameters: Mapping[str, Any], regions: Regions) -> Special | None:
    """Reads an output's special treatment from checked parameters."""
    if "shared_memory_region" not in parameters:
        classes = parameters.get("classification", 0)
        return Special(classes=classes) if classes else None
    for other in ("classification", "binary_data"):
        if other in parameters and parameters[other] is not False:
            raise InvalidRequest(f"Output can't set both 'shared_memory_region' and '{other}'")
    special = Special(
        region=parameters["shared_memory_region"],
        offset=parameters.get("shared_memory_offset", 0),
        byte_size=parameters.get("shared_memory_byte_size", 0),
    )
    regions.check(special.region, special.offset, special.byte_size)
    return special


def bind(plan: OutputPlan, labels: Mapping[str, tuple[str, ...]], *, batched: bool) -> OutputPlan:
    """Completes a plan with the model's labels and batching."""
    if plan.special is None:
        return plan
    special = {
        name: msgspec.structs.replace(output, labels=labels.get(name, ()), batched=batched)
        if output.classes
        else output
        for name, output in plan.special.items()
    }
    return msgspec.structs.replace(plan, special=special)


def prepare(response: Response, plan: OutputPlan, regions: Regions) -> PreparedOutputs:
    """Ranks and places outputs by a bound plan; may be slow."""
    if plan.special is None:
        return PreparedOutputs(response.outputs, frozenset())
    outputs: list[Tensor] = []
    placed: set[str] = set()
    for tensor in response.outputs:
        special = plan.special.get(tensor.name)
        if special is not None and special.classes:
            outputs.append(classify(tensor, special.classes, special.labels, batched=special.batched))
            continue
        if special is not None:
            _place(tensor, special, regions)
            placed.add(tensor.name)
        outputs.append(tensor)
    return PreparedOutputs(tuple(outputs), frozenset(placed))


def _place(tensor: Tensor, special: Special, regions: Regions) -> None:
    nbytes = len(tensor.data)
    if nbytes > special.byte_size:
        raise RegionUnavailable(
            f"shared memory size specified with the request for output '{tensor.name}' ({special.byte_size} bytes) "
            f"should be at least {nbytes} bytes to hold the results"
        )
    regions.write(special.region, special.offset, tensor.data)
