"""The contract of the declarations of endpoints, and of the targets of requests, on each server."""

import asyncio
import time
from types import SimpleNamespace

import msgspec
import pytest

from qinfer.core.settings import LimitSettings
from qinfer.errors import Conflict, EndpointNotFound
from qinfer.models.catalog import Catalog
from qinfer.queue import keys
from qinfer.testing import eventually
from qinfer.traffic.controller import EndpointWatch
from qinfer.traffic.endpoints import Endpoint, Role, Target, read_endpoint
from qinfer.traffic.routing import Endpoints
from qinfer.traffic.store import DEAF_AFTER_S, DeclaredEndpoints, EndpointStore, Kept, KeptTargets, names_of
from tests.contract.conftest import ControlPair, RedisQueue
from tests.support.servers.servers import Database

DAY_S = 86400.0
A, B, C = Kept("m", 1), Kept("späte modelle", 2), Kept("m", 3)


def endpoint(name: str = "e", weight: float = 0.1) -> Endpoint:
    targets = [{"model": "m", "version": 1, "role": "stable"}, {"model": "m", "version": "latest", "weight": weight}]
    return read_endpoint({"name": name, "targets": targets})


async def test_what_was_declared_is_read_with_its_revision(stores: ControlPair) -> None:
    """By every process; revisions count the changes of all endpoints, removals too."""
    one, other = EndpointStore(stores.one), EndpointStore(stores.other)

    first, second = await one.put(endpoint("a"), 0), await other.put(endpoint("b"), None)

    assert (first.revision, second.revision) == (1, 2)
    assert await other.read() == ({"a": first, "b": second}, 2)
    assert await other.delete("a", first.revision) == 3
    assert await one.read() == ({"b": second}, 3)
    assert (await one.put(endpoint("a"), 0)).revision == 4  # no revision comes twice


async def test_of_changes_at_once_one_is_made(stores: ControlPair) -> None:
    one, other = EndpointStore(stores.one), EndpointStore(stores.other)
    seen = (await one.put(endpoint(), 0)).revision

    changes = [store.put(endpoint(weight=weight), seen) for store in (one, other) for weight in (0.2, 0.3)]
    outcomes = await asyncio.gather(*changes, return_exceptions=True)

    made = [outcome for outcome in outcomes if isinstance(outcome, Endpoint)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, Conflict)]
    assert (len(made), len(refused)) == (1, 3)
    assert (await one.read()).endpoints == {"e": made[0]}
    with pytest.raises(Conflict, match=r"now has revision 2, not 1"):
        await one.delete("e", seen)
    with pytest.raises(Conflict, match=r"not 0"):
        await one.put(endpoint(), 0)


async def test_what_is_not_there_is_neither_changed_nor_removed(stores: ControlPair) -> None:
    store = EndpointStore(stores.one)

    for change in (store.delete("e", None), store.delete("e", 7), store.put(endpoint(), 7)):
        with pytest.raises(EndpointNotFound, match="there is no endpoint 'e'"):
            await change
    assert await store.read() == ({}, 0)


async def test_a_change_wakes_who_waits(stores: ControlPair) -> None:
    one, other = EndpointStore(stores.one), EndpointStore(stores.other)
    await other.wait(0.01)

    async with asyncio.timeout(20):
        waiting = asyncio.create_task(other.wait(60))
        await one.put(endpoint(), 0)
        await waiting


async def test_a_damaged_declaration_leaves_the_last_one_in_use(stores: ControlPair, queue: RedisQueue) -> None:
    store = EndpointStore(stores.one)
    known, well = await store.put(endpoint("known"), 0), await store.put(endpoint("well"), 0)
    await store.read()

    queue.on_owner("HSET", keys.endpoints(), "known", "{", "new", '{"revision":1}')

    assert (await store.read()).endpoints == {"known": known, "well": well}
    assert (await EndpointStore(stores.other).read()).endpoints == {"well": well}


async def test_targets_are_pinned_while_they_are_targets(stores: ControlPair, queue: RedisQueue) -> None:
    """`latest` needs no pin: it is what is READY."""
    store, delivery = EndpointStore(stores.one), await queue.connect()
    view = Endpoints(Catalog(stores.one, LimitSettings()))
    watch = EndpointWatch(store, view, delivery.clock.now_s)
    declared = await store.put(endpoint(), 0)
    await watch.refresh_endpoints()
    pins = await stores.other.pins()
    assert [(pin.model, pin.version, pin.holder) for pin in pins] == [("m", 1, "e")]

    moved = (Target(model="m", version=2, role=Role.STABLE), *declared.targets[1:])
    await store.put(msgspec.structs.replace(declared, targets=moved), None)
    await watch.refresh_endpoints()
    assert [pin.version for pin in await stores.other.pins()] == [2]

    await store.delete("e", None)
    await watch.refresh_endpoints()
    assert await stores.other.pins() == []


async def test_what_redis_has_lost_is_written_again(stores: ControlPair, queue: RedisQueue) -> None:
    """By whoever notices first; what was changed before the other noticed stays changed."""
    delivery = await queue.connect()
    watches = [
        EndpointWatch(EndpointStore(store), Endpoints(Catalog(store, LimitSettings())), delivery.clock.now_s)
        for store in stores
    ]
    for name in "abc":
        await watches[0].store.put(endpoint(name), 0)
    for watch in watches:
        await watch.refresh_endpoints()

    queue.on_owner("DEL", keys.endpoints())
    for watch in watches:
        await watch.refresh_endpoints()

    declared = await watches[1].store.read()
    assert set(declared.endpoints) == set("abc")
    assert declared.revision > 3
    assert watches[0].view.by_name.keys() == declared.endpoints.keys()


