"""Load metrics in replies of `generate` (ORCA), as Triton's server has them (`src/orca_http.cc`)."""

import time
from collections.abc import AsyncIterator, Collection, Mapping
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from qinfer.errors import BrokerUnavailable
from qinfer.models.store import ControlStore
from qinfer.observe.exposition import COUNTER, GAUGE, ModelSeries, record_of
from qinfer_api.observe.reporting import KV_CACHE_FAMILY, LOAD_FORMAT_HEADER, LOAD_HEADER, CacheLoad, load_of
from tests.support.gateway import Running, running_gateway

TEXT = "TEXT named_metrics.kv_cache_utilization=0.750000, named_metrics.max_token_capacity=256"
JSON = 'JSON {"named_metrics":{"kv_cache_utilization":0.75,"max_token_capacity":256}}'


def gauges(
    model: str = "", changes: Mapping[str, float] = MappingProxyType({}), kind: str = GAUGE
) -> list[ModelSeries]:
    """Returns gauges of a model by their types; without a name, they have no such label."""
    of_model = (("model", model),) if model else ()
    values = {"used": 3.0, "max": 4.0, "tokens_per": 64.0, **changes}
    return [
        ModelSeries(
            KV_CACHE_FAMILY, kind, "Blocks.", (("kv_cache_block_type", name), *of_model), (), (value, time.time())
        )
        for name, value in values.items()
    ]


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with running_gateway() as one:
        await one.store.put_model_metrics("w1", record_of(gauges("echo")), 60.0)
        yield one


async def ask(running: Running, path: str = "echo/generate", form: str = "text", **more: Any) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        body = {"x": [1, 2, 3, 4], **more}
        return await client.post(f"{running.url}/v2/models/{path}", json=body, headers={LOAD_FORMAT_HEADER: form})


@pytest.mark.parametrize(("form", "told"), [("text", TEXT), ("json", JSON), ("TEXT", None), ("", None)])
async def test_a_reply_has_the_load_in_the_format_that_is_asked_for(
    running: Running, form: str, told: str | None
) -> None:
    """Triton knows two, in lower case."""
    reply = await ask(running, form=form)

    assert (reply.status_code, reply.headers.get(LOAD_HEADER)) == (200, told)


async def test_a_stream_has_the_load_too(running: Running) -> None:
    reply = await ask(running, "echo/generate_stream", responses=2)

    assert reply.headers[LOAD_HEADER] == TEXT
    assert reply.text.count("data: ") == 2


async def test_a_failure_of_the_model_has_the_load_too(running: Running) -> None:
    """A failed reply carries another model's load, as an ensemble's does; an immediate refusal has none."""
    failed, refused = await ask(running, "fails/generate"), await ask(running, "unknown/generate")

    assert (failed.status_code, failed.headers.get(LOAD_HEADER)) == (500, TEXT)
    assert (refused.status_code, refused.headers.get(LOAD_HEADER)) == (404, None)


async def test_nothing_is_read_for_those_who_do_not_ask(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once for many who ask in the time in which workers write."""
    reads = 0
    read = ControlStore.model_metrics

    async def counted(self: ControlStore, workers: Collection[str]) -> list[bytes | None]:
        nonlocal reads
        reads += 1
        return await read(self, workers)

    monkeypatch.setattr(ControlStore, "model_metrics", counted)
    monkeypatch.setattr("qinfer_api.observe.reporting.READ_EVERY_S", 3600.0)
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{running.url}/v2/models/echo/generate", json={"x": [1, 2, 3, 4]})
    assert (reply.headers.get(LOAD_HEADER), reads) == (None, 0)

    replies = [await ask(running) for _ in range(20)]

    assert {reply.headers[LOAD_HEADER] for reply in replies} == {TEXT}
    assert reads == 1


async def test_without_redis_a_reply_has_no_load(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: object) -> list[ModelSeries]:
        raise BrokerUnavailable("Redis can't be reached")

    monkeypatch.setattr(ControlStore, "model_metrics", away)

    reply = await ask(running)

    assert (reply.status_code, reply.headers.get(LOAD_HEADER)) == (200, None)


def test_a_models_own_gauges_count() -> None:
    """Where it has none, those of any model do, with or without a name."""
    others = gauges("other", {"used": 1.0})

    assert load_of([*gauges("m"), *others], "m") == CacheLoad(0.75, 256)
    assert load_of(others, "m") == CacheLoad(0.25, 256)
    assert load_of(gauges(), "m") == CacheLoad(0.75, 256)


@pytest.mark.parametrize("wrong", [{"used": -1.0}, {"max": float("nan")}, {"tokens_per": float("inf")}, {"max": 1e308}])
def test_impossible_numbers_are_no_load(wrong: dict[str, float]) -> None:
    assert load_of(gauges("m", wrong), "m") is None


def test_a_load_needs_all_three_gauges() -> None:
    assert load_of(gauges("m")[:2], "m") is None
    assert load_of([], "m") is None


def test_a_cache_without_blocks_is_empty() -> None:
    assert load_of(gauges("m", {"used": 0.0, "max": 0.0}), "m") == CacheLoad(0.0, 0)


async def test_series_of_another_kind_are_none_of_the_gauges(running: Running) -> None:
    await running.store.put_model_metrics("w1", record_of(gauges("echo", kind=COUNTER)), 60.0)

    assert LOAD_HEADER not in (await ask(running)).headers
