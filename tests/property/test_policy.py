"""What the batching policy never does, whatever it is given."""

from hypothesis import given
from hypothesis import strategies as st

from qinfer.batching.policy import NEVER_S, FreeSlots, Item, LatencyModel, Rules, decide

NOW_S = 1000.0

items = st.builds(
    Item,
    rows=st.integers(1, 6),
    key=st.sampled_from([(1,), (2,)]),
    enqueued_s=st.floats(NOW_S - 2, NOW_S),
    deadline_s=st.floats(NOW_S - 1, NOW_S + 5),
    alone=st.booleans(),
    level=st.integers(0, 3),
    queue_deadline_s=st.one_of(st.just(NEVER_S), st.floats(NOW_S - 1, NOW_S + 5)),
    delays=st.booleans(),
    delayed=st.booleans(),
)
queues = st.lists(items, max_size=20).map(lambda q: sorted(q, key=lambda i: i.enqueued_s))
slots = st.builds(FreeSlots, st.integers(0, 2), st.integers(0, 1))


@st.composite
def rule_sets(draw: st.DrawFn) -> Rules:
    limit = draw(st.integers(1, 12))
    preferred = draw(st.frozensets(st.integers(1, limit), min_size=1, max_size=3))
    return Rules(
        max_rows=limit,
        preferred=preferred,
        largest_preferred=max(preferred),
        delay_s=draw(st.sampled_from([0.0, 0.5, 1.0])),
        merge=draw(st.booleans()),
        prefetch=draw(st.booleans()),
    )


@st.composite
def speeds(draw: st.DrawFn) -> LatencyModel:
    model = LatencyModel()
    for rows, seconds in draw(st.lists(st.tuples(st.integers(1, 12), st.floats(1e-6, 0.5)), max_size=70)):
        model.observe(rows, seconds, NOW_S)
    return model


def is_delayed(item: Item) -> bool:
    return item.delayed or (item.delays and item.queue_deadline_s <= NOW_S)


@given(queues, slots, rule_sets(), speeds())
def test_every_item_ends_in_exactly_one_place(
    queue: list[Item], free: FreeSlots, rules: Rules, latency: LatencyModel
) -> None:
    """No item is lost or doubled, and the order is kept, or is that of levels and delays."""
    decision = decide(queue, NOW_S, free, rules, latency)

    placed = [*decision.expired, *decision.run, *decision.keep]
    assert len(placed) == len(queue)
    assert {id(i) for i in placed} == {id(i) for i in queue}
    gone = {id(i) for i in decision.expired}
    rest = [i for i in queue if id(i) not in gone]
    if not rules.prefetch:
        rest.sort(key=lambda i: (i.level, i.queue_deadline_s if is_delayed(i) else 0.0))
    assert [*decision.run, *decision.keep] == rest


@given(queues, slots, rule_sets(), speeds())
def test_only_what_is_late_or_impatient_expires(
    queue: list[Item], free: FreeSlots, rules: Rules, latency: LatencyModel
) -> None:
    """By its deadline, or by a queue policy that does not delay."""
    decision = decide(queue, NOW_S, free, rules, latency)

    late_s = NOW_S + latency.floor_s(NOW_S)
    for i in queue:
        refused = not rules.prefetch and i.queue_deadline_s <= NOW_S and not i.delays and not i.delayed
        assert any(i is e for e in decision.expired) == (refused or i.deadline_s <= late_s)


@given(queues, slots, rule_sets(), speeds())
def test_batches_are_legal(queue: list[Item], free: FreeSlots, rules: Rules, latency: LatencyModel) -> None:
    """No overrun, no mix of shapes, no company for suspects, nothing expired, nothing without a slot."""
    run = decide(queue, NOW_S, free, rules, latency).run

    assert len(run) <= 1 or sum(i.rows for i in run) <= rules.max_rows
    assert len({i.key for i in run}) <= 1
    assert len(run) <= 1 or (rules.merge and not any(i.alone for i in run))
    assert all(i.deadline_s > NOW_S for i in run)
    assert not run or free.idle or free.ahead


@given(queues, rule_sets(), speeds())
def test_waits_only_for_the_delay(queue: list[Item], rules: Rules, latency: LatencyModel) -> None:
    """With an idle instance something runs now, unless a delay is set and the oldest has not waited it."""
    decision = decide(queue, NOW_S, FreeSlots(1), rules, latency)

    if decision.keep and not decision.run:
        assert rules.delay_s > 0
        oldest_s = decision.keep[0].enqueued_s if rules.prefetch else min(i.enqueued_s for i in decision.keep)
        assert NOW_S < decision.wake_at_s <= oldest_s + rules.delay_s
        assert sum(i.rows for i in decision.keep) < rules.largest_preferred


@given(queues, rule_sets(), speeds())
def test_asking_again_empties_the_queue(queue: list[Item], rules: Rules, latency: LatencyModel) -> None:
    """Following the decisions and their wake-up times, every item runs or expires."""
    now_s, pending, ends = NOW_S, list(queue), 0
    for _ in range(4 * len(queue) + 1):
        decision = decide(pending, now_s, FreeSlots(1), rules, latency)
        pending = list(decision.keep)
        ends += len(decision.run) + len(decision.expired)
        if decision.wake_at_s != NEVER_S:
            now_s = decision.wake_at_s

    assert ends == len(queue)
    assert not pending
