"""`ensemble_scheduling`: its steps as a spec, its mistakes alone and beside the steps' models, and shapes between them.

Texts and rules are those of Triton's `ValidateEnsembleSchedulingConfig` (core `src/model_config_utils.cc`) and, except
for stateful models, of its `ValidateEnsembleConfig` (core `src/ensemble_utils.cc`). Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from qinfer.errors import ModelLoadFailed
from qinfer.models.config.message import ModelConfig
from qinfer.models.spec import EnsembleStep, ModelSpec, Reshape, TensorSpec
from qinfer.tensors import DATATYPES

ENSEMBLE = "ensemble"

_MIN_MAPPED = ("input_map", "output_map")


def ensemble_problems(config: ModelConfig) -> Iterator[str]:
    """Yields the mistakes in an ensemble."""
    name = config.name
    if not config.HasField("ensemble_scheduling"):
        if config.platform == ENSEMBLE:
            yield f"ensemble scheduling must be set for ensemble {name} whose platform is {ENSEMBLE}"
        return
    if config.platform != ENSEMBLE:
        yield f"ensemble scheduling cannot be set for model '{name}' whose platform is not {ENSEMBLE}"
        return
    yield from _contradictions(config)
    if not config.ensemble_scheduling.step:
        yield f"must specify 'step' for ensemble '{name}'"
        return
    problems = list(_map_problems(config)) or _flow_problems(config)
    yield from problems


def to_steps(config: ModelConfig) -> tuple[EnsembleStep, ...]:
    """Returns the steps in order."""
    return tuple(
        EnsembleStep(
            model=step.model_name,
            version=max(step.model_version, 0),
            inputs={name: step.input_map[name] for name in sorted(step.input_map)},
            outputs={name: step.output_map[name] for name in sorted(step.output_map)},
        )
        for step in config.ensemble_scheduling.step
    )


def runnable(given: Iterable[str], steps: Sequence[EnsembleStep]) -> list[int]:
    """Returns the positions of runnable steps, each after those that it reads."""
    ready, left = set(given), list(enumerate(steps))
    ordered: list[int] = []
    while can_run := [pair for pair in left if ready.issuperset(pair[1].inputs.values())]:
        for pair in can_run:
            ready.update(pair[1].outputs.values())
            left.remove(pair)
            ordered.append(pair[0])
    return ordered


def _contradictions(config: ModelConfig) -> Iterator[str]:
    name = config.name
    if config.instance_group:
        yield f"instance group should not be specified for ensemble '{name}'"
    if config.HasField("optimization"):
        yield f"optimization should not be specified for ensemble '{name}'"
    if config.model_warmup:
        yield f"model_warmup can not be specified for ensemble '{name}'"
    if config.backend:
        yield f"ensemble '{name}' has no backend, and its configuration names '{config.backend}': remove it"


def _map_problems(config: ModelConfig) -> Iterator[str]:
    written: set[str] = set()
    for index, step in enumerate(config.ensemble_scheduling.step):
        missing = [] if step.model_name else ["model_name"]
        missing += [field for field in _MIN_MAPPED if not getattr(step, field)]
        for field in missing:
            yield f"must specify '{field}' in step {index} of ensemble '{config.name}'"
        if step.model_version < -1 or step.model_version == 0:
            yield f"model_version of step {index} of ensemble '{config.name}' must be -1 or a version"
        for tensor in (step.output_map[output] for output in sorted(step.output_map)):
            if tensor in written:
                yield (
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble "
                    f"'{config.name}' step {index}"
                )
            written.add(tensor)
    for tensor in sorted(written & {i.name for i in config.input}):
        yield f"ensemble tensor '{tensor}' is an input of ensemble '{config.name}', and no step may write it"


def _flow_problems(config: ModelConfig) -> Iterator[str]:
    name, steps = config.name, to_steps(config)
    inputs, outputs = [i.name for i in config.input], [o.name for o in config.output]
    read = {tensor for step in steps for tensor in step.inputs.values()}
    written = {tensor for step in steps for tensor in step.outputs.values()}
    ready = {*inputs, *(tensor for number in runnable(inputs, steps) for tensor in steps[number].outputs.values())}
    for tensor in inputs:
        if tensor not in read | written:
            yield f"ensemble input '{tensor}' for ensemble {name} is not used"
    for tensor in outputs:
        if tensor not in read | written:
            yield f"ensemble output '{tensor}' for ensemble {name} is not used"
        elif tensor not in ready:
            yield f"output '{tensor}' for ensemble '{name}' is not written"
    for tensor in sorted((read | written).difference(outputs)):
        if tensor not in ready or tensor not in read:
            yield f"ensemble tensor '{tensor}' is unused in ensemble '{name}'"


class _Node(NamedTuple):
    """The first declaration of an ensemble tensor."""

    model: str
    datatype: str
    dims: tuple[int, ...]
    full_dims: tuple[int, ...]


def check_steps(ensemble: ModelSpec, models: Sequence[ModelSpec]) -> None:
    """Checks an ensemble against its steps, or raises `ModelLoadFailed`."""
    tensors: dict[str, _Node] = {}
    for tensor in (*ensemble.inputs, *ensemble.outputs):
        tensors[tensor.name] = _node(ensemble, tensor, tensor.seen_dims)
    for step, model in zip(ensemble.steps, models, strict=True):
        if model.max_batch_size and model.max_batch_size < ensemble.max_batch_size:
            raise ModelLoadFailed(
                f"ensemble {ensemble.name} allows maximum batch size {ensemble.max_batch_size}, but it contains model "
                f"{model.name} which only allows maximum batch size to be {model.max_batch_size}"
            )
        _check_inputs(ensemble, step, model, tensors)
        _check_outputs(ensemble, step, model, tensors)


def is_like(dims: Sequence[int], others: Sequence[int]) -> bool:
    """Compares shapes as Triton's `CompareDimsWithWildcard`; -1 is any size."""
    return len(dims) == len(others) and all(a == b or -1 in (a, b) for a, b in zip(dims, others, strict=True))


