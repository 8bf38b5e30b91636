"""The plans of a worker's ensembles: when one is loaded, each step gets a version of those that are READY then.

It waits for models that load, wherever they are loaded, and fails with those that can't be.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qinfer.core.settings import LimitSettings
from qinfer.errors import ModelLoadFailed, QinferError
from qinfer.models.config.config import from_json, to_spec
from qinfer.models.dependents import users_of
from qinfer.models.ensemble_graph import Plan, Resolved, plan
from qinfer.models.pins import EXECUTED, executed_hash
from qinfer.models.readiness import ModelStatus, Progress, assess, lacking, outcome
from qinfer.models.spec import EnsembleStep, ModelSpec
from qinfer.models.state import StoredModel, Use, WorkerRecord
from qinfer.models.store import ControlStore


class NotYet(QinferError):
    """A model that an ensemble uses is still being loaded."""


class Planned(NamedTuple):
    """What an ensemble version runs.

    Attributes:
        plan: Its plan.
        executed_hash: The hash of what its steps execute; empty = not known.
    """

    plan: Plan
    executed_hash: str

    def with_own(self, own: str) -> str:
        """Returns the hash of what the ensemble executes, of its own part's; empty = not known."""
        if not own or not self.executed_hash:
            return ""
        return EXECUTED + hashlib.sha256(f"{own}\n{self.executed_hash}".encode()).hexdigest()


class Planner:
    """Plans ensembles of what the store says.

    Args:
        store: Holds the desired state, configurations, and what workers report.
        limits: Timeouts of models that set none.
    """

    def __init__(self, store: ControlStore, limits: LimitSettings) -> None:
        self._store = store
        self._limits = limits

    async def look(self, spec: ModelSpec) -> Planned:
        """Plans an ensemble, if all that it uses is loaded.

        Raises:
            NotYet: Something is still being loaded; look again when the store wakes.
            ModelLoadFailed: It does not fit its models, or one of them is not to be loaded, or can't be.
            BrokerUnavailable: The store can't be reached.
        """
        workers = await self._store.workers()  # first: they must not be ahead of the configurations
        desired = {name: wish for name, wish in (await self._store.desired()).items() if wish.load}
        stored = await self._stored(spec)
        if spec.name in stored:
            last = next(user for user in users_of([spec.name], stored))
            raise ModelLoadFailed(f"circular dependency between ensembles: {spec.name} -> ... -> {last} -> {spec.name}")
        statuses = assess({name: wish for name, wish in desired.items() if name in stored}, stored, workers)
        view = _View(spec, stored, statuses, workers, self._limits)
        made = plan(spec, view.resolve)
        return Planned(made, view.executed_hash(made))

    async def _stored(self, spec: ModelSpec) -> dict[str, StoredModel]:
        """Reads what an ensemble uses, directly or not."""
        found: dict[str, StoredModel] = {}
        missing = {step.model for step in spec.steps}
        while missing:
            read = await self._store.models(missing)
            found.update(read)
            missing = {use.model for one in read.values() for use in one.uses} - found.keys()
        return found


class _View(NamedTuple):
    """The state of the models that an ensemble uses."""

    ensemble: ModelSpec
    stored: Mapping[str, StoredModel]
    statuses: Mapping[str, ModelStatus]
    workers: Sequence[WorkerRecord]
    limits: LimitSettings

    def resolve(self, step: EnsembleStep) -> Resolved:
        """Returns the version that a step runs: the highest that is READY, but for those that only pins keep."""
        stored, status = self.stored.get(step.model), self.statuses.get(step.model)
        if stored is None or status is None:
            raise ModelLoadFailed(
                f"ensemble {self.ensemble.name} contains models that are not available or ambiguous: {step.model}"
            )
        progress, reason = outcome(stored, self.workers)
        if progress is Progress.WAITING:
            raise NotYet(f"ensemble '{self.ensemble.name}' waits for '{step.model}': {reason}")
        if lack := lacking(self.ensemble.name, Use(step.model, step.version), self.statuses):
            why = f". Model '{step.model}' loading failed with error: {reason}" if reason else ""
            raise ModelLoadFailed(lack + why)
        ready = [version for version in status.ready_versions if not status.versions[version].pinned]
        spec = to_spec(from_json(stored.config), self.limits, stored.labels)
        return Resolved(spec, step.version or max(ready or status.ready_versions))

    def executed_hash(self, made: Plan) -> str:
        """Returns the hash of what all steps execute."""
        hashes = [
            (model, version, executed_hash(self.workers, model, version)) for model, version in sorted(made.versions)
        ]
        if not all(one for _, _, one in hashes):
            return ""
        return hashlib.sha256(repr(hashes).encode()).hexdigest()
