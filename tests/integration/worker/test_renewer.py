"""The renewer against a real Redis, alone, in a cluster and behind Sentinels."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from qinfer.core.settings import RedisSettings
from qinfer.errors import QinferError
from qinfer.queue import keys
from qinfer.queue.clients import Login
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.queue.lanes import RENEW, Queue
from qinfer.testing import eventually
from qinfer_workers.renewer import HeldLeases, Renewer, RenewerHello
from tests.support.servers.servers import RedisCluster, RedisServer, SentinelSetup, matrix, system_redis

pytestmark = pytest.mark.slow

LANES = [Lane(model, 1) for model in ("one", "two", "three")]
"""In a cluster of three, on several nodes."""


@pytest.fixture(params=["single", *matrix("cluster", "sentinels")])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisSettings]:
    kinds = {"single": RedisServer, "cluster": RedisCluster, "sentinels": SentinelSetup}
    server = kinds[request.param](system_redis(), tmp_path)
    try:
        yield RedisSettings(url=SecretStr(server.url), cluster=request.param == "cluster")
    finally:
        server.stop()


async def taken(delivery: Queue, lane: Lane) -> Lease:
    """Submits an entry, and fetches it as `w`."""
    submitted: asyncio.Future[Entry | QinferError] = asyncio.get_running_loop().create_future()
    await delivery.ensure([lane])
    delivery.submit(lane, b"frame", submitted.set_result)
    assert isinstance(await submitted, Entry)
    (lease,) = await delivery.fetch([lane], "w", 1, 5.0)
    return lease


async def test_it_renews_what_it_was_told_and_what_it_finds(settings: RedisSettings) -> None:
    """On every node; what another finished is lost, and no delivery is counted."""
    hello = RenewerHello(Login.from_settings(settings), keys.GROUP, b"w", RENEW.text, 0.01, 60.0)
    delivery = await Queue.connect(settings)
    leases = [await taken(delivery, lane) for lane in LANES]
    until_s = time.monotonic() + 60.0
    told = {keys.lane(lease.entry.lane): {lease.entry.entry_id.encode(): until_s} for lease in leases}
    renewer = Renewer(hello)
    renewer.report(HeldLeases(told))
    assert (await asyncio.to_thread(renewer.renew)).lost == []

    await delivery.finish([leases[0].entry])
    later = await taken(delivery, LANES[1])  # the worker does not tell of it
    await eventually(lambda: time.monotonic() > renewer._reported_s + 1.0)
    report = await asyncio.to_thread(renewer.renew)

    assert report.failed == {}
    assert report.lost == [(keys.lane(LANES[0]), leases[0].entry.entry_id.encode())]
    assert renewer._unreported[keys.lane(LANES[1])].keys() == {later.entry.entry_id.encode()}
    for lease in (leases[1], leases[2], later):
        assert await delivery.reclaim([lease.entry.lane], "thief", 0.5, 10) == []
    await delivery.release([later])
    (again,) = await delivery.fetch([LANES[1]], "w", 1, 5.0)
    assert again.deliveries == 1
    await delivery.close()
