"""What becomes of answers and entries when the broker refuses."""

import asyncio
from collections.abc import Sequence

import pytest

from qinfer.batching.execution import Pending
from qinfer.delivery.base import Entry, Lane, Lease
from qinfer.delivery.connection import Refused
from qinfer.messages import InferRequest
from qinfer.testing import MemoryDelivery
from qinfer_workers.inference.leases import LeaseKeeper
from qinfer_workers.inference.publisher import Publisher


class Refusing(MemoryDelivery):
    """A queue that takes nothing back."""

    async def release(self, leases: Sequence[Lease]) -> None:
        raise Refused("WRONGTYPE", "WRONGTYPE Operation against a key holding the wrong kind of value")


async def test_a_refused_release_is_left_to_the_end_of_its_lease(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, its lease is renewed no longer, and nothing else ends."""
    delivery = Refusing()
    keeper = LeaseKeeper(delivery, 1.0, lambda _: None)
    request = InferRequest(model="stub", inputs=())
    lease = Lease(Entry(Lane("stub", 1), "1000-0"), "w", b"")
    item = Pending(rows=1, key=None, enqueued_s=1.0, deadline_s=61.0, lease=lease, request=request)
    keeper.hold([item])

    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(delivery, keeper, tasks)
        publisher.give_back([item])
        await publisher.settle()

    assert not keeper.holds(lease.entry)
    assert "refused by the broker" in caplog.text
