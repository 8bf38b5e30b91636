"""The plan of an ensemble and its nested ensembles, and the way of a request through it.

    ModelSpec.steps ── plan_ensemble ──▶ EnsemblePlan ── flow ──▶ Flow
    Flow: start ─▶ step_inputs ─▶ (the caller runs the step) ─▶ put ─▶ step_inputs …

A `Flow` is pure: its caller runs the steps. Steps that no wanted output depends on are left out, as in Triton.

Decoupled steps divide an ensemble into *stages*: the steps before the first decoupled step, the steps behind it, and so
on. No step reads tensors of two decoupled steps, or of a decoupled step and of the stage before it. Each response of
the step that ends a stage starts a flow through the next.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from qinfer.errors import ModelLoadFailed
from qinfer.models.config.ensembles import check_settings, check_steps, origin_of, runnable
from qinfer.models.sequence_spec import of_ensemble
from qinfer.models.spec import EnsembleStep, ModelSpec, Reshape, inward, outward

MAX_STEPS = 1000
"""The most steps of a plan, which nested ensembles multiply."""

MAX_NESTING = 32

MAX_DECOUPLED = 32

_MAX_WAYS = 64

T = TypeVar("T")


class ResolvedModel(NamedTuple):
    """The model version that a step runs."""

    spec: ModelSpec
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """A step that executes a model.

    Attributes:
        outputs: Output of the model → tensor of the plan.
        within: Positions in `EnsemblePlan.nested` of the ensembles around it, outermost first.
    """

    model: ModelSpec
    version: int
    inputs: tuple[tuple[str, str], ...]
    outputs: Mapping[str, str]
    within: tuple[int, ...] = ()
    stage: int = 0
    reshapes: Mapping[str, tuple[Reshape, ...]] = field(default_factory=dict)
    dims: Mapping[str, tuple[int, ...]] = field(init=False)
    wanted: tuple[str, ...] = field(init=False)
    tensors: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(sorted({tensor for _, tensor in self.inputs})))
        object.__setattr__(self, "dims", {tensor.name: tensor.dims for tensor in self.model.inputs})
        is_all = len(self.outputs) == len(self.model.outputs)
        object.__setattr__(self, "wanted", () if is_all else tuple(self.outputs))


class NestedEnsemble(NamedTuple):
    """An ensemble that is a step."""

    ensemble: str
    version: int


_Needed = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Needed tensors: name, tensor, readers."""


class _OutputPath(NamedTuple):
    """The steps of one stage that some outputs need.

    Attributes:
        lacks: Step → how many tensors it reads.
        counts: Tensor → how many steps and wanted outputs need it.
        given: Absent tensors have no name.
    """

    lacks: dict[int, int]
    counts: dict[str, int]
    given: _Needed
    made: tuple[_Needed, ...]
    wanted: tuple[tuple[str, str], ...]


