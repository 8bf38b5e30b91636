"""The worker as a whole, on a real Redis."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from qinfer.errors import CorruptEntry, QinferError, QueueFull
from qinfer.queue.connection import CommandRefused
from qinfer.queue.entries import Lane, Lease, Payload
from qinfer.testing import eventually
from qinfer.wire.frame import FRAME_VERSION, encode_request_apart
from tests.support.inline_workers import InlineWorkers, NoRenewals, value


async def test_answers_one_request(scene: InlineWorkers) -> None:
    """A request comes back with its outputs and timing, and leaves nothing in the lane."""
    await scene.model(mode="add")
    await scene.worker()

    response = await scene.submit(3.0)

    assert value(response) == 3.0
    assert response.timing is not None
    assert response.timing.batch_size == 1
    await scene.queued(0)


async def test_cancelled_caller_leaves_its_batch_mates_alone(scene: InlineWorkers) -> None:
    """Of four callers in one batch one goes away while it runs; the other three get their answers."""
    await scene.model(delay_us=200_000)
    await scene.worker()
    scene.hold()
    calls = [scene.submit(float(i)) for i in range(4)]
    await scene.started()
    calls[1].cancel()
    scene.go()

    answers = await asyncio.gather(calls[0], calls[2], calls[3])

    assert [value(a) for a in answers] == [0.0, 2.0, 3.0]
    assert scene.backends["w1"][0].sizes == [4]


async def test_raising_model_fails_its_batch_and_the_worker_lives(scene: InlineWorkers) -> None:
    """Each item of the batch gets the model's message; the next model version works."""
    await scene.model(mode="raise")
    await scene.worker()

    failures = [(await call).failure for call in [scene.submit(), scene.submit()]]

    assert [f and (f.code, f.message) for f in failures] == [("inference_failed", "the stub was told to raise")] * 2
    await scene.model(mode="echo")
    await scene.ready()
    assert value(await scene.submit(5.0)) == 5.0


async def test_other_shapes_run_in_other_batches(scene: InlineWorkers) -> None:
    """Requests whose variable dimension differs are not stacked."""
    await scene.model(dims=-1, delay_us=200_000)
    await scene.worker()
    scene.forget_started()
    calls = [scene.submit(1.0, width=2), scene.submit(2.0, width=2), scene.submit(3.0, width=3)]

    assert [value(a) for a in await asyncio.gather(*calls)] == [1.0, 2.0, 3.0]
    assert scene.backends["w1"][0].sizes == [2, 1]


async def test_expired_request_is_answered_and_not_executed(scene: InlineWorkers) -> None:
    """A deadline that passes in the queue costs no execution."""
    await scene.model()
    await scene.worker()
    first = await scene.busy()
    late = scene.submit(1.0, timeout_s=0.001)
    expired_s = scene.delivery.clock.now_s() + 0.1
    await eventually(lambda: scene.delivery.clock.now_s() > expired_s)
    scene.go()

    failure = (await late).failure

    assert failure is not None
    assert failure.code == "deadline_exceeded"
    await first
    assert scene.backends["w1"][0].sizes == [1]


async def test_two_workers_share_a_lane(scene: InlineWorkers) -> None:
    """Every request is answered once, and both workers work."""
    await scene.model()
    await scene.worker("w1")
    await scene.worker("w2")
    scene.hold()
    calls = [scene.submit(float(i)) for i in range(40)]
    await scene.started("w1")
    await scene.started("w2")
    scene.go()

    answers = await asyncio.gather(*calls)

    assert [value(a) for a in answers] == [float(i) for i in range(40)]
    assert all(len(r) == 1 for r in scene.responses.values())
    assert scene.backends["w1"][0].sizes
    assert scene.backends["w2"][0].sizes


