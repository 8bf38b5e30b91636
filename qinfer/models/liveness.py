"""Liveness of programs without heartbeats of their own, which `qinfer status` and `qinfer healthcheck` read."""

import asyncio
import contextlib
from typing import NoReturn

from qinfer.errors import BrokerUnavailable
from qinfer.models.store import ControlStore

EVERY_S = 3.0
HOLDS_S = 15.0
"""Longer than a Redis takes that fails over, or an event loop that is late."""

_LEAVE_S = 1.0


async def report_liveness(store: ControlStore, name: str, *programs: str) -> NoReturn:
    """Reports every few seconds that this process is live, also while Redis is away; when cancelled, that it is not.

    Args:
        store: Where to.
        name: The process's, `<name>@<host>`, as Celery has it.
        programs: What the process is: `GATEWAY`, `BULK`, `BEAT`, `BRIDGE`.
    """
    try:
        while True:
            with contextlib.suppress(BrokerUnavailable):  # the next one may get through
                for program in programs:
                    await store.report_liveness(program, name, HOLDS_S)
            await asyncio.sleep(EVERY_S)
    finally:
        with contextlib.suppress(BrokerUnavailable, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                for program in programs:
                    await store.report_liveness(program, name, 0.0)
