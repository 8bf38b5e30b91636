"""The stateful model versions of a worker: a `SequenceService` for each, and for each that is being replaced.

A sequence stays on its model: its version is pinned, and a replaced generation continues until its sequences end.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from qinfer.batching.batcher import LoadedModel
from qinfer.batching.sequences.batcher import SequenceBatcher
from qinfer.batching.sequences.steps import PendingStep
from qinfer.errors import QinferError
from qinfer_workers.inference.ensembles.runs import EnsembleSteps, RunParts
from qinfer_workers.inference.executor import ThreadExecutor
from qinfer_workers.inference.loader import LoadedVersion
from qinfer_workers.inference.models import Key, VersionPins
from qinfer_workers.inference.sequences.service import Parts, SequenceService

StepsBatcher = SequenceBatcher | EnsembleSteps


class SequenceServices:
    """Owns the sequence services of a worker."""

    def __init__(
        self,
        parts: Parts,
        collect: Callable[[StepsBatcher], None],
        ensembles: RunParts,
    ) -> None:
        self._parts = parts
        self._collect = collect
        self._ensembles = ensembles
        self._services: dict[Key, SequenceService] = {}
        self._leaving: dict[SequenceService, asyncio.Task[None]] = {}
        self._hashes: dict[Key, str] = {}
        store, clock = parts.store, parts.queue.clock
        self.pins = VersionPins(store, clock, parts.worker_id, "sequences", self._open_hashes)

    def __contains__(self, key: Key) -> bool:
        return key in self._services

    def batchers(self) -> list[StepsBatcher]:
        """Returns the batchers of all services, including services that end."""
        return [service.batcher for service in self._all()]

    def serve(self, model: LoadedModel, loaded: LoadedVersion) -> None:
        """Serves a version; an earlier generation ends with its sequences."""
        key = model.spec.name, model.version
        before = self._services.get(key)
        ensemble = None if loaded.plan is None else partial(EnsembleSteps, model, loaded.plan, self._ensembles)
        service = SequenceService(model, self._parts, loaded.latency, loaded.initial_states, ensemble)
        service.batcher.tally.with_summaries = self._parts.metrics.summary_latencies
        service.batcher.tally.with_histogram = self._parts.metrics.histogram_latencies
        self._services[key] = service
        self._hashes[key] = loaded.executed_hash
        service.start()
        if before is not None:
            self._leaving[before] = self._parts.tasks.create_task(self._drain_service(before))

    def go_on(self, loaded: LoadedVersion, surplus: int) -> None:
        """Continues a version with another number of instances."""
        service = self._services[loaded.spec.name, loaded.version]
        service.generations.add(loaded.generation)
        batcher, added = service.batcher, loaded.instances
        if not (added or surplus) or not isinstance(batcher, SequenceBatcher):
            return
        executor = batcher.model.executor
        assert isinstance(executor, ThreadExecutor)
        executor.grow(added)
        model = replace(batcher.model, spec=loaded.spec, generation=loaded.generation)
        batcher.resize(model, len(added), surplus, executor.end)

    async def retire(self, key: Key, is_wanted: Callable[[], bool]) -> bool:
        """Waits for a version's sequences to end, and unloads it; returns whether it did."""
        service = self._services[key]
        if service.has_open:
            await self.pins.write()
        if not await service.drain(self._parts.settings.drain_s, is_wanted, hands_over=False):
            return False
        del self._services[key]
        self._collect(service.batcher)
        return True

    async def drain_ensembles(self) -> None:
        """Gives back ensembles' sequences, while their steps' models are here."""
        await self._drain([one for one in self._all() if isinstance(one.batcher, EnsembleSteps)])

    async def drain(self) -> None:
        """Gives back other sequences; while a gateway lives, state in memory may end in half the drain's time."""
        await self._drain([one for one in self._all() if not isinstance(one.batcher, EnsembleSteps)])

    async def give_up(self, key: Key, item: object, error: QinferError) -> None:
        """Gives back unexecuted steps, because an instance of `key` hangs; its own step fails."""
        overdue = item if isinstance(item, PendingStep) else None
        hung = self._services.get(key)
        services = [(one, overdue if one is hung else None) for one in self._all()]
        await asyncio.gather(*[one.give_up(step, error) for one, step in services])

    async def _drain(self, services: Sequence[SequenceService]) -> None:
        limit_s = self._parts.settings.drain_s / 2
        for service in services:
            if service in self._leaving:
                self._leaving[service].cancel()
        await asyncio.gather(*[service.drain(limit_s, lambda: False, hands_over=True) for service in services])

    def _all(self) -> list[SequenceService]:
        return [*self._services.values(), *self._leaving]

    async def pause_services(self) -> None:
        """Pauses executions, except steps of ensembles."""
        async with asyncio.TaskGroup() as pauses:
            for batcher in self.batchers():
                if isinstance(batcher, EnsembleSteps):
                    batcher.hold()
                else:
                    pauses.create_task(batcher.pause_batching())

    def resume_services(self) -> None:
        """Ends a pause."""
        for batcher in self.batchers():
            batcher.resume_batching()

    async def close(self) -> None:
        """Stops all at once."""
        for service in self._all():
            await service.close()

    async def _drain_service(self, service: SequenceService) -> None:
        await service.drain(self._parts.settings.drain_s, lambda: False, hands_over=False)
        del self._leaving[service]
        self._collect(service.batcher)

    def _open_hashes(self) -> dict[Key, str]:
        return {key: self._hashes[key] for key, service in self._services.items() if service.has_open}
