"""The sequences of one worker: which of them have a slot, which steps run, and when a sequence ends (reference §3.4).

The scheduler decides over the sequences that its worker owns; who owns a sequence is Redis' business. It awaits nothing
and reads no clock: each call says what has happened, and when.

    admit  →  decide  →  batches to execute  →  ended  →  decide  → …

A sequence waits in the backlog until a slot of an instance is free, and has that slot for itself until it ends. One
step of it executes at a time, in the order in which they were admitted. It ends by END, by the START of the next
sequence of its correlation ID, when it is dropped, or when a step of it expires, is cancelled or dies: the steps after
that one are refused. What follows under its ID is a sequence of its own, which waits in the backlog like any other.
Whether a sequence that is idle for its time ends is decided where its steps arrive: the scheduler only tells.
"""

from collections import Counter, deque
from collections.abc import Collection, Hashable
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import count, islice, product
from typing import Generic

import msgspec

from qinfer.batching.policy import NEVER_S, Latency
from qinfer.batching.sequences.direct import pick_direct
from qinfer.batching.sequences.oldest import pick_oldest, rules_of
from qinfer.batching.sequences.steps import Pick, Ready, Step, StepBatch, T
from qinfer.errors import BACKLOG_TIMED_OUT, LEFT, TIMED_OUT, Cancelled, DeadlineExceeded, QinferError, SequenceEnded
from qinfer.models.sequence_spec import DirectSpec, SequenceSpec
from qinfer.queue.sequence_records import SequenceId, ended_text, start_missing

MOST_REMEMBERED = 10_000
"""Broken sequences of which the reason is remembered, for later requests."""

_SLACK = 64
"""Entries of the list of deadlines that are kept without need, beside as many as are needed."""


class Ending(StrEnum):
    """Names the reasons, apart from END, for which a sequence ends."""

    RESTARTED = "restarted"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DIED = "died"


class Ended(msgspec.Struct, frozen=True):
    """The end of a sequence that was not ended by END.

    Attributes:
        sequence: The sequence.
        ending: The reason.
        number: The number of the step that ended it; of one that was started again, of its last step.
    """

    sequence: SequenceId
    ending: Ending
    number: int


class Decision(msgspec.Struct, Generic[T], frozen=True):
    """A decision of the scheduler.

    Attributes:
        batches: To be executed now, one for each of several idle instances at most.
        refused: Steps that are not executed, and the error to answer each with.
        ended: Sequences that have ended since the last decision by anything but END.
        idle: Sequences that have been idle for their time. They go on, and are told again after as long, unless they
            are dropped.
        wake_at_s: When to decide again, if nothing else happens; `NEVER_S` = only when something does.
        left: Instances that may end: they had to go, and the last of their sequences has ended.
    """

    batches: list[StepBatch[T]]
    refused: list[tuple[Step[T], QinferError]]
    ended: list[Ended]
    idle: list[SequenceId]
    wake_at_s: float
    left: list[int] = msgspec.field(default_factory=list)


class _Queue(Generic[T]):
    """The steps of one correlation ID: those of the present sequence, then those of sequences started after it.

    Attributes:
        key: Where the scheduler finds it: the sequence, or an iterated request.
        sequence: The tenant, and the correlation ID.
        waiting: The steps that wait, in order.
        executing: The step that executes.
        slot: Its (slot, instance); `None` = it is in the backlog.
        begun: A step of the sequence that has the slot has executed, so that a START can only be the next one's.
        accepts: The last of its sequences goes on: a step without START may follow.
        steps: The number of the last step admitted.
    """

    def __init__(self, key: Hashable, sequence: SequenceId) -> None:
        self.key = key
        self.sequence = sequence
        self.waiting: deque[Step[T]] = deque()
        self.executing: Step[T] | None = None
        self.slot: tuple[int, int] | None = None
        self.begun = False
        self.accepts = True
        self.steps = 0


