"""Starts of programs while Redis is away."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer.errors import BrokerUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def wait_for_redis(work: Callable[[], Awaitable[T]], stop: asyncio.Event | None = None) -> T:
    """Repeats a step of a start while Redis is away; logs so once a minute."""
    stop = stop or asyncio.Event()
    outage = OutageLog(logger, "start waits for redis", "redis is there: start goes on", remind_s=REMIND_S)
    backoff = Backoff(longest_s=1.0, jitter=0.5)
    while True:
        try:
            done = await work()
        except BrokerUnavailable as error:
            outage.failed(error.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_s()):
                    await stop.wait()
            if stop.is_set():
                raise
            continue
        outage.over()
        return done
