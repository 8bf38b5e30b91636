"""The sign of life of programs without heartbeats: else `qinfer healthcheck` could not tell whether one runs."""

import asyncio
import contextlib
from typing import NoReturn

from qinfer.errors import BrokerUnavailable
from qinfer.models.store import ControlStore

EVERY_S = 3.0
HOLDS_S = 15.0
"""Longer than a Redis takes that fails over, or an event loop that is late."""


async def give_signs(store: ControlStore, name: str, *programs: str) -> NoReturn:
    """Tells every few seconds that this process lives, until it is cancelled; while Redis is away it goes on trying.

    Args:
        store: Where to.
        name: The process's, `<name>@<host>`, as Celery has it.
        programs: What the process is: `BULK`, `BEAT`, `BRIDGE`.
    """
    while True:
        with contextlib.suppress(BrokerUnavailable):  # the next one may get through
            for program in programs:
                await store.sign(program, name, HOLDS_S)
        await asyncio.sleep(EVERY_S)
