"""The life of the sequences of one worker (reference §3.4)."""

from collections import Counter
from dataclasses import dataclass, replace

import pytest

from qinfer.batching.policy import NEVER_S, Item
from qinfer.batching.sequences import scheduler as scheduling
from qinfer.batching.sequences.scheduler import SequenceDecision, SequenceScheduler
from qinfer.batching.sequences.steps import SequenceStep, StepBatch
from qinfer.errors import (
    BACKLOG_TIMED_OUT,
    TIMED_OUT,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    SequenceEnded,
)
from qinfer.models.sequence_spec import DirectSpec, OldestSpec, SequenceSpec
from qinfer.queue.sequences.records import SequenceId, start_missing

DIRECT = SequenceSpec(strategy=DirectSpec(), slots=2, max_rows=2, max_idle_s=5.0)
OLDEST = SequenceSpec(strategy=OldestSpec(preferred_sizes=(2,)), slots=3, max_rows=2, max_idle_s=5.0)
ITERATIVE = replace(DIRECT, iterative=True)


@dataclass
class Speed:
    """A latency model that knows how long the shortest execution takes."""

    least_s: float = 0.0

    def estimate_s(self, _: int) -> float:
        return 0.0

    def floor_s(self, _: float) -> float:
        return self.least_s


class Worker:
    """A scheduler, and a clock that stands still until it is set."""

    def __init__(self, spec: SequenceSpec, instances: int = 1) -> None:
        self.scheduler = SequenceScheduler[Item]("m", spec, instances)
        self.now_s = 0.0

    def send(
        self,
        correlation_id: int | str | None,
        flags: str = "",
        left_s: float = 60.0,
        *,
        alone: bool = False,
        key: int = 0,
    ) -> SequenceStep[Item]:
        """Admits a step whose flags are S for START and E for END."""
        sequence = None if correlation_id is None else SequenceId("t", correlation_id)
        item = Item(rows=1, key=key, enqueued_s=self.now_s, deadline_s=self.now_s + left_s, alone=alone)
        step = SequenceStep(item=item, sequence=sequence, start="S" in flags, end="E" in flags)
        self.scheduler.add_step(step, self.now_s)
        return step

    def decide(self, least_s: float = 0.0) -> SequenceDecision[Item]:
        return self.scheduler.decide(self.now_s, Speed(least_s))

    def batches(self) -> list[list[SequenceStep[Item] | None]]:
        """Decides, and returns the rows of each batch."""
        return [list(batch.rows) for batch in self.decide().batches]

    def run(self) -> list[SequenceStep[Item]]:
        """Executes until nothing is ready, and returns the steps in the order in which they ran."""
        ran: list[SequenceStep[Item]] = []
        while batches := self.decide().batches:
            for batch in batches:
                ran += batch.steps
                self.scheduler.end_batch(batch, self.now_s)
        return ran


def ended_text(correlation_id: int, number: int, cause: str) -> str:
    """Returns the error of a step that comes after the one that ended its sequence."""
    return (
        f"sequence {correlation_id} of model 'm' was ended at step {number}: the request {cause}; "
        "begin it again with the START flag"
    )


def only(decision: SequenceDecision[Item]) -> StepBatch[Item]:
    (batch,) = decision.batches
    return batch


@pytest.mark.parametrize("spec", [DIRECT, OLDEST])
def test_the_steps_of_a_sequence_execute_one_after_another(spec: SequenceSpec) -> None:
    worker = Worker(spec)
    first, second, third = worker.send(7, "S"), worker.send(7), worker.send(7, "E")

    assert worker.batches() == [[first]]
    assert worker.batches() == []
    worker.scheduler.end_batch(StepBatch(0, [first]), 0.0)
    assert worker.run() == [second, third]
    assert [step.number for step in (first, second, third)] == [1, 2, 3]


