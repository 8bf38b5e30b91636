"""The control store's way with what redis-py raises."""

from typing import Any

import pytest
from redis.asyncio.connection import Connection

from qinfer.errors import BrokerUnavailable
from qinfer.models.store import translated


async def test_a_connection_that_is_closed_under_a_call_is_an_outage() -> None:
    """The cluster client does so while it looks for other nodes: redis-py then writes without a writer."""
    connection: Any = Connection()

    with pytest.raises(BrokerUnavailable, match="can't be reached: AttributeError"), translated():
        await connection._send_packed_command([b"PING"])


def test_a_defect_of_ones_own_is_none() -> None:
    with pytest.raises(AttributeError), translated():
        _ = object().nothing  # type: ignore[attr-defined]
