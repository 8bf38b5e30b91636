"""Payloads and results in a store that speaks S3's protocol: written, copied, swept, away, and under dying workers.

On a store that speaks Google's, they are written, copied and swept.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from qinfer.core.messages import Response
from qinfer.core.settings import LimitSettings, RedisSettings
from qinfer.errors import BrokerUnavailable, SettingsError
from qinfer.queue.entries import Acceptance, EntryAddress, Lane, Payload, RequestState
from qinfer.queue.object_store import SWEEP_MARGIN_S, ObjectStore
from qinfer.tensors import from_numpy, to_numpy
from qinfer.testing import eventually
from qinfer.wire.frame import decode_responses, encode_request_apart
from tests.support.faulty_backend import SLOW, executed, write_model
from tests.support.servers import object_stores
from tests.support.servers.object_storage import BUCKET, ObjectStorage
from tests.support.servers.servers import free_port
from tests.support.worker_processes import Process, WorkerProcesses, resume, worker_processes

ROWS = 64
URL = f"s3://{BUCKET}/qinfer"
LIMITS = LimitSettings(payload_url=URL, payload_url_min_bytes=128, inline_max_bytes=64)
NOW_S = 1_800_000_000.0


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStorage]:
    with ObjectStorage() as one:
        for name, value in one.environment.items():
            monkeypatch.setenv(name, value)
        yield one


# --- the store by itself ---


async def test_objects_are_written_read_copied_and_deleted(storage: ObjectStorage) -> None:
    """With one part and with several: above 50 MiB the client cuts them."""
    store = await ObjectStore.open(LIMITS, RedisSettings(), lambda: NOW_S)
    small, large = b"x" * 1000, bytes(51 * 2**20)

    references = [await store.write("m", data, 60.0) for data in (small, large)]
    copy = await store.copy(references[0], "m", 6000.0)

    assert [await store.read(reference) == data for reference, data in zip(references, (small, large), strict=True)]
    assert copy is not None
    assert await store.read(copy) == small
    store.delete(reference.name for reference in references)
    await eventually(lambda: storage.names() == [f"qinfer/{copy.name}"])
    assert await store.read(references[0]) is None
    assert await store.copy(references[0], "m", 60.0) is None
    await store.close()


async def test_the_sweep_lists_by_expiry(storage: ObjectStorage) -> None:
    """Nothing younger goes, though it was listed before."""
    now_s = NOW_S
    store = await ObjectStore.open(LIMITS, RedisSettings(), lambda: now_s)
    for _ in range(20):
        await store.write("m", b"old", 60.0)
    young = await store.write("m", b"young", 7200.0)
    assert await store.sweep() == 0

    now_s += 61 + SWEEP_MARGIN_S

    assert await store.sweep() == 20
    assert storage.names() == [f"qinfer/{young.name}"]
    await store.close()


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp, of gcsfs
async def test_google_keeps_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and large ones are written, read and copied; the sweep removes what is old."""
    now_s = NOW_S
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})  # FSSPEC_GCS_TOKEN, which it reads once
    with object_stores.gcs(BUCKET) as google:
        for name, value in google.environment.items():
            monkeypatch.setenv(name, value)
        limits = LIMITS.model_copy(update={"payload_url": f"{google.url}/qinfer"})
        store = await ObjectStore.open(limits, RedisSettings(), lambda: now_s)
        small, large = b"x" * 1000, bytes(51 * 2**20)

        references = [await store.write("m", data, 60.0) for data in (small, large)]
        copy = await store.copy(references[0], "m", 7200.0)

        assert [await store.read(one) == data for one, data in zip(references, (small, large), strict=True)] == [
            True
        ] * 2
        assert copy is not None
        now_s += 61 + SWEEP_MARGIN_S
        assert await store.sweep() == 2
        assert await store.read(copy) == small
        await store.close()


async def test_a_bucket_that_does_not_exist_is_told_at_the_start(storage: ObjectStorage) -> None:
    """With the variable, and what the store says."""
    limits = LIMITS.model_copy(update={"payload_url": "s3://no-such-bucket/x"})

    with pytest.raises(SettingsError, match=r"QINFER_LIMITS__PAYLOAD_URL: the store does not work"):
        await ObjectStore.open(limits, RedisSettings(), lambda: NOW_S)


async def test_a_store_that_is_not_there_is_told_at_the_start(
    storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within seconds."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")

    with pytest.raises(SettingsError, match=r"the store does not work"):
        await ObjectStore.open(LIMITS, RedisSettings(), lambda: NOW_S)


async def test_a_store_that_goes_away_is_unavailable_and_comes_back(storage: ObjectStorage) -> None:
    """Nothing has to be started anew."""
    store = await ObjectStore.open(LIMITS, RedisSettings(), lambda: NOW_S)
    reference = await store.write("m", b"tensors", 60.0)

    storage.stop()
    for action in (store.write("m", b"x", 60.0), store.read(reference), store.copy(reference, "m", 60.0)):
        with pytest.raises(BrokerUnavailable, match="payload store can't be reached"):
            await action
    storage.start()

    async def is_back() -> bool:
        with contextlib.suppress(BrokerUnavailable):
            return await store.read(reference) == b"tensors"
        return False

    await eventually(is_back, 20.0)
    await store.close()


