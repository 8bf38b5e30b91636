"""The response cache in memory: bounded by bytes, the least recently used go first."""

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from qinfer.core.messages import Response
from qinfer.tensors import Tensor

LARGEST_SHARE = 1 / 8
"""An entry takes at most this share of the cache."""

_ENTRY_BYTES, _PART_BYTES = 512, 256
"""Python's overhead of an entry, and of a tensor or parameter in it."""


class _CachedResponse(NamedTuple):
    response: Response
    size: int


class LocalCache:
    """The response cache of one event loop."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._entries: OrderedDict[bytes, _CachedResponse] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes) -> Response | None:
        """Returns a cached response, and marks it as used."""
        kept = self._entries.get(key)
        if kept is None:
            return None
        self._entries.move_to_end(key)
        return kept.response

    def put(self, key: bytes, response: Response) -> None:
        """Caches a response, unless it exceeds its share."""
        size = size_of(response)
        if size > LARGEST_SHARE * self._size_bytes:
            return
        old = self._entries.pop(key, None)
        self.used_bytes += size - (old.size if old is not None else 0)
        self._entries[key] = _CachedResponse(_apart(response), size)
        while self.used_bytes > self._size_bytes:
            _, gone = self._entries.popitem(last=False)
            self.used_bytes -= gone.size


def size_of(response: Response) -> int:
    """Returns the approximate bytes of a response."""
    size = _ENTRY_BYTES
    for tensor in response.outputs:
        size += _PART_BYTES + len(tensor.data)
    for name, value in response.parameters.items():
        size += _PART_BYTES + len(name) + (len(value) if isinstance(value, str) else 0)
    return size


def _apart(response: Response) -> Response:
    outputs = tuple(Tensor(o.name, o.datatype, o.shape, bytes(o.data)) for o in response.outputs)
    return msgspec.structs.replace(response, request_id="", outputs=outputs, timing=None, called=())
