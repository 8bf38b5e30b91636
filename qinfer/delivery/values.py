"""Byte strings beside the streams: payloads and results, up to the 512 MB of a Redis string.

A command is answered after those before it on its connection. So that a request of a hundred bytes never waits for a
hundred megabytes, values above `LARGE_BYTES` have a connection of their own, opened when the first of them comes.
"""

from contextlib import suppress
from functools import partial
from typing import Any

from qinfer.delivery import scripts
from qinfer.delivery.connection import pack
from qinfer.delivery.router import BlockingLink, Router
from qinfer.errors import BrokerUnavailable, PayloadTooLarge
from qinfer.tensors import Bytes

LARGE_BYTES = 2**20
"""Above this a value travels over a connection of its own."""

MAX_BYTES = 512 * 2**20
"""The longest string that Redis stores."""

_TRANSFER_S = 55.0  # a large value may take so much longer than a command until Redis answers


class Values:
    """Stores and reads byte strings; each key expires.

    Args:
        router: The way to Redis.
        is_cluster: Whether each slot may be on another node.
    """

    def __init__(self, router: Router, *, is_cluster: bool) -> None:
        self._router = router
        self._is_cluster = is_cluster
        self._links: dict[int, BlockingLink] = {}

    async def set(self, slot: int, key: str | bytes, value: Bytes, ttl_s: float) -> None:
        """Stores a value for `ttl_s` seconds, in place of what was there.

        Raises:
            PayloadTooLarge: It is longer than `MAX_BYTES`.
            QueueFull: The broker has no memory left.
            BrokerUnavailable: It may have been stored.
        """
        if len(value) > MAX_BYTES:
            raise PayloadTooLarge(f"{len(value)} bytes in one piece are more than the {MAX_BYTES} that the queue takes")
        command = (b"SET", key, packable(value), b"PX", max(1, int(ttl_s * 1000)))
        if len(value) > LARGE_BYTES:
            await self._large(slot, *command)
        else:
            await self._router.call(slot, *command)

    async def get(self, slot: int, key: str | bytes) -> bytes | None:
        """Returns a value; `None` when it is gone.

        Raises:
            BrokerUnavailable: It can't be read now.
        """
        call = partial(self._router.call, slot)
        name = key if isinstance(key, bytes) else key.encode()
        found = await scripts.run(call, scripts.READ, [name], LARGE_BYTES)
        if isinstance(found, int):
            found = await self._large(slot, b"GET", name)
        value: bytes | None = found
        return value

    async def take(self, slot: int, key: str | bytes) -> bytes | None:
        """Returns a value, and has it removed once it has arrived; `None` when it is gone.

        Raises:
            BrokerUnavailable: It can't be read now; it is still there.
        """
        value = await self.get(slot, key)
        if value is not None:
            with suppress(BrokerUnavailable):  # its time to live ends it
                self._router.send(slot, pack((b"UNLINK", key)), lambda _: None)
        return value

    async def _large(self, slot: int, *command: Any) -> Any:
        place = slot if self._is_cluster else 0
        link = self._links.get(place)
        if link is None:
            link = self._links[place] = self._router.blocking(slot, "qinfer-values", _TRANSFER_S)
        return await link.call(*command)


def packable(data: Bytes) -> bytes | memoryview:
    """Returns `data` as one of the two types that are packed without a copy before."""
    return memoryview(data) if isinstance(data, bytearray) else data