@pytest.mark.parametrize("spec", [DIRECT, OLDEST])
def test_end_frees_one_slot_for_the_oldest_of_the_backlog(spec: SequenceSpec) -> None:
    worker = Worker(replace(spec, slots=2))
    worker.send(1, "S")
    ends = worker.send(2, "SE")
    third, fourth = worker.send("c", "S"), worker.send("d", "S")
    batch = only(worker.decide())

    assert (worker.scheduler.open, worker.scheduler.backlog, worker.scheduler.free_slots) == (4, 2, 0)
    worker.scheduler.end_batch(batch, 0.0)
    assert ends in batch.steps
    assert only(worker.decide()).steps == [third]
    assert worker.scheduler.backlog == 1
    worker.scheduler.cancel(fourth, 0.0)
    assert (worker.scheduler.open, worker.scheduler.backlog) == (2, 0)


def test_free_slots_are_those_of_all_instances() -> None:
    worker = Worker(DIRECT, instances=2)

    assert worker.scheduler.free_slots == 4
    worker.send(1, "S")
    assert worker.scheduler.free_slots == 3
    worker.send(2, "SE")
    worker.run()
    assert worker.scheduler.free_slots == 3


def test_sequences_spread_over_the_instances() -> None:
    worker = Worker(DIRECT, instances=2)
    steps = [worker.send(number, "S") for number in range(1, 4)]

    assert worker.batches() == [[steps[0], steps[2]], [steps[1]]]


def test_a_sequence_stays_on_its_instance() -> None:
    worker = Worker(OLDEST, instances=2)
    worker.send(1, "SE")
    worker.send(2, "S")
    worker.run()

    later = worker.send(2)

    assert only(worker.decide()).instance == 1
    assert later.number == 2


@pytest.mark.parametrize("held", range(5))
def test_sequences_keep_their_slots_when_instances_come(held: int) -> None:
    """And the backlog takes the slots of the new instances."""
    worker = Worker(DIRECT, instances=2)
    places: dict[SequenceId | None, int] = {}

    def run() -> None:
        while batches := worker.decide().batches:
            places.update({step.sequence: batch.instance for batch in batches for step in batch.steps})
            for batch in batches:
                worker.scheduler.end_batch(batch, worker.now_s)

    for name in range(held):
        worker.send(name, "S")
    run()
    before = dict(places)
    for name in range(8):
        worker.send(name, "" if name < held else "S")

    worker.scheduler.grow(2)

    run()
    assert before.items() <= places.items()
    assert Counter(places.values()) == dict.fromkeys(range(4), 2)
    assert worker.scheduler.backlog == worker.scheduler.free_slots == 0


def test_instances_with_the_fewest_sequences_go_when_these_have_ended() -> None:
    """The other sequences keep their slots, and the backlog waits for a slot of a remaining instance."""
    worker = Worker(DIRECT, instances=3)
    for name, flags in (("a", "S"), ("b", "S"), ("c", "SE"), ("d", "S"), ("e", "S")):
        worker.send(name, flags)
    assert worker.run()  # a and d are on instance 0, b and e on 1, and c was on 2

    worker.scheduler.shrink(2)

    assert worker.scheduler.free_slots == 0
    assert worker.decide().left == [2]
    worker.send("f", "S")
    worker.send("b")
    batch = only(worker.decide())
    assert (batch.instance, worker.scheduler.backlog) == (1, 1)
    worker.scheduler.end_batch(batch, worker.now_s)
    for name in ("b", "e", "a"):
        worker.send(name, "E")
    places = {}
    decision = worker.decide()
    for batch in decision.batches:
        worker.scheduler.end_batch(batch, worker.now_s)
    decision = worker.decide()
    places = {step.sequence: batch.instance for batch in decision.batches for step in batch.steps}
    assert (decision.left, places) == ([1], {SequenceId("t", "f"): 0})


