"""`sequence_batching` of a `ModelConfig`: defaults, checks with Triton's texts, and its `SequenceSpec`."""

from collections.abc import Iterator
from math import ceil, prod
from typing import Any

import numpy as np

from qinfer.errors import ModelLoadFailed
from qinfer.models.config.message import (
    ModelConfig,
    model_config_pb2,
    preferred_size_problems,
    tensor_problems,
    wire_datatype,
)
from qinfer.models.sequence_spec import ControlKind, ControlSpec, DirectSpec, OldestSpec, SequenceSpec, StateSpec
from qinfer.queue.sequences.records import MAX_STATE_BYTES
from qinfer.tensors import CONFIG_DATATYPES

_DEFAULT_IDLE_US = 1_000_000
_FALSE_TRUE = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}
_CORRID_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def fill_sequence_defaults(config: ModelConfig) -> None:
    """Applies Triton's defaults in place."""
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or _DEFAULT_IDLE_US
    is_sized = batching.HasField("oldest") and config.max_batch_size > 0
    if is_sized and not batching.oldest.preferred_batch_size:
        batching.oldest.preferred_batch_size.append(config.max_batch_size)


def own_inputs(config: ModelConfig) -> frozenset[str]:
    """Returns the inputs that the server fills: controls and states."""
    batching = config.sequence_batching
    return frozenset([*(c.name for c in batching.control_input), *(state.input_name for state in batching.state)])


def state_outputs(config: ModelConfig) -> frozenset[str]:
    """Returns the outputs that the server keeps; responses have only those in `output`, too."""
    return frozenset(state.output_name for state in config.sequence_batching.state)


def sequence_problems(config: ModelConfig) -> Iterator[str]:
    """Yields the mistakes in `sequence_batching`."""
    if not config.HasField("sequence_batching"):
        return
    for name in sorted(own_inputs(config) & {i.name for i in config.input} - {""}):
        yield f"input '{name}' is a control or state of 'sequence_batching', which the server fills; remove it"
    if config.model_transaction_policy.decoupled and not config.sequence_batching.iterative_sequence:
        yield (
            "'model_transaction_policy.decoupled' is not supported with 'sequence_batching', unless it has "
            "'iterative_sequence'; remove one of them"
        )
    if config.model_transaction_policy.decoupled and config.sequence_batching.state:
        yield "'sequence_batching.state' is not supported for decoupled models; keep the state in the model"
    if config.backend == "python" and config.sequence_batching.state:
        yield "'sequence_batching.state' is not supported by backend 'python'; keep the state in model.py"
    yield from _strategy_problems(config)
    yield from _control_problems(config)
    yield from _state_problems(config)


def to_sequence_spec(config: ModelConfig) -> SequenceSpec | None:
    """Returns the sequences, if any, or raises `ModelLoadFailed`."""
    if not config.HasField("sequence_batching"):
        return None
    problems = list(sequence_problems(config))
    if problems:
        raise ModelLoadFailed(f"model '{config.name}': {'; '.join(problems)}")
    batching = config.sequence_batching
    rows = max(config.max_batch_size, 1)
    is_oldest = batching.HasField("oldest")
    candidates = batching.oldest.max_candidate_sequences if is_oldest else 0
    return SequenceSpec(
        strategy=_oldest(batching.oldest, rows) if is_oldest else _direct(batching.direct, rows),
        slots=candidates if candidates > 0 else rows,
        max_rows=rows,
        max_idle_s=(batching.max_sequence_idle_microseconds or _DEFAULT_IDLE_US) / 1e6,
        controls=tuple(_control(entry) for entry in batching.control_input),
        states=tuple(_state(state) for state in batching.state),
        iterative=batching.iterative_sequence,
    )


def _strategy_problems(config: ModelConfig) -> Iterator[str]:
    batching = config.sequence_batching
    sizes = batching.oldest.preferred_batch_size
    yield from preferred_size_problems("sequence batching preferred batch size", sizes, config)
    utilization = batching.direct.minimum_slot_utilization
    if not 0 <= utilization <= 1:
        yield (
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {config.name}, "
            f"got {utilization}"
        )


def _control_problems(config: ModelConfig) -> Iterator[str]:
    entries, name = config.sequence_batching.control_input, config.name
    names = [entry.name for entry in entries]
    if "" in names:
        yield f"sequence batching control tensor must have a name for {name}"
    for entry in entries:
        if not entry.control:
            yield f"sequence batching control tensor '{entry.name}' must specify a control for {name}"
    # Two controls in one entry would fill the same elements.
    doubled = {n for n in names if names.count(n) > 1} | {entry.name for entry in entries if len(entry.control) > 1}
    for tensor in sorted(doubled - {""}):
        yield f"sequence batching control tensor '{tensor}' is specified for multiple control kinds for {name}"
    controls = [control for entry in entries for control in entry.control]
    kinds = [_kind(control) for control in controls]
    for kind in ControlKind:
        if kinds.count(kind) > 1:
            yield f"sequence batching specifies multiple {kind} tensors for {name}"
    for control in controls:
        yield from _value_problems(control, f"for {_kind(control)} for {name}", name)


