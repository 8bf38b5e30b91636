"""The plans of a worker's ensembles: each step gets a READY version.

A load waits for models that any worker loads. A bulk job's plan keeps versions that still execute the same.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qinfer.core.settings import LimitSettings
from qinfer.errors import ModelLoadFailed, QinferError
from qinfer.models.config.config import from_json, to_spec
from qinfer.models.dependents import labels_of, users_of
from qinfer.models.ensemble_graph import EnsemblePlan, ResolvedModel, plan_ensemble
from qinfer.models.readiness import ExecutedVersion, LoadProgress, ModelStatus, assess, executed_hash, lacking, outcome
from qinfer.models.spec import EnsembleStep, ModelSpec
from qinfer.models.state import ModelUse, StepVersion, StoredModel, WorkerRecord
from qinfer.models.store import ControlStore


class NotYet(QinferError):
    """A model that an ensemble uses is still being loaded."""


class PlannedEnsemble(NamedTuple):
    """The plan of an ensemble version, and its models' versions by step."""

    plan: EnsemblePlan
    steps: tuple[StepVersion, ...] = ()


class PlannedAgain(NamedTuple):
    """A job's plan of an ensemble, and its models' generations."""

    plan: EnsemblePlan
    generations: Mapping[str, int]


class EnsemblePlanner:
    """Plans ensembles by the state of the store."""

    def __init__(self, store: ControlStore, limits: LimitSettings) -> None:
        self._store = store
        self._limits = limits

    async def plan_loaded(self, spec: ModelSpec) -> PlannedEnsemble:
        """Plans an ensemble, or raises `NotYet` (look again when the store wakes) or `ModelLoadFailed`."""
        workers = await self._store.workers()  # first: not ahead of the configurations
        desired = {name: wish for name, wish in (await self._store.desired()).items() if wish.load}
        stored = await self._stored(spec)
        if spec.name in stored:
            last = next(user for user in users_of([spec.name], stored))
            raise ModelLoadFailed(f"circular dependency between ensembles: {spec.name} -> ... -> {last} -> {spec.name}")
        for step in spec.steps:
            if step.model not in stored and (hint := await self._store.hint_of_endpoint(step.model)):
                raise ModelLoadFailed(f"{_unknown(spec.name, step.model)}{hint}")
        statuses = assess({name: wish for name, wish in desired.items() if name in stored}, stored, workers)
        view = _ModelsView(spec, stored, statuses, workers, self._limits)
        steps: dict[StepVersion, None] = {}

        def resolve(step: EnsembleStep) -> ResolvedModel:
            found = view.resolve(step)
            steps[StepVersion(step.model, step.version, found.version)] = None
            return found

        return PlannedEnsemble(plan_ensemble(spec, resolve), tuple(steps))

    async def again(self, executes: Sequence[ExecutedVersion]) -> PlannedAgain:
        """Plans an ensemble with a job's versions; `NotYet` if no worker executes them now."""
        # first: later generations are not current
        stored = await self._store.models({one.model for one in executes})
        workers = await self._store.workers()
        for one in executes:
            if one.model not in stored or executed_hash(workers, one.model, one.version) != one.content_hash:
                raise NotYet(
                    f"version {one.version} of model '{one.model}' is not loaded as the job was planned with it"
                )
        versions = {(one.model, one.asked): one.version for one in executes[1:]}

        def resolve(step: EnsembleStep) -> ResolvedModel:
            version = versions.get((step.model, step.version))
            if version is None:
                raise NotYet(f"model '{step.model}' is not a step of the ensemble that the job was planned with")
            return ResolvedModel(_spec_of(stored[step.model], self._limits), version)

        own = stored[executes[0].model]
        spec = to_spec(from_json(own.config), self._limits, labels_of(own, stored))
        return PlannedAgain(plan_ensemble(spec, resolve), {name: one.generation for name, one in stored.items()})

    async def is_current(self, planned: PlannedAgain) -> bool:
        """Returns whether a job's plan has the current generations."""
        stored = await self._store.models(planned.generations)
        return {name: one.generation for name, one in stored.items()} == planned.generations

    async def _stored(self, spec: ModelSpec) -> dict[str, StoredModel]:
        found: dict[str, StoredModel] = {}
        missing = {step.model for step in spec.steps}
        while missing:
            read = await self._store.models(missing)
            found.update(read)
            missing = {use.model for one in read.values() for use in one.uses} - found.keys()
        return found


class _ModelsView(NamedTuple):
    ensemble: ModelSpec
    stored: Mapping[str, StoredModel]
    statuses: Mapping[str, ModelStatus]
    workers: Sequence[WorkerRecord]
    limits: LimitSettings

    def resolve(self, step: EnsembleStep) -> ResolvedModel:
        """Returns the highest READY version that not only pins keep."""
        stored, status = self.stored.get(step.model), self.statuses.get(step.model)
        if stored is None or status is None:
            raise ModelLoadFailed(_unknown(self.ensemble.name, step.model))
        progress, reason = outcome(stored, self.workers)
        if progress is LoadProgress.WAITING:
            raise NotYet(f"ensemble '{self.ensemble.name}' waits for '{step.model}': {reason}")
        if lack := lacking(self.ensemble.name, ModelUse(step.model, step.version), self.statuses):
            why = f". Model '{step.model}' loading failed with error: {reason}" if reason else ""
            raise ModelLoadFailed(lack + why)
        ready = [version for version in status.ready_versions if not status.versions[version].pinned]
        return ResolvedModel(_spec_of(stored, self.limits), step.version or max(ready or status.ready_versions))


def _unknown(ensemble: str, model: str) -> str:
    return f"ensemble {ensemble} contains models that are not available or ambiguous: {model}"


def _spec_of(stored: StoredModel, limits: LimitSettings) -> ModelSpec:
    return to_spec(from_json(stored.config), limits, stored.labels)
