"""The caches of responses by themselves, their keys, and calls between models that are cached."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from qinfer.core.clock import ServerClock
from qinfer.core.messages import OutgoingRequest, Response
from qinfer.core.settings_sections import CachePlan, plan_of
from qinfer.models.catalog import ServedVersion
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.spec import ModelSpec, Routes, TensorSpec
from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord
from qinfer.observe.stats import CACHE_HIT_COUNT, ModelCounts
from qinfer.queue.entries import Lane
from qinfer.queue.lanes import Queue
from qinfer.submission.response_cache import CachedResponses, LocalCache, ResponseCache, response_key, size_of
from qinfer.tensors import Tensor
from qinfer.testing import FakeClock
from tests.unit.workers.inference.test_caller import CONFIG, Scene, asked, scene

A, B = Tensor("a", "FP32", (1, 2), bytes(8)), Tensor("b", "UINT8", (8,), bytes(8))


def served(**fields: object) -> ServedVersion:
    port = TensorSpec(name="a", datatype="FP32", dims=(2,))
    spec = ModelSpec(name="m", backend="stub", inputs=(port,), outputs=(port,), is_cached=True)
    spec = ModelSpec(**{**{name: getattr(spec, name) for name in spec.__slots__}, **fields})
    return ServedVersion(spec=spec, version=1, generation=1, lane=Lane("m", 1), routes=Routes(spec, 1))


def key(model: ServedVersion | None = None, **fields: object) -> bytes | None:
    request = OutgoingRequest(model="m", inputs=(A, B), tenant="t")
    return response_key(msgspec.structs.replace(request, **fields), model or served())


def test_the_key_is_of_what_the_model_sees() -> None:
    """Tensors that have the same bytes are others by name, datatype or shape."""
    others = [
        key(inputs=(A,)),
        key(inputs=(msgspec.structs.replace(A, name="b"), msgspec.structs.replace(B, name="a"))),
        key(inputs=(msgspec.structs.replace(A, shape=(2, 1)), B)),
        key(inputs=(msgspec.structs.replace(A, datatype="INT32"), B)),
        key(inputs=(msgspec.structs.replace(A, data=b"\x01" + bytes(7)), B)),
        key(outputs=("a",)),
        key(outputs=("a", "b")),
        key(outputs=("b", "a")),
        *(key(parameters={"p": value}) for value in (1, 1.0, True, "1", "")),
        key(parameters={"q": 1}),
        key(tenant="u"),
        key(tenant=""),
    ]
    same = [
        key(inputs=(B, A)),
        key(id="x", client_id="y", priority=3, timeout_s=1.0, trace="z", version=1),
        key(inputs=(msgspec.structs.replace(A, data=memoryview(A.data)), B)),
    ]

    assert len({key(), *others}) == len(others) + 1
    assert set(same) == {key()}
    assert len(key() or b"") == 16


def test_a_scope_of_all_leaves_out_the_tenant() -> None:
    """And is the tenant of nobody."""
    shared = served(cached_for_all=True)

    assert key(shared) == key(shared, tenant="u")
    assert key(shared) not in (key(), key(tenant=""))


def test_what_cannot_be_spelled_has_no_key() -> None:
    assert key(parameters={"p": 2**70}) is None
    assert key(parameters={"p": "\ud800"}) is None


def answer(size: int = 8, name: str = "y") -> Response:
    return Response(request_id="r", model="m", version=1, outputs=(Tensor(name, "UINT8", (size,), bytes(size)),))


def test_the_least_recently_used_goes_first() -> None:
    """And no more bytes are used than are allowed."""
    cache = LocalCache(size_of(answer()) * 10)
    for number in range(10):
        cache.put(bytes([number]), answer())
    assert cache.find(b"\x00") is not None

    cache.put(b"new", answer())

    assert cache.find(b"\x00") is not None
    assert cache.find(b"\x01") is None
    assert len(cache) == 10
    assert cache.used_bytes <= size_of(answer()) * 10


def test_what_takes_more_than_its_share_is_not_kept() -> None:
    cache = LocalCache(8 * size_of(answer()))

    cache.put(b"a", answer())
    cache.put(b"b", answer(9))
    cache.put(b"a", answer())

    assert cache.find(b"a") is not None
    assert cache.find(b"b") is None
    assert cache.used_bytes == size_of(answer())


def test_an_entry_holds_no_larger_buffer() -> None:
    """The bytes of a reply are those of a batch."""
    blob = bytes(1000)
    cache = LocalCache(100_000)
    output = Tensor("y", "UINT8", (8,), memoryview(blob)[:8])

    cache.put(b"a", msgspec.structs.replace(answer(), outputs=(output,)))

    found = cache.find(b"a")
    assert found is not None
    assert found.request_id == ""
    assert found.outputs[0].data == bytes(8)
    assert isinstance(found.outputs[0].data, bytes)


async def test_entries_in_redis_are_bounded_by_time_and_bytes(delivery: Queue) -> None:
    """Each eighth of the time to live has its share."""
    clock = FakeClock()
    cache = CachedResponses(delivery.router, ServerClock(clock), size_bytes=9 * 1000, ttl_s=80.0)

    stored = [await cache.put(bytes([number]), bytes(300)) for number in range(4)]
    later = [await cache.put(b"small", b"x")]
    clock.advance(10.0)
    later.append(await cache.put(b"next", bytes(300)))

    assert stored == [True, True, False, False]
    assert later == [True, True]
    assert await cache.find(b"\x00") == bytes(300)
    assert await cache.find(b"\x02") is None
    assert not cache.takes(1000)


async def enable(one: Scene) -> None:
    """Stores the model of the scene anew, with its responses cached."""
    config = to_json(normalise(parse(f'name: "back" {CONFIG} response_cache {{ enable: true }}'), "back"))
    await one.store.put_model(StoredModel("back", 8, config, (1,)))
    await one.store.set_desired(DesiredState("back", 8))
    models = {"back": {1: VersionState(State.READY, 8)}}
    await one.store.heartbeat(WorkerRecord(id="back", started_at=0.0, models=models), ttl_s=3600)


async def test_calls_between_models_are_cached() -> None:
    """A model's second call of another one is no request; each call has its own id."""
    async with scene() as one:
        counts = ModelCounts()
        one.caller.set_cache(ResponseCache(CachePlan("local", 10**6), one.delivery, counts, 100, at_once=False))
        await enable(one)
        first, *others = [await one.call() for _ in range(3)]
        other = await one.call(asked(parameters={"p": 1}))
        at_once = await asyncio.gather(*(one.call(asked(tenant="u")) for _ in range(5)))

        assert len(one.requests) == 3
        assert [each.outputs for each in others] == [first.outputs] * 2
        assert len({each.request_id for each in (first, *others, other, *at_once)}) == 9
        assert counts.drain()["back", 1][CACHE_HIT_COUNT] == 6
    assert np.frombuffer(first.outputs[0].data, "<f4").tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("is_cached", "by"), [(True, ""), (False, "e")])
