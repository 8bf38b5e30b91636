"""Ending tasks."""

import asyncio

_AGAIN_S = 0.5


async def end(*tasks: "asyncio.Task[None]") -> None:
    """Cancels tasks until they are done: redis-py swallows a cancellation that comes while it connects."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