def origin_of(ensemble: str, model: str, origins: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the decoupled steps from which a step's tensors come; these must be the same for all of them."""
    first = next(iter(origins), ())
    if any(origin != first for origin in origins):
        raise ModelLoadFailed(
            f"in ensemble {ensemble}, step of model '{model}' receives inputs originated from different decoupled "
            "models"
        )
    return first


def check_settings(ensemble: ModelSpec, stateful: Sequence[str]) -> None:
    """Refuses settings that a decoupled or stateful ensemble can't have."""
    kinds = (
        ("decoupled' transaction policy", ensemble.decoupled),
        ("sequence_batching' scheduler", ensemble.is_stateful),
    )
    for kind in [kind for kind, is_so in kinds if is_so and ensemble.is_cached]:
        raise ModelLoadFailed(
            f"Response Cache does not currently support model {ensemble.name} with '{kind}. "
            "Please disable the response cache."
        )
    for kind in [kind for kind, is_so in kinds if is_so and ensemble.splits]:
        raise ModelLoadFailed(f"parameter 'qinfer.split' is not for models with '{kind}; remove it")
    if ensemble.decoupled and ensemble.is_stateful:
        raise ModelLoadFailed(
            f"in ensemble {ensemble.name}, model {stateful[0]} keeps state from request to request, and another step "
            "is decoupled: this server runs no such models together"
        )
    for model in {model for model in stateful if stateful.count(model) > 1}:
        raise ModelLoadFailed(
            f"in ensemble {ensemble.name}, model {model} keeps state from request to request, and is a step more than "
            "once: both would be requests of the same sequence"
        )


def _check_inputs(ensemble: ModelSpec, step: EnsembleStep, model: ModelSpec, tensors: dict[str, _Node]) -> None:
    known = {tensor.name for tensor in model.inputs}
    for name, tensor in step.inputs.items():
        if name not in known:
            raise ModelLoadFailed(
                f"in ensemble {ensemble.name}, ensemble tensor {tensor} is mapping to non-existing input {name} in "
                f"model {model.name}"
            )
    for expected in model.inputs:
        mapped = step.inputs.get(expected.name)
        if mapped is not None:
            _compare(ensemble, mapped, _node(model, expected, expected.dims), tensors)
        elif not expected.optional:
            raise ModelLoadFailed(
                f"in ensemble {ensemble.name}, input {expected.name} in model {model.name} is not mapped to any "
                "ensemble tensors"
            )


def _check_outputs(ensemble: ModelSpec, step: EnsembleStep, model: ModelSpec, tensors: dict[str, _Node]) -> None:
    known = {tensor.name: tensor for tensor in model.outputs}
    for name, tensor in step.outputs.items():
        if name not in known:
            raise ModelLoadFailed(
                f"in ensemble {ensemble.name}, ensemble tensor {tensor} is mapped from non-existing output {name} in "
                f"model {model.name}"
            )
        _compare(ensemble, tensor, _node(model, known[name], known[name].dims), tensors)


def _compare(ensemble: ModelSpec, tensor: str, node: _Node, tensors: dict[str, _Node]) -> None:
    before = tensors.setdefault(tensor, node)
    where = f"in ensemble {ensemble.name}, ensemble tensor {tensor}:"
    if before.datatype != node.datatype:
        raise ModelLoadFailed(
            f"{where} inconsistent data type: {_config_type(before)} is inferred from model {before.model} while "
            f"{_config_type(node)} is inferred from model {node.model}"
        )
    if not is_like(before.dims, node.dims) and not is_like(before.full_dims, node.full_dims):
        raise ModelLoadFailed(
            f"{where} inconsistent shape: {_format_dims(before.full_dims)} is inferred from model {before.model} while "
            f"{_format_dims(node.full_dims)} is inferred from model {node.model}"
        )


def _node(model: ModelSpec, tensor: TensorSpec, dims: tuple[int, ...]) -> _Node:
    batch = (-1,) if model.max_batch_size else ()
    return _Node(model.name, tensor.datatype, dims, (*batch, *dims))


def _config_type(node: _Node) -> str:
    return DATATYPES[node.datatype].config


def _format_dims(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"


def fit(shape: tuple[int, ...], rows: int, dims: Sequence[int], *, batched: bool) -> tuple[int, ...]:
    """Returns a tensor's shape for the next model; `rows` 0 = no batch dimension.

    As in Triton's `EnsembleContext::ReshapeTensorDims`, a model without a batch dimension takes a batch as one tensor,
    or a batch of one row without its first dimension, if only that fits.
    """
    if batched and not rows and is_like(dims, shape):
        return (1, *shape)
    if not batched and rows == 1 and not is_like(dims, shape):
        return shape[1:]
    return shape


def refit(shape: tuple[int, ...], rows: int, reshapes: Iterable[Reshape]) -> tuple[tuple[int, ...], int]:
    """Returns shape and rows after reshapes; a misfit changes the number of elements."""
    for reshape in reshapes:
        shape = reshape.apply_to(fit(shape, rows, reshape.before, batched=reshape.batched))
        rows = shape[0] if reshape.batched and shape else 0
    return shape, rows
