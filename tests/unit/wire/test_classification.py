"""The best classes of an output."""

from math import isnan
from typing import Any

import numpy as np
import pytest

from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.tensors import Tensor, from_numpy, to_numpy
from qinfer.wire.outputs import MAX_ELEMENTS, classify, greatest


def ranked(values: Any, count: int, labels: tuple[str, ...] = (), *, batched: bool = False) -> Any:
    return to_numpy(classify(from_numpy("y", values), count, labels, batched=batched)).tolist()


def test_floats_have_six_decimals_and_labels_where_there_are_any() -> None:
    """As `std::to_string` prints them; an empty label is none."""
    values = np.array([0.1, 0.7, 0.2, 1e-9], np.float32)

    assert ranked(values, 4, ("a", "", "c")) == [b"0.700000:1", b"0.200000:2:c", b"0.100000:0:a", b"0.000000:3"]


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"])
def test_integers_are_plain(dtype: str) -> None:
    """Also the greatest of each datatype."""
    top = int(np.iinfo(dtype).max)

    assert ranked(np.array([0, top, 1], dtype), 2) == [f"{top}:1".encode(), b"1:2"]


def test_the_lowest_integer_is_not_the_best() -> None:
    """It has no positive counterpart."""
    assert ranked(np.array([-(2**63), 5, -1], "i8"), 3) == [b"5:1", b"-1:2", f"{-(2**63)}:0".encode()]


@pytest.mark.parametrize("count", [3, 40])
def test_equal_values_keep_their_order(count: int) -> None:
    """However the best are found."""
    values = np.array([1, 2, 2, 0, 2] * 8, np.float32)
    expected = sorted(range(40), key=lambda index: (-values[index], index))[:count]

    assert [int(text.split(b":")[1]) for text in ranked(values, count)] == expected


@pytest.mark.parametrize("count", [1, 7, 100, 1000, 2000])
def test_it_ranks_as_a_sort_does(count: int) -> None:
    """On a thousand values, of which some are equal."""
    values = np.random.default_rng(7).integers(-50, 50, 1000).astype(np.float64)
    expected = np.argsort(-values, kind="stable")[:count].tolist()

    assert [int(text.split(b":")[1]) for text in ranked(values, count)] == expected


def test_nan_comes_last() -> None:
    """It is no class anybody wants, whatever it is compared with."""
    values = np.array([np.nan, -np.inf, 1.0, np.nan, np.inf], np.float32)

    assert ranked(values, 5) == [b"inf:4", b"1.000000:2", b"-inf:1", b"nan:0", b"nan:3"]


def test_each_row_is_ranked_by_itself() -> None:
    """`[rows, classes]`; inner dimensions are one list of classes."""
    values = np.arange(8, dtype=np.int32).reshape(2, 2, 2)
    tensor = classify(from_numpy("y", values), 3, batched=True)

    assert (tensor.datatype, tensor.shape) == ("BYTES", (2, 3))
    assert to_numpy(tensor).tolist() == [[b"3:3", b"2:2", b"1:1"], [b"7:3", b"6:2", b"5:1"]]


def test_no_more_classes_than_elements() -> None:
    """`min(K, elements)`, also when there are none."""
    assert ranked(np.array([[1.0], [2.0]], np.float64), 9, batched=True) == [[b"1.000000:0"], [b"2.000000:0"]]
    assert classify(Tensor("y", "FP32", (2, 0), b""), 3, batched=True).shape == (2, 0)
    assert classify(Tensor("y", "FP32", (0, 3), b""), 2, batched=True).shape == (0, 2)


@pytest.mark.parametrize("datatype", ["BOOL", "FP16", "BF16", "BYTES"])
def test_other_datatypes_are_refused(datatype: str) -> None:
    """With Triton's text."""
    with pytest.raises(InvalidRequest, match=f"class result not available .* unsupported type '{datatype}'"):
        classify(Tensor("y", datatype, (1,), b"\0\0"), 1, batched=False)


def test_too_many_elements_are_refused() -> None:
    """A row of more than a million."""
    tensor = Tensor("y", "UINT8", (MAX_ELEMENTS + 1,), bytes(MAX_ELEMENTS + 1))

    with pytest.raises(InvalidRequest, match=f"at most {MAX_ELEMENTS} elements, got {MAX_ELEMENTS + 1}"):
        classify(tensor, 1, batched=False)


def test_bytes_that_do_not_fill_the_shape_are_refused() -> None:
    """The model gave them."""
    with pytest.raises(OutputMismatch, match="output tensor shape does not match size of output for 'y'"):
        classify(Tensor("y", "FP32", (2,), bytes(4)), 1, batched=False)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.uint64])
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_many_rows_are_ranked_as_python_sorts(dtype: Any, count: int) -> None:
    """Few values, so that many are equal, and NaN and infinities where the datatype has them."""
    values = np.random.default_rng(count).integers(0, 6, (300, 41)).astype(dtype)
    if values.dtype.kind == "f":
        values[values == 5] = np.nan
        values[:100:3, ::5] = -np.inf
        values[150:] = np.nan_to_num(values[150:])

    found = greatest(values, count)

    def sort(row: list[float]) -> list[int]:
        keys = [(isnan(value), 0.0 if isnan(value) else -value, index) for index, value in enumerate(row)]
        return [index for _, _, index in sorted(keys)]

    assert found.tolist() == [sort(row)[:count] for row in values.tolist()]
