"""What a newer qinfer wrote into Redis is refused clearly, and left as it is: programs are upgraded one by one."""

import pytest

from qinfer.jobs.queue.jobs import Jobs
from qinfer.queue import keys
from qinfer.wire.versions import NewerVersion
from tests.contract.conftest import RedisQueue
from tests.support import bulk_jobs, requests

REFUSED = "wire version 2 was written by a newer qinfer; this program reads version 1: upgrade this program first"
NEWER = b"\x02" + b"in a form that nobody here knows"


async def test_a_request_of_a_newer_qinfer_is_refused(redis_queue: RedisQueue) -> None:
    """Reading it is; its end is not, which needs nothing of what is encoded."""
    delivery = await redis_queue.connect()
    await requests.accept(delivery)
    redis_queue.on_owner("HSET", keys.request("digits", 0, "r1"), "accepted", NEWER)

    with pytest.raises(NewerVersion, match=f"the record of a request of {REFUSED}"):
        await delivery.requests.record(requests.address())

    assert await requests.settle(delivery, requests.ended()) == [True]


async def test_a_job_of_a_newer_qinfer_is_refused(redis_queue: RedisQueue) -> None:
    """Nothing of it changes."""
    delivery = await redis_queue.connect()
    await Jobs(delivery).create(bulk_jobs.record())
    key = keys.job("digits", 0, "j1")
    redis_queue.on_owner("HSET", key, "about", NEWER)
    before = redis_queue.on_owner("HGETALL", key)

    with pytest.raises(NewerVersion, match=f"the record of a bulk job of {REFUSED}"):
        await Jobs(delivery).get("j1")
    with pytest.raises(NewerVersion):
        await Jobs(delivery).stop("j1", "cancelled")

    assert redis_queue.on_owner("HGETALL", key) == before


async def test_a_job_of_a_newer_qinfer_hides_no_other(
    redis_queue: RedisQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays in the index, and the log names it."""
    delivery = await redis_queue.connect()
    for job_id in ("j1", "j2"):
        await Jobs(delivery).create(bulk_jobs.record(job_id))
    redis_queue.on_owner("HSET", keys.job("digits", 0, "j1"), "about", NEWER)

    assert [record.id for record in (await Jobs(delivery).list()).records] == ["j2"]
    assert [record.id for record in await Jobs(delivery).unfinished()] == ["j2"]
    assert len(await Jobs(delivery).open_rows()) == 1

    assert redis_queue.on_owner("ZSCORE", keys.open_jobs(), "j1") is not None
    assert any(REFUSED in record.__dict__.get("reason", "") for record in caplog.records)
