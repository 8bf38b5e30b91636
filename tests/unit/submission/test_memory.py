"""Requests whose tensors stay in the memory of the process that submits them, on a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from qinfer.core.messages import MemoryReference, OutgoingRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.errors import QinferError
from qinfer.models.catalog import Catalog
from qinfer.models.state import WorkerRecord
from qinfer.observe.stats import GatewayTally
from qinfer.queue.entries import Lane, Lease
from qinfer.queue.lanes import Queue
from qinfer.segments.memory import OwnMemory
from qinfer.segments.sharing import SegmentSharing
from qinfer.submission.memory import MEMORY, NO_MEMORY, OLD_WORKER, UNREACHABLE, TensorMemory
from qinfer.submission.pending import PendingCall
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import PayloadApart, decode_request, encode_responses
from qinfer_api.auth import ANONYMOUS
from qinfer_api.dispatcher import Dispatcher
from tests.unit.submission.test_cleanup import Models

LANE = Lane("m", 1)
MIB = 2**20


class KnownModels(Models):
    """The catalog of a model, with workers."""

    def __init__(self) -> None:
        super().__init__()
        self.live = [WorkerRecord(id="w1", started_at=0.0, models={})]

    def workers(self) -> list[WorkerRecord]:
        return self.live


class Scene:
    """A gateway's dispatcher whose requests of 1,000 bytes stay in memory, and what its callers got."""

    no_stream = ""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.models = queue, KnownModels()
        self.responses: list[Response] = []
        catalog = cast(Catalog, self.models)
        self.memory = OwnMemory("gateway-a", 4 * MIB)
        self.dispatcher = Dispatcher(queue, catalog, GatewayTally(), LimitSettings(), "me", None)
        self.sharing = SimpleNamespace(
            own=self.memory, readers={"worker-w1"}, others=None, serve_readers=lambda *_: None
        )
        self.tensors = TensorMemory(cast(SegmentSharing, self.sharing), 1000, catalog)
        self.dispatcher.submission.set_memory(self.tensors)
        self.pending = self.dispatcher.submission.pending

    def deliver(self, response: Response) -> None:
        self.responses.append(response)

    def submit(self, size: int = 1000, *, timeout_s: float | None = None, endpoint: str = "") -> PendingCall:
        x = Tensor("x", "UINT8", (1, size), bytes([7]) * size)
        request = OutgoingRequest(model="m", inputs=(x,), endpoint=endpoint, moves=bool(endpoint))
        return self.dispatcher.submit(ANONYMOUS, request, self, asked_s=timeout_s)

    async def fetch(self) -> Lease:
        (lease,) = await self.queue.fetch([LANE], "w1", 1, 5.0)
        return lease

    async def is_apart(self) -> bool:
        """Takes the next request; tells whether its tensors are in memory."""
        try:
            decode_request((await self.fetch()).frame)
        except PayloadApart as apart:
            return apart.request.memory is not None
        return False

    def say_unread(self, pending: PendingCall, reference: MemoryReference) -> None:
        """Tells as a worker does that it can't read tensors."""
        told = Response(request_id=pending.request_id, final=False)
        nothing = msgspec.structs.replace(reference, size=0)
        self.pending.receive(encode_responses([told], {told.request_id: nothing}))

    def answer(self, pending: PendingCall, *, final: bool = True) -> None:
        response = Response(request_id=pending.request_id, model="m", version=1, attempt=1, final=final)
        self.pending.receive(encode_responses([response]))


@pytest.fixture
async def scene(delivery: Queue) -> AsyncIterator[Scene]:
    scene = Scene(delivery)
    running = asyncio.create_task(scene.dispatcher.submission.run())
    yield scene
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    scene.memory.close()


async def test_the_entry_of_a_large_request_refers_to_its_tensors(scene: Scene) -> None:
    pending = scene.submit()
    lease = await scene.fetch()
    with pytest.raises(PayloadApart) as apart:
        decode_request(lease.frame)
    reference = apart.value.request.memory

    assert len(lease.frame) < 400
    assert isinstance(reference, MemoryReference)
    assert pending.tensors is not None
    assert pending.tensors.reference == reference
    assert reference.size == 1000


@pytest.mark.parametrize(("size", "is_apart"), [(999, False), (1000, True), (5000, True), (5001, False)])
async def test_small_and_huge_requests_travel_through_redis(
    scene: Scene, size: int, monkeypatch: pytest.MonkeyPatch, *, is_apart: bool
) -> None:
    monkeypatch.setattr("qinfer.submission.memory.MOST_BYTES", 5000)
    for _ in range(3):  # the second would have its layout remembered
        scene.submit(size)
        assert await scene.is_apart() == is_apart


