"""Asynchronous requests in a worker, and tensors beside the stream, on a real Redis."""

import asyncio

import numpy as np
import pytest

from qinfer.core.messages import Response
from qinfer.errors import BrokerUnavailable, PayloadTooLarge
from qinfer.queue.entries import Entry, Lane, RequestOutcome, RequestState, Settlement
from qinfer.tensors import to_numpy
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses, encode_request_apart
from qinfer_workers.inference.serving import MAX_READS
from tests.support.inline_workers import InlineWorkers, value

LARGE = 50 * 2**20 // 4
"""Elements of a tensor of 50 MB."""

MOST_BYTES = 10_000


async def test_an_asynchronous_request_is_settled(scene: InlineWorkers) -> None:
    """Its result is stored, its record says how it ended, and its entry is gone."""
    await scene.model()
    await scene.worker()

    address = await scene.accept(3.0)
    record = await scene.ended(address)

    assert (record.state, record.attempts, record.code) == (RequestState.SUCCEEDED, 1, "")
    response = await scene.result(address)
    assert value(response) == 3.0
    assert response.timing is not None
    assert response.final
    await scene.queued(0)


async def test_a_batch_may_hold_both_kinds(scene: InlineWorkers) -> None:
    """Each gets its answer in its own way."""
    await scene.model(delay_us=200_000)
    await scene.worker()
    first = await scene.busy()
    call, address, other = scene.submit(1.0), await scene.accept(2.0), scene.submit(3.0)
    await scene.queued(4)
    scene.go()

    assert value(await call) == 1.0
    assert value(await other) == 3.0
    assert (await scene.ended(address)).state is RequestState.SUCCEEDED
    assert value(await scene.result(address)) == 2.0
    assert scene.backends["w1"][0].sizes == [1, 3]
    await first
    await scene.queued(0)


async def test_a_model_that_raises_fails_an_asynchronous_request(scene: InlineWorkers) -> None:
    """Its record has code and text."""
    await scene.model(mode="raise")
    await scene.worker()

    record = await scene.ended(await scene.accept())

    assert (record.state, record.code, record.message) == (
        RequestState.FAILED,
        "inference_failed",
        "the stub was told to raise",
    )


async def test_a_worker_expires_what_waits_too_long(scene: InlineWorkers) -> None:
    """No janitor is needed while a worker looks at its requests."""
    await scene.model()
    await scene.worker()
    first = await scene.busy()
    late = await scene.accept(timeout_s=0.05)
    until_s = scene.delivery.clock.now_s() + 0.1
    await eventually(lambda: scene.delivery.clock.now_s() > until_s)
    scene.go()

    record = await scene.ended(late)

    assert (record.state, record.code) == (RequestState.EXPIRED, "deadline_exceeded")
    await first
    assert scene.backends["w1"][0].sizes == [1]


async def test_what_another_ended_stays_as_it_is(scene: InlineWorkers) -> None:
    """A request that was cancelled while it ran keeps that end."""
    await scene.model()
    await scene.worker()
    scene.hold()
    address = await scene.accept()
    await scene.started()
    cancelled = RequestOutcome(state=RequestState.CANCELLED, blob=b"", code="cancelled")
    assert await scene.delivery.requests.settle([Settlement(address=address, outcome=cancelled)]) == [True]
    scene.go()

    await scene.stop()

    assert (await scene.ended(address)).state is RequestState.CANCELLED
    await scene.queued(0)


