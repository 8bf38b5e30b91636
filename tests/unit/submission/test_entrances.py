"""Entrances of versions: of what they are composed, and what becomes of requests while the catalog replaces them."""

from pathlib import Path

import pytest

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.core.settings import LimitSettings
from qinfer.core.settings_sections import CachePlan
from qinfer.errors import ModelNotFound
from qinfer.models.state import DesiredState, State, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.observe.stats import GatewayTally, ModelCounts
from qinfer.queue.entries import Lane, Lease
from qinfer.queue.lanes import Queue
from qinfer.submission.pending import PendingCall
from qinfer.submission.response_cache import ResponseCache
from qinfer.submission.submit import (
    CacheEntrance,
    Entrance,
    LaneEntrance,
    PolicyEntrance,
    SequenceEntrance,
    SplitEntrance,
)
from qinfer.tensors import Tensor
from qinfer.testing import eventually
from qinfer.wire.frame import decode_request, encode_responses
from qinfer_api.auth import ANONYMOUS
from qinfer_api.dispatcher import Dispatcher, OrderedEntrance
from tests.unit.models.test_catalog import CONFIG, TTL_S, Stack

CACHED = "response_cache { enable: true }"
SPLIT = 'parameters { key: "qinfer.split" value { string_value: "true" } }'
LANES = [Lane("m", 1), Lane("m", 2)]


class Scene(Stack):
    """A catalog, and the dispatcher of a gateway whose replies the test delivers."""

    no_stream = ""

    def __init__(self, path: Path, store: ControlStore, delivery: Queue) -> None:
        super().__init__(path, store, delivery)
        limits = LimitSettings()
        self.dispatcher = Dispatcher(delivery, self.catalog, GatewayTally(), limits, "me")
        cache = ResponseCache(CachePlan(kind="local", size_bytes=10**6), delivery, ModelCounts(), limits.max_in_flight)
        self.submission = self.dispatcher.submission
        self.submission.set_cache(cache)
        self.responses: list[Response] = []

    def deliver(self, response: Response) -> None:
        self.responses.append(response)

    def submit(self, version: int = 0, **fields: object) -> PendingCall:
        x = Tensor("x", "FP32", (4,), bytes(16))
        request = OutgoingRequest(**{"model": "m", "version": version, "inputs": (x,), **fields})  # type: ignore[arg-type]
        return self.dispatcher.submit(ANONYMOUS, request, self)

    async def change(self, *versions: int, config: str) -> None:
        """Stores another configuration, which a worker then has loaded."""
        self.write("m", *versions, config=config)
        await self.sync()
        await self.load("m", *versions)

    async def taken(self, pending: PendingCall, lane: Lane) -> Lease:
        """Takes a request as a worker does; checks that it is the one."""
        (lease,) = await self.delivery.fetch([lane], "w", 1, 5.0)
        assert decode_request(lease.frame).id == pending.request_id
        return lease

    def answer(self, pending: PendingCall, version: int) -> Response:
        y = Tensor("y", "FP32", (4,), bytes(16))
        response = Response(request_id=pending.request_id, model="m", version=version, outputs=(y,), attempt=1)
        self.submission.pending.receive(encode_responses([response]))
        return self.responses[-1]


@pytest.fixture
async def scene(tmp_path: Path, store: ControlStore, delivery: Queue) -> Scene:
    return Scene(tmp_path, store, delivery)


def layers(entrance: Entrance) -> list[type[Entrance]]:
    """Returns the classes of an entrance, the outermost first."""
    inner = getattr(entrance, "_inner", None)
    return [type(entrance), *(layers(inner) if inner is not None else ())]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("", [LaneEntrance]),
        ("dynamic_batching { max_queue_delay_microseconds: 100 }", [LaneEntrance]),
        ("dynamic_batching { priority_levels: 2 default_priority_level: 1 }", [PolicyEntrance]),
        ("dynamic_batching { default_queue_policy { max_queue_size: 3 } }", [PolicyEntrance]),
        ("model_transaction_policy { decoupled: true }", [PolicyEntrance]),
        ("sequence_batching { }", [SequenceEntrance]),
        (CACHED, [CacheEntrance, LaneEntrance]),
        (SPLIT, [SplitEntrance, LaneEntrance]),
        (CACHED + SPLIT, [SplitEntrance, CacheEntrance, LaneEntrance]),
        ("dynamic_batching { preserve_ordering: true }" + CACHED, [OrderedEntrance, CacheEntrance, LaneEntrance]),
    ],
)
async def test_an_entrance_is_composed_of_what_the_configuration_asks_for(
    scene: Scene, config: str, expected: list[type[Entrance]]
) -> None:
    """A plain model has a lane and nothing else."""
    await scene.change(1, config=f"{CONFIG} max_batch_size: 8 {config}")

    assert layers(scene.submission.asked("m", 1)) == expected


