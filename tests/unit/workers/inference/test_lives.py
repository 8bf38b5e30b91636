"""Numbers of steps in an owner's memory: new, repeated and refused ones."""

import pytest

from qinfer.errors import QinferError
from qinfer.queue.entries import Entry, Lane
from qinfer.queue.sequences.records import OwnedLife, SequenceId
from qinfer_workers.inference.sequences.lives import HeldLife, StepFate


def held(accepted: int, committed: int, *, is_ended: bool = False) -> HeldLife:
    """Returns a life with so many steps, of which the first ones are committed."""
    life = HeldLife(
        OwnedLife(sequence=SequenceId("", 7), life=1, token=1, committed=0, generation=0, is_explicit=True, idle_s=1.0)
    )
    for number in range(1, accepted + 1):
        life.accept(number, Entry(Lane("m", 1), f"{number}-0"), is_end=is_ended and number == accepted)
    for number in range(1, committed + 1):
        life.committed = number
        del life.entries[number]
    return life


@pytest.mark.parametrize(
    ("number", "fate"),
    [
        (1, "step 2 is committed"),
        (2, StepFate.ANSWERED),
        (3, StepFate.WAITS),
        (4, StepFate.WAITS),
        (5, StepFate.NEW),
        (6, "leaves a gap: send step 5 first"),
    ],
)
def test_a_step_is_new_repeated_or_refused(number: int, fate: StepFate | str) -> None:
    found = held(4, 2).judge("m", number, 0)

    assert found is fate if isinstance(fate, StepFate) else isinstance(found, QinferError) and fate in found.message


def test_only_repeated_steps_are_accepted_after_the_end() -> None:
    life = held(2, 1, is_ended=True)

    refused = life.judge("m", 3, 0)
    assert isinstance(refused, QinferError)
    assert "must specify the START flag" in refused.message
    assert life.judge("m", 2, 0) is StepFate.WAITS


def test_a_full_sequence_takes_repeated_steps_only() -> None:
    life = held(4, 2)

    refused = life.judge("m", 5, 2)
    assert isinstance(refused, QinferError)
    assert "too many steps" in refused.message
    assert life.judge("m", 5, 3) is StepFate.NEW
    assert life.judge("m", 4, 2) is StepFate.WAITS
