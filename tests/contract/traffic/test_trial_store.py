"""The contract of the trials of canaries, on each server."""

import asyncio
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from qinfer.core.settings import LimitSettings
from qinfer.models.catalog import Catalog
from qinfer.queue.entries import Lane
from qinfer.testing import eventually
from qinfer.traffic.canary import Action, TrialChange, begun, by_hand
from qinfer.traffic.controller import CanaryController
from qinfer.traffic.endpoints import Endpoint, read_endpoint
from qinfer.traffic.routing import Endpoints
from qinfer.traffic.store import EndpointStore, StoredTrial, TrialStore, written_latency
from qinfer.traffic.tally import ObservedTrials
from tests.contract.conftest import ControlPair, RedisQueue

NOW_S = 1000.0
PLAN = {"steps": [{"weight": 0.5}], "checks": [{"of": "errors"}]}


def endpoint() -> Endpoint:
    targets = [{"model": "m", "version": 3, "role": "stable"}, {"model": "m", "version": 4}]
    return read_endpoint({"name": "é", "targets": targets, "canary": PLAN})


class Pair:
    """An endpoint and its trials, as two gateways have them."""

    def __init__(self, stores: ControlPair) -> None:
        self.endpoints = EndpointStore(stores.one)
        self.one, self.other = TrialStore(stores.one), TrialStore(stores.other)

    async def read(self) -> tuple[Endpoint, StoredTrial]:
        found = await self.one.find("é")
        assert found is not None
        return (await self.endpoints.read()).endpoints["é"], found

    async def begin(self) -> tuple[Endpoint, StoredTrial]:
        declared = await self.endpoints.put(endpoint(), 0)
        change = begun(declared, None, (3, 4), NOW_S)
        assert change is not None
        assert await self.one.change(declared, None, change)
        return await self.read()


@pytest.fixture
async def pair(stores: ControlPair) -> Pair:
    return Pair(stores)


def rollback(declared: Endpoint, stored: StoredTrial) -> TrialChange:
    return by_hand(declared, stored.trial, Action.ROLL_BACK, "by hand", (), NOW_S)


async def test_a_trial_and_its_endpoint_have_one_revision(pair: Pair) -> None:
    declared, stored = await pair.begin()

    assert declared.revision == stored.trial.state.revision == 2
    assert declared.weight_of(declared.targets[1]) == 0.5
    assert await pair.other.read() == {"é": stored}
    assert [event.event for event in await pair.other.events("é")] == ["begin"]


async def test_of_two_controllers_one_changes_anything(pair: Pair) -> None:
    """Also where both only note what was counted, and where somebody has put the endpoint meanwhile."""
    declared, stored = await pair.begin()
    noted = TrialChange(replace(stored.trial, counted={"a": 1}))

    both = await asyncio.gather(*(store.change(declared, stored, noted) for store in (pair.one, pair.other)))

    assert sorted(both) == [False, True]
    assert not await pair.other.change(declared, stored, rollback(declared, stored))
    declared, stored = await pair.read()
    assert stored.trial.counted == {"a": 1}
    put = await pair.endpoints.put(endpoint(), declared.revision)
    assert not await pair.other.change(declared, stored, rollback(declared, stored))
    assert await pair.read() == (put, stored)
    assert len(await pair.one.events("é")) == 1


async def test_a_trial_goes_with_its_endpoint(pair: Pair) -> None:
    await pair.begin()

    await pair.endpoints.delete("é", None)

    assert await pair.one.read() == {}


async def test_gateways_add_what_they_count(pair: Pair) -> None:
    latency = written_latency("latency", "", 0.25)

    await pair.one.count("é", 2, {"a": 2, "b": 1}, [latency, written_latency("execution", "8", 0.5, "a|b")])
    await pair.other.count("é", 2, {"a": 3}, [latency])
    await pair.other.count("é", 3, {}, [])

    assert await pair.other.counted("é", 2) == {"a": 5, "b": 1}
    assert await pair.other.latencies("é", 2) == {
        "latency": {"": {"": [0.25, 0.25]}},
        "execution": {"8": {"a|b": [0.5]}},
    }
    assert (await pair.one.counted("é", 3), await pair.one.latencies("é", 3)) == ({}, {})


