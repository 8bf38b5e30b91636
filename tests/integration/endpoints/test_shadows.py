"""Shadows with real workers: executed, compared, counted, and never seen by a caller."""

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from onnx import helper
from typer.testing import CliRunner

from qinfer.cli.main import app
from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings import AuthSettings, LimitSettings
from qinfer.core.settings_sections import CacheSettings, EndpointSettings
from qinfer.queue.entries import shadow_lane
from qinfer.testing import eventually
from tests.support.endpoints import shadow, split
from tests.support.models import accumulator, write
from tests.support.python_models import CONFIG, HEADER
from tests.support.served_models import ServedModels, models_served

VERSIONS = "version_policy: { all { } }"
DISAGREEMENTS = [{"of": "errors"}, {"of": "disagreements", "allowed": 0.01}]


def digits(repository: Path, operators: dict[int, str], more: str = "") -> None:
    """Writes a model `x` → `y` of 4 elements with a version for each operator."""
    for version, operator in operators.items():
        nodes = [helper.make_node(operator, ["x"], ["y"])]
        write(repository, "digits", nodes, [("x", "FP32", (4,))], [("y", "FP32", (4,))], version=version)
    with (repository / "digits" / "config.pbtxt").open("a") as file:
        file.write(f"{VERSIONS} {more}")


WAITS = """
        while not os.path.exists({gate!r}):
            time.sleep(0.01)
"""


def python_model(repository: Path, name: str, before: str) -> None:
    """Writes a Python model `x` → `y` of 4 elements that executes some lines before it answers."""
    directory = repository / name / "1"
    directory.mkdir(parents=True)
    lines = ["class TritonPythonModel:", "    def execute(self, requests):", before.strip("\n")]
    lines.append("        return [reply(x(request)) for request in requests]")
    (directory / "model.py").write_text(HEADER + "\n".join(lines))
    config = CONFIG.format(name=name, max_batch_size=8, datatype="FP32", dims=4, scheduling="", more="")
    (repository / name / "config.pbtxt").write_text(config + "dynamic_batching { }")


async def declared(client: httpx.AsyncClient, name: str, declaration: dict[str, Any]) -> None:
    reply = await client.put(f"/v1/endpoints/{name}", json=declaration)
    assert reply.status_code == 200, reply.text


async def ask(client: httpx.AsyncClient, name: str, values: list[float], **more: Any) -> list[float]:
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": values}], **more}
    reply = await client.post(f"/v2/models/{name}/infer", json=body)
    assert reply.status_code == 200, reply.text
    outputs: list[float] = reply.json()["outputs"][0]["data"]
    return outputs