async def test_settling_waits_for_the_broker(scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that can't be stored now is stored later."""
    settle = scene.delivery.requests.settle
    refusals = [BrokerUnavailable("away"), BrokerUnavailable("away")]

    async def refusing(settlements: list[Settlement]) -> list[bool]:
        if refusals:
            raise refusals.pop()
        return await settle(settlements)

    monkeypatch.setattr(scene.delivery.requests, "settle", refusing)
    await scene.model()
    await scene.worker()

    assert (await scene.ended(await scene.accept())).state is RequestState.SUCCEEDED
    assert not refusals


async def test_a_result_that_is_too_large_is_a_failure(scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the request whose result it is, and not of its batch-mates."""
    settle = scene.delivery.requests.settle

    async def refusing(settlements: list[Settlement]) -> list[bool]:
        if any(len(settlement.outcome.blob) > MOST_BYTES for settlement in settlements):
            raise PayloadTooLarge("it is too large")
        return await settle(settlements)

    monkeypatch.setattr(scene.delivery.requests, "settle", refusing)
    await scene.model(dims=-1, delay_us=200_000)
    await scene.worker()
    addresses = [await scene.accept(float(rows), width=1000, rows=rows) for rows in (1, 3, 2)]

    records = [await scene.ended(address) for address in addresses]

    assert [record.code for record in records] == ["", "payload_too_large", ""]
    assert value(await scene.result(addresses[2])) == 2.0


async def test_tensors_beside_the_stream(scene: InlineWorkers) -> None:
    """They are read before the request is batched, and removed with its entry."""
    await scene.model(delay_us=200_000)
    await scene.worker()
    calls = [scene.submit_apart(1.0, rows=2), scene.submit_apart(2.0)]
    address = await scene.accept(3.0, apart=True)

    assert [value(answer) for answer in await asyncio.gather(*calls)] == [1.0, 2.0]
    assert (await scene.ended(address)).state is RequestState.SUCCEEDED
    assert value(await scene.result(address)) == 3.0
    await scene.queued(0)
    assert [await scene.delivery.payload(entry, entry.payload_id) for entry in scene.entries] == [None, None]


@pytest.mark.slow
async def test_fifty_megabytes_both_ways(scene: InlineWorkers) -> None:
    """Neither the entry nor the reply carries them."""
    await scene.model(dims=-1)
    await scene.worker()

    answer = await scene.submit_apart(5.0, width=LARGE)

    assert (answer.stored, answer.outputs) == (True, ())
    blob = await scene.delivery.take_result(scene.lane, answer.request_id)
    whole = read(blob)
    assert to_numpy(whole.outputs[0]).shape == (1, LARGE)
    assert np.all(to_numpy(whole.outputs[0]) == 5.0)
    address = await scene.accept(6.0, width=LARGE, apart=True)
    await scene.ended(address)
    assert value(await scene.result(address)) == 6.0
    await scene.queued(0)


def read(blob: bytes | None) -> Response:
    """Decodes what is stored of one response."""
    assert blob is not None
    (response,) = decode_responses(blob)
    return response


async def test_small_and_large_answers_of_a_batch(scene: InlineWorkers) -> None:
    """Only what is above 1 MiB is stored beside the reply stream."""
    await scene.model(dims=-1, delay_us=100_000)
    await scene.worker()
    width = 2**18
    calls = [scene.submit(float(i), width=width, rows=rows) for i, rows in ((1, 1), (2, 2), (3, 1))]

    small, large, last = await asyncio.gather(*calls)

    assert (value(small), value(last)) == (1.0, 3.0)
    assert large.stored
    assert value(read(await scene.delivery.take_result(Lane("stub", 1), large.request_id))) == 2.0


async def test_outputs_that_are_too_large_are_a_failure(scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller is told, and the request is not tried again."""

    async def refusing(*_: object) -> None:
        raise PayloadTooLarge("it is too large")

    monkeypatch.setattr(scene.delivery, "store_result", refusing)
    await scene.model(dims=-1)
    await scene.worker()

    failure = (await scene.submit(1.0, width=2**18 + 2)).failure

    assert failure is not None
    assert (failure.code, failure.message) == ("payload_too_large", "it is too large")
    await scene.queued(0)


async def test_a_request_whose_tensors_are_gone_is_finished(scene: InlineWorkers) -> None:
    """It was cancelled, or has expired: nobody waits for an answer."""
    await scene.model()
    request = scene.request()
    request.payload = True
    frame, _ = encode_request_apart(request)
    call = scene.submit_frame(request.id, frame)
    await scene.worker()

    await scene.queued(0)
    await scene.stop()
    assert not call.done()


async def test_a_slow_payload_keeps_no_other_request_waiting(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that was fetched with it, nor another model's."""
    payloads = SlowPayloads(scene, monkeypatch)
    await scene.model()
    await scene.model("other")
    slow, small = scene.submit_apart(1.0), scene.submit(2.0)
    await scene.worker()

    assert value(await small) == 2.0
    assert value(await scene.submit(3.0, model="other")) == 3.0
    assert not slow.done()
    payloads.go.set()
    assert value(await slow) == 1.0


async def test_payloads_that_do_not_come_keep_no_other_request_waiting(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are; no more than a few are read at a time, and with the store back all are answered."""
    monkeypatch.setattr("qinfer_workers.inference.serving.STALLED_S", 0.1)
    monkeypatch.setattr("qinfer_workers.inference.intake.PAUSE_S", 0.1)
    payloads = SlowPayloads(scene, monkeypatch)
    await scene.model()
    await scene.worker()
    slow = [scene.submit_apart(float(i)) for i in range(60)]
    await eventually(lambda: payloads.reading >= MAX_READS)

    assert value(await scene.submit(100.0)) == 100.0
    assert payloads.reading < MAX_READS + 8  # a batch
    payloads.go.set()

    assert [value(answer) for answer in await asyncio.gather(*slow)] == [float(i) for i in range(60)]


async def test_what_is_read_counts_as_room_that_is_taken(scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a worker would take what another could run at once."""
    monkeypatch.setattr("qinfer_workers.inference.serving.SLOW_S", 60.0)
    payloads = SlowPayloads(scene, monkeypatch)
    await scene.model()
    calls = [scene.submit_apart(float(i)) for i in range(12)]
    await scene.queued(12)
    await scene.worker("w1")
    await eventually(lambda: payloads.reading == 8)
    await scene.worker("w2")
    await eventually(lambda: payloads.reading == 12)

    payloads.go.set()

    assert [value(answer) for answer in await asyncio.gather(*calls)] == [float(i) for i in range(12)]


async def test_what_is_being_read_is_given_back_at_the_end(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, however long it would take, and what was read already too; it counts no delivery."""
    payloads = SlowPayloads(scene, monkeypatch, quick=1)
    await scene.model()
    calls = [scene.submit_apart(float(i)) for i in range(3)]
    await scene.queued(3)
    await scene.worker("w1")
    await eventually(lambda: payloads.reading == 3)

    await scene.stop("w1")
    payloads.go.set()
    await scene.worker("w2")

    answers = await asyncio.gather(*calls)
    assert [(value(answer), answer.attempt) for answer in answers] == [(0.0, 1), (1.0, 1), (2.0, 1)]


async def test_a_model_that_is_replaced_while_a_payload_is_read(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are checked against what the model is then, those too whose own payload had been read before."""
    payloads = SlowPayloads(scene, monkeypatch, quick=1)
    await scene.model()
    calls = [scene.submit_apart(1.0), scene.submit_apart(1.0)]
    await scene.queued(2)
    await scene.worker()
    await eventually(lambda: payloads.reading == 2)
    await scene.model(dims=3)
    await scene.ready()
    payloads.go.set()

    failures = [answer.failure for answer in await asyncio.gather(*calls)]

    assert [failure.code for failure in failures if failure] == ["invalid_request"] * 2


class SlowPayloads:
    """Payloads that are read only from `go` on, but for the first ones; counts them."""

    def __init__(self, scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch, quick: int = 0) -> None:
        self.go = asyncio.Event()
        self.reading = 0
        self._quick = quick
        self._payload = scene.delivery.payload
        monkeypatch.setattr(scene.delivery, "payload", self._slow)

    async def _slow(self, entry: Entry, request_id: str, tenant: str = "") -> bytes | None:
        self.reading += 1
        if self.reading > self._quick:
            await self.go.wait()
        return await self._payload(entry, request_id, tenant)


async def test_tensors_that_can_not_be_read_now_are_read_later(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry is released meanwhile, and counts no delivery."""
    monkeypatch.setattr("qinfer_workers.inference.intake.PAUSE_S", 0.01)
    payload = scene.delivery.payload
    refusals = [BrokerUnavailable("away")]

    async def refusing(*arguments: object) -> bytes | None:
        if refusals:
            raise refusals.pop()
        return await payload(*arguments)  # type: ignore[arg-type]  # whatever it was called with

    monkeypatch.setattr(scene.delivery, "payload", refusing)
    await scene.model()
    await scene.worker()

    answer = await scene.submit_apart(4.0)

    assert (value(answer), answer.attempt) == (4.0, 1)
