"""The response cache of a gateway: what it answers, for whom, and what still reaches the queue."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings_sections import MetricsSettings
from qinfer.errors import BrokerUnavailable, QueueFull
from qinfer.queue.connection import Reply
from qinfer.queue.entries import Lane
from qinfer.queue.router import Router
from qinfer.submission.response_cache import CachedResponses
from qinfer.testing import eventually
from tests.support.cached_models import LOCAL, REDIS, cached, caching_gateway, declare
from tests.support.gateway import Running, running_gateway, settings_of, work
from tests.support.rpc import infer_request, stub_of

HEADER, ID = "qinfer-cache", "qinfer-request-id"


def body(value: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [value, 2, 3, 4]}], **more}


def url(running: Running, model: str = "echo_cached") -> str:
    return f"{running.url}/v2/models/{model}/infer"


async def counted(running: Running, model: str = "echo_cached") -> dict[str, Any]:
    """Returns the statistics of a model, once this gateway's counts are in them."""
    await running.gateway._reporting.flush()
    async with httpx.AsyncClient() as client:
        found = (await client.get(f"{running.url}/v2/models/{model}/stats")).json()["model_stats"][0]
    return {name: of["count"] for name, of in found["inference_stats"].items()}


@pytest.fixture(params=[LOCAL, REDIS])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    async with caching_gateway(cached(request.param)) as one:
        yield one


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("config", [LOCAL, REDIS])
async def test_an_equal_request_is_answered_without_the_queue(fast: bool, config: str) -> None:  # noqa: FBT001
    """The fast path and the other one answer from the cache, with the request's own id and otherwise the same bytes."""
    async with (
        caching_gateway(cached(config, settings_of({"fast_path": fast}))) as running,
        httpx.AsyncClient() as client,
    ):
        first = await client.post(url(running), json=body(id="a"))
        await stored(running, config)
        second = await client.post(url(running), json=body(id="b"))

        assert [reply.headers[HEADER] for reply in (first, second)] == ["miss", "hit"]
        assert second.content == first.content.replace(b'"a"', b'"b"')
        assert first.headers[ID] != second.headers[ID]
        assert len(running.requests) == 1
        assert await counted(running) == {
            "success": 1, "fail": 0, "queue": 1, "compute_input": 0, "compute_infer": 0, "compute_output": 0,
            "cache_hit": 1, "cache_miss": 1,
        }  # fmt: skip  # the echo of this test counts no execution


async def stored(running: Running, config: str = REDIS) -> None:
    """Waits until a response is in Redis, if it goes there."""

    async def is_there() -> bool:
        return bool([key async for key in running.store.client.scan_iter(match="qinfer:cache:*")])

    if config == REDIS:
        await eventually(is_there)


async def test_grpc_gives_what_http_has_cached() -> None:
    """One key, whichever protocol asks; the metadata tell of it."""
    async with (
        caching_gateway(cached(LOCAL, settings_of(grpc={}))) as running,
        httpx.AsyncClient() as client,
        grpc.aio.insecure_channel(running.grpc_target) as channel,
    ):
        await client.post(url(running), json=body())
        call = stub_of(channel).ModelInfer(infer_request("echo_cached"))
        other = stub_of(channel).ModelInfer(infer_request("echo_cached", 5.0))
        found, (reply, missed) = dict(await call.initial_metadata()), (await call, await other)

        assert found[HEADER] == "hit"
        assert dict(await other.initial_metadata())[HEADER] == "miss"
        assert found[ID]
        assert reply.raw_output_contents[0] != missed.raw_output_contents[0]
        assert len(running.requests) == 2


@pytest.mark.parametrize("path", ["v2/models/{}/generate", "v2/models/{}/generate_stream", "v1/models/{}/infer_stream"])
async def test_every_reply_tells_of_the_cache(path: str) -> None:
    asked = body() if "infer" in path else {"x": [1, 2, 3, 4]}
    async with caching_gateway(cached(LOCAL)) as running, httpx.AsyncClient(base_url=running.url) as client:
        first, second = [await client.post("/" + path.format("echo_cached"), json=asked) for _ in range(2)]

    assert [reply.headers[HEADER] for reply in (first, second)] == ["miss", "hit"]


async def test_whatever_the_model_sees_is_another_request(running: Running) -> None:
    """Values, parameters, and the outputs that are asked for; priorities and encodings are not."""
    others = [
        body(2.0),
        body(parameters={"told_a": 1}),
        body(parameters={"told_a": True}),
        body(parameters={"told_a": "1"}),
        body(outputs=[{"name": "y"}]),
    ]
    same = [
        body(parameters={"binary_data_output": True}),
        body(parameters={"timeout": 10_000_000}),
        body(id="mine"),
    ]
    async with httpx.AsyncClient() as client:
        for one in (body(), *others):
            assert (await client.post(url(running), json=one)).headers[HEADER] == "miss"
        if running.gateway.dispatcher.submission._cache._local is None:  # type: ignore[union-attr]
            await eventually(lambda: count_entries(running, 6))
        replies = [await client.post(url(running), json=one) for one in (*others, *same)]

        assert {reply.headers[HEADER] for reply in replies} == {"hit"}
        assert len(running.requests) == 6


