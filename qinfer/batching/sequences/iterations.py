"""The batcher of iterative models: one per model version and worker, on the event loop, in place of `Batcher`.

    add_items ─▶ SequenceScheduler ─▶ assemble_steps ─▶ executor ─▶ outlet.publish_responses
                      └──── executed again ◀──────────────┘

Each request is a sequence of its own, and joins one batch after another until the model answers it. Nothing is stored
between iterations, so another worker may execute the request from the beginning. A decoupled model sends responses
while it iterates, in one stream.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain, repeat

import msgspec

from qinfer.batching.batcher import LoadedModel, Outlet
from qinfer.batching.execution import Execution, WorkItem
from qinfer.batching.policy import NEVER_S, LatencyModel
from qinfer.batching.sequences.execution import AnySteps, States, StepRunner
from qinfer.batching.sequences.scheduler import SequenceDecision
from qinfer.batching.sequences.steps import SequenceStep, StepBatch
from qinfer.core import messages
from qinfer.core.clock import ServerClock
from qinfer.core.messages import InferRequest, Response
from qinfer.errors import InferenceFailed, QinferError, SequenceLost
from qinfer.observe.stats import StatsTally
from qinfer.queue.entries import Lane
from qinfer.queue.sequences.records import SequenceId

_DECAY = 0.98
"""The factor by which each later request lowers a request's weight, so that about 50 requests count."""


class _HeldRequest:
    """A request without an answer; `instance` is -1 before it begins."""

    __slots__ = ("instance", "iterations", "states", "step")

    def __init__(self, step: SequenceStep[WorkItem], states: States) -> None:
        self.step = step
        self.states = states
        self.iterations = 0
        self.instance = -1


