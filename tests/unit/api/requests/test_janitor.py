"""The janitor's rounds, one at a time, on a server whose time tests move."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from qinfer.core.messages import InferRequest
from qinfer.core.settings import LimitSettings, WebhookSettings
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.jobs.queue.jobs import Jobs
from qinfer.models.catalog import Catalog
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord
from qinfer.observe.stats import GatewayTally
from qinfer.queue.deliveries import DeliveryItem
from qinfer.queue.entries import Acceptance, Entry, EntryAddress, Lane, RequestState
from qinfer.queue.lanes import Queue
from qinfer.testing import EmbeddedServer, eventually
from qinfer.wire.frame import encode_request
from qinfer_api.jobs.records import message_of
from qinfer_api.requests.janitor import Janitor
from qinfer_api.requests.webhooks import MAX_DELIVERIES, Targets, Webhooks
from tests.support.servers.servers import Database

CONFIG = """
name: "m" backend: "stub" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [4] } output { name: "y" data_type: TYPE_FP32 dims: [4] }
"""
LANE = Lane("m", 1)


class Bench:
    """A janitor and what it looks after: one model, `m`, whose timeout is 60 s."""

    def __init__(self, server: EmbeddedServer, database: Database, delivery: Queue) -> None:
        self.server = server
        self.delivery, self.store = delivery, database.store()
        self.catalog = Catalog(self.store, LimitSettings())
        self.tally = GatewayTally()
        options = WebhookSettings.model_validate({"allow": ("h",), "secret": "s"})
        self.webhooks = Webhooks(options, self.delivery, Targets(options), partial(message_of, Jobs(self.delivery)))
        self.janitor = Janitor(self.delivery, self.catalog, self.tally, 0.001, self.webhooks)

    async def start(self, *, workers: int = 0) -> None:
        await self.store.put_model(StoredModel("m", 1, to_json(normalise(parse(CONFIG), "m")), (1,)))
        await self.store.set_desired(DesiredState("m", 1))
        ready = {"m": {1: VersionState(State.READY, 1)}}
        for number in range(workers):
            await self.store.heartbeat(WorkerRecord(id=f"w{number}", started_at=0.0, models=ready), ttl_s=3600)
        await self.catalog.refresh()
        await self.delivery.ensure([LANE])

    async def accept(self, name: str, timeout_s: float = 1.0, webhook: str = "") -> EntryAddress:
        address = EntryAddress("m", 0, name)
        await self.delivery.requests.accept(
            Acceptance(address=address, lane=LANE, frame=self.frame(""), timeout_s=timeout_s, webhook=webhook)
        )
        return address

    async def submit(self, frame: bytes, lane: Lane = LANE) -> Entry:
        future: asyncio.Future[Entry | QinferError] = asyncio.get_running_loop().create_future()
        self.delivery.submit(lane, frame, future.set_result)
        entry = await future
        assert isinstance(entry, Entry)
        return entry

    def frame(self, reply_to: str, timeout_s: float = 60.0) -> bytes:
        return encode_request(
            InferRequest(model="m", inputs=(), version=1, id="i", reply_to=reply_to, timeout_s=timeout_s)
        )

    async def depth(self) -> int:
        return (await self.delivery.depth([LANE]))[0]

    def failed(self) -> dict[tuple[str, int, str], int]:
        return self.tally.failures


@pytest.fixture
async def bench(timed: EmbeddedServer, database: Database, delivery: Queue) -> Bench:
    bench = Bench(timed, database, delivery)
    await bench.start()
    return bench


async def test_what_is_past_its_deadline_ends(bench: Bench) -> None:
    """More than one write holds; each is answered, counted, and out of its lane."""
    late = [await bench.accept(f"late-{number}") for number in range(450)]
    early = await bench.accept("early", timeout_s=100.0)
    bench.server.advance(2.0)

    assert await bench.janitor.expire() == 450
    assert await bench.janitor.expire() == 0

    record = await bench.delivery.requests.record(late[-1])
    assert record is not None
    assert (record.state, record.code, record.message) == (
        RequestState.EXPIRED,
        "deadline_exceeded",
        "Request timeout expired",
    )
    still = await bench.delivery.requests.record(early)
    assert still is not None
    assert still.state is RequestState.QUEUED
    assert await bench.depth() == 1
    assert bench.failed() == {("m", 1, "deadline_exceeded"): 450}


async def test_several_janitors_end_each_request_once(bench: Bench) -> None:
    """Each gateway has one; what one has ended the other does not count."""
    for number in range(50):
        await bench.accept(f"r{number}")
    bench.server.advance(2.0)

    counts = await asyncio.gather(*(bench.janitor.expire() for _ in range(3)))

    assert sum(counts) == 50


async def test_requests_of_a_model_that_is_no_longer_desired_end_too(bench: Bench) -> None:
    """A gateway that never saw the model loaded ends them."""
    await bench.accept("left over")
    await bench.store.set_desired(DesiredState("m", 2, load=False))
    await bench.catalog.refresh()
    bench.server.advance(2.0)

    assert bench.catalog.readiness() == {}
    assert await bench.janitor.expire() == 1


async def test_a_model_that_is_out_of_reach_keeps_no_other_waiting(bench: Bench) -> None:
    """One node of a cluster is down: deadlines and webhooks of models on the others go on."""
    await bench.store.set_desired(DesiredState("a", 1, load=False))
    await bench.catalog.refresh()
    await bench.accept("r1", webhook="http://h/")
    bench.server.advance(2.0)
    requests, deliveries, asked = bench.delivery.requests, bench.delivery.deliveries, list[str]()

    def unless_away(operation: Any) -> Any:
        async def ask(model: str, *rest: Any, **options: Any) -> Any:
            asked.append(f"{operation.__name__} {model}")
            if model == "a":
                raise BrokerUnavailable("away")
            return await operation(model, *rest, **options)

        return ask

    requests.due = unless_away(requests.due)  # type: ignore[method-assign]
    deliveries.take_due = unless_away(deliveries.take_due)  # type: ignore[method-assign]

    assert await bench.janitor.expire() == 1
    assert [item.text for item in await bench.janitor.take_webhooks()] == ["request:r1"]
    assert "take a" not in asked  # each try would take as long as a command may


async def test_orphans_are_finished_where_no_worker_lives(bench: Bench) -> None:
    """Their gateway died; a second after their time, waiting or held; asynchronous ones have their own deadline."""
    await bench.accept("asynchronous", timeout_s=1000.0)
    for _ in range(50):
        await bench.submit(bench.frame("reply:gone"))
    await bench.delivery.fetch([LANE], "dead worker", 5, 0.0)
    bench.server.advance(60.5)
    young = await bench.submit(bench.frame("reply:living"))

    assert await bench.janitor.finish_orphans() == 0
    bench.server.advance(1.0)
    found = 0
    for _ in range(4):  # a page at a time
        found += await bench.janitor.finish_orphans()

    assert (found, await bench.depth()) == (50, 2)
    assert (await bench.delivery.oldest(LANE, -1.0, 10))[-1][0] == young
    assert bench.failed() == {("m", 1, "deadline_exceeded"): 50}


async def test_a_lane_full_of_orphans_is_emptied_in_one_round(bench: Bench) -> None:
    """Until it is, it refuses what could wake a worker."""
    for _ in range(150):
        await bench.submit(bench.frame("reply:gone"))
    bench.server.advance(62.0)

    assert (await bench.janitor.finish_orphans(), await bench.depth()) == (150, 0)


async def test_orphans_of_an_unloaded_model_are_finished(bench: Bench) -> None:
    """In the lanes of any configuration that it had; else an autoscaler would keep a worker for them for ever."""
    await bench.start(workers=1)
    other = Lane("m", 1, "p2.delayed")
    await bench.delivery.ensure([other])
    await bench.submit(bench.frame("reply:gone"))
    bench.delivery.submit(other, bench.frame("reply:gone"), lambda _: None)
    await bench.accept("asynchronous", timeout_s=1000.0)
    await bench.store.set_desired(DesiredState("m", 1, load=False))
    await bench.catalog.refresh()

    assert await bench.janitor.finish_orphans() == 0
    bench.server.advance(62.0)
    assert (await bench.janitor.finish_orphans(), await bench.depth()) == (2, 1)
    assert await bench.delivery.depth([other]) == [0]


async def test_a_living_worker_expires_its_lanes_itself(bench: Bench) -> None:
    """The janitor does not read them."""
    await bench.start(workers=1)
    await bench.submit(bench.frame("reply:gone"))
    bench.server.advance(100.0)

    assert (await bench.janitor.finish_orphans(), await bench.depth()) == (0, 1)


async def test_longer_timeouts_are_waited_for(bench: Bench) -> None:
    """A frame's own timeout counts; one that can't be read is left for a worker to bury."""
    await bench.submit(bench.frame("reply:gone", timeout_s=500.0))
    await bench.submit(b"damaged")
    bench.server.advance(100.0)

    assert (await bench.janitor.finish_orphans(), await bench.depth()) == (0, 2)


async def test_as_many_webhooks_as_can_be_delivered(bench: Bench) -> None:
    """The rest stays, for others."""
    for number in range(MAX_DELIVERIES + 3):
        await bench.accept(f"r{number}", webhook="http://h/")
    bench.server.advance(2.0)
    await bench.janitor.expire()

    assert len(await bench.janitor.take_webhooks()) == MAX_DELIVERIES
    assert len(await bench.delivery.deliveries.take_due("m", 0, bench.webhooks.kind, 100)) == 3


async def test_where_webhooks_are_off_none_is_taken(bench: Bench) -> None:
    """Gateways that allow them deliver; a try of this one would only count as failed."""
    options = WebhookSettings()
    off = Webhooks(options, bench.delivery, Targets(options), partial(message_of, Jobs(bench.delivery)))
    janitor = Janitor(bench.delivery, bench.catalog, bench.tally, 0.001, off)
    await bench.accept("r1", webhook="http://h/")
    bench.server.advance(2.0)
    await janitor.expire()

    assert await janitor.take_webhooks() == []
    assert len(await bench.janitor.take_webhooks()) == 1


class Away:
    """Has the deadlines of a queue be away."""

    def __init__(self, delivery: Queue) -> None:
        self.rounds = 0
        self.is_away = True
        due = delivery.requests.due

        async def sometimes(model: str, partition: int, count: int) -> list[EntryAddress]:
            self.rounds += 1
            if self.is_away:
                raise BrokerUnavailable("away")
            return await due(model, partition, count)

        delivery.requests.due = sometimes  # type: ignore[method-assign]


async def test_it_survives_a_queue_that_is_away(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """One line when it goes, one when it is back, however many rounds."""
    away = Away(bench.delivery)

    def went_on(rounds: int) -> Callable[[], bool]:
        until = away.rounds + rounds
        return lambda: away.rounds >= until

    with caplog.at_level(logging.INFO, "qinfer_api.requests.janitor"):
        task = asyncio.create_task(bench.janitor.run())
        await eventually(went_on(3))
        away.is_away = False
        await eventually(went_on(3))
        task.cancel()
        await asyncio.wait([task])

    assert [record.message for record in caplog.records] == ["requests can't be swept now", "requests are swept again"]


async def test_expired_objects_are_swept_again_and_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Soon again while there are some, seldom else; a store that is away ends nothing, and is told once."""
    outcomes: list[int | Exception] = [1000, 7, BrokerUnavailable("away"), BrokerUnavailable("away"), 0]
    swept: list[int | Exception] = []
    pauses: list[float] = []

    async def sweep() -> int:
        swept.append(outcomes[len(swept) % len(outcomes)])
        if isinstance(swept[-1], Exception):
            raise swept[-1]
        return swept[-1]

    async def slept(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == len(outcomes):
            raise asyncio.CancelledError

    bench.delivery.sweep = sweep  # type: ignore[method-assign]
    monkeypatch.setattr(asyncio, "sleep", slept)

    with caplog.at_level(logging.INFO, "qinfer_api.requests.janitor"), pytest.raises(asyncio.CancelledError):
        await bench.janitor._sweep()

    assert swept == outcomes
    assert [pause_s < 2 for pause_s in pauses] == [True, True, False, False, False]
    assert [record.message for record in caplog.records] == [
        "expired objects can't be deleted now",
        "expired objects are deleted again",
    ]


async def test_a_webhook_whose_request_is_out_of_reach_comes_again(bench: Bench) -> None:
    """The task that delivers it does not end the janitor."""

    async def record(address: EntryAddress, watcher: str = "") -> None:
        raise BrokerUnavailable("away")

    bench.delivery.requests.record = record  # type: ignore[method-assign]

    await bench.janitor._deliver(DeliveryItem("m", 0, "1-0", "request:r1"))
