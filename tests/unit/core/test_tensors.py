"""Tensors: bytes to arrays and back, for every datatype of the protocol."""

import ml_dtypes
import numpy as np
import pytest

from qinfer.errors import InvalidRequest, UnsupportedDatatype
from qinfer.tensors import (
    CONFIG_DATATYPES,
    DATATYPES,
    Tensor,
    datatype,
    from_numpy,
    iter_bytes,
    pack_bytes,
    to_numpy,
)

NUMERIC = [d for d in DATATYPES.values() if d.numpy]


def test_the_table_has_the_fourteen_datatypes() -> None:
    """Every wire datatype has its config name, and back."""
    assert len(DATATYPES) == 14
    assert CONFIG_DATATYPES["TYPE_STRING"].name == "BYTES"
    assert CONFIG_DATATYPES["TYPE_FP32"].name == "FP32"


@pytest.mark.parametrize("kind", NUMERIC, ids=lambda d: d.name)
def test_numeric_arrays_survive(kind: object) -> None:
    """An array of each numeric datatype comes back equal, with its datatype."""
    assert isinstance(kind, type(DATATYPES["FP32"]))
    array = np.arange(6).reshape(2, 3).astype(kind.numpy)

    tensor = from_numpy("x", array)

    assert (tensor.datatype, tensor.shape, tensor.nbytes) == (kind.name, (2, 3), 6 * kind.itemsize)
    assert np.array_equal(to_numpy(tensor), array)
    assert to_numpy(tensor).dtype == array.dtype


def test_contiguous_arrays_are_not_copied() -> None:
    """A tensor of a contiguous array is a view of it, and so is the array made of the tensor."""
    array = np.zeros((2, 2), dtype="<f4")

    again = to_numpy(from_numpy("x", array))

    assert np.shares_memory(array, again)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=">f4").reshape(3, 4),
        np.arange(12, dtype=">i8"),
        np.arange(12, dtype="<f4").reshape(3, 4)[:, ::2],
        np.asfortranarray(np.arange(12, dtype="<i4").reshape(3, 4)),
        np.array(3.5),
        np.zeros((0, 4), dtype="<f4"),
        np.zeros((), dtype=bool),
    ],
    ids=["big-endian float", "big-endian int", "strided", "fortran", "scalar", "empty", "0-dim bool"],
)
def test_unusual_arrays_become_little_endian_rows(array: np.ndarray) -> None:
    """Byte order, strides and rank of the source do not show in the tensor."""
    tensor = from_numpy("x", array)

    assert bytes(tensor.data) == np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
    assert np.array_equal(to_numpy(tensor), array)


def test_bf16_is_truncated() -> None:
    """BF16 keeps the top 16 bits of each float32, without rounding."""
    array = np.array([1.0, -2.5, 3.14159274, 1e30], dtype="<f4")

    back = to_numpy(from_numpy("x", array, "BF16"))

    assert np.array_equal(back.view("<u4"), array.view("<u4") & 0xFFFF0000)


def test_bfloat16_arrays_are_bf16() -> None:
    """The numpy type that the Triton client uses for BF16 is taken as it is."""
    array = np.array([[1.0, -2.5]], dtype=ml_dtypes.bfloat16)

    tensor = from_numpy("x", array)

    assert (tensor.datatype, bytes(tensor.data)) == ("BF16", array.tobytes())


def test_bytes_arrays_survive() -> None:
    """Object, `S` and `U` arrays become length-prefixed elements, in row-major order."""
    array = np.array([[b"", b"\xff\x00"], ["é", "long " * 10]], dtype=object)

    tensor = from_numpy("x", array)

    assert tensor.datatype == "BYTES"
    assert to_numpy(tensor).tolist() == [[b"", b"\xff\x00"], ["é".encode(), b"long " * 10]]
    assert from_numpy("x", np.array(["a", "bc"])).data == pack_bytes([b"a", b"bc"])


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"\x01\x00", "incomplete string length indicator"), (b"\x05\x00\x00\x00ab", "incomplete string data")],
)
def test_cut_off_strings_are_refused(data: bytes, text: str) -> None:
    """A length indicator or a string that runs past the end is named."""
    with pytest.raises(InvalidRequest, match=text):
        list(iter_bytes(data))


def test_wrong_sizes_are_refused() -> None:
    """Bytes that do not fill the shape never become an array."""
    with pytest.raises(InvalidRequest, match="needs 16"):
        to_numpy(Tensor("x", "FP32", (4,), bytes(12)))
    with pytest.raises(InvalidRequest, match="expected 2 string elements"):
        to_numpy(Tensor("x", "BYTES", (2,), pack_bytes([b"a"])))


@pytest.mark.parametrize("array", [np.zeros(2, dtype="c8"), np.zeros(2, dtype="M8[s]"), np.zeros(2, dtype="f4,i4")])
def test_foreign_dtypes_are_refused(array: np.ndarray) -> None:
    """What the protocol has no datatype for is named, with what to do."""
    with pytest.raises(UnsupportedDatatype, match="cast it"):
        from_numpy("x", array)


def test_a_datatype_that_is_not_the_arrays_is_refused() -> None:
    """`from_numpy` never casts on its own, but for BF16."""
    with pytest.raises(UnsupportedDatatype, match="cast it to FP32"):
        from_numpy("x", np.zeros(2), "FP32")


def test_unknown_datatypes_are_named() -> None:
    """The error lists what there is."""
    with pytest.raises(UnsupportedDatatype, match=r"'FP8'.*FP32"):
        datatype("FP8")


@pytest.mark.parametrize("kind", ["FP32", "BF16", "BYTES"])
def test_shapes_beyond_any_array_are_refused(kind: str) -> None:
    """Numpy's limits hold for an array of nothing too."""
    with pytest.raises(InvalidRequest, match="larger than any array can be"):
        to_numpy(Tensor("x", kind, (0, 2**62, 2**62), b""))