class Iterations(StepRunner[WorkItem]):
    """One generation's requests of an iterative model."""

    def __init__(
        self,
        model: LoadedModel,
        clock: ServerClock,
        outlet: Outlet,
        tally: StatsTally,
        changed: Callable[[], None],
        latency: LatencyModel | None = None,
    ) -> None:
        super().__init__(model, clock, tally, latency)
        self.completed = 0
        self._outlet = outlet
        self._changed = changed
        self._held: dict[WorkItem, _HeldRequest] = {}
        self._weight = self._iterations = 0.0
        # Callers hardly use these 32-bit ids, and the server never.
        self._numbers = chain.from_iterable(repeat(range(2**29, 2**30)))

    @property
    def has_work(self) -> bool:
        """Whether the batcher holds requests."""
        return bool(self._held or self.executing)

    @property
    def begun(self) -> int:
        """The number of requests that have begun."""
        return sum(held.instance >= 0 for held in self._held.values())

    @property
    def waiting(self) -> list[WorkItem]:
        """The requests that do not execute now."""
        executing = {item for execution in self.expected_ends for item in execution.items}
        return [item for item in self._held if item not in executing]

    @property
    def free_slots(self) -> int:
        """How many more requests would fit."""
        rows = self.model.executor.count * min(self._sequences.slots, self._sequences.max_rows)
        return max(rows - len(self._held), 0)

    def speed_rps(self, *, at_best: bool = False) -> float:
        """Returns requests per second, or the most possible; 0 = unknown."""
        if not self._iterations:
            return 0.0
        steps_rps, per_request = super().speed_rps(at_best=at_best), self._iterations / self._weight
        return steps_rps / (1.0 + (per_request - 1.0) * max(1.0 - 1.0 / self._weight, 0.0) if at_best else per_request)

    def classify(self, item: WorkItem) -> None:
        """Sets the key of an item before `add_items`."""
        item.key = self._batch_key(item.request, self.model.initial_states)

    def add_items(self, items: Sequence[WorkItem]) -> None:
        """Takes classified items and starts the next batches."""
        for item in items:
            step = SequenceStep(item=item, sequence=self._identify(item.request))
            self._scheduler.add_step(step, self._clock.now_s())
            self._held[item] = _HeldRequest(step, self.model.initial_states)
            _mark(step)
        self.pump()

    def _identify(self, request: InferRequest) -> SequenceId:
        """Numbers a request without an own free id."""
        flags, tenant = request.sequence, request.tenant
        taken = {of.correlation_id: of.tenant for held in self._held.values() if (of := held.step.sequence)}
        if flags is not None and flags.id and taken.get(flags.id, tenant) == tenant:
            return SequenceId(tenant, flags.id)
        number = next(number for number in self._numbers if number not in taken)
        request.sequence = messages.SequenceFlags(number) if flags is None else flags.told(number)
        return SequenceId("", number)

    def drop(self, item: WorkItem) -> None:
        """Forgets an item."""
        if held := self._held.pop(item, None):
            self._scheduler.cancel(held.step, self._clock.now_s())
            self.pump()

    def take_waiting(self) -> list[WorkItem]:
        """Removes and returns items that have not begun."""
        waiting = [item for item, held in self._held.items() if held.instance < 0]
        for item in waiting:
            self._scheduler.cancel(self._held.pop(item).step, self._clock.now_s())
        return waiting

    def fail(self, items: Sequence[WorkItem], error: QinferError) -> None:
        """Answers items, or ends their streams, with an error."""
        streams = self.model.streams
        if streams is not None:
            begun = [item for item in items if streams.is_open_of(item)]
            for item in begun:
                streams.cancel(item, error)
            items = [item for item in items if item not in begun]
        if items:
            self._outlet.publish_responses(
                items, self._responder.failures(items, error, self._clock.now_s(), self._tally)
            )

    def pump(self) -> None:
        """Starts batches, and reports the change."""
        super().pump()
        self._changed()

    def _report_decision(self, decision: SequenceDecision[WorkItem]) -> None:
        streams = self.model.streams
        for step, error in decision.refused:
            held = self._held.pop(step.item, None)
            if held is not None and (streams is None or held.instance < 0 or streams.is_open_of(step.item)):
                self.fail([step.item], error)

    def _begin_batch(self, batch: StepBatch[WorkItem]) -> list[States]:
        batched = [self._held[step.item] for step in batch.steps]
        for held in batched:
            held.instance = batch.instance
        return [held.states for held in batched]

    def _refuse(self, items: Sequence[WorkItem], responses: Sequence[Response]) -> None:
        for item in items:
            del self._held[item]
        self._outlet.publish_responses(items, responses)

    def _finish_execution(self, execution: AnySteps, now_s: float, begin_s: float) -> None:
        batch, steps = execution.steps, execution.steps.steps
        if isinstance(execution.error, SequenceLost):
            failure = InferenceFailed(execution.error.message)
            execution.answers = [failure if answer is execution.error else answer for answer in execution.answers]
            self._begin_anew(batch, failure)
        self._scheduler.end_batch(batch, now_s, again=[steps[position] for position in execution.again])
        for position, (step, states) in enumerate(zip(steps, execution.states, strict=True)):
            held = self._held.get(step.item)
            if held is None:
                continue
            held.iterations += 1
            if position in execution.again and execution.error is not None:
                self._restart(step.item, held)
            elif position in execution.again:
                held.states = states
                _mark(step)
                step.item.key = self._batch_key(step.item.request, states)
            else:
                self._remove_item(step.item, held)
        if self.model.streams is not None:
            self.model.streams.watch()
            self._responder.observe(execution, begin_s)
            return
        items, responses = self._responder.build_responses(execution, begin_s, self._tally)
        if items:
            self._outlet.publish_responses(items, responses)

    def _remove_item(self, item: WorkItem, held: _HeldRequest) -> None:
        del self._held[item]
        self.completed += 1
        self._weight = self._weight * _DECAY + 1
        self._iterations = self._iterations * _DECAY + held.iterations

    def _begin_anew(self, batch: StepBatch[WorkItem], failure: QinferError) -> None:
        """Begins requests anew after a loss of memory; those with responses fail."""
        for item, held in list(self._held.items()):
            if held.instance == batch.instance and held.step not in batch.steps:
                if self.model.streams is not None and held.iterations:
                    self.model.streams.cancel(item, failure)
                    self.drop(item)
                    continue
                self._restart(item, held)

    def _restart(self, item: WorkItem, held: _HeldRequest) -> None:
        if self.model.streams is not None:
            self.model.streams.lose(item)
        held.states, held.step.start, held.iterations, held.instance = self.model.initial_states, True, 0, -1
        _mark(held.step)
        self.classify(item)


def _mark(step: SequenceStep[WorkItem]) -> None:
    flags = step.item.request.sequence
    assert flags is not None, "it was identified"
    step.item.request.sequence = msgspec.structs.replace(flags, start=step.start, end=False, step=0)


