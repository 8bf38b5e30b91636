"""Frames that someone made up, header and all: whatever they claim, they are `CorruptEntry` at worst."""

import contextlib
import struct
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from qinfer.core.messages import InferRequest
from qinfer.errors import CorruptEntry, InvalidRequest
from qinfer.queue.values import _reference
from qinfer.tensors import Tensor, to_numpy
from qinfer.wire.frame import PayloadApart, decode_request, decode_responses, encode_request_apart

HUGE = st.sampled_from([2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1])
NUMBERS = st.integers(-2, 40) | HUGE
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
TENSOR = st.tuples(
    st.text(max_size=3),
    st.sampled_from(["FP32", "BYTES", "BF16", "none"]),
    st.lists(NUMBERS, max_size=3),
    NUMBERS,
    NUMBERS,
)
TENSORS = st.lists(TENSOR | VALUES, max_size=3)
TEXT = st.text(max_size=3)
REQUEST = st.tuples(
    TEXT, TEXT, TEXT, NUMBERS, TENSORS, st.lists(TEXT, max_size=2), st.dictionaries(TEXT, VALUES, max_size=2),
    NUMBERS, NUMBERS, TEXT, TEXT, TEXT, NUMBERS, NUMBERS, NUMBERS, st.none() | VALUES,
    st.sampled_from(["", "redis", "?"]) | VALUES, NUMBERS | VALUES,
)  # fmt: skip
RESPONSE = st.tuples(
    TEXT, NUMBERS, NUMBERS, st.booleans(), TEXT, NUMBERS, TENSORS, st.none() | VALUES, st.none() | VALUES,
    st.booleans() | VALUES, st.dictionaries(TEXT, VALUES, max_size=2),
)  # fmt: skip


def frame(kind: int, header: Any, tail: bytes, claimed: int | None = None) -> bytes:
    text = msgspec.msgpack.encode(header)
    return struct.pack("<BBHI", 1, kind, 0, len(text) if claimed is None else claimed) + text + tail


@given(
    REQUEST | VALUES, st.binary(max_size=64), st.none() | st.binary(max_size=64), st.none() | st.integers(0, 2**32 - 1)
)
def test_requests(header: Any, tail: bytes, payload: bytes | None, claimed: int | None) -> None:
    """A request's frame is read, is `PayloadApart`, or is corrupt; its tensors never reach beyond it."""
    with contextlib.suppress(CorruptEntry, PayloadApart):
        request = decode_request(frame(0, header, tail, claimed), payload)
        assert sum(tensor.nbytes for tensor in request.inputs) <= len(tail) + len(payload or b"")


@given(st.lists(RESPONSE, max_size=3) | VALUES, st.binary(max_size=64))
def test_responses(header: Any, tail: bytes) -> None:
    """So are responses."""
    with contextlib.suppress(CorruptEntry):
        responses = decode_responses(frame(1, header, tail))
        assert sum(tensor.nbytes for response in responses for tensor in response.outputs) <= len(tail)


@given(st.binary(max_size=40), st.integers(0, 40))
def test_payloads_of_another_length(payload: bytes, cut: int) -> None:
    """A payload that is shorter than its frame says is corrupt; a longer one has only more than was asked for."""
    request = InferRequest(model="m", id="1", inputs=(Tensor("x", "UINT8", (len(payload),), payload),))
    text, stored = encode_request_apart(request)

    with contextlib.suppress(CorruptEntry):
        (tensor,) = decode_request(text, stored[:cut]).inputs
        assert bytes(tensor.data) == payload


FIELD = st.none() | st.sampled_from([b"1", b"2", b"-1", b"9" * 5000, b"1.5"]) | st.binary(max_size=9)


@given(st.tuples(FIELD, FIELD, FIELD))
def test_references(fields: tuple[bytes, bytes, bytes]) -> None:
    """The three fields in the place of a payload may be missing, and hold anything."""
    with contextlib.suppress(CorruptEntry):
        _reference(fields)


@given(
    st.lists(st.integers(0, 3) | st.sampled_from([2**31, 2**62]), max_size=5).map(tuple),
    st.sampled_from(["BYTES", "FP32", "BF16", "BOOL", "FP16", "INT64"]),
    st.binary(max_size=40),
)
def test_tensors_of_any_bytes(shape: tuple[int, ...], datatype: str, data: bytes) -> None:
    """Bytes that do not fill the shape are refused, whatever size the shape claims; nothing is allocated for it."""
    with contextlib.suppress(InvalidRequest):
        assert to_numpy(Tensor("x", datatype, shape, data)).size <= len(data)