@pytest.mark.parametrize("names", [names_of("id"), names_of("", "key"), names_of("id", "key")])
async def test_the_first_target_is_kept(queue: RedisQueue, names: list[str]) -> None:
    """For every process, and however many ask at once; of each endpoint and tenant by itself."""
    one, other = KeptTargets(await queue.connect()), KeptTargets(await queue.connect())

    found = await asyncio.gather(
        *(kept.keep("e", "t", names, target, DAY_S) for target in (A, B) * 5 for kept in (one, other))
    )

    assert len(set(found)) == 1
    assert await other.find("e", "t", names) == found[0]
    assert await other.find("e", "other", names) is None
    assert await other.find("other", "t", names) is None


async def test_a_key_goes_before_an_id(queue: RedisQueue) -> None:
    """As it does where requests are accepted; what only one of them had, both have then."""
    kept = KeptTargets(await queue.connect())
    await kept.keep("e", "t", names_of("one"), A, DAY_S)
    await kept.keep("e", "t", names_of("", "key"), B, DAY_S)

    assert await kept.keep("e", "t", names_of("one", "key"), C, DAY_S) == B
    assert await kept.keep("e", "t", names_of("two", "key"), C, DAY_S) == B
    assert await kept.keep("e", "t", names_of("two"), C, DAY_S) == B
    assert await kept.keep("e", "t", names_of("one"), C, DAY_S) == A


async def test_a_target_that_is_gone_is_replaced_once(queue: RedisQueue) -> None:
    one, other = KeptTargets(await queue.connect()), KeptTargets(await queue.connect())
    await one.keep("e", "t", names_of("id"), A, DAY_S)

    found = await asyncio.gather(
        *(kept.keep("e", "t", names_of("id"), target, DAY_S, A) for target in (B, C) for kept in (one, other))
    )

    assert len(set(found)) == 1
    assert found[0] in (B, C)


async def test_a_target_is_kept_for_its_time(queue: RedisQueue) -> None:
    kept = KeptTargets(await queue.connect())
    await kept.keep("e", "t", names_of("id"), A, 0.05)

    async def is_gone() -> bool:
        return await kept.find("e", "t", names_of("id")) is None

    await eventually(is_gone, description="the end of its time")


async def test_looks_at_once_do_not_overtake_one_another(
    stores: ControlPair, queue: RedisQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that has read less never replaces what the other has shown, nor takes it for lost."""
    reading, may_end = asyncio.Event(), asyncio.Event()

    class Slow(EndpointStore):
        async def read(self) -> DeclaredEndpoints:
            found = await super().read()
            if not reading.is_set():
                reading.set()
                await may_end.wait()
            return found

    view = Endpoints(Catalog(stores.one, LimitSettings()))
    watch = EndpointWatch(Slow(stores.one), view, (await queue.connect()).clock.now_s)
    async with asyncio.TaskGroup() as group:
        group.create_task(watch.refresh_endpoints())
        await reading.wait()
        written = await EndpointStore(stores.other).put(endpoint(), 0)
        group.create_task(watch.refresh_endpoints())
        for _ in range(20):  # time for the second one to be done
            await EndpointStore(stores.other).read()
        may_end.set()

    assert view.revision == written.revision == (await watch.store.read()).revision
    assert set(view.by_name) == {"e"}
    assert "endpoints restored, Redis had lost them" not in caplog.messages


async def test_a_gateway_that_hears_nothing_uses_stable_targets_only() -> None:
    """After two seconds without a look, whatever the last one said; a look that succeeds ends it."""
    async with Database() as database:
        store = EndpointStore(database.store())
        view = Endpoints(Catalog(database.store(), LimitSettings()))
        hears, may_hear = asyncio.Event(), asyncio.Event()

        class Silent(EndpointStore):
            async def wait(self, timeout_s: float) -> None:
                hears.set()
                await may_hear.wait()
                await super().wait(timeout_s)

        await store.put(endpoint(weight=1), 0)
        silent = Silent(database.store())
        watch = EndpointWatch(silent, view, (await database.delivery()).clock.now_s)
        await watch.refresh_endpoints()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(watch.run())
            await hears.wait()
            assert not view.is_stale
            async with asyncio.timeout(DEAF_AFTER_S * 10):
                await eventually(lambda: asyncio.sleep(0, view.is_stale), description="deafness")
            may_hear.set()
            await eventually(lambda: asyncio.sleep(0, not view.is_stale), description="hearing again")
            running.cancel()


async def test_a_gateway_that_was_stopped_before_it_follows_uses_stable_targets_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first look counts from when it was made: a rollback may be done since."""
    async with Database() as database:
        view = Endpoints(Catalog(database.store(), LimitSettings()))
        waits = asyncio.Event()

        class Silent(EndpointStore):
            async def wait(self, timeout_s: float) -> None:
                waits.set()
                await asyncio.Event().wait()

        watch = EndpointWatch(Silent(database.store()), view, (await database.delivery()).clock.now_s)
        await watch.refresh_endpoints()
        resumed_s = time.monotonic() + DEAF_AFTER_S
        monkeypatch.setattr("qinfer.traffic.routing.time", SimpleNamespace(monotonic=lambda: resumed_s))
        async with asyncio.TaskGroup() as group:
            running = group.create_task(watch.run())
            await waits.wait()
            assert view.is_stale
            running.cancel()
