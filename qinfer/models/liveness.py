"""Liveness of programs without heartbeats, for `qinfer status` and `qinfer healthcheck`."""

import asyncio
import contextlib
from typing import NoReturn

from qinfer.errors import BrokerUnavailable
from qinfer.models.store import ControlStore

EVERY_S = 3.0
HOLDS_S = 15.0
"""Longer than a failover of Redis, or a delay of the event loop."""

_LEAVE_S = 1.0


async def report_liveness(store: ControlStore, name: str, *programs: str) -> NoReturn:
    """Reports every few seconds that `<name>@<host>` is live, until cancelled."""
    try:
        while True:
            with contextlib.suppress(BrokerUnavailable):
                for program in programs:
                    await store.report_liveness(program, name, HOLDS_S)
            await asyncio.sleep(EVERY_S)
    finally:
        with contextlib.suppress(BrokerUnavailable, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                for program in programs:
                    await store.report_liveness(program, name, 0.0)
