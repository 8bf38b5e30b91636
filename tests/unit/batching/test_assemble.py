"""Requests → one batch of arrays."""

import mmap
from collections.abc import Sequence

import numpy as np
import pytest

from qinfer.batching.assemble import assemble, key_function
from qinfer.core.messages import InferRequest, MemoryReference
from qinfer.errors import InvalidRequest, QinferError, UnsupportedDatatype
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import Tensor, from_numpy


def request(**arrays: np.ndarray) -> InferRequest:
    return InferRequest(model="m", inputs=tuple(from_numpy(name, array) for name, array in arrays.items()))


def spec(*inputs: TensorSpec) -> ModelSpec:
    return ModelSpec(name="m", backend="stub", inputs=inputs, outputs=(), max_batch_size=8)


def tensor(name: str, *dims: int, optional: bool = False) -> TensorSpec:
    return TensorSpec(name=name, datatype="FP32", dims=dims, optional=optional)


def test_rows_are_stacked_in_order() -> None:
    """Rows of several requests follow one another."""
    a, b = np.arange(4, dtype="f4").reshape(2, 2), np.arange(4, 6, dtype="f4").reshape(1, 2)

    batch = assemble([request(x=a), request(x=b)], [2, 1])

    assert batch.size == 3
    np.testing.assert_array_equal(batch.inputs["x"], np.concatenate([a, b]))


def test_single_request_is_not_copied() -> None:
    """The array of a lone request is its own memory."""
    array = np.ones((1, 2), dtype="f4")

    batch = assemble([request(x=array)], [1])

    assert np.shares_memory(batch.inputs["x"], array)


def test_single_request_in_memory_of_another_process_is_copied() -> None:
    """The other process may use the memory for another request while a model computes."""
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    array = np.ndarray((1, 2), "f4", shared)
    array[:] = 1
    alone = InferRequest(model="m", inputs=(Tensor("x", "FP32", (1, 2), memoryview(shared)[:8]),))
    alone.memory = MemoryReference("gateway", 1, 0, 8, 1)

    batch = assemble([alone], [1])

    assert not np.shares_memory(batch.inputs["x"], array)
    np.testing.assert_array_equal(batch.inputs["x"], array)


def test_single_request_whose_tensors_were_copied_is_not_copied_again() -> None:
    array = np.ones((1, 2), dtype="f4")
    alone = request(x=array)
    alone.memory = MemoryReference("gateway", 1, 0, 8, 1)

    assert np.shares_memory(assemble([alone], [1]).inputs["x"], array)


def test_inputs_are_matched_by_name() -> None:
    """Requests may list their inputs in any order."""
    x, y = np.ones((1, 1), dtype="f4"), np.zeros((1, 1), dtype="f4")

    batch = assemble([request(x=x, y=y), request(y=y, x=x)], [1, 1])

    assert batch.inputs["x"].ravel().tolist() == [1, 1]
    assert batch.inputs["y"].ravel().tolist() == [0, 0]


@pytest.mark.parametrize("dtype", ["?", "u1", "i8", "f2", "f8"])
def test_fixed_size_datatypes(dtype: str) -> None:
    """Every fixed-size datatype is stacked with its dtype."""
    array = np.ones((1, 3), dtype=dtype)

    stacked = assemble([request(x=array), request(x=array)], [1, 1]).inputs["x"]

    assert stacked.dtype == array.dtype
    assert stacked.shape == (2, 3)


def test_strings_are_stacked() -> None:
    """BYTES become one object array."""
    a, b = np.array([[b"a"]], dtype=object), np.array([[b"bc"]], dtype=object)

    assert assemble([request(x=a), request(x=b)], [1, 1]).inputs["x"].tolist() == [[b"a"], [b"bc"]]


def test_a_string_does_not_reach_into_the_next_request() -> None:
    long = Tensor("x", "BYTES", (1, 1), b"\x05\0\0\0a")
    short = Tensor("x", "BYTES", (2, 1), b"\x00\0\0\0" * 2)

    with pytest.raises(InvalidRequest, match="expecting string of length 5"):
        assemble([InferRequest(model="m", inputs=(one,)) for one in (long, short)], [1, 2])


def test_bf16_is_widened() -> None:
    """BF16 becomes float32."""
    one = InferRequest(model="m", inputs=(Tensor("x", "BF16", (1, 1), b"\x80\x3f"),))

    assert assemble([one, one], [1, 1]).inputs["x"].tolist() == [[1.0], [1.0]]


def test_key_is_empty_when_all_is_fixed() -> None:
    """Fixed dimensions and required inputs always match."""
    key = key_function(spec(tensor("x", 2)))

    assert key(request(x=np.ones((1, 2), "f4"))) is None


def test_key_tells_variable_shapes_apart() -> None:
    """The batch dimension does not count, the others do."""
    key = key_function(spec(tensor("x", -1)))

    assert key(request(x=np.ones((1, 2), "f4"))) == key(request(x=np.ones((3, 2), "f4")))
    assert key(request(x=np.ones((1, 2), "f4"))) != key(request(x=np.ones((1, 3), "f4")))


def test_key_tells_input_sets_apart() -> None:
    """With optional inputs the set of inputs counts, in whatever order."""
    key = key_function(spec(tensor("x", 1), tensor("y", 1, optional=True)))
    one = np.ones((1, 1), "f4")

    assert key(request(x=one, y=one)) == key(request(y=one, x=one))
    assert key(request(x=one, y=one)) != key(request(x=one))


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (Tensor("x", "FP7", (1, 1), bytes(4)), UnsupportedDatatype),
        (Tensor("x", "FP32", (1, 1), bytes(8)), InvalidRequest),
        (Tensor("x", "BF16", (2, 1), bytes(4)), InvalidRequest),
        (Tensor("x", "BF16", (), bytes(2)), InvalidRequest),
    ],
)
def test_what_cannot_be_stacked_is_an_error_of_the_request(x: Tensor, error: type[QinferError]) -> None:
    """An unknown datatype, too many bytes, more rows than were announced, no batch dimension."""
    one = InferRequest(model="m", inputs=(x,))

    with pytest.raises(error):
        assemble([one, one], [1, 1])


@pytest.mark.parametrize("rows", [[2, 1], [2]])
def test_an_instance_gets_its_inputs_in_its_own_memory(rows: list[int]) -> None:
    """Each is copied once, also a lone one."""
    arrays = [np.full((count, 3), count, "f4") for count in rows]
    places: list[np.ndarray] = []

    def room(sizes: Sequence[int]) -> Sequence[np.ndarray]:
        places.extend(np.empty(size, np.uint8) for size in sizes)
        return places

    batch = assemble([request(x=array, y=array[:, :0]) for array in arrays], rows, room=room)

    np.testing.assert_array_equal(batch.inputs["x"], np.concatenate(arrays))
    assert batch.inputs["y"].shape == (sum(rows), 0)
    assert np.shares_memory(batch.inputs["x"], places[0])


def test_without_room_a_batch_is_made_elsewhere() -> None:
    array = np.ones((1, 2), "f4")

    batch = assemble([request(x=array)] * 2, [1, 1], room=lambda _: None)

    assert batch.inputs["x"].tolist() == [[1, 1], [1, 1]]
