"""What a worker that has nothing to do asks each node of Redis: it does not depend on how many models it serves."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from pydantic import SecretStr

from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable
from qinfer.models.state import State
from qinfer.models.store import ControlStore
from qinfer.queue import doorbell, keys, readers
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import Entry, Lane, reply_address
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer.wire.frame import encode_request
from qinfer_workers.inference.worker import Worker
from tests.integration.worker.test_sequence_owners import lose_lease
from tests.support.inline_workers import OWNER, InlineWorkers, inline_workers, value
from tests.support.sequence_scene import Sequencing, scheduler
from tests.support.servers.servers import RedisCluster, RedisServer, SentinelSetup, system_redis

MODELS = 150
MOST_PER_S = 50
WINDOW_S = 4


async def calls(scene: InlineWorkers, command: str = "") -> dict[str, int]:
    """Returns how many commands, or calls of one, each node has executed, those in scripts included."""
    found = {}
    for label, link in scene.delivery.router.owners().items():
        text = await link.call(b"INFO", b"commandstats")
        lines = [line.partition(":calls=") for line in text.decode().splitlines()]
        counts = {name: int(rest.split(",")[0]) for name, _, rest in lines if rest}
        found[label] = counts.get(f"cmdstat_{command}", 0) if command else sum(counts.values())
    return found


async def calls_per_s(scene: InlineWorkers, command: str = "") -> float:
    """Returns how many each node executes, of the one that executes most."""
    begin_s, before = time.monotonic(), await calls(scene, command)
    await asyncio.sleep(WINDOW_S)
    after, end_s = await calls(scene, command), time.monotonic()
    return max(count - before.get(label, 0) for label, count in after.items()) / (end_s - begin_s)


async def served(scene: InlineWorkers, models: int, monkeypatch: pytest.MonkeyPatch, *, stateful: int = 0) -> Worker:
    """Starts a worker with so many models, and as many with sequences; waits until it has forgotten its start."""
    monkeypatch.setattr(readers, "AWAKE_S", 0.2)
    for number in range(models):
        await scene.model(f"m{number}")
    for number in range(stateful):
        await scene.model(f"s{number}", mode="add", scheduler=scheduler())
    worker = await scene.worker(max_wait_s=0.5, lease_s=1.0, renew_every_s=0.3, ready=False)

    async def is_ready() -> bool:
        states = [s.state for r in await scene.store.workers() for each in r.models.values() for s in each.values()]
        return len(states) >= models + stateful and set(states) == {State.READY}

    await eventually(is_ready, timeout_s=60.0, description="all models ready")
    await quiet(scene, worker)
    return worker


async def quiet(scene: InlineWorkers, worker: Worker) -> None:
    """Waits until a worker looks for nothing any more: all its readers sleep, and it has no lease on sequences."""

    def is_quiet() -> bool:
        services = worker._sequences._all()
        if worker._keeper.owners or not all(service._tickets.is_asleep for service in services):
            return False
        return not any(r._sleep is None or _is_stirred(scene, r) for r in scene.delivery._readers.values())

    async def is_round_over() -> bool:
        before = sum((await calls(scene, "xpending")).values())
        await asyncio.sleep(0.2)
        return sum((await calls(scene, "xpending")).values()) - before < 10

    await eventually(is_quiet, timeout_s=30.0, description="an idle worker")
    await eventually(is_round_over, timeout_s=30.0, description="the end of a round through all lanes")


def _is_stirred(scene: InlineWorkers, reader: readers.LaneReader) -> bool:
    return scene.delivery.doorbell.is_stirred(reader.stirred_at_s)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("models", "stateful"), [(MODELS, 0), (0, MODELS)])
async def test_an_idle_worker_asks_little_however_many_models_it_serves(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch, models: int, stateful: int
) -> None:
    """Heartbeats, statistics, renewals and looks of its own accord are included."""
    await served(scene, models, monkeypatch, stateful=stateful)

    assert await calls_per_s(scene) <= MOST_PER_S


async def test_a_request_after_a_long_sleep_is_answered(scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes its model's reader."""
    await served(scene, 3, monkeypatch)

    answers = [await scene.submit(7.0, model=f"m{number}") for number in range(3)]

    assert [value(answer) for answer in answers] == [7.0] * 3