class EnsemblePlan:
    """The steps of an ensemble version; made by `plan_ensemble`.

    Attributes:
        spec: Decoupled or with sequences if one of the steps is.
        inputs: Input of the ensemble → tensor of the plan.
        absent: Tensors that never exist: unused optional inputs of nested ensembles.
    """

    def __init__(self, spec: ModelSpec, planner: "_Planner", views: Mapping[str, "_TensorView"]) -> None:
        self.last_stage = max([len(planner.origins[views[tensor.name].tensor]) for tensor in spec.outputs], default=0)
        self.steps = tuple(planner.steps)
        sequences = of_ensemble([step.model.sequences for step in self.steps if step.model.sequences is not None])
        self.spec = replace(spec, decoupled=self.last_stage > 0, sequences=sequences)
        self.nested = tuple(planner.nested)
        self.inputs = {tensor.name: views[tensor.name].tensor for tensor in spec.inputs}
        self.absent = tuple(planner.absent)
        self.dims = {tensor.name: tensor.dims for tensor in spec.outputs}
        self.reshapes = _reshapes({tensor.name: views[tensor.name] for tensor in spec.outputs})
        self._outputs = {tensor.name: views[tensor.name].tensor for tensor in spec.outputs}
        self._writer = {tensor: number for number, step in enumerate(self.steps) for tensor in step.outputs.values()}
        self._ways: dict[tuple[str, ...], tuple[_OutputPath, ...]] = {}

    @property
    def versions(self) -> frozenset[tuple[str, int]]:
        """The (model, version) of every step."""
        return frozenset((step.model.name, step.version) for step in self.steps)

    @property
    def stateful(self) -> list[str]:
        """The stateful models of the steps, in order."""
        return [step.model.name for step in self.steps if step.model.is_stateful]

    def flow(self, outputs: tuple[str, ...], stage: int = 0) -> "Flow[Any]":
        """Begins a flow through a stage; no `outputs` = all."""
        ways = self._ways.get(outputs)
        if ways is None:
            if len(self._ways) >= _MAX_WAYS:
                self._ways.clear()
            ways = self._ways[outputs] = self._find_ways(outputs)
        return Flow(self, ways[stage])

    def _find_ways(self, outputs: tuple[str, ...]) -> tuple[_OutputPath, ...]:
        wanted = tuple((name, self._outputs[name]) for name in outputs or self._outputs)
        steps, left = set[int](), [tensor for _, tensor in wanted]
        while left:
            number = self._writer.get(left.pop())
            if number is not None and number not in steps:
                steps.add(number)
                left += [tensor for _, tensor in self.steps[number].inputs]
        in_stages: list[list[int]] = [[] for _ in range(self.last_stage + 1)]
        for number in steps:
            in_stages[self.steps[number].stage].append(number)
        *earlier, last = in_stages
        return (*(self._way(of_stage, ()) for of_stage in earlier), self._way(last, wanted))

    def _way(self, steps: Collection[int], wanted: tuple[tuple[str, str], ...]) -> _OutputPath:
        readers: dict[str, list[int]] = {}
        for number in sorted(steps):
            for tensor in self.steps[number].tensors:
                readers.setdefault(tensor, []).append(number)
        counts = Counter({tensor: len(numbers) for tensor, numbers in readers.items()})
        counts.update(tensor for _, tensor in wanted)

        def needed(names: Mapping[str, str]) -> _Needed:
            return tuple(
                (name, tensor, tuple(readers.get(tensor, ()))) for tensor, name in names.items() if counts[tensor]
            )

        return _OutputPath(
            {number: len(self.steps[number].tensors) for number in steps},
            dict(counts),
            needed({tensor: name for name, tensor in self.inputs.items()} | dict.fromkeys(self.absent, "")),
            tuple(needed({tensor: name for name, tensor in step.outputs.items()}) for step in self.steps),
            wanted,
        )


class Flow(Generic[T]):
    """The way of one request: `start`, then `step_inputs` and `put` for each step; later stages `put` first."""

    __slots__ = ("_lacks", "_plan", "_readers", "_tensors", "_way", "source")

    def __init__(self, plan: EnsemblePlan, way: _OutputPath) -> None:
        self._plan = plan
        self._way = way
        self._lacks = way.lacks.copy()
        self._readers = way.counts.copy()
        self._tensors: dict[str, T | None] = {}
        self.source: int | None = None
        """The decoupled step, once it may run."""

    def start(self, given: Mapping[str, T]) -> list[int]:
        """Begins with a request; returns the steps that may run."""
        return self._add(self._way.given, given)

    def step_inputs(self, number: int) -> list[tuple[str, T]]:
        """Returns a step's inputs, and drops unneeded tensors."""
        step, found = self._plan.steps[number], []
        for name, tensor in step.inputs:
            value = self._tensors[tensor]
            if value is not None:
                found.append((name, value))
        for tensor in step.tensors:
            self._readers[tensor] -= 1
            if not self._readers[tensor]:
                del self._tensors[tensor]
        return found

    def put(self, number: int, outputs: Mapping[str, T]) -> list[int]:
        """Adds a step's outputs; returns the steps that may run now."""
        return self._add(self._way.made[number], outputs)

    def missing(self) -> list[str]:
        """Returns the wanted outputs that are missing."""
        return [name for name, tensor in self._way.wanted if self._tensors.get(tensor) is None]

    def outputs(self) -> list[tuple[str, T]]:
        """Returns the wanted outputs that exist, in order."""
        found = [(name, self._tensors.get(tensor)) for name, tensor in self._way.wanted]
        return [(name, value) for name, value in found if value is not None]

    @property
    def held(self) -> Collection[str]:
        """The tensors that may still be needed."""
        return self._tensors.keys()

    def _add(self, needed: _Needed, values: Mapping[str, T]) -> list[int]:
        ready = []
        for name, tensor, readers in needed:
            self._tensors[tensor] = values.get(name)
            for number in readers:
                self._lacks[number] -= 1
                if self._lacks[number]:
                    continue
                if self._plan.steps[number].model.decoupled:
                    self.source = number
                else:
                    ready.append(number)
        return ready


def plan_ensemble(spec: ModelSpec, resolve: Callable[[EnsembleStep], ResolvedModel]) -> EnsemblePlan:
    """Checks and plans an ensemble, or raises `ModelLoadFailed`."""
    planner = _Planner(resolve)
    views = planner.add(spec, {}, (spec.name,), ())
    made = EnsemblePlan(spec, planner, views)
    check_settings(made.spec, made.stateful)
    return made


