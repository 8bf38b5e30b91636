"""A model version that a worker serves: its batcher, the lanes that it reads, and what reads them."""

import asyncio

from qinfer.batching.batcher import Batcher
from qinfer.control.lanes import MAX_LANES, lanes_of
from qinfer.delivery.base import DELAYED, Delivery, Lane


class Serving:
    """See the module docstring.

    Args:
        batcher: Runs what was fetched.

    Attributes:
        batcher: The same.
        lanes: What to read, in order; those of an earlier configuration last, until they are empty.
        quiet: Set while no fetch is under way: what a cancelled fetch had taken would be lost until its lease ends.
    """

    fetcher: "asyncio.Task[None]"
    """Fetches for it."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.lanes = self._own()
        self.quiet = asyncio.Event()
        self.quiet.set()
        self._is_settled = False

    @property
    def is_still(self) -> bool:
        """Whether it is paused, and nothing is under way."""
        return self.batcher.paused and not self.batcher.executing and self.quiet.is_set()

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
        names = [f"p{number}{suffix}" for number in range(1, MAX_LANES + 1) for suffix in ("", DELAYED)]
        others = [Lane(first.model, first.version, name, first.partition) for name in names]
        others = [lane for lane in others if lane not in own]
        depths = await delivery.depth(others)
        if own != self._own():
            return  # reconfigured meanwhile
        left = tuple(lane for lane, depth in zip(others, depths, strict=True) if depth)
        self.lanes = own + left
        self._is_settled = not left

    def _own(self) -> tuple[Lane, ...]:
        return lanes_of(self.batcher.model.spec, self.batcher.model.version)
