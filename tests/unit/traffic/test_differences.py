"""How outputs of two targets are compared."""

import math
from typing import Any

import numpy as np
import pytest

from qinfer.errors import InvalidRequest
from qinfer.traffic.differences import Rule, Samples, Summary, compared, shown

NAN, INF = math.nan, math.inf
AUTO, ARGMAX, EQUAL, WITHIN = (Rule(agree=agree) for agree in ("", "argmax", "equal", "within"))


def floats(*rows: Any) -> np.ndarray:
    return np.array(rows, np.float32)


def texts(*rows: Any) -> np.ndarray:
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


def agree(rule: Rule, one: Any, other: Any) -> list[bool]:
    return list(map(bool, compared(rule, one, other).agrees))


@pytest.mark.parametrize(
    ("values", "by"),
    [
        (floats([0.1, 0.9]), "argmax"),
        ([floats(0.1, 0.9)], "argmax"),
        (floats([0.5]), "within"),
        (floats(0.5), "within"),
        (floats([[1, 2], [3, 4]]), "within"),
        (np.array([[3]]), "equal"),
        (np.array([True]), "equal"),
        (texts(b"cat"), "equal"),
    ],
)
def test_the_values_decide_where_the_rule_does_not(values: Any, by: str) -> None:
    assert AUTO.for_values(values).agree == by
    assert WITHIN.for_values(floats([0.1, 0.9])) is WITHIN


@pytest.mark.parametrize("rule", [ARGMAX, WITHIN])
def test_texts_are_compared_as_they_are(rule: Rule) -> None:
    with pytest.raises(InvalidRequest, match=f"can't be compared by '{rule.agree}'"):
        compared(rule, texts(b"a"), texts(b"a"))


def test_single_values_have_no_argmax() -> None:
    with pytest.raises(InvalidRequest, match="has no argmax"):
        compared(ARGMAX, floats(1, 2), floats(1, 2))


def test_labels_agree_whatever_the_scores_are() -> None:
    rows = compared(AUTO, floats([0.1, 0.9], [0.6, 0.4]), floats([0.4, 0.6], [0.4, 0.6]))

    assert rows.agrees.tolist() == [True, False]
    assert rows.distances == pytest.approx([0.3, 0.2])


def test_every_vector_of_a_row_counts() -> None:
    one = floats([[0.1, 0.9], [0.9, 0.1]])

    assert agree(ARGMAX, one, floats([[0.2, 0.8], [0.8, 0.2]])) == [True]
    assert agree(ARGMAX, one, floats([[0.2, 0.8], [0.2, 0.8]])) == [False]


def test_texts_and_whole_numbers_are_equal_or_not() -> None:
    large = 2**62
    assert agree(AUTO, texts(b"cat", "dog"), texts(b"cat", "dot")) == [True, False]
    assert agree(AUTO, np.array([[large], [1]]), np.array([[large + 1], [1]])) == [False, True], (
        "as float64 they are equal"
    )
    assert np.isnan(compared(AUTO, texts(b"a"), texts(b"b")).distances).all()


def test_tolerances_are_added() -> None:
    rule = Rule(agree="within", tolerance=0.5, relative=0.1)

    assert agree(rule, floats(10, 10, -10), floats(11.4, 11.6, -11.4)) == [True, False, True]
    assert agree(WITHIN, floats(1, 1), floats(1, 1.001)) == [True, False]


@pytest.mark.parametrize("how", ["argmax", "equal", "within"])
def test_nan_of_both_targets_is_as_the_rule_says(how: Any) -> None:
    both = floats([NAN, 1.0])

    assert agree(Rule(agree=how, tolerance=1e9), both, both) == [True]
    assert agree(Rule(agree=how, tolerance=1e9, nan="differs"), both, both) == [False]


@pytest.mark.parametrize("how", ["argmax", "equal", "within"])
def test_nan_of_one_target_cannot_be_measured(how: Any) -> None:
    rows = compared(Rule(agree=how, tolerance=1e9), floats([NAN, 1.0]), floats([0.0, 1.0]))

    assert rows.agrees.tolist() == [False]
    assert np.isnan(rows.distances[0]) if how == "equal" else rows.distances[0] == INF


