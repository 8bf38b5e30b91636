"""Batches of the strategies `direct` and `oldest`, and the inputs that tell a model about them (reference §3.4)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qinfer.batching.policy import Item
from qinfer.batching.sequences.execution import control_inputs, padded
from qinfer.batching.sequences.steps import Pick, Ready, SequenceStep, pick_direct, pick_oldest, rules_of
from qinfer.models.sequence_spec import ControlKind, ControlSpec, DirectSpec, OldestSpec
from qinfer.queue.sequences.records import SequenceId

NOW_S = 100.0


@dataclass
class Speed:
    """A latency model that says what it is told."""

    each_s: float = 0.0

    def estimate_s(self, rows: int) -> float:
        return self.each_s * rows

    def floor_s(self, _: float) -> float:
        return 0.0


def ready(
    slot: int, age_s: float = 0.0, key: object = None, left_s: float = 60.0, *, alone: bool = False
) -> Ready[Item]:
    item = Item(rows=1, key=key, enqueued_s=NOW_S - age_s, deadline_s=NOW_S + left_s, alone=alone)
    return Ready(slot, SequenceStep(item=item, sequence=SequenceId("t", slot + 1)))


def slots_of(pick: Pick[Item], entries: list[Ready[Item]]) -> list[int | None]:
    """Returns the slot of the step in each row; `None` = padding."""
    slot = {entry.step: entry.slot for entry in entries}
    return [None if step is None else slot[step] for step in pick.rows]


@pytest.mark.parametrize(
    ("entries", "rows"),
    [
        ([ready(0)], [0]),
        ([ready(2), ready(0)], [0, None, 2]),
        ([ready(3)], [None, None, None, 3]),
        ([ready(1, key="b"), ready(0, key="a"), ready(2, key="b")], [None, 1, 2]),  # the first one's shape
        ([ready(1, alone=True), ready(0)], [None, 1]),
        ([ready(1), ready(0, alone=True)], [None, 1]),
    ],
)
def test_direct_keeps_each_step_in_the_row_of_its_slot(entries: list[Ready[Item]], rows: list[int | None]) -> None:
    pick = pick_direct(entries, NOW_S, DirectSpec(), Speed())

    assert slots_of(pick, entries) == rows


@pytest.mark.parametrize(
    ("entries", "leaves_at_s"),
    [
        ([ready(0), ready(1)], NOW_S),  # 2 of the 2 rows wanted
        ([ready(0, key="a"), ready(1, key="b")], NOW_S),  # counted as Triton does, whatever their shapes
        ([ready(0, age_s=0.3)], NOW_S + 0.7),
        ([ready(0, age_s=1.0)], NOW_S),
        ([ready(0, left_s=0.5)], NOW_S + 0.4),  # of which the execution takes 0.1 s
        ([ready(4, left_s=0.5)], NOW_S),  # here 0.5 s, of five rows
        ([ready(0, alone=True)], NOW_S),
    ],
)
def test_direct_waits_for_a_share_of_its_slots(entries: list[Ready[Item]], leaves_at_s: float) -> None:
    spec = DirectSpec(minimum_rows=2, max_queue_delay_s=1.0)

    pick = pick_direct(entries, NOW_S, spec, Speed(0.1))

    assert bool(pick.rows) == (leaves_at_s == NOW_S)
    assert pick.rows or pick.wake_at_s == pytest.approx(leaves_at_s)


def test_direct_does_not_wait_without_a_delay() -> None:
    entries = [ready(0)]

    assert slots_of(pick_direct(entries, NOW_S, DirectSpec(minimum_rows=2), Speed()), entries) == [0]


@pytest.mark.parametrize(
    ("preferred", "delay_s", "entries", "rows"),
    [
        ((4,), 0.0, [ready(5), ready(2), ready(9)], [5, 2, 9]),  # no padding, in the order in which they were ready
        ((4,), 0.0, [ready(slot) for slot in range(6)], [0, 1, 2, 3]),
        ((2, 4), 1.0, [ready(0), ready(1), ready(2)], [0, 1]),
        ((4,), 1.0, [ready(0, age_s=0.5)], []),
        ((4,), 1.0, [ready(0, age_s=1.0)], [0]),
        ((4,), 0.0, [ready(0, key="a"), ready(1, key="b"), ready(2, key="a")], [0]),
        ((4,), 0.0, [ready(0, alone=True), ready(1)], [0]),
    ],
)
def test_oldest_batches_as_the_dynamic_batcher_does(
    preferred: tuple[int, ...], delay_s: float, entries: list[Ready[Item]], rows: list[int | None]
) -> None:
    rules = rules_of(OldestSpec(preferred_sizes=preferred, max_queue_delay_s=delay_s), 4)

    pick = pick_oldest(entries, NOW_S, rules, Speed())

    assert slots_of(pick, entries) == rows
    assert rows or pick.wake_at_s == NOW_S + 0.5


ITEM = Item(rows=1, key=None, enqueued_s=0.0, deadline_s=1.0)
ROWS = [
    SequenceStep(item=ITEM, sequence=SequenceId("t", 5), start=True),
    None,
    SequenceStep(item=ITEM, sequence=SequenceId("t", 6), end=True),
    SequenceStep(item=ITEM, sequence=SequenceId("t", 7)),
    SequenceStep(item=ITEM, sequence=SequenceId("t", 8), start=True, end=True),
]


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        (ControlKind.START, [1, 0, 0, 0, 1]),
        (ControlKind.END, [0, 0, 1, 0, 1]),
        (ControlKind.READY, [1, 0, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize(
    ("datatype", "false", "true", "dtype"),
    [("INT32", -7, 9, "<i4"), ("FP32", 0.5, -1.5, "<f4"), ("BOOL", True, False, "|b1"), ("BOOL", False, True, "|b1")],
)
def test_controls_have_the_value_of_each_row(
    kind: ControlKind, holds: list[int], datatype: str, false: float, true: float, dtype: str
) -> None:
    control = ControlSpec(name="c", kind=kind, datatype=datatype, false=false, true=true)

    made = control_inputs(ROWS, [control], batched=True)["c"]

    expected = np.array([[true if held else false] for held in holds], dtype=dtype)
    assert (made.dtype, made.shape, made.tolist()) == (expected.dtype, (5, 1), expected.tolist())


@pytest.mark.parametrize(
    ("datatype", "correlation_id", "value"),
    [
        ("UINT64", 2**64 - 1, 2**64 - 1),
        ("INT64", 2**64 - 1, -1),
        ("UINT32", 2**32 + 5, 5),
        ("INT32", 2**31, -(2**31)),
        ("BYTES", 12, b"12"),
        ("BYTES", "é", "é".encode()),
    ],
)
def test_the_correlation_id_as_number_and_as_text(datatype: str, correlation_id: int | str, value: Any) -> None:
    """A number that is too large loses its high bits, as in Triton; padding has 0, or no text."""
    control = ControlSpec(name="c", kind=ControlKind.CORRID, datatype=datatype)

    made = control_inputs(
        [None, SequenceStep(item=ITEM, sequence=SequenceId("t", correlation_id))], [control], batched=True
    )["c"]

    assert made.tolist() == [[b"" if datatype == "BYTES" else 0], [value]]
    assert made.dtype == {"UINT64": "<u8", "INT64": "<i8", "UINT32": "<u4", "INT32": "<i4", "BYTES": "O"}[datatype]


def test_controls_of_a_model_without_a_batch_dimension() -> None:
    control = ControlSpec(name="c", kind=ControlKind.READY, datatype="INT32", false=0, true=1)

    assert control_inputs(ROWS[:1], [control], batched=False)["c"].tolist() == [1]


def test_padding_is_zeros() -> None:
    numbers, texts = np.ones((2, 3), dtype="<f4"), np.array([[b"a"], [b"b"]], dtype=object)

    made = padded({"x": numbers, "t": texts}, [None, ROWS[0], None, ROWS[2]])

    assert made["x"].tolist() == [[0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert (made["x"].dtype, made["t"].tolist()) == (numbers.dtype, [[b""], [b"a"], [b""], [b"b"]])


def test_a_batch_without_padding_is_left_as_it_is() -> None:
    inputs = {"x": np.ones((1, 3), dtype="<f4")}

    assert padded(inputs, ROWS[:1]) is inputs