async def test_a_refresh_without_changes_keeps_the_entrances(scene: Scene) -> None:
    """A version has one entrance, also for requests that name no version."""
    await scene.change(1, config=CONFIG)
    entrance = scene.submission.asked("m", 1)

    await scene.catalog.refresh()

    assert scene.submission.asked("m", 1) is scene.submission.asked("m", 0) is entrance
    assert scene.submission.of(scene.catalog.resolve("m", 1)) is entrance


async def test_a_reload_replaces_an_entrance_and_requests_keep_theirs(scene: Scene) -> None:
    """The new configuration caches; who waited before is answered, and leaves nothing in the cache."""
    await scene.change(1, config=CONFIG)
    before, waiting = scene.submission.asked("m", 1), scene.submit()

    await scene.change(1, config=CONFIG + CACHED)

    after, later = scene.submission.asked("m", 1), scene.submit()
    assert (layers(before), layers(after)) == ([LaneEntrance], [CacheEntrance, LaneEntrance])
    await scene.taken(waiting, LANES[0])
    assert scene.answer(waiting, 1).request_id == waiting.request_id
    assert later in scene.submission.pending


async def test_a_request_does_not_join_an_execution_of_another_generation(scene: Scene) -> None:
    """Equal requests to the old and the new generation are executed once each, and each is answered."""
    await scene.change(1, config=CONFIG + CACHED)
    old = [scene.submit(), scene.submit()]
    await scene.change(1, config=CONFIG + CACHED + "max_batch_size: 0 default_model_filename: 'b'")
    new = scene.submit()

    executed = [lease for _ in range(2) for lease in await scene.delivery.fetch([LANES[0]], "w", 1, 5.0)]
    requests = [decode_request(lease.frame) for lease in executed]

    assert len({request.generation for request in requests}) == 2
    for request in requests:
        response = Response(request_id=request.id, model="m", version=1, attempt=1)
        scene.submission.pending.receive(encode_responses([response]))
    assert sorted(one.request_id for one in scene.responses) == sorted(each.request_id for each in (*old, new))


async def test_a_version_that_only_pins_keep_has_an_entrance_of_its_own(scene: Scene) -> None:
    """Requests that name the version use it, all others the version of the policy, before and after a pin ends."""
    await scene.change(1, 2, config=CONFIG)
    newest, waiting = scene.submission.asked("m", 0), scene.submit(2)
    generation = newest.served.generation
    states = {1: VersionState(State.READY, generation), 2: VersionState(State.READY, generation, pinned=True)}
    await scene.store.heartbeat(WorkerRecord(id="w", started_at=0.0, models={"m": states}), TTL_S)

    await scene.catalog.refresh()

    assert [scene.submission.asked("m", version).served.version for version in (0, 1, 2)] == [1, 1, 2]
    assert scene.submission.asked("m", 2) is newest
    pinned = scene.submit(2)
    await scene.load("m", 1)  # the pin has ended: a request would wait for a worker that loads the version
    assert layers(scene.submission.asked("m", 2)) == [PolicyEntrance]
    for pending in (waiting, pinned):
        await scene.taken(pending, LANES[1])
        assert scene.answer(pending, 2).version == 2


async def test_an_unload_ends_an_entrance_and_not_its_requests(scene: Scene) -> None:
    """Requests in flight are executed or expire; new ones are refused as the catalog says."""
    await scene.change(1, config=CONFIG)
    waiting = scene.submit()
    desired = (await scene.store.desired())["m"]
    await scene.store.set_desired(DesiredState("m", desired.generation + 1, load=False))

    await scene.catalog.refresh()

    with pytest.raises(ModelNotFound):
        scene.submit()
    await scene.taken(waiting, LANES[0])
    assert scene.answer(waiting, 1).failure is None


async def test_a_request_is_moved_to_another_version_while_entrances_are_replaced(scene: Scene) -> None:
    """The entrance that it came by is gone: the reply finds it, with the version that has answered."""
    await scene.change(1, 2, config=CONFIG)
    waiting = scene.submit(2, endpoint="e", moves=True)
    await eventually(lambda: waiting.entry is not None)
    before = scene.submission.asked("m", 1)
    await scene.change(1, config=CONFIG + "dynamic_batching { }")

    assert await scene.delivery.moves.move([LANES[1]], 1, "e")

    assert scene.submission.asked("m", 1) is not before
    await scene.taken(waiting, LANES[0])
    assert (scene.answer(waiting, 1).version, waiting.version) == (1, 1)
    assert waiting not in scene.submission.pending
