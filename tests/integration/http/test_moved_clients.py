"""The REST paths of TensorFlow Serving and TorchServe: the requests that their documents show, and their answers."""

import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import onnx
import pytest
import pytest_asyncio
from fastapi.routing import APIRoute
from onnx import TensorProto, helper

from tests.support.gateway import running_gateway, settings_of
from tests.support.python_models import HEADER, write_model
from tests.support.served_models import ServedModels, models_served

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

PREDICT = "/v1/models/half_plus_three:predict"
ROWS = {
    "instances": [
        {"tag": "foo", "signal": [1, 2, 3, 4, 5], "sensor": [[1, 2], [3, 4]]},
        {"tag": "bar", "signal": [3, 4, 1, 2, 5], "sensor": [[4, 5], [6, 8]]},
    ]
}
COLUMNS = {
    "inputs": {
        "tag": ["foo", "bar"],
        "signal": [[1, 2, 3, 4, 5], [3, 4, 1, 2, 5]],
        "sensor": [[[1, 2], [3, 4]], [[4, 5], [6, 8]]],
    }
}
IMAGE, OTHER = b"image bytes", b"awesome \xff image bytes"
KITTEN = bytes(range(256)) + b"\r\n--x\n"
CAT = {"class": "n02123045 tabby, tabby cat", "probability": 0.5}
CLASSIFIER = f"""{HEADER}
class TritonPythonModel:
    def execute(self, requests):
        kitten = {KITTEN!r}
        text = json.dumps({CAT!r})
        return [reply(np.array([[text if x(r).item() == kitten else "no cat"]], object)) for r in requests]
"""
MAR = HEADER + (
    """
class TritonPythonModel:
    def execute(self, requests):
        return [reply(x(request) * 2) for request in requests]
"""
)

WIDE = 100_000
IMAGES = HEADER + (
    """
class TritonPythonModel:
    def execute(self, requests):
        return [reply(x(request, "image"), "image_bytes") for request in requests]
"""
)
IMAGES_CONFIG = """
backend: "python" max_batch_size: 4
input { name: "image" data_type: TYPE_STRING dims: [ 1 ] reshape { shape: [ ] } }
output { name: "image_bytes" data_type: TYPE_STRING dims: [ 1 ] reshape { shape: [ ] } }
"""

Port = tuple[str, int, Sequence[Any]]


def put(repository: Path, name: str, nodes: Sequence[onnx.NodeProto], *ports: Sequence[Port], version: int = 1) -> None:
    """Writes an ONNX model without a configuration."""
    inputs, outputs = ([helper.make_tensor_value_info(*port) for port in side] for side in ports)
    values = ("half", 0.5), ("three", 3.0)
    constants = [helper.make_tensor(key, TensorProto.FLOAT, [], [value]) for key, value in values]
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(nodes, "g", inputs, outputs, [each for each in constants if each.name in used])
    directory = repository / name / str(version)
    directory.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, directory / "model.onnx")