class IterativeBatcher:
    """An iterative model's `Batcher`; instants are on Redis' clock."""

    def __init__(
        self, model: LoadedModel, clock: ServerClock, outlet: Outlet, latency: LatencyModel | None = None
    ) -> None:
        self._clock = clock
        self._outlet = outlet
        self._fetchable, self._idle = asyncio.Event(), asyncio.Event()
        self._leaving: list[Iterations] = []
        self._completed = 0
        self.tally = StatsTally()
        self.paused = False
        self._current = self._iterations(model, latency)
        self._update_gate()

    def _iterations(self, model: LoadedModel, latency: LatencyModel | None) -> Iterations:
        return Iterations(model, self._clock, self._outlet, self.tally, self._update_gate, latency)

    @property
    def model(self) -> LoadedModel:
        """The model of the present generation."""
        return self._current.model

    @model.setter
    def model(self, model: LoadedModel) -> None:
        self._current.model = model

    @property
    def executing(self) -> int:
        """Items that have begun."""
        return sum(generation.begun for generation in self._generations)

    @property
    def completed(self) -> int:
        """Items that were executed to their end."""
        return self._completed + sum(generation.completed for generation in self._generations)

    @property
    def expected_ends(self) -> dict[Execution, float]:
        """The running executions and their expected ends."""
        return {
            execution: end_s
            for generation in self._generations
            for execution, end_s in generation.expected_ends.items()
        }

    @property
    def waiting(self) -> list[WorkItem]:
        """The items that wait here for an instance."""
        return [item for generation in self._generations for item in generation.waiting]

    @property
    def has_work(self) -> bool:
        """Whether an item is here; for any thread."""
        return not self._idle.is_set()

    def speed_rps(self, *, at_best: bool = False) -> float:
        """Returns requests per second; 0 = unknown."""
        return self._current.speed_rps(at_best=at_best)

    def replace(self, model: LoadedModel, latency: LatencyModel | None = None) -> list[WorkItem]:
        """Switches to another generation; the old one ends the requests that have begun.

        Returns the other requests: check them again, `classify` them, and pass them to `add_items`.
        """
        waiting = self._current.take_waiting()
        self._leaving.append(self._current)
        self._current = self._iterations(model, latency)
        self._update_gate()
        return waiting

    def classify(self, item: WorkItem) -> None:
        """Sets the item's batching key."""
        self._current.classify(item)

    def add_items(self, items: Sequence[WorkItem]) -> None:
        """Takes fetched items and starts batches."""
        self._current.add_items(items)

    async def fetchable(self) -> None:
        """Waits until more items may be fetched."""
        await self._fetchable.wait()

    def welcome(self, lanes: Sequence[Lane]) -> Sequence[Lane]:
        """Returns all lanes."""
        return lanes

    def plan_fetch(self) -> tuple[int, float]:
        """Returns how many entries to fetch, and an endless wait."""
        return max(self._current.free_slots, 1), NEVER_S

    def lost(self, item: WorkItem) -> None:
        """Forgets an item whose lease is lost."""
        item.lose()
        for generation in self._generations:
            generation.drop(item)

    def fail(self, items: Sequence[WorkItem], error: QinferError) -> None:
        """Answers items with an error, without executing them."""
        self._current.fail(items, error)

    async def pause_batching(self) -> None:
        """Gives back items that have not begun, and waits for the other items."""
        self.paused = True
        if waiting := self._current.take_waiting():
            self._outlet.give_back(waiting)
        self._update_gate()
        await self._idle.wait()

    async def idle(self) -> None:
        """Waits until no item is here."""
        await self._idle.wait()

    def resume_batching(self) -> None:
        """Forms batches again after `pause_batching`."""
        self.paused = False
        self._update_gate()

    @property
    def _generations(self) -> list[Iterations]:
        return [self._current, *self._leaving]

    def _update_gate(self) -> None:
        for ended in [generation for generation in self._leaving if not generation.has_work]:
            self._leaving.remove(ended)
            self._completed += ended.completed
            ended.model.executor.retire()
        has_work = any(generation.has_work for generation in self._generations)
        (self._idle.clear if has_work else self._idle.set)()
        is_open = self._current.free_slots > 0 and not self.paused
        (self._fetchable.set if is_open else self._fetchable.clear)()
