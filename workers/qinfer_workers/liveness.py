"""Liveness of programs without heartbeats, which `qinfer healthcheck` asks for, and how such a program ends."""

import asyncio
import contextlib
import logging
import os
import sys
from typing import NoReturn

from qinfer.errors import BrokerUnavailable
from qinfer.models.store import ControlStore

EVERY_S = 3.0
HOLDS_S = 15.0
"""Longer than a Redis takes that fails over, or an event loop that is late."""


async def report_liveness(store: ControlStore, name: str, *programs: str) -> NoReturn:
    """Reports every few seconds that this process is live, until it is cancelled, also while Redis is away.

    Args:
        store: Where to.
        name: The process's, `<name>@<host>`, as Celery has it.
        programs: What the process is: `BULK`, `BEAT`, `BRIDGE`.
    """
    while True:
        with contextlib.suppress(BrokerUnavailable):  # the next one may get through
            for program in programs:
                await store.report_liveness(program, name, HOLDS_S)
        await asyncio.sleep(EVERY_S)


def end(code: int) -> NoReturn:
    """Ends the process; threads that wait for a broker or a store that is away are not waited for."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