async def differences(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """Returns what is known of the only shadow of an endpoint."""
    reply = await client.get(f"/v1/endpoints/{name}/differences")
    assert reply.status_code == 200, reply.text
    (target,) = reply.json()["targets"]
    found: dict[str, Any] = target
    return found


async def counted(client: httpx.AsyncClient, name: str, **least: int) -> dict[str, Any]:
    """Waits until so many shadows have ended in these ways; returns what is known then."""

    async def is_so() -> bool:
        shadows = (await differences(client, name))["shadows"]
        return all(shadows[outcome] >= count for outcome, count in least.items())

    await eventually(is_so, description=f"shadows: {least}")
    return await differences(client, name)


async def test_a_wrong_version_is_caught_and_answers_nobody(tmp_path: Path) -> None:
    digits(tmp_path, {1: "Identity", 2: "Neg", 3: "Identity"})
    async with models_served(tmp_path) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        await declared(client, "reader", split(shadow("digits:2"), stable="digits:1"))
        await declared(client, "good", split(shadow("digits:3"), stable="digits:1"))

        for number in range(1, 21):
            row = [1.0, 2.0, 3.0, float(number)]
            assert await ask(client, "reader", row, id=f"r{number}") == row
            assert await ask(client, "good", row) == row

        found = await counted(client, "reader", compared=20)
        assert found["shadows"] == {"compared": 20, "disagreed": 20, "failed": 0, "dropped": 0}
        assert found["outputs"][0] | {"mean_distance": 0} == {
            "output": "y", "rows": 20, "agreement": 0.0, "mean_distance": 0, "largest_distance": 40.0, "unmeasured": 0,
        }  # fmt: skip
        worst = found["samples"][0]
        assert (worst["row"], worst["stable"], worst["canary"]) == ("r20", "[1, 2, 3, 20]", "[-1, -2, -3, -20]")
        good = await counted(client, "good", compared=20)
        assert (good["shadows"]["disagreed"], good["samples"]) == (0, [])
        metrics = (await client.get("/metrics")).text
        assert 'endpoint="reader",outcome="disagreed"' in metrics
        state = (await client.get("/v1/endpoints/reader")).json()["targets"]
        assert [target["shadows"] for target in state] == [None, found["shadows"]]
        assert await scene.gateway._delivery.depth([shadow_lane("digits", 2)]) == [0]
        command = ["endpoints", "differences", "reader", "--url", scene.gateway.url]
        shown = await asyncio.to_thread(CliRunner().invoke, app, command, env={"COLUMNS": "200"})
        assert "digits:2: 20 compared, 20 disagreed, 0 failed, 0 dropped" in shown.stdout
        assert "r20" in shown.stdout
        assert "[-1, -2, -3, -20]" in shown.stdout


async def test_no_reply_waits_for_a_shadow(tmp_path: Path) -> None:
    """The shadow stands still until the test lets it go on, which is after all callers have their answers."""
    digits(tmp_path, {1: "Identity"})
    gate = tmp_path / "gate"
    python_model(tmp_path, "slow", WAITS.format(gate=str(gate)))
    async with models_served(tmp_path) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        gate.touch()  # warming up goes through
        await scene.http.load_model("digits")
        await scene.http.load_model("slow")
        gate.unlink()
        await declared(client, "reader", split(shadow("slow:1"), stable="digits:1"))

        for _ in range(10):
            assert await ask(client, "reader", [1, 2, 3, 4]) == [1, 2, 3, 4]
        before = await differences(client, "reader")
        gate.touch()

        assert before["shadows"]["compared"] == 0
        assert (await counted(client, "reader", compared=10))["shadows"]["disagreed"] == 0


async def test_a_shadow_that_raises_is_seen_by_nobody(tmp_path: Path) -> None:
    digits(tmp_path, {1: "Identity"})
    raises = """
        if any((x(request) == 7).any() for request in requests):
            raise ValueError("seven")
"""
    python_model(tmp_path, "broken", raises)
    async with models_served(tmp_path) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        await scene.http.load_model("broken")
        await declared(client, "reader", split(shadow("broken:1"), stable="digits:1"))

        rows = [[float(number), 0.0, 0.0, 1.0] for number in range(10)]
        answers = await asyncio.gather(*[ask(client, "reader", row) for row in rows])

        assert answers == rows
        found = await counted(client, "reader", compared=9, failed=1)
        assert found["shadows"] == {"compared": 9, "disagreed": 0, "failed": 1, "dropped": 0}


async def test_what_is_too_much_is_dropped_and_counted(tmp_path: Path) -> None:
    digits(tmp_path, {1: "Identity", 2: "Neg"})
    sections = {"endpoints": EndpointSettings(max_shadow_bytes=8, redact_samples=True)}
    async with models_served(tmp_path, sections) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        await declared(client, "reader", split(shadow("digits:2"), stable="digits:1"))

        assert await ask(client, "reader", [1, 2, 3, 4]) == [1, 2, 3, 4]

        found = await differences(client, "reader")
        assert found["shadows"] == {"compared": 0, "disagreed": 0, "failed": 0, "dropped": 1}


async def test_samples_can_be_kept_without_values(tmp_path: Path) -> None:
    digits(tmp_path, {1: "Identity", 2: "Neg"})
    sections = {"endpoints": EndpointSettings(redact_samples=True)}
    async with models_served(tmp_path, sections) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        await declared(client, "reader", split(shadow("digits:2"), stable="digits:1"))

        await ask(client, "reader", [1, 2, 3, 4], id="mine")

        (sample,) = (await counted(client, "reader", compared=1))["samples"]
        assert (sample["row"], sample["stable"], sample["canary"]) == ("mine", "", "")


async def test_the_declaration_says_what_agrees(tmp_path: Path) -> None:
    digits(tmp_path, {1: "Identity", 2: "Abs"})
    async with models_served(tmp_path) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        near = {"agree": "within", "tolerance": 1.9}
        rules = {"argmax": {"agree": "argmax"}, "within": near, "equal": {"agree": "equal"}}
        for name, rule in rules.items():
            declaration = split(shadow("digits:2"), stable="digits:1", compare={"y": rule})
            await declared(client, name, declaration)
            await ask(client, name, [-1, 2, 3, 4])

        found = {name: (await counted(client, name, compared=1))["shadows"]["disagreed"] for name in rules}

        assert found == {"argmax": 0, "within": 1, "equal": 1}


@pytest.mark.parametrize("rows", [1, 4])
async def test_shadows_go_on_when_their_worker_is_another(tmp_path: Path, rows: int) -> None:
    """What the dead worker held is lost, and what comes then is compared."""
    digits(tmp_path, {1: "Identity", 2: "Neg"})
    async with models_served(tmp_path) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        await declared(client, "reader", split(shadow("digits:2"), stable="digits:1"))
        await scene.worker("w2")
        await scene.kill("w1")

        await scene.infer("reader", x=np.ones((rows, 4), np.float32))

        await counted(client, "reader", compared=1)


async def test_a_shadow_has_the_tenant_of_its_request_and_counts_in_no_quota(tmp_path: Path) -> None:
    """The tenant may have one request in flight, and asks again while the shadow of the first stands still."""
    digits(tmp_path / "models", {1: "Identity"})
    gate = tmp_path / "gate"
    python_model(tmp_path / "models", "slow", WAITS.format(gate=str(gate)))
    keys = tmp_path / "keys.json"
    _, user = add_key(keys, "acme", (Scope.INFER,))
    _, admin = add_key(keys, "ops", (Scope.ADMIN, Scope.INFER))
    written = json.loads(keys.read_text())
    written["keys"][0]["max_in_flight"] = 1
    keys.write_text(json.dumps(written))
    sections = {"auth": AuthSettings(mode="keys", keys_file=str(keys))}
    gate.touch()
    async with models_served(tmp_path / "models", sections) as scene:
        headers = {"x-api-key": admin}
        async with httpx.AsyncClient(base_url=scene.gateway.url, headers=headers, timeout=60) as client:
            for model in ("digits", "slow"):
                assert (await client.post(f"/v2/repository/models/{model}/load")).status_code == 200
            gate.unlink()
            await declared(client, "reader", split(shadow("slow:1"), stable="digits:1"))

            async with httpx.AsyncClient(base_url=scene.gateway.url, headers={"x-api-key": user}) as mine:
                for _ in range(3):
                    assert await ask(mine, "reader", [1, 2, 3, 4]) == [1, 2, 3, 4]
                assert (await mine.get("/v1/endpoints/reader/differences")).status_code == 403
            shares = await scene.gateway._delivery.shares([shadow_lane("slow", 1)], named=True)
            before = await differences(client, "reader")
            gate.touch()

            assert before["shadows"]["compared"] == 0
            assert {tenant for share in shares[0] for tenant in share.tenants} == {"acme"}
            await counted(client, "reader", compared=3)


async def test_a_shadow_bypasses_the_response_cache(tmp_path: Path) -> None:
    digits(tmp_path, {1: "Identity", 2: "Neg"}, "response_cache { enable: true }")
    sections = {"cache": CacheSettings(config="local,size=1048576")}
    async with models_served(tmp_path, sections) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        await declared(client, "reader", split(shadow("digits:2"), stable="digits:1"))

        for _ in range(5):
            assert await ask(client, "reader", [1, 2, 3, 4]) == [1, 2, 3, 4]
        await counted(client, "reader", compared=5)

        async def is_counted() -> bool:
            versions = (await client.get("/v2/models/digits/versions/2/stats")).json()["model_stats"]
            return bool(
                versions[0]["inference_count"] == 5 and not versions[0]["inference_stats"]["cache_hit"]["count"]
            )

        await eventually(is_counted, description="five executions of the shadow")


@pytest.mark.parametrize(("operator", "ends"), [("Neg", "rolled back"), ("Identity", "promoted")])
async def test_a_step_with_a_shadow_only_decides_about_a_canary(tmp_path: Path, operator: str, ends: str) -> None:
    """The canary is asked by nobody until it has agreed with the stable version."""
    digits(tmp_path, {1: "Identity", 2: operator})
    plan = {"steps": [{"shadow": 1.0, "least_s": 0, "least_requests": 20}], "checks": DISAGREEMENTS}
    async with models_served(tmp_path) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        await declared(client, "reader", split({"model": "digits", "version": 2}, stable="digits:1", canary=plan))

        async def has_ended() -> bool:
            for _ in range(5):
                assert await ask(client, "reader", [1, 2, 3, 4]) == [1, 2, 3, 4]
            found.update((await client.get("/v1/endpoints/reader")).json())
            return (found.get("canary") or {}).get("state") == ends

        found: dict[str, Any] = {}
        await eventually(has_ended, timeout_s=60, description=f"a canary that is {ends}")

        check = found["canary"]["checks"][1]
        assert check["canary_requests"] > 0
        assert check["canary_bad"] == (check["canary_requests"] if ends == "rolled back" else 0)
        stable = next(target for target in found["targets"] if target["role"] == "stable")
        assert stable["target"] == ("digits:1" if ends == "rolled back" else "digits:2")


async def test_a_shadow_step_of_a_model_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    accumulator(tmp_path)
    async with models_served(tmp_path) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("accumulator")
        plan = {"steps": [{"shadow": 0.5}], "checks": DISAGREEMENTS}

        reply = await client.put("/v1/endpoints/sums", json=split(stable="accumulator:1", canary=plan))

        assert (reply.status_code, "a model with sequences can't be a shadow" in reply.json()["error"]) == (400, True)


async def test_tensors_beside_the_stream_are_executed_and_removed(tmp_path: Path) -> None:
    digits(tmp_path, {1: "Identity", 2: "Neg"})
    sections = {"limits": LimitSettings(inline_max_bytes=8, wait_for_workers_s=10)}
    async with models_served(tmp_path, sections) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        await declared(client, "reader", split(shadow("digits:2"), stable="digits:1"))

        answers = await asyncio.gather(*[ask(client, "reader", [1, 2, 3, float(number)]) for number in range(10)])

        assert [answer[3] for answer in answers] == [float(number) for number in range(10)]
        found = await counted(client, "reader", compared=10)
        assert found["shadows"]["disagreed"] == 10

        async def has_nothing() -> bool:
            return not await scene.store.client.keys("*:payload:*") and await depth(scene) == 0

        await eventually(has_nothing, description="no tensors and no shadows in Redis")


async def test_a_request_without_an_answer_takes_its_shadow_along(tmp_path: Path) -> None:
    """The stable target raises: there is nothing to compare with, and nothing is left in the lane."""
    digits(tmp_path, {1: "Identity"})
    python_model(tmp_path, "raises", "        raise ValueError('no')")
    async with models_served(tmp_path) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        await scene.http.load_model("raises")
        await declared(client, "reader", split(shadow("digits:1"), stable="raises:1"))
        body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}

        for _ in range(3):
            assert (await client.post("/v2/models/reader/infer", json=body)).status_code == 500

        found = await counted(client, "reader", dropped=3)
        assert found["shadows"] == {"compared": 0, "disagreed": 0, "failed": 0, "dropped": 3}

        async def is_empty() -> bool:
            return await depth(scene, 1) == 0

        await eventually(is_empty, description="an empty shadow lane")


