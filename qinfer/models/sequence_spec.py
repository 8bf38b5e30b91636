"""`SequenceSpec`: a model's `sequence_batching`, made by `config.sequences`, and the check of a request against it.

Defaults, checks and texts are Triton's (reference §3.4; core `src/model_config_utils.cc`,
`src/sequence_batch_scheduler/`).
"""

from collections import abc
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from qinfer.core.messages import MAX_SEQUENCE_ID_BYTES, InferRequest, SequenceFlags
from qinfer.errors import InvalidRequest, InvalidStep, ModelLoadFailed
from qinfer.tensors import Tensor, datatype, element_count, pack_bytes


class ControlKind(StrEnum):
    """The meaning of a control input, named as in `config.pbtxt`."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    CORRID = "CONTROL_SEQUENCE_CORRID"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSpec:
    """An input that the server fills: `true` where START, READY or END holds, else `false`; or the correlation ID."""

    name: str
    kind: ControlKind
    datatype: str
    false: float = 0
    true: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """An implicit state: an input that gets an output of the previous step.

    Attributes:
        initial_dims: The dimensions in the first step: those of `initial_state`, else `dims` with 1 for each -1.
        file: The file with the bytes of one row, in the model's directory `initial_state`; empty = zeros.
    """

    input: str
    output: str
    datatype: str
    dims: tuple[int, ...]
    initial_dims: tuple[int, ...]
    file: str = ""
    same_buffer: bool = False
    growable: bool = False

    def initial(self, content: bytes | None, *, batched: bool) -> Tensor:
        """Returns the first row of `content`, or zeros (for BYTES empty elements), or raises `ModelLoadFailed`."""
        count, itemsize = element_count(self.initial_dims), datatype(self.datatype).itemsize
        shape = (1, *self.initial_dims) if batched else self.initial_dims
        if content is None:
            zeros = bytes(count * itemsize) if itemsize else pack_bytes([b""] * count)
            return Tensor(self.input, self.datatype, shape, zeros)
        if itemsize == 0:
            return Tensor(self.input, self.datatype, shape, content)
        if len(content) < count * itemsize:
            raise ModelLoadFailed(
                f"initial_state setting expects {count * itemsize} bytes, but the data provided from {self.file} only "
                f"has {len(content)} bytes."
            )
        return Tensor(self.input, self.datatype, shape, content[: count * itemsize])


class DirectSpec(msgspec.Struct, frozen=True, kw_only=True, tag="direct"):
    """The strategy `direct`: each sequence has its own row of the batch.

    Attributes:
        minimum_rows: Rows that must have a request before a batch leaves (`minimum_slot_utilization`).
    """

    minimum_rows: int = 0
    max_queue_delay_s: float = 0.0


class OldestSpec(msgspec.Struct, frozen=True, kw_only=True, tag="oldest"):
    """The strategy `oldest`: a dynamic batcher merges the next requests of the sequences.

    An instance keeps the order without `preserve_ordering`, too.
    """

    preferred_sizes: tuple[int, ...]
    max_queue_delay_s: float = 0.0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """The `sequence_batching` part of a configuration (reference §3.4).

    Attributes:
        max_rows: The most rows of a batch; 1 without a batch dimension.
        iterative: Each request is a sequence, which executes until the model says that it is done.
        of_steps: The sequences of an ensemble's steps keep the state.
    """

    strategy: DirectSpec | OldestSpec
    slots: int
    max_rows: int
    max_idle_s: float = 1.0
    controls: tuple[ControlSpec, ...] = ()
    states: tuple[StateSpec, ...] = ()
    iterative: bool = False
    of_steps: bool = False

    @property
    def is_explicit(self) -> bool:
        """Tells whether the model's memory has the state."""
        return not (self.states or self.of_steps)

    @property
    def told_bits(self) -> int:
        """The bits of the model's sequence numbers; 0 = text."""
        corrid = self.control(ControlKind.CORRID)
        return 64 if corrid is None else 8 * datatype(corrid.datatype).itemsize

    def control(self, kind: ControlKind) -> ControlSpec | None:
        """Returns the control input of a kind, if any."""
        return next((control for control in self.controls if control.kind is kind), None)


MAX_ENSEMBLE_SEQUENCES = 1000
"""The most sequences of an ensemble version in one worker."""


def of_ensemble(steps: abc.Sequence[SequenceSpec]) -> SequenceSpec | None:
    """Returns the sequences of an ensemble; iterative steps do not count."""
    kept = [step for step in steps if not step.iterative]
    if not kept:
        return None
    ids = [control for step in kept for control in step.controls if control.kind is ControlKind.CORRID]
    ids.sort(key=lambda control: control.datatype == "BYTES")
    return SequenceSpec(
        strategy=OldestSpec(preferred_sizes=(1,)),
        slots=MAX_ENSEMBLE_SEQUENCES,
        max_rows=1,
        max_idle_s=max([step.max_idle_s for step in kept]),
        controls=tuple(ids[:1]),
        of_steps=True,
    )


def check_sequence(request: InferRequest, rows: int, spec: SequenceSpec) -> SequenceFlags | None:
    """Returns a request's sequence flags, or raises `InvalidStep` or `InvalidRequest`."""
    if rows != 1:
        raise InvalidStep(
            f"inference request to model '{request.model}' must specify batch-size 1 due to requirements of sequence "
            "batcher"
        )
    sequence = request.sequence
    if sequence is None or not sequence.id:
        if spec.iterative:
            return None
        raise InvalidStep(
            f"inference request to model '{request.model}' must specify a non-zero or non-empty correlation ID"
        )
    _check_id(request.model, sequence.id, spec)
    return sequence


def _check_id(model: str, correlation_id: int | str, spec: SequenceSpec) -> None:
    nbytes = len(correlation_id.encode()) if isinstance(correlation_id, str) else 0
    if nbytes > MAX_SEQUENCE_ID_BYTES:
        raise InvalidStep(
            f"inference request to model '{model}' has a correlation ID of {nbytes} bytes; text may have "
            f"{MAX_SEQUENCE_ID_BYTES}"
        )
    corrid, given = spec.control(ControlKind.CORRID), "BYTES" if nbytes else "UINT64"
    if corrid is not None and (corrid.datatype == "BYTES") != (given == "BYTES"):
        raise InvalidRequest(
            f"sequence batching control '{corrid.name}' data-type is '{given}', but model '{model}' expects "
            f"'{corrid.datatype}'"
        )
