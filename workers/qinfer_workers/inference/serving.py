"""A model version that a worker serves: its batcher, the lanes that it reads, and what reads them."""

import asyncio
from collections.abc import Callable

from qinfer.batching.batcher import Batcher
from qinfer.core.settings import MetricsSettings
from qinfer.errors import QinferError
from qinfer.models.routes import NAMES, lanes_of
from qinfer.observe.latencies import LatencyTally
from qinfer.queue.base import Lane
from qinfer.queue.redis import Delivery
from qinfer_workers.inference.intake import Readings

_LOOK_S = 0.05
_GRACE_S = 0.2  # gateways learn at the same time as the worker that a model is to be unloaded


class Serving:
    """See the module docstring.

    Args:
        batcher: Runs what was fetched.
        metrics: What is to be counted.

    Attributes:
        batcher: The same.
        lanes: What to read, in order; those of an earlier configuration last, until they are empty.
        quiet: Set while no fetch is under way: what a cancelled fetch had taken would be lost until its lease ends.
        readings: What was fetched and is not in the batcher yet, for its tensors are still beside the stream.
    """

    fetcher: "asyncio.Task[None]"
    """Fetches for it."""

    def __init__(self, batcher: Batcher, metrics: MetricsSettings) -> None:
        self.batcher = batcher
        if metrics.summary_latencies or metrics.histogram_latencies:
            batcher.tally.latencies = LatencyTally(
                summaries=metrics.summary_latencies, histogram=metrics.histogram_latencies
            )
        self.lanes = self._own()
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.readings = Readings()
        self._is_settled = False

    @property
    def is_still(self) -> bool:
        """Whether it is paused, and nothing is under way."""
        batcher = self.batcher
        return batcher.paused and not batcher.executing and self.quiet.is_set() and not self.readings

    def reread(self) -> None:
        """Takes note of another configuration of the model; the lanes of the last are read on for now."""
        own = self._own()
        self.lanes = own + tuple(lane for lane in self.lanes if lane not in own)
        self._is_settled = False

    async def find_leftovers(self, delivery: Delivery) -> None:
        """Has lanes read that only an earlier configuration had, as long as they hold anything."""
        if self._is_settled:
            return
        own = self._own()
        first = own[0]
        others = [Lane(first.model, first.version, name, first.partition) for name in NAMES]
        others = [lane for lane in others if lane not in own]
        depths = await delivery.depth(others)
        if own != self._own():
            return  # reconfigured meanwhile
        left = tuple(lane for lane, depth in zip(others, depths, strict=True) if depth)
        self.lanes = own + left
        self._is_settled = not left

    async def drain(self, delivery: Delivery, limit_s: float, is_wanted: Callable[[], bool]) -> bool:
        """Serves on until the lanes are empty, for the limit at most; returns false once it is wanted again."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        was_empty = False
        while not is_wanted():
            try:
                is_empty = not any(await delivery.depth(self.lanes))
            except QinferError:  # what waits can't be seen now
                is_empty = False
            if (is_empty and was_empty) or loop.time() >= until_s:
                return True
            was_empty = is_empty
            await asyncio.sleep(_GRACE_S if is_empty else _LOOK_S)
        return False

    def _own(self) -> tuple[Lane, ...]:
        return lanes_of(self.batcher.model.spec, self.batcher.model.version)