def build(repository: Path) -> None:
    floats, text = TensorProto.FLOAT, TensorProto.STRING
    half = [helper.make_node("Mul", ["x", "half"], ["h"]), helper.make_node("Add", ["h", "three"], ["y"])]
    put(repository, "half_plus_three", half, [("x", floats, ["n"])], [("y", floats, ["n"])], version=123)
    put(repository, "pairs", half, [("x", floats, ["n", 1, 2])], [("y", floats, ["n", 1, 2])])
    ports: list[tuple[str, int, Sequence[Any]]] = [
        ("tag", text, ["n"]),
        ("signal", TensorProto.INT64, ["n", 5]),
        ("sensor", floats, ["n", 2, 2]),
    ]
    same = [helper.make_node("Identity", [name], [f"{name}_out"]) for name, _, _ in ports]
    put(repository, "sensors", same, ports, [(f"{name}_out", kind, dims) for name, kind, dims in ports])
    wide = [helper.make_node("Mul", ["x", "half"], ["y"])]
    put(repository, "wide", wide, [("x", floats, ["n", WIDE])], [("y", floats, ["n", WIDE])])
    (repository / "images" / "1").mkdir(parents=True)
    (repository / "images" / "1" / "model.py").write_text(IMAGES)
    (repository / "images" / "config.pbtxt").write_text(IMAGES_CONFIG)
    scalar = [helper.make_node("Mul", ["m", "k"], ["y"])]
    put(repository, "scaled", scalar, [("m", floats, [2, 2]), ("k", floats, [])], [("y", floats, [2, 2])])
    write_model(repository, CLASSIFIER, "resnet-18", datatype="STRING", dims="1")
    (repository / "resnet-18" / "2").symlink_to(repository / "resnet-18" / "1")
    write_model(repository, MAR, "doubling", dims="2")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedModels]:
    repository = tmp_path_factory.mktemp("moved")
    build(repository)
    async with models_served(repository) as scene:
        for path in repository.iterdir():
            await scene.http.load_model(path.name)
        yield scene


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: ServedModels) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.gateway.url, timeout=20) as opened:
        yield opened


async def predicted(client: httpx.AsyncClient, model: str, body: Mapping[str, Any] | bytes) -> Any:
    """Returns the body of a reply; a refusal is its status and error."""
    content = body if isinstance(body, bytes) else json.dumps(body)
    reply = await client.post(f"/v1/models/{model}:predict", content=content)
    return reply.json() if reply.status_code == 200 else (reply.status_code, reply.json()["error"])


async def test_the_example_of_tensorflow_serving(client: httpx.AsyncClient) -> None:
    body = b'{"instances": [1.0,2.0,5.0]}'

    assert await predicted(client, "half_plus_three", body) == {"predictions": [3.5, 4.0, 5.5]}
    of_version = await client.post("/v1/models/half_plus_three/versions/123:predict", content=body)
    assert of_version.json() == {"predictions": [3.5, 4.0, 5.5]}


async def test_the_status_of_tensorflow_serving(client: httpx.AsyncClient) -> None:
    status = {"error_code": "OK", "error_message": ""}
    expected = {"model_version_status": [{"version": "123", "state": "AVAILABLE", "status": status}]}

    assert (await client.get("/v1/models/half_plus_three")).json() == expected
    assert (await client.get("/v1/models/half_plus_three/versions/123")).json() == expected
    assert (await client.get("/v1/models/half_plus_three/versions/124")).status_code == 404
    assert (await client.get("/v1/models/half")).status_code == 404


async def test_the_metadata_of_tensorflow_serving(client: httpx.AsyncClient) -> None:
    about = (await client.get("/v1/models/half_plus_three/metadata")).json()

    assert about["model_spec"] == {"name": "half_plus_three", "signature_name": "", "version": "123"}
    signature = about["metadata"]["signature_def"]["signature_def"]["serving_default"]
    shape = {"dim": [{"size": "-1", "name": ""}], "unknown_rank": False}
    assert signature["inputs"] == {"x": {"dtype": "DT_FLOAT", "tensor_shape": shape, "name": "x"}}
    assert signature["method_name"] == "tensorflow/serving/predict"


async def test_rows_of_the_only_input_are_nested_lists(client: httpx.AsyncClient) -> None:
    found = await predicted(client, "pairs", {"instances": [[[1, 2]], [[3, 4]]]})

    assert found == {"predictions": [[[3.5, 4.0]], [[4.5, 5.0]]]}


async def test_rows_with_names(client: httpx.AsyncClient) -> None:
    expected = [{f"{name}_out": value for name, value in row.items()} for row in ROWS["instances"]]

    assert await predicted(client, "sensors", ROWS) == {"predictions": expected}


