"""A sequence's states in Redis: a record of tensors (`qinfer.wire.versions`)."""

from typing import Annotated

import msgspec

from qinfer.tensors import Tensor
from qinfer.wire.versions import Record


class _State(msgspec.Struct, array_like=True, gc=False):
    name: str
    datatype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    # An aligned copy.
    data: bytes


class _States(msgspec.Struct, array_like=True):
    states: list[_State]


_RECORD = Record(_States, "the state of a sequence")


def encode_states(states: tuple[Tensor, ...]) -> bytes:
    """Encodes a step's states, by input name."""
    return _RECORD.encode(_States([_State(s.name, s.datatype, s.shape, bytes(s.data)) for s in states]))


def decode_states(raw: bytes) -> tuple[Tensor, ...]:
    """Decodes states."""
    return tuple(Tensor(s.name, s.datatype, s.shape, s.data) for s in _RECORD.decode(raw).states)
