"""The outboxes that programs named, on Redis: streams that settle.lua appends to, read by endings.lua.

One script call takes many requests that ended, with their records and results. Only a result that is too large to pass
others on the common connection, or that is an object in a store, is fetched by itself.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from qinfer.delivery import keys, scripts
from qinfer.delivery.request_scripts import RECORD_FIELDS, record_of
from qinfer.delivery.requests import Address, Ending
from qinfer.delivery.router import Router
from qinfer.delivery.values import LARGE_BYTES, Values
from qinfer.errors import CorruptEntry

logger = logging.getLogger(__name__)

CONSUMER_GONE_MS = 3_600_000
"""A reader that has not asked for so long, and owns nothing, is forgotten."""

_LOOKS = (
    10  # so often within `retry_s` for what was not confirmed: Redis goes through all that is unconfirmed each time
)
_MAX_IDS = 1000  # of one script call: Lua's stack holds about 8000 values


class RedisOutboxes:
    """The part of `RedisRequests` that reads outboxes; see `Requests` for each method.

    Args:
        router: The way to Redis.
        values: The way to large results.
    """

    def __init__(self, router: Router, values: Values) -> None:
        self._router = router
        self._values = values
        self._looked_at: dict[bytes, float] = {}

    async def endings(
        self, model: str, partition: int, outbox: str, consumer: str, count: int, *, retry_s: float
    ) -> list[Ending]:
        """See `Requests.endings`."""
        name = keys.outbox(model, partition, outbox).encode()
        now_s = asyncio.get_running_loop().time()
        looks = now_s - self._looked_at.get(name, -math.inf) >= retry_s / _LOOKS
        found = await scripts.run(
            self._call(name),
            scripts.ENDINGS,
            [name],
            *(keys.READERS, consumer, count, int(retry_s * 1000) if looks else -1, keys.prefix(model, partition)),
            *(LARGE_BYTES, CONSUMER_GONE_MS, *RECORD_FIELDS),
        )
        if looks and not any(fields[2] > 1 for fields in found):
            self._looked_at[name] = now_s
        addresses = [Address(model, partition, fields[1].decode()) for fields in found]
        apart = [number for number, fields in enumerate(found) if fields[5] == b"apart"]
        fetched = await asyncio.gather(*(self._result(addresses[number]) for number in apart))
        blobs = dict(zip(apart, fetched, strict=True))
        return [
            _ending(address, fields, blobs.get(number))
            for number, (address, fields) in enumerate(zip(addresses, found, strict=True))
        ]

    async def confirm_endings(self, model: str, partition: int, outbox: str, ids: Sequence[str]) -> None:
        """See `Requests.confirm_endings`."""
        name = keys.outbox(model, partition, outbox).encode()
        for first in range(0, len(ids), _MAX_IDS):
            part = ids[first : first + _MAX_IDS]
            await scripts.run(self._call(name), scripts.CONFIRM_ENDINGS, [name], keys.READERS, *part)

    def _call(self, key: bytes) -> Callable[..., Awaitable[Any]]:
        return partial(self._router.call, keys.slot(key))

    async def _result(self, address: Address) -> bytes | None:
        name = keys.result(address.model, address.partition, address.id)
        try:
            return await self._values.get(keys.slot(name), name)
        except CorruptEntry as error:
            logger.warning("a result is gone before its time", extra={"request_id": address.id, "error": error.message})
            return None


def _ending(address: Address, fields: Sequence[Any], fetched: bytes | None) -> Ending:
    """Reads one of the replies of endings.lua."""
    ending_id, _, deliveries, notes, values, place, given = fields
    blob = given if place == b"given" else fetched
    record = None
    if values[0] is not None:
        record = record_of(address, values, has_result=blob is not None)
    return Ending(
        id=ending_id.decode(), request_id=address.id, record=record, notes=notes, blob=blob, deliveries=deliveries
    )