async def count_entries(running: Running, count: int) -> bool:
    return len([key async for key in running.store.client.scan_iter(match="qinfer:cache:*")]) == count


async def test_equal_requests_at_once_are_executed_once(running: Running) -> None:
    """Requests that came while an equal one was executed count as hits."""
    async with httpx.AsyncClient() as client, asyncio.TaskGroup() as group:
        asking = [group.create_task(client.post(url(running, "late"), json=body())) for _ in range(10)]
        await eventually(lambda: running.gateway.dispatcher.in_flight == 11)
        worker = group.create_task(work(running, "late"))
        replies = [await one for one in asking]
        worker.cancel()

        assert sorted(reply.headers[HEADER] for reply in replies) == ["hit"] * 9 + ["miss"]
        assert len({reply.headers[ID] for reply in replies}) == 10
        assert len(running.requests) == 1
        assert running.gateway.dispatcher.in_flight == 0
        assert (await counted(running, "late"))["cache_hit"] == 9


async def is_queued(running: Running) -> bool:
    return await running.depth("late") == 1


async def test_an_execution_goes_on_for_those_who_stay(running: Running) -> None:
    """An execution goes on when its first caller leaves, and is taken out of the queue when the last one does."""
    async with httpx.AsyncClient() as client, asyncio.TaskGroup() as group:
        first = group.create_task(client.post(url(running, "late"), json=body()))
        await eventually(partial(is_queued, running))
        second = group.create_task(client.post(url(running, "late"), json=body()))
        await eventually(lambda: running.gateway.dispatcher.in_flight == 3)
        first.cancel()
        await eventually(lambda: running.gateway.dispatcher.in_flight == 2)
        assert await running.depth("late") == 1
        second.cancel()

        await running.emptied("late")
        assert running.gateway.dispatcher.in_flight == 0


async def test_each_waits_until_its_own_deadline() -> None:
    """Each caller waits until its own deadline, and the execution goes on until the last of these."""
    async with (
        caching_gateway(cached(LOCAL, settings_of(grpc={}))) as running,
        grpc.aio.insecure_channel(running.grpc_target) as channel,
        httpx.AsyncClient() as client,
        asyncio.TaskGroup() as group,
    ):
        hasty = stub_of(channel).ModelInfer(infer_request("late"), timeout=0.3)
        patient = group.create_task(client.post(url(running, "late"), json=body()))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hasty
        worker = group.create_task(work(running, "late"))
        reply = await patient
        worker.cancel()

        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert reply.status_code == 200
        assert len(running.requests) == 1


