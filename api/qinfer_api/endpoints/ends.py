"""Watches the ends of stored requests to endpoints, as evidence for canaries on trial and for shadows.

Failures and execution times count; the time in the queue does not, because it says nothing about the version. Whether a
request is watched is decided when it is accepted, before its end is known, so that the evidence has no bias.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence

from qinfer.core.messages import OutgoingRequest
from qinfer.errors import QinferError
from qinfer.queue.entries import RequestState
from qinfer.traffic.tally import Key, TargetTally, key_of, witness_of
from qinfer_api.dispatcher import Ending
from qinfer_api.endpoints.shadows import OnlineShadows, Shadow
from qinfer_api.shared_limit import SharedLimit

logger = logging.getLogger(__name__)

MOST = 128
"""The most watched requests of a target: each costs a read a second, and a slow target must not starve others."""

SHADOW_WAIT_S = 60.0
"""A shadow's longest wait for the request's own answer."""


class StoredEnds:
    """Watches the ends of stored requests; each gateway has one."""

    def __init__(self, targets: TargetTally, shadows: OnlineShadows) -> None:
        self._targets = targets
        self._shadows = shadows
        self._waiting: dict[Key, SharedLimit] = defaultdict(SharedLimit)
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, request: OutgoingRequest, ending: Ending, tenant: str, given_s: float) -> None:
        """Watches a stored request; `given_s` is the caller's timeout, infinite if the model's configuration set it."""
        key, witness = key_of(request), witness_of(request)
        if not self._waiting[key].has_room(MOST, tenant):
            return
        drawn = self._shadows.drawn(request)
        is_evidence = witness is not None and key in self._targets.observed.by_target
        if not drawn and not is_evidence:
            return
        loop = asyncio.get_running_loop()
        for shadow in drawn:
            shadow.start(request)
            loop.call_later(SHADOW_WAIT_S, shadow.left)
        self._waiting[key].take_place(tenant)
        task = loop.create_task(self._follow(key, drawn, ending, witness, given_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._waiting[key].free_place(tenant))

    async def close(self) -> None:
        """Stops watching."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _follow(
        self, key: Key, shadows: Sequence[Shadow], ending: Ending, witness: str | None, given_s: float
    ) -> None:
        try:
            async with ending() as (record, last):
                response = last if record is not None and record.state is RequestState.SUCCEEDED else None
                waiting, shadows = shadows, ()
                for shadow in waiting:
                    shadow.left() if response is None else shadow.stable_answered(response)
                on_trial = self._targets.observed.by_target.get(key)
                if witness is None or on_trial is None or record is None or not record.state.is_terminal:
                    return
                if response is not None:
                    on_trial.executed(response, witness)
                elif record.state is not RequestState.SUCCEEDED:
                    on_trial.failed(record.code, witness, given_s)
        except QinferError as error:
            logger.debug("the outcome of a stored request can't be counted", extra={"reason": error.message})
        except Exception:  # a failing watcher must not disturb other work of the gateway
            logger.exception("the outcome of a stored request can't be counted")
        finally:
            for shadow in shadows:
                shadow.left()