def test_infinities_of_one_sign_are_equal() -> None:
    rows = compared(Rule(agree="within", relative=0.1), floats([INF], [INF], [INF]), floats([INF], [-INF], [1.0]))

    assert rows.agrees.tolist() == [True, False, False]
    assert rows.distances.tolist() == [0.0, INF, INF]


def test_rows_of_other_shapes_cannot_be_measured() -> None:
    one = [floats(1, 2), floats(1, 2, 3), floats(), floats(5, 6)]
    other = [floats(1, 2), floats(1, 2), floats(), floats(5, 7)]

    rows = compared(WITHIN, one, other)

    assert rows.agrees.tolist() == [True, False, True, False]
    assert rows.distances.tolist() == [0.0, INF, 0.0, 1.0]
    assert agree(WITHIN, floats([1, 2]), floats([1, 2, 3])) == [False]


def test_no_rows_and_rows_without_elements() -> None:
    assert agree(AUTO, floats().reshape(0, 4), floats().reshape(0, 4)) == []
    assert agree(ARGMAX, np.zeros((2, 0)), np.zeros((2, 0))) == [True, True]


def test_different_numbers_of_rows_are_an_error() -> None:
    with pytest.raises(InvalidRequest, match="1 and 2 rows"):
        compared(AUTO, floats([1]), floats([1], [2]))


def test_a_summary_is_the_same_in_any_batches() -> None:
    one, other = floats(1, 2, NAN, 4), floats(1, 2.5, 3, 5)

    whole = Summary().with_rows(compared(WITHIN, one, other))
    halves = [Summary().with_rows(compared(WITHIN, one[part], other[part])) for part in (slice(2), slice(2, 4))]

    assert whole == halves[0] + halves[1]
    assert whole == Summary(rows=4, agreeing=1, unmeasured=1, measured=3, largest=1.0, total=1.5)
    assert (whole.agreement, whole.mean) == (0.25, 0.5)
    assert Summary().agreement == 1.0


def test_samples_are_the_most_different_rows() -> None:
    samples = Samples(most=3)
    for first, others in ((0, floats(0, 0, 3)), (3, floats(NAN, 1, 2))):
        ones = floats(0, 0, 0)
        names = [str(first + row) for row in range(3)]
        samples.add_rows("y", names, ones, others, compared(WITHIN, ones, others))

    found = [(sample.row, sample.distance) for sample in samples.all()]
    assert found == [("3", None), ("2", 3.0), ("5", 2.0)]


def test_rows_that_disagree_come_before_rows_that_are_far_apart() -> None:
    one, other = floats([1, 2], [1, 90], [1, 2]), floats([2, 1], [1, 9], [1, 2])
    samples = Samples()

    samples.add_rows("y", ["a", "b", "c"], one, other, compared(ARGMAX, one, other))

    assert [(sample.row, sample.agrees) for sample in samples.all()] == [("a", False), ("b", True)]


def test_samples_hold_few_bytes() -> None:
    samples = Samples(most=100, most_bytes=2000)
    one, other = texts(*["x" * 10_000] * 50), texts(*["y" * 10_000] * 50)

    samples.add_rows("y", ["r" * 10_000] * 50, one, other, compared(AUTO, one, other))

    assert 0 < sum(sample.size_bytes for sample in samples.all()) <= 2000


def test_redacted_samples_have_no_values() -> None:
    samples = Samples(redact=True)

    samples.add_rows("y", ["a"], texts("secret"), texts("hidden"), compared(AUTO, texts("secret"), texts("hidden")))

    assert [(sample.row, sample.stable, sample.canary) for sample in samples.all()] == [("a", "", "")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"caf\xc3\xa9", "café"),
        (np.float32(0.25), "0.25"),
        (np.int64(7), "7"),
        (floats(0.125, 1), "[0.125, 1]"),
        (np.arange(9), "[0, 1, 2, 3, 4, 5, 6, 7, …]"),
        (texts(b"a", "b"), "[a, b]"),
        ("x" * 300, "x" * 199 + "…"),
    ],
)
def test_values_are_shown_shortened(value: Any, text: str) -> None:
    assert shown(value) == text
