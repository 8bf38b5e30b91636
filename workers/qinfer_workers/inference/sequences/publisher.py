"""Commits executed steps of sequences, then publishes their responses, then removes their entries.

A commit stores state, response and number together. Commits run one at a time, for one step of each sequence. A step
whose sequence another worker owns is not published; a refused step breaks its sequence. Sequences with state in memory,
which can't be restored, commit only their last step, and steps that may be sent again; their other steps are published
at once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from qinfer.batching.sequences.steps import PendingStep
from qinfer.core.messages import Response
from qinfer.core.retry import Backoff, OutageLog
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.queue.entries import Entry
from qinfer.queue.sequences.ownership import AT_ONCE, Sequences
from qinfer.queue.sequences.records import CommittedStep, SequenceId, StepPlace, done_name, encode_states
from qinfer.wire.frame import encode_responses
from qinfer_workers.inference.publisher import Publisher

logger = logging.getLogger(__name__)

_TOGETHER = AT_ONCE
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 2.0


class _ExecutedStep(msgspec.Struct, frozen=True, eq=False):
    step: PendingStep
    response: Response
    committed: CommittedStep


class StepPublisher:
    """Commits and publishes a model's steps.

    `is_explicit` = state in memory. `settled` gets each step and whether it is committed; `broken` gets refused steps.
    """

    def __init__(
        self,
        sequences: Sequences,
        publisher: Publisher,
        idle_s: float,
        is_explicit: bool,  # noqa: FBT001  a property of the model
        settled: Callable[[PendingStep, bool], None],
        broken: Callable[[PendingStep, QinferError], None],
    ) -> None:
        self._sequences = sequences
        self._publisher = publisher
        self._idle_s = idle_s
        self._is_explicit = is_explicit
        self._settled = settled
        self._broken = broken
        self.finished: Callable[[Entry], None] = lambda _: None
        """Gets the entries that were removed."""
        self._unfinished: set[StepPlace] = set()
        """Committed steps whose response may not be published yet."""
        self._waiting: list[_ExecutedStep] = []
        self._work = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._uncommitted: set[asyncio.Task[None]] = set()
        self._outage = OutageLog(logger, "steps not committed, trying again", "steps are committed again")

    def put(self, steps: Sequence[PendingStep], responses: Sequence[Response]) -> None:
        """Takes executed steps, in order within each sequence."""
        by_id = {response.request_id: response for response in responses if response.final}
        if free := [step for step in steps if not self._is_committed(step)]:
            self._publish_uncommitted(free, [by_id[step.request.id] for step in free])
            steps = [step for step in steps if self._is_committed(step)]
        for step in steps:
            response = by_id[step.request.id]
            is_changed = step.state and (response.failure is None or step.changes_failing)
            state = encode_states(step.state) if is_changed else None
            committed = CommittedStep(
                place=step.place,
                token=step.token,
                response=encode_responses([response]),
                state=state,
                idle_s=self._idle_s,
                ends=step.end,
                entry_id="" if self._is_explicit and _number_of(step) else done_name(step.lease.entry),
            )
            self._waiting.append(_ExecutedStep(step, response, committed))
        if steps:
            self._quiet.clear()
            self._work.set()

    def keep(self, place: StepPlace) -> None:
        """Keeps the response to a former owner's step when the next one is committed, until it is `answered`."""
        self._unfinished.add(place)

    def answered(self, place: StepPlace) -> None:
        """Notes that a step of `keep` is answered."""
        self._unfinished.discard(place)

    async def run(self) -> None:
        """Commits until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._waiting:
                await self._commit(self._next())
            self._quiet.set()

    async def flush(self) -> None:
        """Waits until all steps are committed, published or lost."""
        await self._quiet.wait()
        if self._uncommitted:
            await asyncio.wait(self._uncommitted)

    def _is_committed(self, step: PendingStep) -> bool:
        return not self._is_explicit or step.end or _number_of(step) > 0

    def _next(self) -> list[_ExecutedStep]:
        group: dict[SequenceId, _ExecutedStep] = {}
        left: list[_ExecutedStep] = []
        for executed in self._waiting:
            sequence = executed.step.place.sequence
            if sequence in group or len(group) == _TOGETHER:
                left.append(executed)
            else:
                group[sequence] = executed
        self._waiting = left
        return list(group.values())

    async def _commit(self, group: list[_ExecutedStep]) -> None:
        begin_ns = time.perf_counter_ns()
        backoff = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S)
        while True:
            try:
                outcomes = await self._sequences.commit([self._commitment(executed) for executed in group])
            except BrokerUnavailable as error:
                self._outage.failed(error.message)
                await asyncio.sleep(backoff.next_s())
                continue
            except QinferError as error:
                await self._commit_alone(group, error)
                return
            self._outage.over()
            done = [executed for executed, is_committed in zip(group, outcomes, strict=True) if is_committed]
            if done:
                self._unfinished.update(executed.step.place for executed in done)
                self._publish([executed.step for executed in done], [executed.response for executed in done], begin_ns)
            for executed, is_committed in zip(group, outcomes, strict=True):
                self._settled(executed.step, is_committed)
            return

    def _commitment(self, executed: _ExecutedStep) -> CommittedStep:
        place = executed.step.place
        is_needed = StepPlace(place.sequence, place.life, place.number - 1) in self._unfinished
        return msgspec.structs.replace(executed.committed, keeps_previous=True) if is_needed else executed.committed

    async def _commit_alone(self, group: list[_ExecutedStep], error: QinferError) -> None:
        """Finds a commit's refused step."""
        if len(group) == 1:
            self._broken(group[0].step, error)
            return
        for executed in group:
            await self._commit([executed])

    def _publish_uncommitted(self, steps: Sequence[PendingStep], responses: Sequence[Response]) -> None:
        def settle(_: object) -> None:
            for step in steps:
                self._settled(step, True)

        task = self._publish(steps, responses, time.perf_counter_ns())
        if task is not None:
            self._uncommitted.add(task)
            task.add_done_callback(settle)
            task.add_done_callback(self._uncommitted.discard)

    def _publish(
        self, steps: Sequence[PendingStep], responses: Sequence[Response], begin_ns: int
    ) -> "asyncio.Task[None] | None":
        async def work() -> None:
            await self._publisher.publish(steps, responses, begin_ns)
            await self._finish(steps)

        return self._publisher.spawn(self._publisher.recorded(steps, work))

    async def _finish(self, steps: Sequence[PendingStep]) -> None:
        """Removes entries; those of which Redis keeps nothing else go together."""
        bare: list[Entry] = []
        others: list[tuple[StepPlace, Entry]] = []
        for step in steps:
            entry = step.lease.entry
            if step.is_direct and not (self._is_committed(step) or entry.payload_id):
                bare.append(entry)
            else:
                others.append((step.place, entry))
        if bare:
            await self._sequences.drop_answered(bare)
        if others:
            await self._sequences.finish(others)
        for step in steps:
            self._unfinished.discard(step.place)
            self.finished(step.lease.entry)


def _number_of(step: PendingStep) -> int:
    """Returns its caller's number; 0 = not numbered."""
    flags = step.request.sequence
    return flags.step if flags is not None else 0