async def test_what_may_be_cached_is_not_moved_to_another_version(by: str, *, is_cached: bool) -> None:
    """Its response is the version's that was asked, also for those who named that."""
    async with scene() as one:
        submit, endpoints = one.delivery.submit, []

        def spied(*entry: Any, endpoint: str, **about: Any) -> None:
            endpoints.append(endpoint)
            submit(*entry, endpoint=endpoint, **about)

        one.delivery.submit = spied  # type: ignore[assignment]
        if is_cached:
            one.caller.set_cache(
                ResponseCache(CachePlan("local", 10**6), one.delivery, ModelCounts(), 100, at_once=False)
            )
            await enable(one)
        await one.call(asked(endpoint="e", moves=True))

    assert endpoints == [by]


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("", None),
        ("local,size=1000", CachePlan("local", 1000)),
        ("redis", CachePlan("redis", 256 * 2**20, 3600)),
        ("redis, ttl=5, size=7", CachePlan("redis", 7, 5)),
    ],
)
def test_the_setting_is_tritons(text: str, plan: CachePlan | None) -> None:
    assert plan_of(text) == plan


@pytest.mark.parametrize(
    "text", ["local", "local,size=0", "local,size=x", "local,ttl=3,size=1", "other,size=1", "redis,host=a"]
)
def test_a_wrong_setting_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cache"):
        plan_of(text)