@pytest.mark.parametrize("end", ["answered", "cancelled", "expired", "all fail", "cleared"])
async def test_tensors_are_given_back_when_their_request_ends(scene: Scene, end: str) -> None:
    pending = scene.submit(timeout_s=0.05 if end == "expired" else None)
    assert scene.memory.held_bytes
    await scene.fetch()
    if end == "answered":
        scene.answer(pending)
    elif end == "cancelled":
        scene.pending.cancel(pending)
    elif end == "all fail":
        scene.pending.fail_all(QinferError("the end"))
    elif end == "cleared":
        scene.pending.clear()

    await eventually(lambda: scene.memory.held_bytes == 0, description="memory that was given back")


async def test_a_request_that_goes_on_after_its_first_deadline_keeps_its_tensors(scene: Scene) -> None:
    """It is taken out of the table, and added again."""
    scene.models.wait_s = 0.02
    pending = scene.submit()
    reference = pending.tensors and pending.tensors.reference
    scene.models.wait_s = 0.0  # a worker has loaded it
    await scene.fetch()
    await eventually(lambda: not pending.deadline_s, description="the second deadline")

    assert pending in scene.pending
    assert scene.memory.held_bytes
    scene.answer(pending)
    assert scene.memory.held_bytes == 0
    assert reference is not None


@pytest.mark.parametrize(
    "others",
    [
        WorkerRecord(id="far", started_at=0.0, models={}),
        WorkerRecord(id="far", started_at=0.0, models={}, places=("n", "m*")),
    ],
)
async def test_one_worker_that_does_not_share_the_memory_is_enough_for_redis(
    scene: Scene, others: WorkerRecord
) -> None:
    """It may be of another machine, or of an older qinfer."""
    scene.models.live.append(others)
    scene.submit()

    assert not await scene.is_apart()
    assert scene.tensors.ways == {OLD_WORKER: 1}


async def test_a_worker_of_other_models_does_not_count(scene: Scene) -> None:
    scene.models.live.append(WorkerRecord(id="far", started_at=0.0, models={}, places=("n",)))
    scene.submit()

    assert await scene.is_apart()


async def test_the_readers_are_looked_up_anew_when_they_change(scene: Scene) -> None:
    scene.submit()
    assert await scene.is_apart()
    scene.sharing.readers = set()
    scene.tensors.forget()
    scene.submit()

    assert not await scene.is_apart()


def land(scene: Scene, size: int = 1000) -> PendingCall:
    """Submits a request whose tensor was received into memory."""
    landing = scene.tensors.land(size, 0, "m", "", MIB)
    if landing is None:
        return scene.submit(size)
    landing.add(bytes([size % 251]) * size)
    request = OutgoingRequest(model="m", inputs=(Tensor("x", "UINT8", (1, size), landing.body),))
    landing.enter(request)
    pending = scene.dispatcher.submit(ANONYMOUS, request, scene)
    landing.leave()
    return pending


async def test_similar_requests_that_landed_each_refer_to_their_own_tensors(scene: Scene) -> None:
    """From the third on, their layout is known."""
    sent = [land(scene, size) for size in (1000, 1000, 1000, 2000, 1000, 2000, 2000)]
    read = []
    for pending in sent:
        with pytest.raises(PayloadApart) as apart:
            decode_request((await scene.fetch()).frame)
        reference = apart.value.request.memory
        assert reference is not None
        assert pending.tensors is not None
        assert reference == pending.tensors.reference
        assert apart.value.request.id == pending.request_id
        read.append(reference.size)

    assert read == [1000, 1000, 1000, 2000, 1000, 2000, 2000]
    assert len({pending.tensors.reference.generation for pending in sent if pending.tensors is not None}) == len(sent)
    assert scene.tensors.ways == {MEMORY: len(sent)}
    for pending in sent:
        scene.answer(pending)
    assert scene.memory.held_bytes == 0


