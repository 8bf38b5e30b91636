"""The sequences of one worker: which have a slot, which steps run, and when a sequence ends (reference §3.4).

    add_step  →  decide  →  batches to execute  →  end_batch  →  decide  → …

Pure; Redis decides the owner. A sequence waits in the backlog for a slot of an instance, and keeps it until it ends.
The steps of a sequence execute one at a time, in the order of admission. It ends by END, by the START of the next
sequence of its correlation ID, by `drop`, or when a step expires or is cancelled; later steps are then refused.
Sequences past their idle time are only reported, because another step may be on its way.
"""

from collections import Counter, deque
from collections.abc import Collection, Hashable
from heapq import heapify, heappop, heappush
from itertools import count, islice, product
from typing import Generic

import msgspec

from qinfer.batching.policy import NEVER_S, Latency
from qinfer.batching.sequences.steps import Pick, Ready, SequenceStep, StepBatch, T, pick_direct, pick_oldest, rules_of
from qinfer.errors import BACKLOG_TIMED_OUT, LEFT, TIMED_OUT, Cancelled, DeadlineExceeded, QinferError, SequenceEnded
from qinfer.models.sequence_spec import DirectSpec, SequenceSpec
from qinfer.queue.sequences.records import SequenceId, ended_text, start_missing

MOST_REMEMBERED = 10_000
"""The most broken sequences whose reason is remembered."""

_EXPIRED = "the request expired"
_SLACK = 64
"""The number of obsolete entries that the heap of deadlines may always have."""


class SequenceDecision(msgspec.Struct, Generic[T], frozen=True):
    """A decision of the scheduler.

    Attributes:
        batches: The batches to execute, at most one for each idle instance.
        ended: Sequences that a step has ended, because it expired or was cancelled.
        idle: Sequences past their idle time, reported again after as long.
        wake_at_s: When to decide again without an event; `NEVER_S` = never.
        left: Surplus instances whose last sequence has ended.
    """

    batches: list[StepBatch[T]]
    refused: list[tuple[SequenceStep[T], QinferError]]
    ended: list[SequenceId]
    idle: list[SequenceId]
    wake_at_s: float
    left: list[int] = msgspec.field(default_factory=list)


class _Queue(Generic[T]):
    """The steps of one correlation ID: first those of the present sequence, then those of later sequences.

    Attributes:
        slot: The slot and the instance of the sequence; `None` = the sequence is in the backlog.
    """

    def __init__(self, key: Hashable, sequence: SequenceId) -> None:
        self.key = key
        self.sequence = sequence
        self.waiting: deque[SequenceStep[T]] = deque()
        self.executing: SequenceStep[T] | None = None
        self.slot: tuple[int, int] | None = None
        self.begun = False
        self.accepts = True
        self.steps = 0


