"""The bulk worker's sign of life: Celery's remote control is off, so that nobody else could tell whether one runs."""

import asyncio
import contextlib
from typing import NoReturn

from qinfer.control.base import BULK, ControlStore
from qinfer.errors import BrokerUnavailable

EVERY_S = 3.0
HOLDS_S = 15.0
"""Longer than a Redis takes that fails over, or an event loop that is late."""


async def give_signs(store: ControlStore, name: str) -> NoReturn:
    """Tells every few seconds that this process lives, until it is cancelled; while Redis is away it goes on trying.

    Args:
        store: Where to.
        name: The process's, `<name>@<host>`, as Celery has it.
    """
    while True:
        with contextlib.suppress(BrokerUnavailable):  # the next one may get through
            await store.sign(BULK, name, HOLDS_S)
        await asyncio.sleep(EVERY_S)