def test_instances_that_come_have_numbers_of_their_own() -> None:
    """Slots of ended instances are not used again."""
    worker = Worker(DIRECT, instances=2)
    worker.scheduler.shrink(1)
    worker.scheduler.grow(1)

    for name in range(4):
        worker.send(name, "S")

    decision = worker.decide()
    assert decision.left == [1]
    assert [(batch.instance, len(batch.steps)) for batch in decision.batches] == [(0, 2), (2, 2)]


@pytest.mark.parametrize("flags", ["", "E"])
def test_a_step_without_start_is_refused(flags: str) -> None:
    worker = Worker(DIRECT)

    with pytest.raises(InvalidRequest) as refused:
        worker.send("x", flags)

    assert refused.value.message == start_missing("m", "x").message
    assert worker.scheduler.open == 0


def test_a_step_after_end_is_refused_even_before_end_has_executed() -> None:
    worker = Worker(DIRECT)
    worker.send(1, "S")
    worker.send(1, "E")

    with pytest.raises(InvalidRequest):
        worker.send(1)


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_start_ends_the_running_sequence_early_and_queues_behind(is_idle: bool) -> None:  # noqa: FBT001
    worker = Worker(replace(DIRECT, slots=1))
    first = worker.send(1, "S")
    if is_idle:
        assert worker.run() == [first]
    other = worker.send(2, "SE")
    again = worker.send(1, "S")

    decision = worker.decide()

    assert decision.ended == []
    assert again.number == 1
    ran = decision.batches[0].steps
    worker.scheduler.end_batch(decision.batches[0], 0.0)
    assert ran + worker.run() == ([] if is_idle else [first]) + [other, again]


def test_a_sequence_of_the_same_id_after_end_queues_behind_the_backlog() -> None:
    worker = Worker(replace(DIRECT, slots=1))
    steps = [worker.send(1, "SE"), worker.send(2, "SE"), worker.send(1, "S"), worker.send(1, "E")]

    assert worker.run() == steps[:2] + steps[2:]
    assert worker.scheduler.free_slots == 1


def test_a_step_that_expires_ends_its_sequence() -> None:
    worker = Worker(DIRECT)
    batch = [worker.send(1, "S")]
    worker.batches()
    before, expires, after, next_one = worker.send(1), worker.send(1, "", 2.0), worker.send(1, "E"), worker.send(1, "S")
    worker.now_s = 1.5

    decision = worker.decide(least_s=0.5)

    assert [step for step, _ in decision.refused] == [expires, after]
    assert [error.message for _, error in decision.refused] == [TIMED_OUT, ended_text(1, 3, "expired")]
    assert isinstance(decision.refused[0][1], DeadlineExceeded)
    worker.scheduler.end_batch(StepBatch(0, batch), worker.now_s)
    assert worker.run() == [before, next_one]


def test_later_steps_of_a_broken_sequence_are_told_why() -> None:
    worker = Worker(DIRECT)
    worker.send(1, "S", 1.0)
    worker.send(2, "S")
    worker.decide()
    worker.send(1, "", 1.0)
    worker.now_s = 1.0

    decision = worker.decide()

    assert decision.ended == [SequenceId("t", 1)]
    with pytest.raises(SequenceEnded) as refused:
        worker.send(1)
    assert refused.value.message == ended_text(1, 2, "expired")
    worker.send(1, "S")
    worker.send(1)


def test_only_so_many_broken_sequences_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "MOST_REMEMBERED", 1)
    worker = Worker(DIRECT)
    for correlation_id in (1, 2):
        worker.scheduler.cancel(worker.send(correlation_id, "S"), 0.0)

    with pytest.raises(InvalidRequest):
        worker.send(1)
    with pytest.raises(SequenceEnded, match="sequence 2 of model 'm' was ended at step 1: the request was cancelled"):
        worker.send(2)