async def test_errors_are_not_stored(running: Running) -> None:
    """Failures of a worker, and of a request that does not fit, are told as without a cache, and not stored."""
    lane = Lane("late", 1)
    wrong = {"inputs": [{"name": "z", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
    async with httpx.AsyncClient() as client, asyncio.TaskGroup() as group:
        refused = [await client.post(url(running), json=wrong) for _ in range(2)]
        plain = await client.post(url(running, "echo"), json=wrong)
        for _ in range(2):
            asking = group.create_task(client.post(url(running, "late"), json=body(id="c")))
            (lease,) = await running.delivery.fetch([lane], "w9", 1, 30.0)
            await fail(running, lease)
            reply = await asking

            assert (reply.status_code, reply.json()["error"]) == (500, "boom")
            assert HEADER not in reply.headers

    assert [one.status_code for one in refused] == [400, 400]
    told, told_plainly = (reply.json()["error"].partition("] ")[2] for reply in (refused[0], plain))
    assert told.replace("echo_cached", "echo") == told_plainly
    assert running.gateway.dispatcher.in_flight == 0


async def fail(running: Running, lease: Any) -> None:
    from qinfer.core.messages import Failure, Response
    from qinfer.wire.frame import decode_request, encode_responses

    request = decode_request(lease.frame)
    response = Response(request_id=request.id, model="late", version=1, failure=Failure("inference_failed", "boom"))
    await running.delivery.publish(request.reply_to, encode_responses([response]))
    await running.delivery.finish([lease.entry])


async def test_a_new_generation_has_no_responses(running: Running) -> None:
    """A model that was loaded again answers itself."""
    async with httpx.AsyncClient() as client:
        await client.post(url(running), json=body())
        await declare(running, generation=2)
        reply = await client.post(url(running), json=body())

        assert reply.headers[HEADER] == "miss"


async def test_redis_without_room_is_a_miss() -> None:
    """Neither an entry above the share, nor what is left of one that can't be read, is an error."""
    async with caching_gateway(cached("redis,ttl=60,size=100")) as running, httpx.AsyncClient() as client:
        replies = [await client.post(url(running), json=body()) for _ in range(2)]

        assert [reply.headers[HEADER] for reply in replies] == ["miss", "miss"]
    async with caching_gateway(cached(REDIS)) as running, httpx.AsyncClient() as client:
        await client.post(url(running), json=body())
        await stored(running)
        (key,) = [key async for key in running.store.client.scan_iter(match="qinfer:cache:*")]
        assert 0 < await running.store.client.pttl(key) <= 60_000
        await running.store.client.set(key, b"damaged")
        reply = await client.post(url(running), json=body())

        assert (reply.status_code, reply.headers[HEADER]) == (200, "miss")


async def test_metrics_have_tritons_names(running: Running) -> None:
    """Only of models that use the cache."""
    async with httpx.AsyncClient() as client:
        await client.post(url(running), json=body())
        await client.post(url(running, "echo"), json=body())
        await running.gateway._reporting.flush()
        text = (await client.get(f"{running.url}/metrics")).text

    assert 'nv_cache_num_misses_per_model{model="echo_cached",version="1"} 1' in text
    assert 'nv_cache_num_hits_per_model{model="echo_cached",version="1"} 0' in text
    assert 'nv_cache_num_hits_per_model{model="echo",' not in text


async def test_summaries_of_hits_and_misses() -> None:
    """Where summaries are wanted; of requests of the model there is none, as in Triton."""
    metrics = MetricsSettings(summary_latencies=True, summary_quantiles="0.5:0.05")
    settings = cached(LOCAL).model_copy(update={"metrics": metrics})
    async with caching_gateway(settings) as running, httpx.AsyncClient() as client:
        for _ in range(3):
            assert (await client.post(url(running), json=body())).status_code == 200
        await running.gateway._reporting.flush()
        text = (await client.get(f"{running.url}/metrics")).text

    of = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[:1] != "#"}
    labels = 'model="echo_cached",version="1"'
    for which, count in (("hit", 2), ("miss", 1)):
        name = f"nv_cache_{which}_summary_per_model"
        assert of[f"{name}_count{{{labels}}}"] == count
        assert of[f"{name}_sum{{{labels}}}"] == of[f"nv_cache_{which}_duration_per_model{{{labels}}}"]
        assert of[f'{name}{{model="echo_cached",version="1",quantile="0.5"}}'] > 0
    assert 'nv_inference_request_summary_us{model="echo_cached"' not in text
    assert 'nv_inference_request_summary_us{model="echo",' in text
    assert 'nv_cache_hit_summary_per_model_count{model="echo",' not in text


@pytest.mark.parametrize("fast", [True, False])
async def test_a_local_hit_never_reaches_redis(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """While hits are answered, the gateway sends no more than without them; an execution is seen on the way there."""
    async with (
        caching_gateway(cached(LOCAL, settings_of({"fast_path": fast}))) as running,
        httpx.AsyncClient() as client,
    ):
        await client.post(url(running), json=body())
        sent: list[bytes] = []
        send = Router.send

        def noted(self: Router, slot: int, packed: bytes, reply: Reply) -> None:
            sent.append(packed)
            send(self, slot, packed, reply)

        monkeypatch.setattr(Router, "send", noted)
        replies = [await client.post(url(running), json=body()) for _ in range(200)]

        assert {(reply.status_code, reply.headers[HEADER]) for reply in replies} == {(200, "hit")}
        # A gateway looks at its lanes now and then, whatever it is asked.
        assert len(sent) < 100
        assert not [packed for packed in sent if b"qinfer:cache:" in packed or b"XADD" in packed]
        await client.post(url(running), json=body(5.0))
        assert [packed for packed in sent if b"XADD" in packed or b"EVALSHA" in packed]
        assert len(running.requests) == 2


@pytest.mark.parametrize("broken", ["find", "put", "both"])
async def test_requests_are_answered_while_the_cache_is_away_or_full(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be read is executed, and what can't be written is executed again."""
    names = ("find", "put") if broken == "both" else (broken,)
    errors = {"find": BrokerUnavailable("redis is away"), "put": QueueFull("OOM: used memory > 'maxmemory'")}

    def failing(name: str) -> Callable[..., Awaitable[None]]:
        async def fail(*_: object) -> None:
            raise errors[name]

        return fail

    async with caching_gateway(cached(REDIS)) as running, httpx.AsyncClient() as client:
        for name in names:
            monkeypatch.setattr(CachedResponses, name, failing(name))
        replies = [await client.post(url(running), json=body(value)) for value in (1, 1, 2)]

        assert {(reply.status_code, reply.headers[HEADER]) for reply in replies} == {(200, "miss")}
        assert replies[0].content == replies[1].content != replies[2].content
        monkeypatch.undo()
        if broken == "find":
            await stored(running)
        else:
            await client.post(url(running), json=body())
            await stored(running)
        assert (await client.post(url(running), json=body())).headers[HEADER] == "hit"


@pytest.mark.long
@pytest.mark.parametrize("config", [LOCAL, "local,size=20000", REDIS])
async def test_random_traffic_is_answered_as_without_a_cache(config: str, tmp_path: Path) -> None:
    """Byte for byte, over two tenants, valid and invalid requests, in both encodings, at once."""
    file = tmp_path / "keys.json"
    tokens = [add_key(file, name, (Scope.INFER,), name)[1] for name in ("acme", "other")]
    settings = settings_of(auth={"mode": "keys", "keys_file": str(file)})
    chance = Random(config)
    asked = [(chance.choice(tokens), chance.choice(["echo_cached", "shared"]), random_body(chance)) for _ in range(400)]
    async with caching_gateway(cached(config, settings)) as one, caching_gateway(settings) as other:
        results = [await traffic(each, asked) for each in (one, other)]

        assert results[0] == results[1]
        assert len(other.requests) > len(one.requests)
        assert {request.tenant for request in one.requests if request.model == "echo_cached"} == {"acme", "other"}
    private = {(token, json.dumps(body)) for token, model, body in asked if model == "echo_cached"}
    assert len(private) > 20


def random_body(chance: Random) -> dict[str, Any]:
    made = body(chance.randrange(4), id=chance.choice("abc"))
    if chance.random() < 0.2:
        made["inputs"][0]["shape"] = chance.choice([[1, 4], [2, 2], [1, 5]])
    if chance.random() < 0.3:
        made["parameters"] = {"told_p": chance.choice([1, 1.0, True, "1"]), "binary_data_output": chance.random() < 0.5}
    if chance.random() < 0.2:
        made["outputs"] = [{"name": chance.choice("yz")}]
    return made


async def traffic(running: Running, asked: list[tuple[str, str, dict[str, Any]]]) -> list[tuple[int, bytes]]:
    room = asyncio.Semaphore(8)
    async with httpx.AsyncClient() as client:

        async def ask(token: str, model: str, content: dict[str, Any]) -> tuple[int, bytes]:
            async with room:
                headers = {"authorization": f"Bearer {token}"}
                reply = await client.post(url(running, model), json=content, headers=headers)
            return reply.status_code, reply.content

        return list(await asyncio.gather(*(ask(*one) for one in asked)))


async def test_a_tenant_gets_only_its_own_responses(tmp_path: Path) -> None:
    """Unless the model's scope is `all`."""
    file = tmp_path / "keys.json"
    tokens = [add_key(file, name, (Scope.INFER,), name)[1] for name in ("acme", "other")]
    settings = settings_of(auth={"mode": "keys", "keys_file": str(file)})
    async with caching_gateway(cached(LOCAL, settings)) as running, httpx.AsyncClient() as client:
        found: dict[str, list[str]] = {}
        for model in ("echo_cached", "shared"):
            for token in tokens:
                reply = await client.post(
                    url(running, model), json=body(), headers={"authorization": f"Bearer {token}"}
                )
                found.setdefault(model, []).append(reply.headers[HEADER])

        assert found == {"echo_cached": ["miss", "miss"], "shared": ["miss", "hit"]}


async def test_without_a_cache_the_setting_of_a_model_has_no_effect() -> None:
    """Each request is executed, and no header tells of a cache."""
    async with caching_gateway(settings_of()) as running, httpx.AsyncClient() as client:
        replies = [await client.post(url(running), json=body()) for _ in range(2)]

        assert not [reply for reply in replies if HEADER in reply.headers]
        assert len(running.requests) == 2


async def test_forwarded_headers_are_part_of_a_request() -> None:
    """The model sees them."""
    settings = settings_of({"header_forward_pattern": "x-told"})
    async with caching_gateway(cached(LOCAL, settings)) as running, httpx.AsyncClient() as client:
        replies = [await client.post(url(running), json=body(), headers={"x-told": text}) for text in ("a", "b", "a")]

        assert [reply.headers[HEADER] for reply in replies] == ["miss", "miss", "hit"]


async def test_models_that_do_not_cache_are_as_before() -> None:
    """On the same server."""
    async with running_gateway(cached()) as running, httpx.AsyncClient() as client:
        replies = [await client.post(url(running, "echo"), json=body()) for _ in range(2)]

        assert not [reply for reply in replies if HEADER in reply.headers]
        assert len(running.requests) == 2
