"""The abrupt end of a worker, because an instance hangs or Redis is away."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from qinfer.batching.execution import WorkItem
from qinfer.batching.watched import ExecutionClock
from qinfer.core.retry import PATIENCE_S
from qinfer.errors import ExecutionOverdue, QinferError
from qinfer_workers import liveness
from qinfer_workers.due_table import GRACE_S
from qinfer_workers.inference.publisher import Publisher
from qinfer_workers.inference.serving import LaneBatcher

logger = logging.getLogger(__name__)

STATUS = 70
"""The exit code, EX_SOFTWARE of sysexits.h."""

_SETTLE_S = 1.0
_OTHERS_S = GRACE_S - 2 * _SETTLE_S
"""Time for batches of other instances."""


def overdue_error(clock: ExecutionClock) -> ExecutionOverdue:
    """Returns the error of an execution over its limit."""
    return ExecutionOverdue(clock.limit.text(clock.model))


def fail_overdue(batcher: LaneBatcher, item: WorkItem, error: ExecutionOverdue) -> None:
    """Answers an item that is late even alone."""
    if (streams := batcher.model.streams) is not None:
        streams.cancel(item, error)
    else:
        batcher.fail([item], error)


async def end_worker(
    pauses: Sequence[Coroutine[Any, Any, Any]], publisher: Publisher, retire: Callable[[], Awaitable[None]]
) -> None:
    """Gives back unexecuted items, publishes finished items, exits."""
    tasks = [asyncio.ensure_future(pause) for pause in pauses]
    await asyncio.wait(tasks, timeout=_OTHERS_S)
    with suppress(TimeoutError, QinferError):
        async with asyncio.timeout(_SETTLE_S):
            await publisher.finish_accepted()
            await retire()
    logger.error("worker ends: an instance hangs", extra={"status": STATUS})
    liveness.exit_process(STATUS)


def cut_short(drain: asyncio.Timeout, away_s: float) -> None:
    """Ends a drain if Redis is away for too long."""
    if away_s >= PATIENCE_S and not drain.expired():
        logger.warning("drain cut short: nothing executes, and redis is away", extra={"away_s": round(away_s, 1)})
        drain.reschedule(asyncio.get_running_loop().time())
