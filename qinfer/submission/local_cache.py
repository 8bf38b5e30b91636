"""The response cache in the memory of a process: bounded by bytes, the least recently used entry goes first."""

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from qinfer.core.messages import Response
from qinfer.tensors import Tensor

LARGEST_SHARE = 8
"""An entry takes at most this part of the cache: a few large ones may not drive out all others."""

_ENTRY_BYTES, _PART_BYTES = 512, 256
"""About what Python needs for an entry, and for a tensor or a parameter in it, besides their bytes."""


class _Kept(NamedTuple):
    response: Response
    size: int


class LocalCache:
    """See the module docstring; of one event loop.

    Args:
        size_bytes: The most that its entries take.

    Attributes:
        used_bytes: What they take now.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._entries: OrderedDict[bytes, _Kept] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes) -> Response | None:
        """Returns the response of a key, which counts as used; `None` where there is none."""
        kept = self._entries.get(key)
        if kept is None:
            return None
        self._entries.move_to_end(key)
        return kept.response

    def put(self, key: bytes, response: Response) -> None:
        """Keeps a response; one that takes more than its share of the cache is not kept."""
        size = size_of(response)
        if size * LARGEST_SHARE > self._size_bytes:
            return
        old = self._entries.pop(key, None)
        self.used_bytes += size - (old.size if old is not None else 0)
        self._entries[key] = _Kept(_apart(response), size)
        while self.used_bytes > self._size_bytes:
            _, gone = self._entries.popitem(last=False)
            self.used_bytes -= gone.size


def size_of(response: Response) -> int:
    """Returns about how many bytes a response takes in memory."""
    size = _ENTRY_BYTES
    for tensor in response.outputs:
        size += _PART_BYTES + len(tensor.data)
    for name, value in response.parameters.items():
        size += _PART_BYTES + len(name) + (len(value) if isinstance(value, str) else 0)
    return size


def _apart(response: Response) -> Response:
    """Returns a response without id and times, whose tensors keep no larger buffer alive than they are."""
    outputs = tuple(Tensor(o.name, o.datatype, o.shape, bytes(o.data)) for o in response.outputs)
    return msgspec.structs.replace(response, request_id="", outputs=outputs, timing=None, called=())
