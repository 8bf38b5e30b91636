"""What is found out about a shadow, and how shadows are counted."""

from unittest.mock import Mock

import numpy as np
import pytest

from qinfer.errors import InvalidRequest
from qinfer.tensors import Tensor, from_numpy
from qinfer.traffic.differences import Differences, Rule
from qinfer.traffic.tally import ShadowCounts, ShadowOutcome, TargetTally


def outputs(*rows: list[float], name: str = "y") -> list[Tensor]:
    return [from_numpy(name, np.array(rows, np.float32))]


def differences(sample_bytes: int = 65_536, *, redact: bool = False, **rules: Rule) -> Differences:
    return Differences(rules, sample_bytes, redact=redact)


def test_a_request_agrees_if_all_its_rows_do() -> None:
    of = differences()

    assert of.add("a", outputs([1, 2], [2, 1]), outputs([3, 4], [4, 3]), is_batched=True)
    assert not of.add("b", outputs([1, 2], [2, 1]), outputs([3, 4], [3, 4]), is_batched=True)

    found = of.found()
    assert [(one.output, one.rows, one.agreement, one.largest_distance) for one in found.outputs] == [
        ("y", 4, 0.75, 3.0)
    ]
    assert [(sample.row, sample.stable, sample.canary) for sample in found.samples] == [("b[1]", "[2, 1]", "[3, 4]")]


def test_a_rule_is_that_of_its_output() -> None:
    of = differences(y=Rule(agree="within", tolerance=0.5))

    assert of.add("a", outputs([1, 2]), outputs([1.5, 2]), is_batched=True)
    assert not of.add("a", outputs([1, 2]), outputs([1, 2.6]), is_batched=True)


def test_what_has_no_batch_dimension_is_one_row() -> None:
    of = differences()

    assert of.add("a", [from_numpy("y", np.arange(4.0))], [from_numpy("y", np.arange(4.0))], is_batched=False)

    assert of.found().outputs[0].rows == 1


@pytest.mark.parametrize("other", [outputs([1, 2], [1, 2]), outputs([1, 2], name="z"), []])
def test_other_outputs_cannot_be_compared(other: list[Tensor]) -> None:
    with pytest.raises(InvalidRequest):
        differences().add("a", outputs([1, 2]), other, is_batched=True)


def test_samples_are_bounded_in_bytes_and_may_have_no_values() -> None:
    small, secret, none = differences(200), differences(redact=True), differences(0)
    for number in range(100):
        for of in (small, secret, none):
            of.add(f"r{number}", outputs([number, 0]), outputs([0, number + 1]), is_batched=True)

    assert 0 < sum(sample.size_bytes for sample in small.found().samples) <= 200
    assert {sample.stable + sample.canary for sample in secret.found().samples} == {""}
    assert none.found().samples == []


def test_counts_are_by_endpoint_and_target() -> None:
    tally = TargetTally(Mock(by_name={}, revision=1))
    for outcome in (ShadowOutcome.AGREED, *ShadowOutcome):
        tally.shadow(("e", "m:2"), outcome)

    assert tally.shadows("e", "m:2") == ShadowCounts(compared=3, disagreed=1, failed=1, dropped=1)
    assert tally.shadows("e", "m:3") == ShadowCounts()