async def test_columns(client: httpx.AsyncClient) -> None:
    expected = {f"{name}_out": value for name, value in COLUMNS["inputs"].items()}

    assert await predicted(client, "sensors", COLUMNS) == {"outputs": expected}
    assert await predicted(client, "half_plus_three", {"inputs": [1.0, 2.0]}) == {"outputs": [3.5, 4.0]}
    assert await predicted(client, "half_plus_three", {"inputs": {"x": [1.0]}}) == {"outputs": [3.5]}


async def test_shapes_without_rows_are_columns(client: httpx.AsyncClient) -> None:
    found = await predicted(client, "scaled", {"inputs": {"m": [[1, 2], [3, 4]], "k": 2}})

    assert found == {"outputs": [[2.0, 4.0], [6.0, 8.0]]}


async def test_bytes_are_base64_in_an_object(client: httpx.AsyncClient) -> None:
    coded = [{"b64": base64.b64encode(image).decode()} for image in (IMAGE, OTHER)]

    assert await predicted(client, "images", {"instances": coded}) == {"predictions": coded}
    named = [{"image": each} for each in coded]
    assert await predicted(client, "images", {"instances": named}) == {"predictions": coded}
    assert await predicted(client, "images", {"inputs": {"image": ["text", coded[1]]}}) == {
        "outputs": [{"b64": base64.b64encode(b"text").decode()}, coded[1]]
    }


async def test_numbers_may_be_nan_and_infinite(client: httpx.AsyncClient) -> None:
    reply = await client.post(PREDICT, content=b'{"instances": [NaN, Infinity, -Infinity]}')

    assert reply.text == '{"predictions":[NaN,Infinity,-Infinity]}'


async def test_large_bodies_are_decoded_in_pieces(client: httpx.AsyncClient) -> None:
    wide = [[float(n)] * WIDE for n in (2, 4)]
    halves = [[float(n)] * WIDE for n in (1, 2)]
    image = {"b64": base64.b64encode(b"i" * 2**21).decode()}

    assert await predicted(client, "wide", {"instances": wide}) == {"predictions": halves}
    assert await predicted(client, "wide", {"instances": [{"x": row} for row in wide]}) == {"predictions": halves}
    assert await predicted(client, "wide", {"inputs": {"x": wide}}) == {"outputs": halves}
    assert await predicted(client, "images", {"instances": [image]}) == {"predictions": [image]}


@pytest.mark.parametrize(
    ("model", "body", "status", "told"),
    [
        ("half", {"instances": [1.0, 5.0]}, 404, "unknown model: 'half'"),
        ("half_plus_three", {"signature_name": "regress", "instances": [1]}, 400, "serves 'serving_default'"),
        ("half_plus_three", {"instances": [1], "inputs": [1]}, 400, "either 'instances' (rows) or 'inputs' (columns)"),
        ("half_plus_three", {"instances": 1.0}, 400, "'instances' must be a list of rows"),
        ("half_plus_three", {"instances": []}, 400, "input 'x' is empty"),
        ("half_plus_three", {"instances": ["one"]}, 400, "input 'x' of model 'half_plus_three' is FP32"),
        ("half_plus_three", {"instances": [{"b64": "AA=="}]}, 400, "for strings only"),
        ("half_plus_three", {"inputs": {"z": [1]}}, 400, "unknown input 'z'; model 'half_plus_three' takes x"),
        ("pairs", {"instances": [[1, 2]]}, 400, "has shape [-1, 1, 2], got [1, 2]"),
        ("sensors", {"instances": [1.0]}, 400, "several inputs; name them: tag, signal, sensor"),
        ("sensors", {"inputs": {"tag": ["a"]}}, 400, "input 'signal' is missing"),
        ("sensors", {"instances": [ROWS["instances"][0], {"tag": "a"}]}, 400, "with the same members"),
        ("images", {"instances": [{"b64": "%"}]}, 400, "'b64' is not base64"),
    ],
)
async def test_refusals_name_value_and_remedy(
    client: httpx.AsyncClient, model: str, body: Mapping[str, Any], status: int, told: str
) -> None:
    found = await predicted(client, model, body)

    assert found[0] == status
    assert told in found[1]