@pytest.mark.parametrize("broken", ["tensor_bytes", "why_no_shadow", "Differences"])
async def test_a_defect_of_shadows_is_logged_and_counted_and_nothing_to_callers(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the draw, as one is submitted, and as both answers are there."""
    where = "qinfer.submission.submit" if broken == "why_no_shadow" else "qinfer_api.endpoints.shadows"
    monkeypatch.setattr(f"{where}.{broken}", Mock(side_effect=RuntimeError("defect")))
    digits(tmp_path, {1: "Identity", 2: "Neg"})
    async with models_served(tmp_path) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        await declared(client, "reader", split(shadow("digits:2"), stable="digits:1"))

        for _ in range(3):
            assert await ask(client, "reader", [1, 2, 3, 4]) == [1, 2, 3, 4]

        found = await counted(client, "reader", dropped=3)
        assert found["shadows"] == {"compared": 0, "disagreed": 0, "failed": 0, "dropped": 3}
        assert "defect" in caplog.text
        shadows = scene.gateway.shadows
        assert (shadows.waiting, shadows._in_flight, shadows._bytes) == (0, 0, 0)


async def depth(scene: ServedModels, version: int = 2) -> int:
    """Returns how many shadows a version of the model has in Redis."""
    return (await scene.gateway._delivery.depth([shadow_lane("digits", version)]))[0]
