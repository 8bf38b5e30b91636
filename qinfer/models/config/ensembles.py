"""`ensemble_scheduling`: its mistakes that Triton finds without other models, and its steps as a spec.

Texts and rules are those of Triton's `ValidateEnsembleSchedulingConfig` (core `src/model_config_utils.cc`).
"""

from collections.abc import Iterable, Iterator, Sequence

from qinfer.models.config.message import ModelConfig
from qinfer.models.spec import EnsembleStep

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