def test_in_the_backlog_the_earliest_deadline_is_the_sequences() -> None:
    """Triton's timeout of a backlog; the sequence that starts behind it goes on."""
    worker = Worker(replace(DIRECT, slots=1))
    worker.send(1, "S")
    sequence = [worker.send(2, "S"), worker.send(2, "", 1.0), worker.send(2, "E")]
    behind = worker.send(2, "SE", 9.0)
    worker.batches()
    worker.now_s = 1.0

    decision = worker.decide()

    assert [(step, error.message) for step, error in decision.refused] == [
        (step, BACKLOG_TIMED_OUT) for step in sequence
    ]
    assert worker.scheduler.backlog == 1
    assert behind.number == 1


def test_a_step_that_executes_does_not_expire() -> None:
    worker = Worker(DIRECT)
    step = worker.send(1, "SE", 1.0)
    batch = only(worker.decide())
    worker.now_s = 2.0

    assert worker.decide().refused == []
    worker.scheduler.end_batch(batch, 2.0)
    assert worker.decide() == SequenceDecision([], [], [], [], NEVER_S)
    assert step.number == 1


def test_the_cancel_of_a_waiting_step_ends_its_sequence() -> None:
    worker = Worker(DIRECT)
    worker.send(1, "S")
    batch = only(worker.decide())
    cancelled, after = worker.send(1), worker.send(1)

    worker.scheduler.cancel(cancelled, 0.0)
    decision = worker.decide()

    assert [(step, type(error)) for step, error in decision.refused] == [
        (cancelled, Cancelled),
        (after, SequenceEnded),
    ]
    assert decision.ended == [SequenceId("t", 1)]
    worker.scheduler.end_batch(batch, 0.0)
    worker.scheduler.cancel(cancelled, 0.0)
    assert worker.scheduler.free_slots == 2


def test_a_step_that_is_cancelled_while_it_executes_ends_its_sequence() -> None:
    worker = Worker(DIRECT)
    step = worker.send(1, "S")
    batch = only(worker.decide())
    after = worker.send(1)
    worker.scheduler.cancel(step, 0.0)

    worker.scheduler.end_batch(batch, 0.0)
    decision = worker.decide()

    assert [refused for refused, _ in decision.refused] == [after]
    assert decision.ended == [SequenceId("t", 1)]
    assert worker.scheduler.open == 0


def test_an_idle_sequence_is_told_and_goes_on_unless_it_is_dropped() -> None:
    worker = Worker(DIRECT)
    worker.send(1, "S")
    worker.now_s = 3.0
    worker.run()
    worker.now_s = 7.5

    assert worker.decide() == SequenceDecision([], [], [], [], 8.0)
    worker.now_s = 8.0
    assert worker.decide() == SequenceDecision([], [], [], [SequenceId("t", 1)], 13.0)
    assert worker.decide().idle == []
    assert worker.scheduler.drop(SequenceId("t", 1), worker.now_s) == []
    assert worker.scheduler.free_slots == 2
    with pytest.raises(InvalidRequest, match="must specify the START flag"):
        worker.send(1)


@pytest.mark.parametrize("executes", [True, False])
def test_a_sequence_is_not_idle_while_something_executes_or_waits(executes: bool) -> None:  # noqa: FBT001
    worker = Worker(replace(DIRECT, slots=1))
    worker.send(1, "S")
    batch = only(worker.decide())
    if not executes:
        worker.send(2, "S", 99.0)
    worker.now_s = 50.0

    assert worker.decide().idle == []
    worker.scheduler.end_batch(batch, 50.0)
    worker.now_s = 54.0
    assert worker.decide().idle == []


def test_an_adopted_sequence_goes_on_without_start() -> None:
    worker = Worker(DIRECT)
    worker.scheduler.adopt(SequenceId("t", 1), steps=4)

    step = worker.send(1, "E")

    assert worker.run() == [step]
    assert (step.number, worker.scheduler.open) == (5, 0)