class _TensorView(NamedTuple):
    tensor: str
    reshapes: tuple[Reshape, ...] = ()

    def behind(self, reshape: Reshape) -> "_TensorView":
        return _TensorView(self.tensor, (*self.reshapes, reshape))


class _Planner:
    """`origins`: tensor → the positions of the decoupled steps that it comes from, in order."""

    def __init__(self, resolve: Callable[[EnsembleStep], ResolvedModel]) -> None:
        self.origins: dict[str, tuple[int, ...]] = {}
        self.steps: list[PlanStep] = []
        self.nested: list[NestedEnsemble] = []
        self.absent: list[str] = []
        self._resolve = resolve

    def add(
        self, spec: ModelSpec, views: dict[str, _TensorView], path: tuple[str, ...], within: tuple[int, ...]
    ) -> Mapping[str, _TensorView]:
        """Adds the steps of an ensemble; returns views of its tensors.

        `path` has the ensembles around it, outermost first, and itself; `within` their positions in `nested`, without
        the outermost.
        """
        if len(path) > MAX_NESTING:
            raise ModelLoadFailed(f"more than {MAX_NESTING} ensembles are within one another: {' -> '.join(path)}")
        resolved = [self._resolve(step) for step in spec.steps]
        for one in resolved:
            if one.spec.name in path:
                raise ModelLoadFailed(
                    f"circular dependency between ensembles: {one.spec.name} -> ... -> {spec.name} -> {one.spec.name}"
                )
        check_steps(spec, [one.spec for one in resolved])
        prefix = f"{len(self.nested)}/"
        origin = next((self.origins[view.tensor] for view in views.values()), ())
        given = [_view(views, i.name, prefix).tensor for i in spec.inputs if i.name not in views]
        self.origins.update(dict.fromkeys(given, origin))
        if within:
            self.absent += given
        views.update({name: views[name].behind(reshape) for name, reshape in inward(spec).items()})
        # Steps are added in the order of the data: a nested ensemble needs the names of its inputs.
        for step, one in _in_order(spec, resolved):
            mapped = {name: _view(views, tensor, prefix) for name, tensor in step.inputs.items()}
            origin = origin_of(spec.name, one.spec.name, [self.origins[view.tensor] for view in mapped.values()])
            if not one.spec.steps:
                outputs = {name: _view(views, tensor, prefix).tensor for name, tensor in step.outputs.items()}
                self._add_step(one, mapped, outputs, within, origin)
                continue
            self.nested.append(NestedEnsemble(one.spec.name, one.version))
            inner = self.add(one.spec, mapped, (*path, one.spec.name), (*within, len(self.nested) - 1))
            views.update((tensor, inner[output]) for output, tensor in step.outputs.items())
        origin_of(spec.name, spec.name, [self.origins[views[output.name].tensor] for output in spec.outputs])
        views.update({name: views[name].behind(reshape) for name, reshape in outward(spec).items()})
        return views

    def _add_step(
        self,
        one: ResolvedModel,
        inputs: Mapping[str, _TensorView],
        outputs: Mapping[str, str],
        within: tuple[int, ...],
        origin: tuple[int, ...],
    ) -> None:
        if len(self.steps) >= MAX_STEPS:
            raise ModelLoadFailed(
                f"the ensemble has more than {MAX_STEPS} steps, those of ensembles within it included"
            )
        made_by = (*origin, len(self.steps)) if one.spec.decoupled else origin
        if len(made_by) > MAX_DECOUPLED:
            raise ModelLoadFailed(f"more than {MAX_DECOUPLED} decoupled steps of the ensemble are behind one another")
        self.origins.update(dict.fromkeys(outputs.values(), made_by))
        self.steps.append(
            PlanStep(
                model=one.spec,
                version=one.version,
                inputs=tuple((i.name, inputs[i.name].tensor) for i in one.spec.inputs if i.name in inputs),
                outputs=outputs,
                within=within,
                stage=len(origin),
                reshapes=_reshapes(inputs),
            )
        )


def _in_order(spec: ModelSpec, resolved: Sequence[ResolvedModel]) -> Iterator[tuple[EnsembleStep, ResolvedModel]]:
    order = runnable([tensor.name for tensor in spec.inputs], spec.steps)
    if len(order) < len(resolved):
        raise ModelLoadFailed(f"the steps of ensemble '{spec.name}' wait for one another")
    for number in order:
        yield spec.steps[number], resolved[number]


def _view(views: dict[str, _TensorView], tensor: str, prefix: str) -> _TensorView:
    return views.setdefault(tensor, _TensorView(prefix + tensor))


def _reshapes(views: Mapping[str, _TensorView]) -> Mapping[str, tuple[Reshape, ...]]:
    return {name: view.reshapes for name, view in views.items() if view.reshapes}
