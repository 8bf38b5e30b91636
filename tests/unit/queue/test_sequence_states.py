"""The states of a sequence in Redis."""

import struct

import pytest

from qinfer.errors import CorruptEntry
from qinfer.queue.sequences.records import decode_states, encode_states
from qinfer.tensors import Tensor, pack_bytes
from qinfer.wire.versions import NewerVersion

STATES = (
    Tensor("total", "FP32", (1, 2), struct.pack("<2f", 1.5, -2.0)),
    Tensor("text", "BYTES", (1, 1), pack_bytes([b"\xff"])),
    Tensor("empty", "INT64", (1, 0), b""),
)
GOLDEN = (
    b"\x01\x91\x93"
    b"\x94\xa5total\xa4FP32\x92\x01\x02\xc4\x08\x00\x00\xc0?\x00\x00\x00\xc0"
    b"\x94\xa4text\xa5BYTES\x92\x01\x01\xc4\x05\x01\x00\x00\x00\xff"
    b"\x94\xa5empty\xa5INT64\x92\x01\x00\xc4\x00"
)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_states_are_read_as_they_were_written(kind: type) -> None:
    states = tuple(Tensor(s.name, s.datatype, s.shape, kind(s.data)) for s in STATES)

    assert encode_states(states) == GOLDEN
    assert decode_states(GOLDEN) == STATES
    assert decode_states(encode_states(())) == ()


@pytest.mark.parametrize("raw", [b"", GOLDEN[:-1], b"\x01\x91\x91\x94\xa1x\xa4FP32\x91\xff\xc4\x00"])
def test_damaged_states_are_corrupt(raw: bytes) -> None:
    """Cut off, or with a negative dimension."""
    with pytest.raises(CorruptEntry, match="the state of a sequence can't be decoded"):
        decode_states(raw)


def test_states_of_a_newer_qinfer_are_refused() -> None:
    with pytest.raises(NewerVersion):
        decode_states(b"\x02" + GOLDEN[1:])
