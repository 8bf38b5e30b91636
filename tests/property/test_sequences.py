"""The schedulers of sequences against everything that may happen to them, in any order, and a simple model of §3.4."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qinfer.batching.policy import Item
from qinfer.batching.sequences.execution import control_inputs
from qinfer.batching.sequences.scheduler import SequenceDecision, SequenceScheduler
from qinfer.batching.sequences.steps import SequenceStep, StepBatch
from qinfer.errors import Cancelled, DeadlineExceeded, InvalidRequest, SequenceEnded
from qinfer.models.sequence_spec import ControlKind, ControlSpec, DirectSpec, OldestSpec, SequenceSpec
from qinfer.queue.sequences.records import SequenceId

IDLE_S = 4.0
CONTROLS = tuple(
    ControlSpec(name=kind.name, kind=kind, datatype="INT32" if kind is ControlKind.CORRID else "BOOL", true=1)
    for kind in ControlKind
)


class Speed:
    """A latency model that knows nothing."""

    def estimate_s(self, _: int) -> float:
        return 0.0

    def floor_s(self, _: float) -> float:
        return 0.0


@st.composite
def specs(draw: st.DrawFn, *, iterative: bool = False) -> SequenceSpec:
    rows = draw(st.integers(1, 3))
    delay_s = draw(st.sampled_from([0.0, 1.0]))
    direct = DirectSpec(minimum_rows=draw(st.integers(0, rows)), max_queue_delay_s=delay_s)
    oldest = OldestSpec(preferred_sizes=(draw(st.integers(1, rows)),), max_queue_delay_s=delay_s)
    is_direct = draw(st.booleans())
    return SequenceSpec(
        strategy=direct if is_direct else oldest,
        slots=rows if is_direct else draw(st.integers(1, 4)),
        max_rows=rows,
        max_idle_s=IDLE_S,
        controls=CONTROLS,
        iterative=iterative,
    )


def id_of(step: SequenceStep[Item]) -> int:
    """Returns the correlation ID of a step."""
    assert step.sequence is not None
    return int(step.sequence.correlation_id)


@dataclass(eq=False)
class Sequence:
    """A sequence as the model sees it: the steps that were admitted, and what became of them.

    Attributes:
        steps: All of them.
        fates: What became of each that is not here any more.
        open: Steps may follow.
        broken: A step of it expired or was cancelled.
        place: The instance, and for the strategy `direct` the row, that all its steps have.
    """

    steps: list[SequenceStep[Item]] = field(default_factory=list)
    fates: dict[SequenceStep[Item], str] = field(default_factory=dict)
    open: bool = True
    broken: bool = False
    place: tuple[int, int] | None = None

    @property
    def left(self) -> list[SequenceStep[Item]]:
        return [step for step in self.steps if step not in self.fates]


class SchedulerMachine(RuleBasedStateMachine):
    """See the module docstring."""

    @initialize(spec=st.one_of(specs(), specs(iterative=True)), instances=st.integers(1, 2))
    def begin(self, spec: SequenceSpec, instances: int) -> None:
        """Makes a scheduler."""
        self.spec, self.instances, self.now_s = spec, instances, 0.0
        self.scheduler = SequenceScheduler[Item]("m", spec, instances)
        self.last: dict[int, Sequence] = {}
        self.of: dict[SequenceStep[Item], Sequence] = {}
        self.executing: dict[int, StepBatch[Item]] = {}
        self.cancelled: set[SequenceStep[Item]] = set()
        self.begun: set[SequenceStep[Item]] = set()
        self.numbered, self.left = instances, set[int]()

    @rule(
        sent=st.lists(
            st.tuples(st.integers(1, 4), st.sampled_from(["", "", "", "S", "E", "SE"]), st.integers(0, 1)),
            min_size=1,
            max_size=6,
        ),
        left_s=st.sampled_from([1.0, 3.0, 50.0, 50.0]),
        alone=st.sampled_from([False, False, False, True]),
        forgets=st.sampled_from([False, False, False, True]),
    )
    def send(self, *, sent: list[tuple[int, str, int]], left_s: float, alone: bool, forgets: bool) -> None:
        """Some steps come; callers seldom forget START where it is due."""
        for correlation_id, flags, key in sent:
            sequence = self.last.get(correlation_id)
            starts = "S" in flags or not (forgets or (sequence and sequence.open))
            item = Item(rows=1, key=key, enqueued_s=self.now_s, deadline_s=self.now_s + left_s, alone=alone)
            self.admit(
                SequenceStep(item=item, sequence=SequenceId("t", correlation_id), start=starts, end="E" in flags)
            )

    def admit(self, step: SequenceStep[Item]) -> None:
        """A step comes; without START it is taken only where its sequence is open."""
        sequence, starts = self.last.get(id_of(step)), step.start or self.spec.iterative
        if not (starts or (sequence and sequence.open)):
            with pytest.raises((InvalidRequest, SequenceEnded)):
                self.scheduler.add_step(step, self.now_s)
            return
        ends = step.end or self.spec.iterative
        self.scheduler.add_step(step, self.now_s)
        if sequence is None or starts:
            if sequence:
                sequence.open = False
            sequence = self.last[id_of(step)] = Sequence()
        sequence.steps.append(step)
        sequence.open = not ends
        self.of[step] = sequence
        assert step.number == len(sequence.steps)

    @precondition(lambda self: not self.spec.iterative)
    @rule(correlation_id=st.integers(1, 4), steps=st.integers(1, 3))
    def hand_over(self, correlation_id: int, steps: int) -> None:
        """A sequence is taken over, or given to another worker if something of its ID is here."""
        is_open = correlation_id in self.last and self.last[correlation_id].open
        if is_open or any(id_of(step) == correlation_id for step in self.here):
            self.drop(correlation_id)
            return
        self.scheduler.adopt(SequenceId("t", correlation_id), steps)
        sequence = self.last[correlation_id] = Sequence()
        for _ in range(steps):
            step = SequenceStep(item=Item(rows=1, key=0, enqueued_s=0.0, deadline_s=0.0))
            sequence.steps.append(step)
            sequence.fates[step] = "elsewhere"

    def drop(self, correlation_id: int) -> None:
        """Another worker takes an ID."""
        dropped = self.scheduler.drop(SequenceId("t", correlation_id), self.now_s)
        assert set(dropped) == {s for s in self.here if id_of(s) == correlation_id and s not in self.executed}
        for step in dropped:
            self.of[step].fates[step] = "dropped"
        if correlation_id in self.last:
            self.last[correlation_id].open = False

    @precondition(lambda self: self.is_direct and not self.spec.iterative)
    @rule(added=st.integers(0, 2), surplus=st.integers(0, 2))
    def resize(self, added: int, surplus: int) -> None:
        """Adds instances and marks others as surplus."""
        surplus = min(surplus, self.instances + added - 1)
        self.scheduler.grow(added)
        self.scheduler.shrink(surplus)
        self.numbered += added
        self.instances += added - surplus

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 4.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds
        self.decide()

    @rule()
    def serve(self) -> None:
        """All batches that can run do so, one after another."""
        self.decide()
        while self.executing:
            for batch in list(self.executing.values()):
                self.end_with(batch, dict.fromkeys(batch.steps, "done"))
            self.decide()

    @rule()
    def decide(self) -> None:
        """The scheduler is asked, and what it says is compared with the model."""
        decision = self.scheduler.decide(self.now_s, Speed())
        self.check_refused(decision)
        for idle in decision.idle:
            sequence = self.last[int(idle.correlation_id)]
            assert sequence.open
            assert not sequence.left
            assert self.scheduler.drop(idle, self.now_s) == []
            sequence.open = False
        assert not self.left.intersection(decision.left)
        self.left.update(decision.left)
        assert not any(one.place and one.place[0] in self.left for one in self.sequences if self.is_here(one))
        for batch in decision.batches:
            self.check_batch(batch)
            self.executing[batch.instance] = batch
        self.check_late()
        assert decision.wake_at_s > self.now_s

    def check_refused(self, decision: SequenceDecision[Item]) -> None:
        """What expired, was cancelled, or follows such a step, is refused, and nothing else."""
        in_backlog: set[Sequence] = set()
        for step, error in decision.refused:
            sequence = self.of[step]
            if isinstance(error, DeadlineExceeded):
                if step.item.deadline_s > self.now_s:
                    # In the backlog the whole sequence expires with one of its steps.
                    assert sequence.place is None
                    in_backlog.add(sequence)
                sequence.broken = True
            elif isinstance(error, Cancelled):
                assert step in self.cancelled
                sequence.broken = True
            sequence.fates[step] = "refused"
        for step, error in decision.refused:
            sequence = self.of[step]
            assert sequence.broken
            sequence.open = False
            if isinstance(error, SequenceEnded):
                assert sequence.steps.index(step) > 0
        for sequence in in_backlog:
            assert any(step.item.deadline_s <= self.now_s for step in sequence.steps)

    def check_batch(self, batch: StepBatch[Item]) -> None:
        """Rows belong to sequences, of which each has one step at most, and its next one; controls say which."""
        steps = batch.steps
        assert batch.instance not in self.executing
        assert batch.instance not in self.left
        assert steps
        assert len(batch.rows) <= self.spec.max_rows
        assert len({id(self.of[step]) for step in steps}) == len(steps)
        assert len({step.item.key for step in steps}) == 1
        assert len(steps) == 1 or not any(step.item.alone for step in steps)
        assert batch.rows[-1] is not None
        assert self.is_direct or None not in batch.rows
        for row, step in enumerate(batch.rows):
            if step is not None:
                self.check_step(step, (batch.instance, row if self.is_direct else 0))
        made = control_inputs(batch.rows, self.spec.controls, batched=True)
        for row, step in enumerate(batch.rows):
            values = {kind: made[kind.name][row, 0] for kind in ControlKind}
            if step is None:
                assert not any(values.values())
                continue
            sequence = self.of[step]
            assert values[ControlKind.READY]
            assert values[ControlKind.CORRID] == id_of(step)
            assert values[ControlKind.START] == (step is sequence.steps[0] and step not in self.begun)
            assert values[ControlKind.END] == (step.end and not self.spec.iterative)
        self.begun.update(steps)

    def check_step(self, step: SequenceStep[Item], place: tuple[int, int]) -> None:
        """A step executes where its sequence is, after those before it, and while no other sequence is there."""
        sequence = self.of[step]
        assert step is sequence.left[0]
        assert step not in self.executed
        assert sequence.place in (None, place)
        if sequence.place is None:
            others = [other for other in self.sequences if other.place == place and self.is_here(other)]
            assert len(others) < (1 if self.is_direct else self.spec.slots)
        sequence.place = place
        if not self.spec.iterative:
            before = [
                other for other in self.sequences if id_of(other.steps[-1]) == id_of(step) and other is not sequence
            ]
            assert all(not other.left or other.place is None for other in before)

    def check_late(self) -> None:
        """No step that waits is late."""
        assert all(step.item.deadline_s > self.now_s for step in self.here if step not in self.executed)

    @precondition(lambda self: self.executing)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A batch ends; some of its steps go on with another iteration."""
        batch = self.executing[data.draw(st.sampled_from(sorted(self.executing)))]
        fate = st.sampled_from(["done", "done", "done", "again" if self.spec.iterative else "done"])
        self.end_with(batch, {step: data.draw(fate) for step in batch.steps})

    def end_with(self, batch: StepBatch[Item], fates: Mapping[SequenceStep[Item], str]) -> None:
        """A batch ends, of each step as it is told."""
        del self.executing[batch.instance]
        for step, became in fates.items():
            sequence = self.of[step]
            if became != "again":
                sequence.fates[step] = became
            if step in self.cancelled:
                sequence.broken, sequence.open = True, False
        again = [step for step, became in fates.items() if became == "again"]
        self.scheduler.end_batch(batch, self.now_s, again)
        if self.cancelled.intersection(batch.steps):
            self.decide()

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A caller goes away."""
        step = data.draw(st.sampled_from(self.here))
        self.scheduler.cancel(step, self.now_s)
        self.cancelled.add(step)
        if step not in self.executed:
            self.of[step].broken, self.of[step].open = True, False
            self.decide()

    @property
    def is_direct(self) -> bool:
        return isinstance(self.spec.strategy, DirectSpec)

    @property
    def executed(self) -> set[SequenceStep[Item]]:
        """The steps that execute now."""
        return {step for batch in self.executing.values() for step in batch.steps}

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of which a step was admitted here."""
        return list(dict.fromkeys(self.of.values()))

    @property
    def here(self) -> list[SequenceStep[Item]]:
        """The steps that wait or execute."""
        return [step for step, sequence in self.of.items() if step not in sequence.fates]

    def is_here(self, sequence: Sequence) -> bool:
        """Tells whether a sequence has not ended."""
        return bool(sequence.left) or sequence.open

    @invariant()
    def slots_are_counted(self) -> None:
        """Sequences that have executed and not ended hold a slot each."""
        if not hasattr(self, "spec"):
            return
        total = self.spec.slots * (self.numbered - len(self.left))
        held = sum(sequence.place is not None and self.is_here(sequence) for sequence in self.sequences)
        assert self.scheduler.free_slots <= total - held
        assert self.scheduler.backlog <= self.scheduler.open

    def teardown(self) -> None:
        """Whatever has happened, all that is left runs in a bounded number of rounds, and every slot is free again."""
        if not hasattr(self, "spec"):
            return
        for correlation_id, sequence in list(self.last.items()):
            if sequence.open:
                item = Item(rows=1, key=0, enqueued_s=self.now_s, deadline_s=self.now_s + 1e6)
                self.admit(SequenceStep(item=item, sequence=SequenceId("t", correlation_id), end=True))
        for _ in range(2 * len(self.here) + 4):
            self.decide()
            for batch in list(self.executing.values()):
                self.end_with(batch, dict.fromkeys(batch.steps, "done"))
            self.now_s += 1.0
        assert not self.here
        assert (self.scheduler.open, self.scheduler.backlog) == (0, 0)
        assert self.scheduler.free_slots == self.spec.slots * self.instances
        assert len(self.left) == self.numbered - self.instances
        counted = Counter(fate for sequence in self.sequences for fate in sequence.fates.values())
        assert counted.total() - counted["elsewhere"] == len(self.of)