async def test_sequences_after_a_long_sleep_are_answered(scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has a lease while it owns them, and gives it back afterwards."""
    monkeypatch.setattr(doorbell, "SHORTEST_S", 600.0)
    sums = Sequencing(scene)
    await sums.model()
    worker = await served(scene, 0, monkeypatch)

    first = await sums.sum(1, 2, 3)
    await quiet(scene, worker)
    second = await sums.sum(4, 5)

    assert (first, second) == ([1, 3, 6], [4, 9])


async def test_open_sequences_without_steps_cost_their_lease_only(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step wakes the owner, though it has no free slot."""
    monkeypatch.setattr(doorbell, "SHORTEST_S", 600.0)
    sums = Sequencing(scene)
    await sums.model()
    worker = await served(scene, 0, monkeypatch)
    for number in range(8):
        await (await sums.send(1, number + 1, start=True))
    (service,) = worker._sequences._all()
    await eventually(lambda: service._tickets.is_asleep, description="a sleeping owner")
    looks = await calls_per_s(scene, "xrange")
    again = [value(await (await sums.send(2, number + 1))) for number in range(8)]

    assert (service.batcher.free_slots, again) == (0, [3] * 8)
    assert looks == 0


async def test_a_lease_on_sequences_that_ends_in_a_sleep_is_noticed(
    scene: InlineWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker owns them again, though all its slots were taken by them."""
    monkeypatch.setattr(doorbell, "SHORTEST_S", 600.0)
    sums = Sequencing(scene)
    await sums.model()
    worker = await served(scene, 0, monkeypatch)
    for number in range(8):
        await (await sums.send(1, number + 1, start=True))
    (service,) = worker._sequences._all()
    await eventually(lambda: service._tickets.is_asleep, description="a sleeping owner")

    await lose_lease(sums, "w1")
    again = [value(await (await sums.send(2, number + 1))) for number in range(8)]

    assert again == [3] * 8


# --- several nodes, and one that goes away ---


class Servers(NamedTuple):
    """Servers of which one may go away.

    Attributes:
        settings: How they are reached.
        primary: Returns the node that goes away: it has the lanes of model `m0`, and not the replies of all.
    """

    settings: RedisSettings
    primary: Callable[[], RedisServer]


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[Servers]:
    """Provides three primaries with a replica each."""
    setup = RedisCluster(system_redis(), directory, replicated=True)

    def primary() -> RedisServer:
        kept = setup.primary(keys.reply(reply_address(OWNER)))
        lanes = [keys.lane(Lane(f"m{number}", 1)).decode() for number in range(FEW)]
        return next(node for node in map(setup.primary, lanes) if node is not kept)

    try:
        yield Servers(RedisSettings(url=SecretStr(setup.url), cluster=True), primary)
    finally:
        setup.stop()


@asynccontextmanager
async def sentinels(directory: Path) -> AsyncIterator[Servers]:
    """Provides a primary, two replicas and three Sentinels."""
    setup = SentinelSetup(system_redis(), directory)
    try:
        yield Servers(RedisSettings(url=SecretStr(setup.url)), setup.primary)
    finally:
        setup.stop()


FEW = 12


@pytest.fixture(params=[cluster, sentinels])
async def servers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Servers]:
    async with request.param(tmp_path) as one:
        yield one


@pytest.fixture
async def spread(servers: Servers) -> AsyncIterator[InlineWorkers]:
    """Workers on these servers."""
    delivery, store = await Queue.connect(servers.settings), ControlStore(admin_client(servers.settings))
    async with inline_workers(delivery, store) as scene:
        yield scene
    await store.close()
    await delivery.close()
    gc.collect()  # what redis-py has dropped is complained about here, and not in the next test


async def answered(scene: InlineWorkers, model: str) -> float:
    """Submits a request until it is accepted, once; returns the answer."""
    request = scene.request(7.0, model=model)
    answer = scene.expect(request.id)
    while True:
        accepted: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        try:
            scene.delivery.submit(Lane(model, 1), encode_request(request), accepted.set_result)
        except BrokerUnavailable as error:
            accepted.set_result(error)
        if isinstance(await accepted, Entry):
            return value(await answer)
        await asyncio.sleep(0.05)


@contextmanager
def _killed(server: RedisServer) -> Iterator[None]:
    server.kill()
    yield


@pytest.mark.matrix
@pytest.mark.timeout(150)
@pytest.mark.filterwarnings("ignore:unclosed Connection:ResourceWarning")  # redis-py drops those to a former primary
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_failover_is_no_reason_to_ask_more_and_hides_no_request(
    servers: Servers, spread: InlineWorkers, monkeypatch: pytest.MonkeyPatch, *, hangs: bool
) -> None:
    """Requests that come meanwhile are found by what they wake, not by a look; a primary may also only hang."""
    monkeypatch.setattr(doorbell, "SHORTEST_S", 600.0)
    sums = Sequencing(spread)
    await sums.model()
    worker = await served(spread, FEW, monkeypatch, stateful=FEW)
    before = await calls_per_s(spread)
    victim = servers.primary()

    with victim.paused() if hangs else _killed(victim):
        answers = await asyncio.gather(*(answered(spread, f"m{number}") for number in range(FEW)))
        await quiet(spread, worker)
        after = await calls_per_s(spread)
        summed = await sums.sum(1, 2)

    assert (answers, summed) == ([7.0] * FEW, [1, 3])
    assert max(before, after) <= MOST_PER_S
