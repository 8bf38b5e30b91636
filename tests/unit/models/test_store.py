"""The control store's way with what redis-py raises."""

import asyncio
from typing import Any

import pytest
import redis
from redis.asyncio.connection import Connection

from qinfer.errors import BrokerUnavailable
from qinfer.queue.stored_records import translated


async def test_a_connection_that_is_closed_under_a_call_is_an_outage() -> None:
    """The cluster client does so while it looks for other nodes: redis-py then writes without a writer."""
    connection: Any = Connection()

    with pytest.raises(BrokerUnavailable, match="can't be reached: AttributeError"), translated():
        await connection._send_packed_command([b"PING"])


def test_a_defect_of_ones_own_is_none() -> None:
    with pytest.raises(AttributeError), translated():
        _ = object().nothing  # type: ignore[attr-defined]


async def test_a_cancellation_that_redis_py_loses_ends_its_task() -> None:
    """While a broken connection is closed, redis-py may raise another error in its place."""

    async def read() -> None:
        with translated():
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                raise redis.ConnectionError("Connection closed by server.") from None

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    assert task.cancelled()
