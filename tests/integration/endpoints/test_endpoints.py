"""Endpoints over HTTP and gRPC: who answers, under which name, and what is refused."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import httpx
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton

from qinfer.testing import eventually
from tests.support.endpoints import BODY, canary, declare, gateways, seen, shadow, split
from tests.support.gateway import Running, settings_of
from tests.support.rpc import infer_request, stub_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[list[Running]]:
    async with gateways(2, settings_of(grpc={})) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(both: list[Running]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=both[1].url, headers={"accept-encoding": "identity"}) as opened:
        yield opened


def told(reply: httpx.Response) -> tuple[str, str, str]:
    """Returns the names that a reply has: model, version, and target."""
    assert reply.status_code == 200, reply.text
    length = reply.headers.get("inference-header-content-length")
    found = json.loads(reply.content[: int(length)] if length else reply.content)
    return found["model_name"], found["model_version"], reply.headers["qinfer-target"]


async def test_an_endpoint_is_asked_like_a_model(both: list[Running], client: httpx.AsyncClient) -> None:
    await declare(both, "plain", split())

    assert told(await client.post("/v2/models/plain/infer", json=BODY)) == ("plain", "1", "echo:1")


async def test_binary_requests_are_too(both: list[Running], client: httpx.AsyncClient) -> None:
    await declare(both, "all-canary", split(canary(1)))
    row = np.arange(4, dtype="<f4").tobytes()
    head = json.dumps(
        {
            "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()

    reply = await client.post(
        "/v2/models/all-canary/infer", content=head + row, headers={"inference-header-content-length": str(len(head))}
    )

    assert told(reply) == ("all-canary", "2", "echo:2")
    assert reply.content.endswith(row)


@pytest.mark.parametrize("how", [{"accept-encoding": "gzip"}, {"expect": "100-continue"}, {"x-api-key": "k"}])
async def test_beyond_the_plainest_head_too(
    both: list[Running], client: httpx.AsyncClient, how: dict[str, str]
) -> None:
    await declare(both, "all-canary", split(canary(1)))

    assert told(await client.post("/v2/models/all-canary/infer", json=BODY, headers=how))[1:] == ("2", "echo:2")


async def test_a_large_request_is_checked_against_its_target(both: list[Running], client: httpx.AsyncClient) -> None:
    await declare(both, "other-model", split(canary(1, "späte modelle:1")))
    rows = 20_000
    body = {"inputs": [{"name": "x", "shape": [rows, 4], "datatype": "FP32", "data": [0.5] * 4 * rows}]}

    reply = await client.post("/v2/models/other-model/infer", json=body)

    assert (reply.status_code, "'späte modelle'" in reply.json()["error"]) == (400, True)


async def test_generate_answers_under_the_endpoints_name(both: list[Running], client: httpx.AsyncClient) -> None:
    await declare(both, "all-canary", split(canary(1)))

    reply = await client.post("/v2/models/all-canary/generate", json={"x": [1, 2, 3, 4]})
    stream = await client.post("/v2/models/all-canary/generate_stream", json={"x": [1, 2, 3, 4]})

    assert told(reply) == ("all-canary", "2", "echo:2")
    event = json.loads(stream.text.removeprefix("data: "))
    assert (event["model_name"], stream.headers["qinfer-target"]) == ("all-canary", "echo:2")


async def test_classes_have_the_labels_of_the_target(both: list[Running], client: httpx.AsyncClient) -> None:
    await declare(both, "labels", split(canary(1), stable="späte modelle:1"))
    wanted = {"outputs": [{"name": "y", "parameters": {"classification": 1}}]}

    reply = await client.post("/v2/models/labels/infer", json={**BODY, **wanted})

    assert reply.json()["outputs"][0]["data"] == ["4.000000:3"]
    shorter = {"inputs": [{**BODY["inputs"][0], "data": [0, 9, 0, 0]}]}
    reply = await client.post("/v2/models/labels/infer", json={**shorter, **wanted})
    assert reply.json()["outputs"][0]["data"] == ["9.000000:1:one"]


async def test_grpc_asks_endpoints_too(both: list[Running]) -> None:
    await declare(both, "all-canary", split(canary(1)))
    async with grpc.aio.insecure_channel(both[1].grpc_target) as channel:
        stub = stub_of(channel)
        for _ in range(4):  # the later ones are read in the short way
            call = stub.ModelInfer(infer_request("all-canary"))
            reply, metadata = await call, dict(await call.initial_metadata())

            assert (reply.model_name, reply.model_version) == ("all-canary", "2")
            assert metadata["qinfer-target"] == "echo:2"

        stream = stub.ModelStreamInfer(iter([infer_request("all-canary")]))
        (answer,) = [one.infer_response async for one in stream]
        assert (answer.model_name, answer.model_version) == ("all-canary", "2")


async def test_conditions_go_before_weights(both: list[Running], client: httpx.AsyncClient) -> None:
    """By a header in any case, whatever way the request takes; and by a parameter, with all that is given."""
    beta = [{"headers": {"X-Beta": "yes"}}, {"parameters": {"lang": "de", "dry": True}}]
    await declare(both, "beta", split(canary(0, when=beta)))

    async def version(headers: dict[str, str] | None = None, **parameters: Any) -> str:
        body = {**BODY, "parameters": parameters} if parameters else BODY
        return told(await client.post("/v2/models/beta/infer", json=body, headers=headers))[1]

    assert await version() == "1"
    assert await version({"x-beta": "yes"}) == "2"
    assert await version({"X-BETA": "yes", "accept-encoding": "gzip"}) == "2"
    assert await version({"x-beta": "yes", "expect": "100-continue"}) == "2"
    assert await version({"x-beta": "no"}) == "1"
    assert await version(lang="de", dry=True) == "2"
    assert await version(lang="de") == "1"
    async with grpc.aio.insecure_channel(both[0].grpc_target) as channel:
        reply = await stub_of(channel).ModelInfer(infer_request("beta"), metadata=(("x-beta", "yes"),))
        assert reply.model_version == "2"


async def test_a_sticky_key_has_one_target_at_every_gateway(both: list[Running]) -> None:
    await declare(both, "sticky", split(canary(0.5), sticky="header:X-User"))
    users = [f"user-{number}" for number in range(40)]

    async def targets(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url) as client:
            return [
                told(await client.post("/v2/models/sticky/infer", json=BODY, headers={"x-user": user}))[2]
                for user in users
            ]

    first = await targets(both[0].url)

    assert await targets(both[1].url) == first
    assert set(first) == {"echo:1", "echo:2"}


async def test_a_version_picks_its_target(both: list[Running], client: httpx.AsyncClient) -> None:
    await declare(both, "picked", split(canary(0)))

    assert told(await client.post("/v2/models/picked/versions/2/infer", json=BODY)) == ("picked", "2", "echo:2")
    wrong = await client.post("/v2/models/picked/versions/7/infer", json=BODY)
    assert (wrong.status_code, "targets of that endpoint are echo:1, echo:2" in wrong.json()["error"]) == (404, True)


async def test_the_latest_version_is_the_newest_that_is_ready(both: list[Running], client: httpx.AsyncClient) -> None:
    await declare(both, "follows", split(canary(1, "echo:latest")))

    assert told(await client.post("/v2/models/follows/infer", json=BODY))[2] == "echo:2"

    await declare(both, "follows", split(canary(1, "echo:latest"), stable="echo:2"))
    assert told(await client.post("/v2/models/follows/infer", json=BODY))[2] == "echo:2"


async def test_what_a_canary_cannot_answer_the_stable_target_does(
    both: list[Running], client: httpx.AsyncClient
) -> None:
    await declare(both, "unready", split(canary(1, "loading:1")))

    assert told(await client.post("/v2/models/unready/infer", json=BODY))[2] == "echo:1"
    state = (await client.get("/v1/endpoints/unready")).json()
    assert state["problems"] == ["target 'loading:1' is not ready: its requests go to the stable target"]
    assert [target["ready"] for target in state["targets"]] == [True, False]


async def test_a_failure_names_its_target(both: list[Running], client: httpx.AsyncClient) -> None:
    await declare(both, "failing", split(canary(1, "fails:1")))

    reply = await client.post("/v2/models/failing/infer", json=BODY)

    assert (reply.status_code, reply.headers["qinfer-target"]) == (500, "fails:1")


async def test_an_endpoint_may_stand_in_front_of_a_model(both: list[Running], client: httpx.AsyncClient) -> None:
    """Only if it says so; its targets are then the models of that name, never itself."""
    hidden = split(canary(1, "pair:1"), stable="pair:1") | {
        "targets": [{"model": "echo", "version": 1, "role": "stable"}, {"model": "echo", "version": 2, "weight": 1}]
    }
    refused = await client.put("/v1/endpoints/echo", json=hidden)
    assert refused.status_code == 400
    assert refused.json()["error"] == (
        "endpoint 'echo': it would hide the model 'echo'; rename it, or set hides_model to true"
    )

    revision = await declare(both, "echo", {**hidden, "hides_model": True})

    assert told(await client.post("/v2/models/echo/infer", json=BODY)) == ("echo", "2", "echo:2")
    assert (await client.delete(f"/v1/endpoints/echo?revision={revision}")).status_code == 200
    await seen(both, revision + 1)
    assert "qinfer-target" not in (await client.post("/v2/models/echo/infer", json=BODY)).headers


@pytest.mark.parametrize(
    ("declaration", "text"),
    [
        (split(canary(0.1, "nothing:1")), "target 'nothing:1': there is no such model; there are "),
        (split(canary(0.1, "basis:1")), "target 'basis:1': it is an endpoint, and targets are models"),
        (split(canary(0.1, "echo:9")), "target 'echo:9': the model has no such version; its versions are 1, 2"),
        (split(canary(0.1, "half:1")), "target 'half:1' does not fit 'echo:1': they differ in input x"),
        (split(canary(0.1, "flow:1")), "one gives a single response, the other a stream"),
        (split(canary(0.1, "stateful:1")), "a model with sequences can be mixed with its own versions only"),
        (split(canary(10)), "weight 10 is not a share from 0 to 1, such as 0.1"),
        (split(typo=1), "the declaration of an endpoint has no 'typo'"),
        (split(shadow("stateful:1"), stable="stateful:1"), "a model with sequences can't be a shadow"),
        (split(shadow("flow:1"), stable="flow:1"), "a decoupled model can't be a shadow"),
        (split(compare={"z": {}}), "compare: 'echo' has no output 'z'; it has y"),
        (split(compare={"y": {"agree": "nearly"}}), "invalid enum value 'nearly'; it may be argmax or equal or within"),
        (split(compare={"y": {"within": 1}}), "`compare[...]`: object contains unknown field `within`"),
        (
            split(stable="text:1", compare={"y": {"agree": "argmax"}}),
            "compare: output 'y' has texts, which can't be compared by 'argmax'; say 'equal'",
        ),
        ({"targets": 7}, "this is no declaration of an endpoint: `targets` is '7'; expected `array`, got `int`"),
    ],
)
async def test_what_cannot_be_declared(
    both: list[Running], client: httpx.AsyncClient, declaration: dict[str, Any], text: str
) -> None:
    await declare(both, "basis", split())

    reply = await client.put("/v1/endpoints/refused", json=declaration)

    assert (reply.status_code, text in reply.json()["error"]) == (400, True), reply.text
    assert (await client.get("/v1/endpoints/refused")).status_code == 404


async def test_a_plan_without_a_canary_is_a_problem(both: list[Running], client: httpx.AsyncClient) -> None:
    await declare(both, "planned", split(canary={"steps": [{"weight": 0.5}]}))

    state = (await client.get("/v1/endpoints/planned")).json()

    assert state["problems"] == ["it plans canaries, and no target is one: add a target with the version latest"]


async def test_a_change_to_another_revision_is_refused(both: list[Running], client: httpx.AsyncClient) -> None:
    """Of two that read the same revision and change it at once, one is told."""
    await declare(both, "edited", split())
    read = (await client.get("/v1/endpoints/edited")).json()["endpoint"]

    async with httpx.AsyncClient(base_url=both[0].url) as other:
        replies = await asyncio.gather(
            client.put("/v1/endpoints/edited", json=read | split(canary(0.05))),
            other.put("/v1/endpoints/edited", json=read | split(canary(0.1))),
        )

    assert sorted(reply.status_code for reply in replies) == [200, 409]
    (refused,) = [reply for reply in replies if reply.status_code == 409]
    assert f"not {read['revision']}; read it again and change that" in refused.json()["error"]
    gone = await client.delete("/v1/endpoints/edited?revision=1")
    assert gone.status_code == 409


async def test_an_endpoint_is_described_as_its_stable_target(both: list[Running], client: httpx.AsyncClient) -> None:
    """Under its own name: metadata, readiness, configuration, statistics and index, over HTTP and gRPC alike."""
    await declare(both, "described", split(canary(0.5, "späte modelle:1"), stable="echo:2"))
    metadata = (await client.get("/v2/models/described")).json()
    config = (await client.get("/v2/models/described/config")).json()
    (stats,) = (await client.get("/v2/models/described/stats")).json()["model_stats"]
    index = (await client.post("/v2/repository/index")).json()

    assert (metadata["name"], metadata["versions"], metadata["inputs"][0]["name"]) == ("described", ["2"], "x")
    assert (config["name"], config["max_batch_size"]) == ("described", 8)
    assert (stats["name"], stats["version"]) == ("described", "2")
    assert {"name": "described", "version": "2", "state": "READY"} in index
    assert (await client.get("/v2/models/described/ready")).status_code == 200
    assert (await client.get("/v2/models/described/versions/1")).json()["versions"] == ["1"]
    assert (await client.get("/v2/models/described/versions/9/ready")).status_code == 404

    async with triton.InferenceServerClient(both[0].grpc_target) as theirs:
        assert await theirs.is_model_ready("described")
        about = await theirs.get_model_metadata("described", as_json=True)
        assert (about["name"], about["versions"]) == ("described", ["2"])
        assert (await theirs.get_model_config("described", as_json=True))["config"]["name"] == "described"
        counted = await theirs.get_inference_statistics("described", as_json=True)
        assert [one["name"] for one in counted["model_stats"]] == ["described"]
        found = await theirs.get_model_repository_index(as_json=True)
        assert {"name": "described", "version": "2", "state": "READY"} in found["models"]


async def test_shares_are_those_of_the_weights() -> None:
    """Within the binomial interval of 99.9 %: 400 requests by each of three gateways, a quarter to the canary."""
    async with gateways(3) as three:
        await declare(three, "quarter", split(canary(0.25)))

        async def counted(url: str) -> Counter[str]:
            async with httpx.AsyncClient(base_url=url) as client:
                return Counter([told(await client.post("/v2/models/quarter/infer", json=BODY))[2] for _ in range(400)])

        counts = sum(await asyncio.gather(*(counted(one.url) for one in three)), Counter[str]())

    assert counts.total() == 1200
    assert abs(counts["echo:2"] - 300) <= 50  # 3.29 standard deviations are 49.4


async def test_requests_are_counted_by_target(both: list[Running], client: httpx.AsyncClient) -> None:
    """Answers, failures, refusals, those whose callers left, and stored ones; and what share each is to get."""
    for version_of in ("echo:1", "echo:2", "fails:1"):
        target = [canary(1, version_of)] if version_of != "echo:1" else []
        await declare(both, "counted", split(*target))
        await client.post("/v2/models/counted/infer", json=BODY)
    await client.post("/v1/models/counted/requests", json=BODY)
    await declare(both, "counted", split(canary(1, "stuck:1")))
    with pytest.raises(httpx.ReadTimeout):
        await client.post("/v2/models/counted/infer", json=BODY, timeout=0.5)

    async def metrics() -> dict[str, float]:
        lines = (await client.get("/metrics?scope=process")).text.splitlines()
        found = [line.rpartition(" ") for line in lines if 'endpoint="counted"' in line]
        return {re.sub(r',process="[^"]*"', "", name): float(value) for name, _, value in found}

    async def are_all() -> bool:
        left = 'qinfer_endpoint_request_failures_total{endpoint="counted",reason="cancelled",target="stuck:1"}'
        return (await metrics()).get(left) == 1

    await eventually(are_all, description="the caller who left")
    shown = await metrics()
    requests = {name: value for name, value in shown.items() if name.startswith("qinfer_endpoint_requests_total")}
    assert requests == {
        f'qinfer_endpoint_requests_total{{endpoint="counted",target="{target}"}}': count
        for target, count in {"echo:1": 1, "echo:2": 1, "fails:1": 2, "stuck:1": 1}.items()
    }
    failed = 'qinfer_endpoint_request_failures_total{endpoint="counted",reason="inference_failed",target="fails:1"}'
    assert shown[failed] == 1
    assert shown['qinfer_endpoint_weight{endpoint="counted",role="canary",target="stuck:1"}'] == 1
    assert shown['qinfer_endpoint_request_duration_seconds_count{endpoint="counted",target="echo:2"}'] == 1