def _value_problems(control: Any, where: str, name: str) -> Iterator[str]:
    given = [field for field in _FALSE_TRUE if len(getattr(control, field))]
    choices = "'int32_false_true', 'fp32_false_true'"
    if _kind(control) is ControlKind.CORRID:
        if given:
            yield f"sequence batching must not specify either {choices} or 'bool_false_true' {where}"
        if model_config_pb2.DataType.Name(control.data_type) not in _CORRID_TYPES:
            yield (
                f"unexpected data type for control {ControlKind.CORRID} for {name}. Allowed data types are "
                "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
    elif not given:
        yield f"sequence batching must specify either {choices} or 'bool_false_true' {where}"
    elif len(given) > 1:
        yield f"sequence batching specifies more than one from {choices} and 'bool_false_true' {where}"
    elif len(getattr(control, given[0])) != 2:
        yield f"sequence batching control '{given[0]}' must have exactly 2 entries {where}"


def _state_problems(config: ModelConfig) -> Iterator[str]:
    states = config.sequence_batching.state
    controls = [entry.name for entry in config.sequence_batching.control_input]
    inputs = [state.input_name for state in states]
    outputs = [state.output_name for state in states]
    for name in sorted({n for n in inputs if n and (inputs + controls).count(n) > 1}):
        yield f"State input name '{name}' specified more than once."
    for name in sorted({n for n in outputs if n and outputs.count(n) > 1}):
        yield f"State output name '{name}' specified more than once."
    for state in states:
        where = f"model state '{state.input_name}'"
        if not state.input_name or not state.output_name:
            yield f"{where} must specify 'input_name' and 'output_name'"
        yield from tensor_problems(where, state)
        if len(state.initial_state) > 1:
            yield (
                f"initial_state field for state input '{state.input_name}' must contain exactly one or zero element. "
                f"Found '{len(state.initial_state)}' elements."
            )
        for initial in state.initial_state[:1]:
            yield from _initial_problems(state, initial)
        yield from _size_problems(state, where)


def _initial_problems(state: Any, initial: Any) -> Iterator[str]:
    name, dims, wanted = state.input_name, list(initial.dims), list(state.dims)
    if initial.data_type != state.data_type:
        yield f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
    if not initial.name:
        yield f"Field 'name' must be set when using initial_state for state input '{name}'."
    if len(dims) != len(wanted):
        yield (
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(dims)} != {len(wanted)}"
        )
        return
    if any(dim < 1 for dim in dims):
        yield f"'initial_state' field for state input name '{name}' contains variable dimensions."
        return
    for dim, of_state in zip(dims, wanted, strict=True):
        if of_state not in (-1, dim):
            yield (
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                f"{dim} != {of_state}"
            )
    if initial.WhichOneof("state_data") is None:
        yield f"initial_state setting expects state'{name}' to have state_data set"


def _size_problems(state: Any, where: str) -> Iterator[str]:
    datatype = CONFIG_DATATYPES.get(model_config_pb2.DataType.Name(state.data_type))
    if datatype is None:
        return
    size = prod(dim for dim in _initial_dims(state) if dim > 0) * (datatype.itemsize or 4)
    if size > MAX_STATE_BYTES:
        yield f"{where} has {size} bytes in its first step; {MAX_STATE_BYTES} is the limit"


def _kind(control: Any) -> ControlKind:
    return ControlKind(model_config_pb2.ModelSequenceBatching.Control.Kind.Name(control.kind))


def _direct(direct: Any, slots: int) -> DirectSpec:
    """Compares rows in single precision, as Triton does, so that 4 of 5 are 0.8."""
    utilization = direct.minimum_slot_utilization
    rows = max(ceil(utilization * slots) - 1, 0)
    while np.float32(rows) / np.float32(slots) < np.float32(utilization):
        rows += 1
    return DirectSpec(minimum_rows=rows, max_queue_delay_s=direct.max_queue_delay_microseconds / 1e6)


def _oldest(oldest: Any, max_rows: int) -> OldestSpec:
    return OldestSpec(
        preferred_sizes=tuple(sorted(set(oldest.preferred_batch_size))) or (max_rows,),
        max_queue_delay_s=oldest.max_queue_delay_microseconds / 1e6,
        preserve_ordering=oldest.preserve_ordering,
    )


def _control(entry: Any) -> ControlSpec:
    (control,) = entry.control
    kind = _kind(control)
    if kind is ControlKind.CORRID:
        return ControlSpec(name=entry.name, kind=kind, datatype=wire_datatype(control.data_type))
    field = next(field for field in _FALSE_TRUE if len(getattr(control, field)))
    false, true = getattr(control, field)
    return ControlSpec(name=entry.name, kind=kind, datatype=_FALSE_TRUE[field], false=false, true=true)


def _state(state: Any) -> StateSpec:
    return StateSpec(
        input=state.input_name,
        output=state.output_name,
        datatype=wire_datatype(state.data_type),
        dims=tuple(state.dims),
        initial_dims=_initial_dims(state),
        file=state.initial_state[0].data_file if state.initial_state else "",
        same_buffer=state.use_same_buffer_for_input_output,
        growable=state.use_growable_memory,
    )


def _initial_dims(state: Any) -> tuple[int, ...]:
    dims = state.initial_state[0].dims if state.initial_state else state.dims
    return tuple(1 if dim == -1 else dim for dim in dims)
