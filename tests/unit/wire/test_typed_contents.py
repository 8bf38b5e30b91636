"""Large typed contents become the tensors that protobuf would make of them, and are counted before."""

import random
from typing import Any

import numpy as np
import pytest

from qinfer.errors import InvalidRequest, PayloadTooLarge, QinferError
from qinfer.tensors import DATATYPES, pack_bytes
from qinfer.wire.protos import grpc_service_pb2 as pb
from qinfer.wire.typed_contents import MAX_FIELDS, WINDOW_BYTES, TypedContents, check_fields

MOST = 2**26
NUMBERS: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("bool_contents", [False, True]),
    "INT8": ("int_contents", [-1, 0, 1, 127, -128, 300, 2**31 - 1, -(2**31)]),
    "INT16": ("int_contents", [-1, 0, 2**15 - 1, 2**31 - 1, -(2**31)]),
    "INT32": ("int_contents", [-1, 0, 2**31 - 1, -(2**31)]),
    "INT64": ("int64_contents", [-1, 0, 2**63 - 1, -(2**63), 127, 128, 2**35]),
    "UINT8": ("uint_contents", [0, 255, 256, 2**32 - 1]),
    "UINT32": ("uint_contents", [0, 1, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1, 2**63]),
    "FP32": ("fp32_contents", [0.0, -1.5, float("inf")]),
    "FP64": ("fp64_contents", [0.0, -1.5, 1e300]),
}


def tensor_bytes(contents: bytes, datatype: str, count: int, most: int = MOST) -> bytes:
    return bytes(TypedContents(contents).tensor_bytes("x", datatype, count, most))


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numbers_are_what_protobuf_reads(datatype: str) -> None:
    field, values = NUMBERS[datatype]
    some: list[Any] = random.Random(datatype).choices(values, k=WINDOW_BYTES)
    text = pb.InferTensorContents(**{field: some}).SerializeToString()

    found = tensor_bytes(text, datatype, len(some))

    wide = np.array(some, dtype="f8" if datatype.startswith("FP") else "i8" if datatype != "UINT64" else "u8")
    assert found == wide.astype(DATATYPES[datatype].numpy).tobytes()


@pytest.mark.parametrize("kind", [0, 1, 2, 7, 126, 127, 128, 129, 5000, 16383, 16384, WINDOW_BYTES + 1])
def test_strings_are_what_protobuf_reads(kind: int) -> None:
    chance = random.Random(kind)
    some = [chance.randbytes(chance.choice((kind, kind, 0, 3, chance.randint(0, 300)))) for _ in range(3000)]
    if kind > 1000:
        some = some[:300]
    text = pb.InferTensorContents(bytes_contents=some).SerializeToString()

    assert tensor_bytes(text, "BYTES", len(some)) == pack_bytes(some)


def test_many_strings_without_text() -> None:
    assert tensor_bytes(b"\x42\x00" * 10**6, "BYTES", 10**6) == bytes(4 * 10**6)


@pytest.mark.parametrize("count", [1, 10**6 - 1, 10**6 + 1])
def test_another_number_of_strings_than_the_shape_takes(count: int) -> None:
    with pytest.raises(
        InvalidRequest, match=rf"input 'x' has \d+ elements in its contents, and its shape takes {count}"
    ):
        tensor_bytes(b"\x42\x00" * 10**6, "BYTES", count)


@pytest.mark.parametrize("datatype", NUMBERS)
def test_another_number_of_numbers_than_the_shape_takes(datatype: str) -> None:
    field, values = NUMBERS[datatype]
    text = pb.InferTensorContents(**{field: values * 1000}).SerializeToString()

    with pytest.raises(
        InvalidRequest, match=f"has {len(values) * 1000} elements in its contents, and its shape takes 7"
    ):
        tensor_bytes(text, datatype, 7)


def test_a_tensor_that_takes_more_bytes_than_it_may() -> None:
    text = pb.InferTensorContents(int64_contents=[1] * 1000).SerializeToString()

    with pytest.raises(PayloadTooLarge, match="takes 8000 bytes as a tensor, and 7999 are left"):
        tensor_bytes(text, "INT64", 1000, 7999)


def test_strings_that_take_more_bytes_than_they_may() -> None:
    with pytest.raises(PayloadTooLarge, match="takes 5000 bytes as a tensor, and 4999 are left"):
        tensor_bytes(b"\x42\x01a" * 1000, "BYTES", 1000, 4999)


def test_lists_in_several_pieces_and_numbers_by_themselves_are_one_list() -> None:
    packed, alone = b"\x1a\x03\x01\xac\x02", b"\x18\x07"

    assert tensor_bytes(packed + alone + packed, "INT64", 5) == np.array([1, 300, 7, 1, 300], "<i8").tobytes()


def test_many_numbers_by_themselves_are_refused() -> None:
    with pytest.raises(PayloadTooLarge, match=f"have more than {MAX_FIELDS} fields; send their numbers packed"):
        TypedContents(b"\x18\x07" * (MAX_FIELDS + 1))


@pytest.mark.parametrize(
    "text", [b"\x1a\x01\x80\x1a\x01\x01", b"\x32\x03\0\0\0", b"\x1a\x0b" + b"\x80" * 10 + b"\x01", b"\x0b"]
)
def test_damaged_numbers_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="is not a message of this call's type"):
        tensor_bytes(text, "INT64" if text[:1] == b"\x1a" else "FP32", 1)


@pytest.mark.parametrize("cut", range(1, 12))
def test_damaged_strings_are_refused(cut: int) -> None:
    text = pb.InferTensorContents(bytes_contents=[b"abc", b"d" * 200]).SerializeToString()

    for damaged in (text[:-cut], text[:5] + b"\x18\x01" + text[5:], text[: cut + 5]):
        with pytest.raises(QinferError):
            tensor_bytes(damaged, "BYTES", 2)


def test_two_kinds_of_contents_are_told() -> None:
    assert TypedContents(b"\x18\x07\x08\x01").is_mixed
    assert TypedContents(b"").field == 0


LISTS = {
    "empty inputs": b"\x2a\x00",
    "parameters": b"\x22\x00",
    "unknown": b"\x78\x00",
}


@pytest.mark.parametrize("field", LISTS.values(), ids=LISTS)
def test_many_fields_are_refused(field: bytes) -> None:
    check_fields(field * MAX_FIELDS, pb.ModelInferRequest.DESCRIPTOR)

    with pytest.raises(PayloadTooLarge, match=f"has more than {MAX_FIELDS} fields and elements of lists"):
        check_fields(field * (MAX_FIELDS + 1), pb.ModelInferRequest.DESCRIPTOR)


def test_many_values_within_a_message_are_refused() -> None:
    settings = pb.TraceSettingRequest()
    settings.settings["trace_level"].value.extend([""] * (MAX_FIELDS + 1))

    with pytest.raises(PayloadTooLarge):
        check_fields(settings.SerializeToString(), settings.DESCRIPTOR)


def test_packed_numbers_count_as_fields() -> None:
    request = pb.ModelInferRequest()
    request.inputs.add(shape=[1] * (MAX_FIELDS + 1))

    with pytest.raises(PayloadTooLarge):
        check_fields(request.SerializeToString(), request.DESCRIPTOR)