def test_an_adopted_sequence_that_nothing_follows_is_idle() -> None:
    worker = Worker(DIRECT)
    worker.scheduler.adopt(SequenceId("t", 1), steps=4)

    assert worker.decide().wake_at_s == 5.0
    worker.now_s = 5.0
    assert worker.decide().idle == [SequenceId("t", 1)]


def test_a_dropped_sequence_leaves_its_waiting_steps_unanswered() -> None:
    worker = Worker(DIRECT)
    worker.send(1, "S")
    batch = only(worker.decide())
    waiting = [worker.send(1), worker.send(1)]

    assert worker.scheduler.drop(SequenceId("t", 1), 0.0) == waiting
    assert worker.scheduler.drop(SequenceId("t", 9), 0.0) == []
    worker.scheduler.end_batch(batch, 0.0)
    assert worker.decide() == SequenceDecision([], [], [], [], NEVER_S)
    assert worker.scheduler.free_slots == 2


def test_an_iterated_request_joins_the_running_batch_until_it_is_done() -> None:
    worker = Worker(ITERATIVE)
    first = worker.send(None, "SE")
    batch = only(worker.decide())
    second = worker.send(9)
    assert (first.start, first.end) == (True, False)

    worker.scheduler.end_batch(batch, 0.0, again=[first])
    batch = only(worker.decide())

    assert list(batch.rows) == [first, second]
    assert (first.start, second.start, first.sequence) == (False, True, SequenceId("", 1))
    worker.scheduler.end_batch(batch, 0.0, again=[second])
    assert only(worker.decide()).steps == [second]
    assert worker.scheduler.open == 1


def test_tenants_have_correlation_ids_of_their_own() -> None:
    worker = Worker(DIRECT)
    mine = worker.send(1, "S")
    item = Item(rows=1, key=0, enqueued_s=0.0, deadline_s=60.0)
    other = SequenceStep(item=item, sequence=SequenceId("other", 1), start=True)

    worker.scheduler.add_step(other, 0.0)

    assert worker.batches() == [[mine, other]]


def test_iterated_requests_of_one_id_are_sequences_of_their_own() -> None:
    worker = Worker(ITERATIVE)

    assert worker.batches() == []
    steps = [worker.send(9), worker.send(9)]
    assert worker.batches() == [steps]


@pytest.mark.parametrize("how", ["expires", "expired while it executed", "cancelled"])
def test_an_iterated_request_ends_between_two_iterations(how: str) -> None:
    worker = Worker(ITERATIVE)
    step = worker.send(None, "", 1.0)
    batch = only(worker.decide())
    if how == "cancelled":
        worker.scheduler.cancel(step, 0.0)
    if how == "expired while it executed":
        worker.now_s = 1.0
        assert worker.decide().refused == []
    worker.scheduler.end_batch(batch, worker.now_s, again=[step])
    worker.now_s = 1.0

    decision = worker.decide()

    assert [refused for refused, _ in decision.refused] == [step]
    assert (decision.batches, decision.ended, worker.scheduler.open) == ([], [], 0)


def test_deadlines_of_steps_that_are_gone_are_not_kept() -> None:
    worker = Worker(ITERATIVE)
    for _ in range(500):
        worker.send(None, "")
        worker.run()

    assert len(worker.scheduler._deadlines._heap) < 100


def test_a_sequence_that_comes_again_while_a_step_of_it_executes_keeps_its_place() -> None:
    worker = Worker(DIRECT)
    worker.send(1, "S")
    batch = only(worker.decide())
    worker.scheduler.drop(SequenceId("t", 1), 0.0)
    worker.scheduler.adopt(SequenceId("t", 1), steps=1)
    worker.scheduler.end_batch(batch, 0.0)

    step = worker.send(1, "E")

    assert worker.run() == [step]
    assert (step.number, worker.scheduler.open, worker.scheduler.free_slots) == (2, 0, 2)
