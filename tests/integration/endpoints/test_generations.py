"""Endpoints whose targets are one version with two configurations: `digits`, and `quick` for the files of `digits`."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from onnx import helper
from typer.testing import CliRunner

from qinfer.cli.main import app
from qinfer.testing import eventually
from tests.support.endpoints import canary, shadow, split
from tests.support.models import write
from tests.support.python_models import HEADER
from tests.support.served_models import ServedModels, models_served

FILES_OF = 'parameters { key: "qinfer.files_of" value { string_value: "digits" } }'
OVERRIDE = {"parameters": {"qinfer.files_of": {"string_value": "digits"}}}
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
QUICK = "quick:3"


def digits(repository: Path, operator: str = "Neg") -> None:
    """Writes version 3 of `digits`."""
    nodes = [helper.make_node(operator, ["x"], ["y"])]
    write(repository, "digits", nodes, [("x", "FP32", (4,))], [("y", "FP32", (4,))], version=3)


@asynccontextmanager
async def served(repository: Path, config: str = FILES_OF, **sections: Any) -> AsyncIterator[tuple[Any, ServedModels]]:
    """Serves `digits` and `quick`; yields an HTTP client and the scene."""
    digits(repository)
    (repository / "quick").mkdir()
    (repository / "quick" / "config.pbtxt").write_text(config)
    async with models_served(repository, sections) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        await scene.http.load_model("quick")
        yield client, scene


async def declared(client: httpx.AsyncClient, declaration: dict[str, Any]) -> None:
    reply = await client.put("/v1/endpoints/reader", json=declaration)
    assert reply.status_code == 200, reply.text


async def ask(client: httpx.AsyncClient, path: str = "/v2/models/reader") -> tuple[str, str, str, list[float]]:
    """Returns who answered, and what: model, version, target, output."""
    reply = await client.post(f"{path}/infer", json=BODY)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    target = reply.headers.get("qinfer-target", "")
    return found["model_name"], found["model_version"], target, found["outputs"][0]["data"]


async def executions(client: httpx.AsyncClient, model: str) -> int:
    reply = await client.get(f"/v2/models/{model}/versions/3/stats")
    count: int = reply.json()["model_stats"][0]["inference_count"]
    return count


async def test_another_configuration_answers_a_share(tmp_path: Path) -> None:
    async with served(tmp_path, f"max_batch_size: 2 {FILES_OF}") as (client, _):
        await declared(client, split(canary(0.5, QUICK), stable="digits:3"))

        answers = [await ask(client) for _ in range(40)]

        expected = [-1.0, -2.0, -3.0, -4.0]
        assert {answer[2] for answer in answers} == {"digits:3", QUICK}
        assert {(name, version) for name, version, *_ in answers} == {("reader", "3")}
        assert all(answer[3] == expected for answer in answers)
        config = (await client.get("/v2/models/quick/config")).json()
        assert (config["max_batch_size"], config["parameters"]["qinfer.files_of"]["string_value"]) == (2, "digits")
        shown = (await client.get("/v1/endpoints/reader")).json()
        assert [target["target"] for target in shown["targets"]] == ["digits:3", QUICK]
        assert not shown["problems"]


async def test_another_configuration_is_a_shadow(tmp_path: Path) -> None:
    async with served(tmp_path) as (client, _):
        await declared(client, split(shadow(QUICK), stable="digits:3"))

        for _ in range(5):
            assert (await ask(client))[2] == "digits:3"

        async def are_compared() -> bool:
            found.update((await client.get("/v1/endpoints/reader/differences")).json()["targets"][0])
            return bool(found["shadows"].get("compared", 0) == 5)

        found: dict[str, Any] = {}
        await eventually(are_compared, description="five shadows that were compared")
        assert await executions(client, "quick") == 5


async def test_a_load_request_is_all_that_it_takes(tmp_path: Path) -> None:
    """No directory and no file: the configuration comes with the request, and lasts as loads do."""
    digits(tmp_path)
    async with models_served(tmp_path) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        await scene.http.load_model("digits")
        await scene.http.load_model("quick", config=json.dumps({**OVERRIDE, "max_batch_size": 2}))
        await declared(client, split(canary(1, QUICK), stable="digits:3"))
        assert (await ask(client))[2] == QUICK

        shutil.rmtree(tmp_path / "digits" / "3")
        digits(tmp_path, "Identity")
        await scene.http.load_model("quick")

        async def has_new_files() -> bool:
            return (await ask(client))[3] == [1.0, 2.0, 3.0, 4.0]

        await eventually(has_new_files, description="an answer by the new files")
        assert (await ask(client, "/v2/models/digits"))[3] == [-1.0, -2.0, -3.0, -4.0]


SCALES = (
    HEADER
    + """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(8)
        return config

    def initialize(self, args):
        self.factor = float(json.loads(args["model_config"])["parameters"]["factor"]["string_value"])

    def execute(self, requests):
        if not self.factor:
            raise ValueError("the factor is 0")
        return [reply(x(request) * np.float32(self.factor)) for request in requests]