class SequenceScheduler(Generic[T]):
    """Decides when and where a worker's steps execute."""

    def __init__(self, model: str, spec: SequenceSpec, instances: int) -> None:
        self._model = model
        self._spec = spec
        self._instances = instances
        self._rules = None if isinstance(spec.strategy, DirectSpec) else rules_of(spec.strategy, spec.max_rows)
        self._queues: dict[Hashable, _Queue[T]] = {}
        self._backlog: dict[_Queue[T], None] = {}
        self._ready: list[dict[int, _Queue[T]]] = [{} for _ in range(instances)]
        """Each instance's executable slots."""
        self._idle: dict[_Queue[T], float] = {}
        """Idle sequences → since when; oldest first."""
        self._busy: set[int] = set()
        self._freed: list[tuple[int, int]] = []
        self._used = 0
        self._leaving: dict[int, int] = {}
        """Surplus instances, also those that have ended, and how many of their slots are still taken."""
        self._left: list[int] = []
        self._deadlines = _Deadlines[T]()
        self._home: dict[SequenceStep[T], _Queue[T]] = {}
        self._cancelled: set[SequenceStep[T]] = set()
        self._broken: dict[SequenceId, str] = {}
        self._refused: list[tuple[SequenceStep[T], QinferError]] = []
        self._ended: list[SequenceId] = []
        self._numbers = count(1)

    @property
    def free_slots(self) -> int:
        """How many more sequences would get a slot."""
        unused = self._instances * self._spec.slots - self._used
        return max(unused + len(self._freed) - len(self._backlog), 0)

    @property
    def open(self) -> int:
        """Correlation IDs that are in use."""
        return len(self._queues)

    @property
    def backlog(self) -> int:
        """Sequences that wait for a slot."""
        return len(self._backlog)

    def grow(self, instances: int) -> None:
        """Adds instances for the strategy `direct`; sequences keep their slots."""
        self._list_unused()
        before = self._instances
        self._instances += instances
        for slot in product(range(self._spec.slots), range(before, self._instances)):
            heappush(self._freed, slot)
        self._used = self._instances * self._spec.slots
        self._ready += [{} for _ in range(instances)]

    def shrink(self, instances: int) -> None:
        """Marks the instances with the fewest sequences as surplus, for the strategy `direct`.

        A surplus instance ends with its last sequence; the other instances keep their numbers.
        """
        self._list_unused()
        free = Counter(instance for _, instance in self._freed)
        staying = [instance for instance in range(self._instances) if instance not in self._leaving]
        for instance in sorted(staying, key=lambda one: (free[one], one), reverse=True)[:instances]:
            self._leaving[instance] = self._spec.slots - free[instance]
            if not self._leaving[instance]:
                self._left.append(instance)
        self._freed = [slot for slot in self._freed if slot[1] not in self._leaving]
        heapify(self._freed)

    def add_step(self, step: SequenceStep[T], now_s: float) -> None:
        """Takes the next step of a sequence.

        Raises:
            SequenceEnded: The step has no START, and an earlier step has ended its sequence.
            InvalidRequest: The step has no START, and its correlation ID has no open sequence.
        """
        queue = self._queue_of(step)
        queue.accepts = not (step.end or self._spec.iterative)
        queue.steps = 1 if step.start else queue.steps + 1
        step.number = queue.steps
        queue.waiting.append(step)
        self._home[step] = queue
        self._deadlines.add(step, self._home)
        self._advance_queue(queue, now_s)

    def adopt(self, sequence: SequenceId, steps: int) -> None:
        """Takes over a sequence after `steps` steps."""
        self._open_queue(sequence, sequence).steps = steps

    def executes(self, step: SequenceStep[T]) -> bool:
        """Returns whether a step executes."""
        queue = self._home.get(step)
        return queue is not None and step is queue.executing

    def cancel(self, step: SequenceStep[T], now_s: float) -> None:
        """Ends a cancelled step's sequence."""
        queue = self._home.get(step)
        if queue is None:
            return
        if step is queue.executing:
            self._cancelled.add(step)
            return
        self._break(queue, step, Cancelled(LEFT))
        self._advance_queue(queue, now_s)

    def drop(self, sequence: SequenceId, now_s: float) -> list[SequenceStep[T]]:
        """Forgets a sequence; returns its waiting steps."""
        queue = self._queues.get(sequence)
        if queue is None:
            return []
        dropped = list(queue.waiting)
        queue.waiting.clear()
        queue.accepts = False
        self._remove_steps(dropped)
        self._advance_queue(queue, now_s)
        return dropped

    def end_batch(self, batch: StepBatch[T], now_s: float, again: Collection[SequenceStep[T]] = ()) -> None:
        """Records an executed batch; a failed step does not end its sequence. The steps of `again` run once more."""
        self._busy.discard(batch.instance)
        for step in batch.steps:
            queue = self._home[step]
            queue.executing = None
            is_cancelled = step in self._cancelled
            if step in again:
                step.start = False
                queue.waiting.appendleft(step)
                self._deadlines.add(step, self._home)
            else:
                self._remove_steps([step])
            if is_cancelled:
                self._break(queue, step, Cancelled(LEFT))
            self._advance_queue(queue, now_s)

    def decide(self, now_s: float, latency: Latency) -> SequenceDecision[T]:
        """Decides which batches run, and which steps are refused."""
        wake_at_s = self._expire(now_s, latency.floor_s(now_s))
        self._fill(now_s)
        idle = self._find_idle(now_s)
        wake_at_s = min(wake_at_s, self._next_idle_s())
        batches: list[StepBatch[T]] = []
        for instance, ready in enumerate(self._ready):
            if not ready or instance in self._busy:
                continue
            pick = self._pick(ready, now_s, latency)
            wake_at_s = min(wake_at_s, pick.wake_at_s)
            if pick.rows:
                batches.append(self._make_batch(instance, pick))
        decision = SequenceDecision(batches, self._refused, self._ended, idle, wake_at_s, self._left)
        self._refused, self._ended, self._left = [], [], []
        return decision

    def _list_unused(self) -> None:
        """Adds unused slots to the free slots, because their numbers depend on the count of instances."""
        for number in range(self._used, self._instances * self._spec.slots):
            heappush(self._freed, divmod(number, self._instances))
        self._used = self._instances * self._spec.slots

    def _queue_of(self, step: SequenceStep[T]) -> _Queue[T]:
        if self._spec.iterative:
            # Only the model ends a request's own sequence.
            step.sequence = step.sequence or SequenceId("", next(self._numbers))
            step.start, step.end = True, False
            return self._open_queue(step, step.sequence)
        sequence = step.sequence
        assert sequence is not None, "a step of a model that is not iterative names its sequence"
        queue = self._queues.get(sequence)
        if not step.start and (queue is None or not queue.accepts):
            cause = self._broken.get(sequence)
            raise SequenceEnded(cause) if cause else start_missing(self._model, sequence.correlation_id)
        self._broken.pop(sequence, None)
        return queue or self._open_queue(sequence, sequence)

    def _open_queue(self, key: Hashable, sequence: SequenceId) -> _Queue[T]:
        queue = self._queues[key] = _Queue[T](key, sequence)
        self._backlog[queue] = None
        return queue

    def _advance_queue(self, queue: _Queue[T], now_s: float) -> None:
        if queue.executing is not None:
            return
        if queue.slot is None:
            if not queue.waiting and not queue.accepts:
                del self._backlog[queue]
                self._close(queue)
            return
        slot, instance = queue.slot
        self._idle.pop(queue, None)
        if queue.waiting and not (queue.begun and queue.waiting[0].start):
            self._ready[instance].setdefault(slot, queue)
            return
        self._ready[instance].pop(slot, None)
        if not queue.waiting and queue.accepts:
            self._idle[queue] = now_s
        else:
            self._release(queue, queue.slot)

    def _release(self, queue: _Queue[T], slot: tuple[int, int]) -> None:
        """Frees a slot; the next sequence of the ID goes to the backlog's end."""
        if (instance := slot[1]) in self._leaving:
            self._leaving[instance] -= 1
            if not self._leaving[instance]:
                self._left.append(instance)
        else:
            heappush(self._freed, slot)
        queue.slot = None
        if queue.waiting:
            self._backlog[queue] = None
        else:
            self._close(queue)

    def _close(self, queue: _Queue[T]) -> None:
        """Keeps the key's newer queue."""
        if self._queues.get(queue.key) is queue:
            del self._queues[queue.key]

    def _fill(self, now_s: float) -> None:
        """Fills the lowest slots first, so that batches get few rows."""
        while self._backlog and (self._freed or self._used < self._instances * self._spec.slots):
            queue = next(iter(self._backlog))
            del self._backlog[queue]
            if self._freed:
                queue.slot = heappop(self._freed)
            else:
                queue.slot = divmod(self._used, self._instances)
                self._used += 1
            queue.begun = not (queue.waiting and queue.waiting[0].start)
            self._advance_queue(queue, now_s)

    def _pick(self, ready: dict[int, _Queue[T]], now_s: float, latency: Latency) -> Pick[T]:
        # Thousands of candidates cost nothing more.
        first = islice(ready.items(), self._spec.max_rows)
        steps = [Ready(slot, queue.waiting[0]) for slot, queue in first]
        if isinstance(self._spec.strategy, DirectSpec):
            return pick_direct(steps, now_s, self._spec.strategy, latency)
        assert self._rules is not None, "the strategy `oldest` has rules"
        return pick_oldest(steps, now_s, self._rules, latency)

    def _make_batch(self, instance: int, pick: Pick[T]) -> StepBatch[T]:
        batch = StepBatch(instance, pick.rows)
        self._busy.add(instance)
        for step in batch.steps:
            queue = self._home[step]
            queue.executing = queue.waiting.popleft()
            queue.begun = True
            assert queue.slot is not None, "a step executes in a slot"
            del self._ready[instance][queue.slot[0]]
        return batch

    def _expire(self, now_s: float, floor_s: float) -> float:
        """Returns the next expiry."""
        while (step := self._deadlines.first(self._home)) and step.item.deadline_s <= now_s + floor_s:
            self._deadlines.pop()
            queue = self._home[step]
            if step is queue.executing:
                continue
            self._break(queue, step, DeadlineExceeded(TIMED_OUT if queue.slot is not None else BACKLOG_TIMED_OUT))
            self._advance_queue(queue, now_s)
        return step.item.deadline_s - floor_s if step else NEVER_S

    def _find_idle(self, now_s: float) -> list[SequenceId]:
        found: list[SequenceId] = []
        while self._next_idle_s() <= now_s:
            queue = next(iter(self._idle))
            del self._idle[queue]
            self._idle[queue] = now_s
            found.append(queue.sequence)
        return found

    def _next_idle_s(self) -> float:
        return next(iter(self._idle.values()), NEVER_S) + self._spec.max_idle_s

    def _break(self, queue: _Queue[T], step: SequenceStep[T], error: Cancelled | DeadlineExceeded) -> None:
        """Refuses the sequence's waiting steps from `step` on.

        If the step expires in the backlog, earlier steps are refused too, because Triton's timeout is one of the whole
        sequence.
        """
        steps = list(queue.waiting)
        first = steps.index(step) if step in steps else 0
        last = next((i for i in range(first, len(steps)) if steps[i].start and steps[i] is not step), len(steps))
        has_expired = isinstance(error, DeadlineExceeded)
        is_timed_out = queue.slot is None and has_expired
        while is_timed_out and first > 0 and not steps[first].start:
            first -= 1
        cause = ended_text(self._model, queue.sequence.correlation_id, step.number, _EXPIRED if has_expired else LEFT)
        for refused in steps[first:last]:
            self._refused.append((refused, error if refused is step or is_timed_out else SequenceEnded(cause)))
        self._remove_steps(steps[first:last])
        queue.waiting = deque(steps[:first] + steps[last:])
        if last < len(steps):
            return
        queue.accepts = False
        if not self._spec.iterative:
            self._ended.append(queue.sequence)
            self._remember(queue.sequence, cause)

    def _remember(self, sequence: SequenceId, cause: str) -> None:
        self._broken[sequence] = cause
        if len(self._broken) > MOST_REMEMBERED:
            del self._broken[next(iter(self._broken))]

    def _remove_steps(self, steps: Collection[SequenceStep[T]]) -> None:
        for step in steps:
            del self._home[step]
            self._cancelled.discard(step)


class _Deadlines(Generic[T]):
    """Obsolete entries are removed once they are the majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SequenceStep[T]]] = []
        self._listed: set[SequenceStep[T]] = set()
        self._numbers = count()

    def add(self, step: SequenceStep[T], here: Collection[SequenceStep[T]]) -> None:
        """Adds a step; the steps in `here` still wait or execute, and all other steps may be forgotten."""
        if step in self._listed:
            return
        if len(self._heap) > 2 * len(here) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2] in here]
            self._listed = {entry[2] for entry in self._heap}
            heapify(self._heap)
        self._listed.add(step)
        heappush(self._heap, (step.item.deadline_s, next(self._numbers), step))

    def first(self, here: Collection[SequenceStep[T]]) -> SequenceStep[T] | None:
        while self._heap and self._heap[0][2] not in here:
            self.pop()
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        self._listed.discard(heappop(self._heap)[2])