async def test_busy_worker_hoards_nothing(scene: InlineWorkers) -> None:
    """What would wait behind a long execution is answered by the idle worker meanwhile."""
    await scene.model()
    await scene.worker("w1")
    first = await scene.busy()
    await scene.worker("w2")

    answers = await asyncio.gather(*[scene.submit(float(i)) for i in range(1, 30)])

    assert [value(a) for a in answers] == [float(i) for i in range(1, 30)]
    assert not first.done()
    scene.go()
    await first


async def test_drain_releases_what_did_not_start(scene: InlineWorkers) -> None:
    """A stopping worker ends its batch; the rest goes to another at once, its delivery count unchanged."""
    await scene.model()
    await scene.worker("w1")
    first = await scene.busy()
    waiting = [scene.submit(float(i)) for i in range(1, 20)]
    await scene.queued(20)
    stopping = asyncio.create_task(scene.stop("w1"))
    scene.go()
    await stopping

    assert value(await first) == 0.0
    assert "w1" not in {w.id for w in await scene.store.workers()}
    await scene.worker("w2")
    answers = await asyncio.gather(*waiting)
    assert [value(a) for a in answers] == [float(i) for i in range(1, 20)]
    assert {a.attempt for a in answers} == {1}


async def test_nothing_is_fetched_while_nobody_renews(scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start and later: what could be renewed no more could not be answered either."""
    renewals = NoRenewals()
    monkeypatch.setattr("tests.support.inline_workers.InlineRenewals", lambda *_: renewals)
    await scene.model()
    worker = await scene.worker()
    for _ in range(2):
        await renewals.asked.wait()
        scene.entries.clear()
        scene.submit(1.0)
        await eventually(lambda: scene.entries != [])
        assert await scene.delivery.withdraw(scene.entries) == [True]
        renewals.asked.clear()
        worker._keeper.renewed(time.monotonic(), set())
        assert value(await scene.submit(2.0)) == 2.0
        worker._keeper._renewed_at = float("-inf")


async def test_lost_lease_discards_the_item_and_not_its_batch(
    scene: InlineWorkers, caplog: pytest.LogCaptureFixture
) -> None:
    """An entry that another finished meanwhile is not answered; its batch-mates are."""
    caplog.set_level("INFO")
    await scene.model(delay_us=200_000)
    await scene.worker(renew_every_s=0.02)
    scene.hold()
    lost, mate = scene.submit(1.0), scene.submit(2.0)
    await scene.started()
    await scene.delivery.finish(scene.entries[:1])
    await eventually(lambda: "leases lost" in caplog.text)
    scene.go()

    assert value(await mate) == 2.0
    assert scene.backends["w1"][0].sizes == [2]
    await scene.stop()
    assert not lost.done()


async def test_corrupt_entry_is_a_dead_letter_and_the_worker_lives(scene: InlineWorkers) -> None:
    """Bytes that are no frame are kept for a person to look at."""
    await scene.model()
    await scene.worker()
    scene.submit_frame("broken", b"\x01not a frame")

    assert value(await scene.submit(1.0)) == 1.0
    await scene.queued(0)
    (listed,) = await scene.delivery.dead_letters.list("stub")
    letter = await scene.delivery.dead_letters.show("stub", listed.id)
    assert letter is not None
    assert (letter.code, letter.request_id, letter.frame) == ("corrupt_entry", "", b"\x01not a frame")
    await scene.stop()
    assert (await scene.store.stats("stub", 1))["dead_letters"] == 1


async def test_a_damaged_payload_is_a_dead_letter_and_its_caller_is_told(scene: InlineWorkers) -> None:
    """The frame names the caller."""
    await scene.model()
    await scene.worker()
    request = scene.request()
    request.payload = True
    frame, payload = encode_request_apart(request)

    call = scene.submit_frame(request.id, frame, payload=Payload(request.id, payload[:3], 60.0))

    failure = (await call).failure
    assert failure is not None
    assert failure.code == "corrupt_entry"
    (letter,) = await scene.delivery.dead_letters.list("stub")
    assert (letter.request_id, letter.code) == (request.id, "corrupt_entry")
    await scene.queued(0)


async def test_a_payload_that_was_deleted_in_its_store_is_a_dead_letter_and_its_caller_is_told(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known and can't be had: to wait for the deadline would help nobody."""
    await scene.model()
    await scene.worker()

    async def deleted(*_: object) -> None:
        raise CorruptEntry("the tensors are not in the payload store any more")

    monkeypatch.setattr(scene.delivery, "payload", deleted)

    failure = (await scene.submit_apart(1.0)).failure

    assert failure is not None
    assert (failure.code, failure.message) == ("corrupt_entry", "the tensors are not in the payload store any more")
    (letter,) = await scene.delivery.dead_letters.list("stub")
    assert letter.code == "corrupt_entry"
    await scene.queued(0)


async def test_a_newer_frame_is_released_at_drain(scene: InlineWorkers) -> None:
    """It waits for a worker that can read it, and is not kept by one that ends."""
    await scene.model()
    await scene.worker()
    scene.submit_frame("newer", bytes([FRAME_VERSION + 1]) + b"whatever it holds")
    await eventually(lambda: bool(scene.entries))

    await scene.stop()

    (lease,) = await scene.delivery.fetch([scene.lane], "other", 1, 1.0)
    assert (lease.deliveries, lease.suspect) == (1, False)


async def test_request_of_an_older_generation_is_checked_again(scene: InlineWorkers) -> None:
    """A request that does not fit the new configuration is refused, not executed."""
    old = await scene.model(dims=2)
    await scene.model(dims=3)
    await scene.worker()

    refused = (await scene.submit(1.0, width=2, generation=old)).failure

    assert refused is not None
    assert refused.code == "invalid_request"
    assert value(await scene.submit(2.0, width=3, generation=old)) == 2.0


async def test_failed_reload_keeps_the_old_generation(scene: InlineWorkers) -> None:
    """A new generation that can't be loaded leaves the old one serving; it is counted, and the heartbeat says why."""
    first = await scene.model()
    await scene.worker()
    await scene.model(error="the file is broken")

    async def is_told() -> bool:
        (record,) = await scene.store.workers()
        return record.models["stub"][1].reason == "the file is broken"

    await eventually(is_told)
    (record,) = await scene.store.workers()
    assert record.models["stub"][1].generation == first
    assert value(await scene.submit(4.0, generation=first)) == 4.0

    async def is_counted() -> bool:
        return (await scene.store.stats("stub", 1)).get("load_failures", 0) == 1

    await eventually(is_counted)


async def test_unloaded_model_leaves_the_heartbeat(scene: InlineWorkers) -> None:
    """A model that is not desired any more is drained and unloaded."""
    await scene.model()
    await scene.worker()
    await scene.unload()

    async def is_gone() -> bool:
        (record,) = await scene.store.workers()
        return not record.models

    await eventually(is_gone)
    await eventually(lambda: not scene.backends["w1"][0].loaded)


async def test_statistics_are_added(scene: InlineWorkers) -> None:
    """A drained worker leaves nothing uncounted."""
    await scene.model()
    await scene.worker()
    await asyncio.gather(*[scene.submit() for _ in range(5)])

    await scene.stop("w1")

    stats = await scene.store.stats("stub", 1)
    assert 5 in stats.values()


async def test_a_refused_fetch_is_tried_again(scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the broker says: the worker and its other models go on."""
    fetch = scene.delivery.fetch
    refusals: list[QinferError] = [QueueFull("full"), CommandRefused("WRONGTYPE", "WRONGTYPE not a stream")]

    async def refusing(lanes: Sequence[Lane], consumer: str, count: int, wait_s: float) -> list[Lease]:
        if refusals:
            raise refusals.pop()
        return await fetch(lanes, consumer, count, wait_s)

    monkeypatch.setattr(scene.delivery, "fetch", refusing)
    await scene.model()
    await scene.worker()

    assert value(await scene.submit(3.0)) == 3.0
    assert not refusals