async def test_similar_requests_are_each_copied_to_their_own_place(scene: Scene) -> None:
    """From the third on, their layout is known; without room, the same requests travel through Redis."""
    sent = [scene.submit() for _ in range(5)]
    for _ in sent:
        assert await scene.is_apart()
    references = [pending.tensors.reference for pending in sent if pending.tensors is not None]
    assert len({reference.offset for reference in references}) == len(sent)
    big = []
    for _ in range(8):  # the memory has room for three, and one tenant may use it all
        big.append(scene.submit(MIB))
        assert await scene.is_apart() == (big[-1].tensors is not None)

    assert [pending.tensors is not None for pending in big] == [True] * 3 + [False] * 5
    assert scene.tensors.ways == {MEMORY: 8, NO_MEMORY: 5}
    for pending in [*sent, *big]:
        scene.answer(pending)
    assert scene.memory.held_bytes == 0


async def test_a_known_layout_does_not_outlive_the_readers_of_the_memory(scene: Scene) -> None:
    for _ in range(3):
        land(scene)
        assert await scene.is_apart()
    scene.sharing.readers = set()
    landing = scene.tensors.land(1000, 0, "m", "", MIB)
    assert landing is not None, "nobody has said so yet"
    scene.tensors.forget()
    request = OutgoingRequest(model="m", inputs=(Tensor("x", "UINT8", (1, 1000), landing.body),))
    landing.enter(request)
    scene.dispatcher.submit(ANONYMOUS, request, scene)

    assert not await scene.is_apart()


async def test_tensors_that_a_worker_can_not_read_go_through_redis(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the request, and of further requests of its model for a while; once for each note."""
    monkeypatch.setattr("qinfer.submission.memory.LEFT_S", 0.2)
    pending = scene.submit()
    await eventually(lambda: pending.entry is not None, description="the entry")
    entry, reference = (await scene.fetch()).entry, reference_of(pending)
    scene.say_unread(pending, msgspec.structs.replace(reference, generation=reference.generation + 1))
    assert scene.tensors.land(2000, 0, "m", "", MIB)
    scene.say_unread(pending, reference)
    assert scene.tensors.land(2000, 0, "m", "", MIB) is None

    async def is_stored() -> bool:
        return await scene.queue.payload(entry, pending.request_id) == bytes([7]) * 1000

    await eventually(is_stored, description="stored tensors")
    scene.submit()
    assert not await scene.is_apart()
    assert scene.tensors.ways == {MEMORY: 1, UNREACHABLE: 1}
    await eventually(lambda: bool(scene.tensors.land(2000, 0, "m", "", MIB)), description="memory again")


async def test_a_request_that_has_ended_stores_nothing(scene: Scene) -> None:
    """Nor does one that is not in memory, or not known."""
    pending = scene.submit()
    entry, reference = (await scene.fetch()).entry, reference_of(pending)
    scene.answer(pending)
    scene.say_unread(pending, reference)
    small = scene.submit(10)
    await scene.fetch()
    scene.say_unread(small, reference)
    await asyncio.sleep(0)

    assert await scene.queue.payload(entry, pending.request_id) is None
    assert scene.tensors.land(2000, 0, "m", "", MIB)


def reference_of(pending: PendingCall) -> MemoryReference:
    assert pending.tensors is not None
    return pending.tensors.reference


async def test_a_request_that_an_endpoint_moves_refers_to_the_same_tensors(scene: Scene) -> None:
    """It moves to another version of its model, which the same workers load."""
    pending = scene.submit(endpoint="e")
    await eventually(lambda: pending.entry is not None, description="the entry")
    assert await scene.queue.moves.move([LANE], 2, "e") == 1
    (lease,) = await scene.queue.fetch([Lane("m", 2)], "w1", 1, 5.0)

    with pytest.raises(PayloadApart) as apart:
        decode_request(lease.frame)

    assert pending.tensors is not None
    assert apart.value.request.memory == pending.tensors.reference
    assert scene.memory.held_bytes


async def test_without_room_tensors_travel_through_redis(scene: Scene) -> None:
    first = scene.submit(3 * MIB)
    await scene.fetch()
    second = scene.submit(3 * MIB)

    assert not await scene.is_apart()
    assert (first.tensors is None, second.tensors) == (False, None)
    assert scene.tensors.ways == {MEMORY: 1, NO_MEMORY: 1}


async def test_a_request_that_is_refused_holds_nothing(scene: Scene) -> None:
    x = Tensor("x", "UINT8", (1, 1000), bytes(1000))
    request = OutgoingRequest(model="m", inputs=(x,), parameters={"a": "b" * 2**20})

    with pytest.raises(QinferError, match="send what is large as a tensor"):
        scene.dispatcher.submit(ANONYMOUS, request, scene)

    assert scene.memory.held_bytes == 0
    assert len(scene.pending) == 0