# --- workers ---


@pytest.fixture
async def pool(tmp_path: Path, storage: ObjectStorage) -> AsyncIterator[WorkerProcesses]:
    write_model(tmp_path / "repository", hold_s=1.5)
    async with worker_processes(tmp_path, LIMITS) as one:
        yield one


async def worker(pool: WorkerProcesses) -> Process:
    return await pool.worker(
        QINFER_LIMITS__PAYLOAD_URL=URL,
        QINFER_LIMITS__PAYLOAD_URL_MIN_BYTES="128",
        QINFER_LIMITS__INLINE_MAX_BYTES="64",
        QINFER_WORKER__LEASE_S="2",
    )


async def accept(pool: WorkerProcesses, value: float = 1.0) -> EntryAddress:
    """Has a request accepted whose tensor is an object, and so will be its result."""
    request = pool.request(value, reply_to="")
    request.inputs, request.payload = (from_numpy("x", np.full((ROWS, 1), value, "<f4")),), True
    frame, payload = encode_request_apart(request)
    address = EntryAddress(request.model, 0, request.id)
    lane = Lane(request.model, 1)
    await pool.delivery.requests.accept(
        Acceptance(address=address, lane=lane, frame=frame, payload=payload, timeout_s=50)
    )
    return address


async def result(pool: WorkerProcesses, address: EntryAddress) -> Response:
    """Reads a result; asks again while this reader's own connection to the store has not recovered yet."""
    blob: bytes | None = None
    async with asyncio.timeout(10):
        while blob is None:
            try:
                blob = await pool.delivery.requests.result(address)
                assert blob is not None
            except BrokerUnavailable:
                await asyncio.sleep(0.1)
    (response,) = decode_responses(blob)
    return response


def is_right(response: Response, value: float = 1.0) -> bool:
    assert response.failure is None, response.failure
    return bool(np.array_equal(to_numpy(response.outputs[0]), np.full((ROWS, 1), value, "<f4")))


@pytest.mark.slow
async def test_a_killed_worker_leaves_the_object_to_the_next(
    pool: WorkerProcesses, storage: ObjectStorage, tmp_path: Path
) -> None:
    """The payload is there until the request has ended; then only the result is."""
    first = await worker(pool)
    request = await accept(pool, SLOW)
    await pool.began(tmp_path / "faulty.trace")

    first.kill()
    await worker(pool)
    record = await pool.ended(request)

    assert (record.state, record.attempts) == (RequestState.SUCCEEDED, 2)
    assert is_right(await result(pool, request), SLOW)
    assert is_right(await result(pool, request), SLOW)
    await eventually(lambda: len(storage.names()) == 1, description="only the result in the store")
    assert len([batch for batch in executed(tmp_path / "faulty.trace") if SLOW in batch]) == 2


@pytest.mark.slow
async def test_a_worker_waits_for_a_store_that_is_away(pool: WorkerProcesses, storage: ObjectStorage) -> None:
    """It gives back what it can't read, and neither ends nor counts it; with the store back all is answered."""
    process = await worker(pool)
    process.send_signal(signal.SIGSTOP)
    requests = [await accept(pool, float(i + 1)) for i in range(3)]
    storage.stop()
    resume(process)
    refused: list[object] = []
    frame, payload = encode_request_apart(pool.request(1.0))
    pool.delivery.submit(Lane("faulty", 1), frame, refused.append, payload=Payload("r", payload * ROWS, 60.0))

    await eventually(lambda: len(refused) == 1, 20.0, "a refusal")
    small = pool.submit(5.0)
    assert (await pool.answered(small))[0].failure is None
    storage.start()
    records = await asyncio.gather(*(pool.ended(request) for request in requests))

    assert isinstance(refused[0], BrokerUnavailable)
    assert [record.state for record in records] == [RequestState.SUCCEEDED] * 3
    assert [is_right(await result(pool, r), float(i + 1)) for i, r in enumerate(requests)] == [True] * 3
    assert process.poll() is None
    await pool.empty()


@pytest.mark.long
@pytest.mark.slow
async def test_a_result_waits_for_a_store_that_is_away(
    pool: WorkerProcesses, storage: ObjectStorage, tmp_path: Path
) -> None:
    """The worker holds its leases meanwhile, and stores it later; it is not computed anew."""
    await worker(pool)
    request = await accept(pool, SLOW)
    await pool.began(tmp_path / "faulty.trace")

    storage.stop()
    await asyncio.sleep(1.5 + 2.5)  # the batch ends, and a lease after it
    storage.start()
    record = await pool.ended(request)

    assert (record.state, record.attempts) == (RequestState.SUCCEEDED, 1)
    assert is_right(await result(pool, request), SLOW)
    assert len([batch for batch in executed(tmp_path / "faulty.trace") if SLOW in batch]) == 1