async def test_one_gateway_decides(pair: Pair) -> None:
    assert [await pair.one.lead("a"), await pair.other.lead("b"), await pair.one.lead("a")] == [True, False, True]


async def test_a_gateway_that_stops_leaves_the_lease_to_the_next(
    pair: Pair, stores: ControlPair, queue: RedisQueue
) -> None:
    view = Endpoints(Catalog(stores.one, LimitSettings()))
    controller = CanaryController(pair.endpoints, view, ObservedTrials(), "a", await queue.connect())
    assert await pair.one.lead("a")
    running = asyncio.create_task(controller.run())

    async def works() -> bool:
        return "a" in await pair.other.heard()

    await eventually(works, description="a controller at work")
    assert not await pair.other.lead("b")
    running.cancel()
    await asyncio.wait([running])

    assert running.cancelled()
    assert await pair.other.lead("b")


async def test_a_lease_that_went_to_another_stays_with_it(pair: Pair) -> None:
    assert await pair.one.lead("a")

    await pair.other.release_lease("b")

    assert not await pair.other.lead("b")


async def test_gateways_confirm_their_revisions(pair: Pair) -> None:
    await pair.one.confirm("a", 7)
    await pair.other.confirm("b", 8)
    await pair.one.confirm("a", 8)

    assert await pair.one.heard() == {"a": 8, "b": 8}

    async def are_forgotten() -> bool:
        return not await pair.one.heard()

    await eventually(are_forgotten, timeout_s=30, description="gateways that are not heard of")


async def test_a_rollback_waits_for_the_gateway_that_lags(pair: Pair, stores: ControlPair, queue: RedisQueue) -> None:
    declared, stored = await pair.begin()
    view = Endpoints(Catalog(stores.one, LimitSettings()))
    delivery, waiting = await queue.connect(), asyncio.get_running_loop().create_future()
    delivery.submit(Lane("m", 4), b"waits", waiting.set_result, endpoint="é")
    await waiting
    controller = CanaryController(pair.endpoints, view, ObservedTrials(), "a", delivery)
    assert await pair.one.change(declared, stored, rollback(declared, stored))
    view.show(await pair.endpoints.read())

    await pair.other.confirm("b", declared.revision)
    await controller.round()
    assert not (await pair.read())[1].trial.done_s

    await pair.other.confirm("b", declared.revision + 1)
    await controller.round()
    assert (await pair.read())[1].trial.done_s > NOW_S
    assert await delivery.depth([Lane("m", 4), Lane("m", 3)]) == [1, 0]  # nobody else is READY to answer it
    assert [event.event for event in await pair.one.events("é")] == ["rolled back everywhere", "roll back", "begin"]


@pytest.mark.parametrize(("model", "waiting"), [("", [0, 1]), ("other", [1, 0])], ids=["same model", "another model"])
async def test_what_waits_is_moved_within_a_model(
    pair: Pair, queue: RedisQueue, model: str, waiting: list[int]
) -> None:
    """Lanes of another model are elsewhere, and a version of that number in the stable one's is none of the trial's."""
    declared, stored = await pair.begin()
    lanes = [Lane("m", 4), Lane("m", 3)]
    delivery, submitted = await queue.connect(), asyncio.get_running_loop().create_future()
    delivery.submit(lanes[0], b"waits", submitted.set_result, endpoint="é")
    await submitted
    view = Endpoints(Mock(lanes=Mock(return_value=lanes[:1]), ready_versions=Mock(return_value=())))
    view.show(await pair.endpoints.read())
    back = rollback(declared, stored)
    assert await pair.one.change(declared, stored, back._replace(trial=replace(back.trial, model=model)))

    await CanaryController(pair.endpoints, view, ObservedTrials(), "a", delivery).round()

    assert await delivery.depth(lanes) == waiting
