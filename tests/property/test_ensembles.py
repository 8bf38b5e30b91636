"""Random ensembles of ensembles, with reshapes, give what plain evaluation gives, in whatever order their steps end."""

import random
from collections.abc import Mapping, Sized

from hypothesis import given
from hypothesis import strategies as st

from qinfer.models.ensemble_graph import Flow, ResolvedModel, plan_ensemble
from qinfer.models.spec import EnsembleStep, ModelSpec, TensorSpec, inward, outward

DEPTH = 2


def tensors(names: list[str], reshaped: frozenset[str] = frozenset()) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=name, datatype="FP32", dims=(-1,), reshape=(-1,) if name in reshaped else None)
        for name in names
    )


class World:
    """Random models: plain ones, whose outputs tell what they were made of, and ensembles of them."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.specs: dict[str, ModelSpec] = {}

    def plain(self) -> ModelSpec:
        name = f"m{len(self.specs)}"
        count, outputs = self.choose.randint(1, 3), self.choose.randint(1, 2)
        spec = ModelSpec(
            name=name,
            backend="stub",
            inputs=tensors([f"i{i}" for i in range(count)]),
            outputs=tensors([f"o{o}" for o in range(outputs)]),
        )
        self.specs[name] = spec
        return spec

    def ensemble(self, depth: int) -> ModelSpec:
        inputs = [f"in{i}" for i in range(self.choose.randint(1, 3))]
        known, steps = list(inputs), []
        for number in range(self.choose.randint(1, 5)):
            one = self.ensemble(depth - 1) if depth and self.choose.random() < 0.3 else self.plain()
            taken = {i.name: self.choose.choice(known) for i in one.inputs}
            given_out = [o.name for o in one.outputs if self.choose.random() < 0.8] or [one.outputs[0].name]
            made = {output: f"t{number}{output}" for output in given_out}
            steps.append(EnsembleStep(one.name, 0, taken, made))
            known += made.values()
        outputs = self.choose.sample(known, self.choose.randint(1, min(3, len(known))))
        self.choose.shuffle(steps)
        name = f"e{len(self.specs)}"
        reshaped = frozenset(one for one in inputs + outputs if self.choose.random() < 0.3)
        spec = ModelSpec(
            name=name,
            backend="",
            inputs=tensors(inputs, reshaped),
            outputs=tensors(outputs, reshaped),
            steps=tuple(steps),
        )
        self.specs[name] = spec
        return spec

    def resolve(self, step: EnsembleStep) -> ResolvedModel:
        return ResolvedModel(self.specs[step.model], 1)


def turned(values: Mapping[str, str], turns: Mapping[str, Sized]) -> dict[str, str]:
    """Returns texts in as many brackets as they have reshapes."""
    counts = {name: len(turns.get(name, ())) for name in values}
    return {name: "[" * counts[name] + value + "]" * counts[name] for name, value in values.items()}


def executed(spec: ModelSpec, given_in: Mapping[str, str]) -> dict[str, str]:
    """Returns what a plain model gives: texts that tell model, output and inputs."""
    said = ",".join(f"{i.name}={given_in[i.name]}" for i in spec.inputs)
    return {o.name: f"{spec.name}.{o.name}({said})" for o in spec.outputs}


def evaluated(world: World, spec: ModelSpec, given_in: Mapping[str, str]) -> dict[str, str]:
    """Evaluates an ensemble step by step, and ensembles in it by themselves."""
    values = turned(given_in, {name: (one,) for name, one in inward(spec).items()})
    left = list(spec.steps)
    while left:
        step = next(step for step in left if values.keys() >= set(step.inputs.values()))
        left.remove(step)
        model = world.specs[step.model]
        run = evaluated if model.steps else lambda _, model, taken: executed(model, taken)
        made = run(world, model, {name: values[tensor] for name, tensor in step.inputs.items()})
        values.update((tensor, made[output]) for output, tensor in step.outputs.items())
    made = {o.name: values[o.name] for o in spec.outputs}
    return turned(made, {name: (one,) for name, one in outward(spec).items()})


@given(seed=st.integers(0, 2**32), order=st.randoms(use_true_random=False))
def test_a_flow_gives_what_plain_evaluation_gives(seed: int, order: random.Random) -> None:
    world = World(random.Random(seed))
    spec = world.ensemble(DEPTH)
    given_in = {i.name: f"<{i.name}>" for i in spec.inputs}
    wanted = tuple(o.name for o in spec.outputs if order.random() < 0.6)
    made = plan_ensemble(spec, world.resolve)
    flow: Flow[str] = made.flow(wanted)

    ran, ready = list[int](), flow.start(given_in)
    running: list[tuple[int, dict[str, str]]] = []
    while ready or running:
        if ready and (not running or order.random() < 0.5):
            number = ready.pop(order.randrange(len(ready)))
            running.append((number, turned(dict(flow.step_inputs(number)), made.steps[number].reshapes)))
        else:
            number, taken = running.pop(order.randrange(len(running)))
            ran.append(number)
            ready += flow.put(number, executed(made.steps[number].model, taken))

    expected = evaluated(world, spec, given_in)
    assert turned(dict(flow.outputs()), made.reshapes) == {name: expected[name] for name in wanted or expected}
    assert len(ran) == len(set(ran))
    assert len(flow.held) == len({expected[name].strip("[]") for name in wanted or expected})