TestSchedulers = SchedulerMachine.TestCase
TestSchedulers.settings = settings(stateful_step_count=30, deadline=None)


@given(specs(), st.integers(1, 2), st.lists(st.integers(0, 2), min_size=1, max_size=10))
def test_every_sequence_that_has_a_slot_is_scheduled_again_soon(
    spec: SequenceSpec, instances: int, keys: list[int]
) -> None:
    """However eager the others are, a step waits for one execution at most of each other slot of its instance."""
    scheduler = SequenceScheduler[Item]("m", spec, instances)
    now_s, number = 0.0, len(keys)
    slots = spec.slots * instances
    since: Counter[int] = Counter()
    for correlation_id, key in enumerate(keys, start=1):
        scheduler.add_step(_eager(correlation_id, key, now_s, start=True), now_s)

    for _ in range(5 * slots):
        decision = scheduler.decide(now_s, Speed())
        ran = {id_of(step) for batch in decision.batches for step in batch.steps}
        for correlation_id in range(1, min(number, slots) + 1):
            since[correlation_id] = 0 if correlation_id in ran else since[correlation_id] + 1
            assert since[correlation_id] <= spec.slots
        for batch in decision.batches:
            scheduler.end_batch(batch, now_s)
            for step in batch.steps:
                scheduler.add_step(_eager(id_of(step), step.item.key, now_s, start=False), now_s)
        now_s += 1.0


def _eager(correlation_id: int, key: object, now_s: float, *, start: bool) -> SequenceStep[Item]:
    item = Item(rows=1, key=key, enqueued_s=now_s, deadline_s=now_s + 1e6)
    return SequenceStep(item=item, sequence=SequenceId("t", correlation_id), start=start)