class SequenceScheduler(Generic[T]):
    """Decides when the steps of a worker's sequences of one model execute, and on which instance.

    Args:
        model: The model's name, for errors.
        spec: Its sequences.
        instances: How many executions can run at a time.
    """

    def __init__(self, model: str, spec: SequenceSpec, instances: int) -> None:
        self._model = model
        self._spec = spec
        self._instances = instances
        self._rules = None if isinstance(spec.strategy, DirectSpec) else rules_of(spec.strategy, spec.max_rows)
        self._queues: dict[Hashable, _Queue[T]] = {}
        self._backlog: dict[_Queue[T], None] = {}
        self._ready: list[dict[int, _Queue[T]]] = [{} for _ in range(instances)]
        """The slots of each instance whose next step can execute, in the order in which they became so."""
        self._idle: dict[_Queue[T], float] = {}
        """Since when nothing of a sequence waits or executes; the first is idle for longest."""
        self._busy: set[int] = set()
        self._freed: list[tuple[int, int]] = []
        self._used = 0
        self._leaving: dict[int, int] = {}
        """The instances that go or are gone, and how many of their slots sequences have yet."""
        self._left: list[int] = []
        self._deadlines = _Deadlines[T]()
        self._home: dict[Step[T], _Queue[T]] = {}
        """The queue of each step that waits or executes."""
        self._cancelled: set[Step[T]] = set()
        self._broken: dict[SequenceId, str] = {}
        self._refused: list[tuple[Step[T], QinferError]] = []
        self._ended: list[Ended] = []
        self._numbers = count(1)

    @property
    def free_slots(self) -> int:
        """How many sequences more would get a slot at once."""
        unused = self._instances * self._spec.slots - self._used
        return max(unused + len(self._freed) - len(self._backlog), 0)

    @property
    def open(self) -> int:
        """Correlation IDs of which a sequence is open or steps wait; of an iterative model the requests in work."""
        return len(self._queues)

    @property
    def backlog(self) -> int:
        """How many of them wait for a slot."""
        return len(self._backlog)

    def grow(self, instances: int) -> None:
        """Takes more instances beside those there are; sequences keep their slots. For the strategy `direct`."""
        self._list_unused()
        before = self._instances
        self._instances += instances
        for slot in product(range(self._spec.slots), range(before, self._instances)):
            heappush(self._freed, slot)
        self._used = self._instances * self._spec.slots
        self._ready += [{} for _ in range(instances)]

    def shrink(self, instances: int) -> None:
        """Lets so many instances go once their sequences have ended: those with the fewest. For the strategy `direct`.

        The numbers of the others do not change.
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

    def admit(self, step: Step[T], now_s: float) -> None:
        """Takes a step; those of one sequence come in their order.

        Raises:
            SequenceEnded: It does not start a sequence, and the one of its correlation ID was ended by an earlier step.
            InvalidRequest: It does not start a sequence, and none of its correlation ID is open.
        """
        queue = self._queue_of(step)
        if step.start and queue.accepts and queue.steps:
            self._ended.append(Ended(queue.sequence, Ending.RESTARTED, queue.steps))
        queue.accepts = not (step.end or self._spec.iterative)
        queue.steps = 1 if step.start else queue.steps + 1
        step.number = queue.steps
        queue.waiting.append(step)
        self._home[step] = queue
        self._deadlines.add(step, self._home)
        self._settle(queue, now_s)

    def adopt(self, sequence: SequenceId, steps: int) -> None:
        """Takes over an open sequence that another worker had begun.

        Args:
            sequence: The sequence; nothing of its correlation ID is here.
            steps: The number of the last step that was executed.
        """
        self._open(sequence, sequence).steps = steps

    def executes(self, step: Step[T]) -> bool:
        """Tells whether a step executes."""
        queue = self._home.get(step)
        return queue is not None and step is queue.executing

    def cancel(self, step: Step[T], now_s: float) -> None:
        """Ends the sequence of a step that nobody waits for; one that executes is not refused, unless it is iterated.

        A step that is not here any more is passed over.
        """
        queue = self._home.get(step)
        if queue is None:
            return
        if step is queue.executing:
            self._cancelled.add(step)
            return
        self._break(queue, step, Ending.CANCELLED, Cancelled(_CAUSES[Ending.CANCELLED]))
        self._settle(queue, now_s)

    def drop(self, sequence: SequenceId, now_s: float) -> list[Step[T]]:
        """Forgets a sequence that has ended, or that another worker owns now.

        Returns:
            Its waiting steps, which are not refused; what executes ends as usual.
        """
        queue = self._queues.get(sequence)
        if queue is None:
            return []
        dropped = list(queue.waiting)
        queue.waiting.clear()
        queue.accepts = False
        self._forget(dropped)
        self._settle(queue, now_s)
        return dropped

    def ended(
        self,
        batch: StepBatch[T],
        now_s: float,
        again: Collection[Step[T]] = (),
        died: Collection[Step[T]] = (),
    ) -> None:
        """Takes note that a batch was executed; a step that was answered with a failure does not end its sequence.

        Args:
            batch: The batch, as `decide` made it.
            now_s: The present.
            again: Its steps that the model wants to execute again (iterative sequences).
            died: Its steps that took their worker or the model's process with them.
        """
        self._busy.discard(batch.instance)
        for step in batch.steps:
            queue = self._home[step]
            queue.executing = None
            ending = Ending.DIED if step in died else Ending.CANCELLED if step in self._cancelled else None
            if step in again and ending is not Ending.DIED:
                step.start = False
                queue.waiting.appendleft(step)
                self._deadlines.add(step, self._home)
            else:
                self._forget([step])
            if ending is not None:
                self._break(queue, step, ending, Cancelled(_CAUSES[Ending.CANCELLED]))
            self._settle(queue, now_s)

    def decide(self, now_s: float, latency: Latency) -> Decision[T]:
        """Decides what runs, and what has come to its end.

        Args:
            now_s: The present, on the clock of the items' instants.
            latency: What is known of the model's speed.
        """
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
                batches.append(self._begin(instance, pick))
        decision = Decision(batches, self._refused, self._ended, idle, wake_at_s, self._left)
        self._refused, self._ended, self._left = [], [], []
        return decision

    def _list_unused(self) -> None:
        """Lists the slots that were never used, numbered by the count of instances, with those that are free."""
        for number in range(self._used, self._instances * self._spec.slots):
            heappush(self._freed, divmod(number, self._instances))
        self._used = self._instances * self._spec.slots

    def _queue_of(self, step: Step[T]) -> _Queue[T]:
        """Returns the queue of a step that comes, a new one where it begins a sequence and there is none."""
        if self._spec.iterative:
            # Each request is a sequence of its own, which END does not end before the model does.
            step.sequence = step.sequence or SequenceId("", next(self._numbers))
            step.start, step.end = True, False
            return self._open(step, step.sequence)
        sequence = step.sequence
        assert sequence is not None, "a step of a model that is not iterative names its sequence"
        queue = self._queues.get(sequence)
        if not step.start and (queue is None or not queue.accepts):
            cause = self._broken.get(sequence)
            raise SequenceEnded(cause) if cause else start_missing(self._model, sequence.correlation_id)
        self._broken.pop(sequence, None)
        return queue or self._open(sequence, sequence)

    def _open(self, key: Hashable, sequence: SequenceId) -> _Queue[T]:
        queue = self._queues[key] = _Queue[T](key, sequence)
        self._backlog[queue] = None
        return queue

    def _settle(self, queue: _Queue[T], now_s: float) -> None:
        """Finds out what is next for a queue after something has happened to it: to run, to idle, or to end."""
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
        """Frees the slot of a sequence that has ended; the next one of its ID goes to the end of the backlog."""
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
        """Forgets a queue; another may have its place, of the same sequence, which was dropped and came again."""
        if self._queues.get(queue.key) is queue:
            del self._queues[queue.key]

    def _fill(self, now_s: float) -> None:
        """Gives free slots to the backlog, the lowest of all instances first, so that batches have few rows."""
        while self._backlog and (self._freed or self._used < self._instances * self._spec.slots):
            queue = next(iter(self._backlog))
            del self._backlog[queue]
            if self._freed:
                queue.slot = heappop(self._freed)
            else:
                queue.slot = divmod(self._used, self._instances)
                self._used += 1
            queue.begun = not (queue.waiting and queue.waiting[0].start)
            self._settle(queue, now_s)

    def _pick(self, ready: dict[int, _Queue[T]], now_s: float, latency: Latency) -> Pick[T]:
        # No batch has more: thousands of candidates that are ready cost each of them nothing.
        first = islice(ready.items(), self._spec.max_rows)
        steps = [Ready(slot, queue.waiting[0]) for slot, queue in first]
        if isinstance(self._spec.strategy, DirectSpec):
            return pick_direct(steps, now_s, self._spec.strategy, latency)
        assert self._rules is not None, "the strategy `oldest` has rules"
        return pick_oldest(steps, now_s, self._rules, latency)

    def _begin(self, instance: int, pick: Pick[T]) -> StepBatch[T]:
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
        """Breaks the sequences of steps that can't be answered in time; returns when the next step expires."""
        while (step := self._deadlines.first(self._home)) and step.item.deadline_s <= now_s + floor_s:
            self._deadlines.pop()
            queue = self._home[step]
            if step is queue.executing:
                continue
            error = DeadlineExceeded(TIMED_OUT if queue.slot is not None else BACKLOG_TIMED_OUT)
            self._break(queue, step, Ending.EXPIRED, error)
            self._settle(queue, now_s)
        return step.item.deadline_s - floor_s if step else NEVER_S

    def _find_idle(self, now_s: float) -> list[SequenceId]:
        """Returns the sequences that have been idle for their time, whose time begins anew."""
        found: list[SequenceId] = []
        while self._next_idle_s() <= now_s:
            queue = next(iter(self._idle))
            del self._idle[queue]
            self._idle[queue] = now_s
            found.append(queue.sequence)
        return found

    def _next_idle_s(self) -> float:
        """Returns when the next sequence will have been idle for its time."""
        return next(iter(self._idle.values()), NEVER_S) + self._spec.max_idle_s

    def _break(self, queue: _Queue[T], step: Step[T], ending: Ending, error: QinferError) -> None:
        """Ends a sequence at one of its steps: refuses that step if it waits, and those that wait behind it.

        In the backlog those that wait before it are refused too, where it has expired: Triton's timeout is the
        sequence's.
        """
        steps = list(queue.waiting)
        first = steps.index(step) if step in steps else 0
        last = next((i for i in range(first, len(steps)) if steps[i].start and steps[i] is not step), len(steps))
        is_timed_out = queue.slot is None and ending is Ending.EXPIRED
        while is_timed_out and first > 0 and not steps[first].start:
            first -= 1
        cause = ended_text(self._model, queue.sequence.correlation_id, step.number, _CAUSES[ending])
        for refused in steps[first:last]:
            self._refused.append((refused, error if refused is step or is_timed_out else SequenceEnded(cause)))
        self._forget(steps[first:last])
        queue.waiting = deque(steps[:first] + steps[last:])
        if last < len(steps):
            return
        queue.accepts = False
        if not self._spec.iterative:
            self._ended.append(Ended(queue.sequence, ending, step.number))
            self._remember(queue.sequence, cause)

    def _remember(self, sequence: SequenceId, cause: str) -> None:
        self._broken[sequence] = cause
        if len(self._broken) > MOST_REMEMBERED:
            del self._broken[next(iter(self._broken))]

    def _forget(self, steps: Collection[Step[T]]) -> None:
        for step in steps:
            del self._home[step]
            self._cancelled.discard(step)


_CAUSES = {
    Ending.EXPIRED: "the request expired",
    Ending.CANCELLED: LEFT,
    Ending.DIED: "the request ended the process that executed it",
}


class _Deadlines(Generic[T]):
    """The steps by their deadlines; those that are gone are passed over, and thrown out once they are the most."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Step[T]]] = []
        self._listed: set[Step[T]] = set()
        self._numbers = count()

    def add(self, step: Step[T], here: Collection[Step[T]]) -> None:
        """Adds a step, unless it is in already; `here` are the steps that are not gone."""
        if step in self._listed:
            return
        if len(self._heap) > 2 * len(here) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2] in here]
            self._listed = {entry[2] for entry in self._heap}
            heapify(self._heap)
        self._listed.add(step)
        heappush(self._heap, (step.item.deadline_s, next(self._numbers), step))

    def first(self, here: Collection[Step[T]]) -> Step[T] | None:
        """Returns the step with the earliest deadline; `None` = there is none."""
        while self._heap and self._heap[0][2] not in here:
            self.pop()
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """Removes the step with the earliest deadline."""
        self._listed.discard(heappop(self._heap)[2])