"""
)


@asynccontextmanager
async def scaled(repository: Path, factor: int) -> AsyncIterator[httpx.AsyncClient]:
    """Serves one Python model with two factors: 2 as `digits`, another one as `quick`."""
    (repository / "digits" / "3").mkdir(parents=True)
    (repository / "digits" / "3" / "model.py").write_text(SCALES)
    async with models_served(repository) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        for name, more, by in (("digits", {}, 2), ("quick", OVERRIDE["parameters"], factor)):
            parameters = {**more, "factor": {"string_value": str(by)}}
            await scene.http.load_model(name, config=json.dumps({"backend": "python", "parameters": parameters}))
        yield client


async def test_a_python_model_is_told_its_own_parameters(tmp_path: Path) -> None:
    """Also where it completes its configuration itself, which a worker has it do."""
    async with scaled(tmp_path, 3) as client:
        await declared(client, split(canary(0.5, QUICK), stable="digits:3"))

        answers = [await ask(client) for _ in range(30)]

        assert {(target, *outputs) for *_, target, outputs in answers} == {
            ("digits:3", 2.0, 4.0, 6.0, 8.0),
            (QUICK, 3.0, 6.0, 9.0, 12.0),
        }


SHADOW = {"shadow": 1.0, "least_s": 0, "least_requests": 5}
HALF = {"weight": 0.5, "least_s": 0, "least_requests": 20}
CHECKS = [{"of": "errors"}, {"of": "disagreements", "allowed": 0.01}]


@pytest.mark.parametrize(
    ("factor", "steps", "ends", "answered_by"),
    [
        (2, [SHADOW, HALF], "promoted", {"digits:3", QUICK}),
        (-1, [SHADOW | {"least_requests": 1000}, HALF], "rolled back", {"digits:3"}),
        (0, [HALF], "rolled back", {"digits:3"}),
    ],
    ids=["good", "wrong", "failing"],
)
async def test_another_configuration_proves_itself(
    tmp_path: Path, factor: int, steps: list[Any], ends: str, answered_by: set[str]
) -> None:
    """One as good becomes the stable target; one that answers otherwise, or fails, is rolled back."""
    plan, target = {"steps": steps, "checks": CHECKS}, {"model": "quick", "version": 3}
    async with scaled(tmp_path, factor) as client:
        await declared(client, split(target, stable="digits:3", canary=plan))

        async def has_ended() -> bool:
            for _ in range(5):
                reply = await client.post("/v2/models/reader/infer", json=BODY)
                if reply.status_code == 200:
                    answered.add(reply.headers["qinfer-target"])
            found.update((await client.get("/v1/endpoints/reader")).json())
            return bool(found["canary"] and found["canary"]["state"] == ends)

        answered: set[str] = set()
        found: dict[str, Any] = {}
        await eventually(has_ended, timeout_s=60, description=f"a canary that is {ends}")

        trial, stable = found["canary"], found["targets"][0]
        assert (trial["model"], trial["version"], answered) == ("quick", 3, answered_by)
        assert stable["target"] == (QUICK if ends == "promoted" else "digits:3")
        assert (await ask(client))[:3] == ("reader", "3", stable["target"])
        arguments = ["endpoints", "show", "reader", "--url", str(client.base_url)]
        shown = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert f"Canary: {QUICK}, {ends}" in shown.stdout


async def test_a_load_request_for_files_that_are_not_there_is_refused(tmp_path: Path) -> None:
    async with models_served(tmp_path) as scene, httpx.AsyncClient(base_url=scene.gateway.url) as client:
        (tmp_path / "other").mkdir()
        body = {"parameters": {"config": json.dumps(OVERRIDE)}}

        reply = await client.post("/v2/repository/models/quick/load", json=body)

        assert reply.status_code == 500
        assert "qinfer.files_of names 'digits': no model repository has a model of that name" in reply.json()["error"]
        assert not await scene.store.desired()