async def test_torchserve_takes_the_body_as_it_is(client: httpx.AsyncClient) -> None:
    """`curl -T kitten.jpg` sends PUT, without a content type."""
    for path in ("/predictions/resnet-18", "/predictions/resnet-18/2.0", "/predictions/resnet-18/2"):
        reply = await client.put(path, content=KITTEN)

        assert (reply.status_code, reply.json()) == (200, CAT)
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"


async def test_torchserve_takes_a_form(client: httpx.AsyncClient) -> None:
    """`curl -F "data=@kitten.jpg"`."""
    reply = await client.post("/predictions/resnet-18", files={"data": ("kitten.jpg", KITTEN, "image/jpeg")})

    assert reply.json() == CAT
    twice = [("data", ("a", KITTEN)), ("data", ("b", KITTEN))]
    refused = await client.post("/predictions/resnet-18", files=twice)
    assert (refused.status_code, refused.json()["error"][:26]) == (400, "field 'data' is given twic")


async def test_torchserve_takes_json(client: httpx.AsyncClient) -> None:
    for content in (b"[1.5, 2]", b'{"x": [1.5, 2]}'):
        reply = await client.post("/predictions/doubling", content=content)

        assert (reply.status_code, reply.json()) == (200, [3.0, 4.0])
    form = await client.post("/predictions/doubling", data={"x": "[1, 2]"})
    assert form.json() == [2.0, 4.0]
    wrong = await client.post("/predictions/doubling", data={"y": "[1, 2]"})
    assert (wrong.status_code, wrong.json()["error"]) == (
        400,
        "unknown field 'y'; model 'doubling' takes data, body, x",
    )


async def test_a_form_that_is_cut_off_is_refused(client: httpx.AsyncClient) -> None:
    kind = {"content-type": "multipart/form-data; boundary=x"}
    whole = b'--x\r\ncontent-disposition: form-data; name="data"\r\n\r\nabc\r\n--x--\r\n'

    replies = [await client.post("/predictions/resnet-18", content=text, headers=kind) for text in (whole, whole[:-9])]

    assert [reply.status_code for reply in replies] == [200, 400]
    assert "the form is cut off" in replies[1].json()["error"]


async def test_ping(client: httpx.AsyncClient) -> None:
    reply = await client.get("/ping")

    assert (reply.status_code, reply.json()) == (200, {"status": "Healthy"})


async def test_ping_says_that_no_model_is_ready() -> None:
    strict = settings_of(repository={"strict_readiness": True})
    async with running_gateway(strict) as running, httpx.AsyncClient(base_url=running.url) as client:
        reply = await client.get("/ping")

    assert (reply.status_code, reply.json()) == (500, {"status": "Unhealthy"})


async def test_plain_requests_meet_none_of_these_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small `infer` request meets no route at all; others are compared with those of qinfer and Triton first."""
    compared: list[str] = []
    matches = APIRoute.matches

    def noted(route: APIRoute, scope: Any) -> Any:
        compared.append(route.path)
        return matches(route, scope)

    monkeypatch.setattr(APIRoute, "matches", noted)
    body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
    async with running_gateway() as running, httpx.AsyncClient(base_url=running.url) as client:
        plain = await client.post("/v2/models/echo/infer", json=body)
        after_plain = list(compared)
        stored = await client.post("/v1/models/echo/requests", json=body)
        loads = await client.get("/v2/models/echo/config")
        after_own = list(compared)
        await client.get("/ping")

    assert [plain.status_code, stored.status_code, loads.status_code] == [200, 202, 200]
    assert after_plain == []
    assert "/v2/models/{model}/infer" in after_own
    assert not [path for path in after_own if path.endswith(":predict") or path == "/ping"]
    assert "/v1/models/{model}:predict" in compared
