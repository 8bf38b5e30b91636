"""The client's calls about models, and inputs that are lists: what is sent, and what comes back."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import qinfer
from qinfer import errors
from tests.support.scripted_gateway import Server, X, answer, reply

METADATA = reply(
    200,
    name="m",
    versions=["1"],
    inputs=[
        {"name": "x", "datatype": "FP32", "shape": [-1, 2]},
        {"name": "half", "datatype": "BF16", "shape": [-1, 1]},
        {"name": "text", "datatype": "BYTES", "shape": [1]},
    ],
    outputs=[],
)
OTHERS = reply(200, name="m", versions=["1"], inputs=[{"name": "x", "datatype": "INT64", "shape": [-1, 2]}])


def sent(server: Server, index: int = -1) -> list[dict[str, Any]]:
    request = server.requests[index]
    header = json.loads(request.content[: int(request.headers["Inference-Header-Content-Length"])])
    inputs: list[dict[str, Any]] = header["inputs"]
    return inputs


def test_lists_get_the_datatypes_of_the_model() -> None:
    """They are read once; arrays keep their own."""
    server = Server(METADATA, answer())
    client = server.client()

    client.infer("m", {"x": [[1, 2]], "half": [[0.5]], "text": "grüße"})
    client.infer("m", {"x": ((1.0, 2.0),)})

    assert server.paths == ["GET /v2/models/m", *["POST /v2/models/m/infer"] * 2]
    assert [(i["name"], i["datatype"], i["shape"]) for i in sent(server, 1)] == [
        ("x", "FP32", [1, 2]),
        ("half", "BF16", [1, 1]),
        ("text", "BYTES", []),
    ]
    assert server.requests[1].content.endswith("grüße".encode())


def test_arrays_need_no_metadata() -> None:
    server = Server(answer())

    server.client().infer("m", {"x": X})

    assert server.paths == ["POST /v2/models/m/infer"]


def test_datatypes_are_read_again_after_a_refusal() -> None:
    """The model was loaded with others meanwhile."""
    server = Server(METADATA, reply(400, error="unexpected datatype"), OTHERS, answer())
    client = server.client()

    with pytest.raises(errors.InvalidRequest, match="unexpected datatype"):
        client.infer("m", {"x": [[1, 2]]})
    client.infer("m", {"x": [[1, 2]]})

    assert [i["datatype"] for i in sent(server)] == ["INT64"]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"z": [1]}, "has no input 'z'; its inputs are: x, half, text"),
        ({"x": [[1], [2, 3]]}, "input 'x' can't be read as FP32"),
        ({"x": [["a"]]}, "its elements are not numbers"),
        ({"text": [True]}, "instead of a text"),
    ],
)
def test_lists_that_do_not_fit(inputs: dict[str, Any], said: str) -> None:
    server = Server(METADATA)

    with pytest.raises(errors.InvalidRequest, match=said):
        server.client().infer("m", inputs)

    assert server.paths == ["GET /v2/models/m"]


def test_a_sequence_takes_lists_too() -> None:
    server = Server(METADATA, answer())
    sequence = server.client().sequence("m")

    sequence.infer({"x": [[1.0, 2.0]]})
    sequence.infer({"x": [[1.0, 2.0]]}, end=True)

    assert server.paths[0] == "GET /v2/models/m"
    assert [i["datatype"] for i in sent(server)] == ["FP32"]


def test_generate_takes_and_returns_plain_values() -> None:
    server = Server(reply(200, model_name="m", model_version="1", y=[1.0, 2.0]))

    found = server.client().generate(
        "m", {"x": np.array([1.0, 2.0]), "n": np.int64(3), "text": "é"}, parameters={"top": 2}, id="7", version=1
    )

    assert found == {"model_name": "m", "model_version": "1", "y": [1.0, 2.0]}
    assert server.paths == ["POST /v2/models/m/versions/1/generate"]
    assert json.loads(server.requests[0].content) == {
        "x": [1.0, 2.0],
        "n": 3,
        "text": "é",
        "parameters": {"top": 2},
        "id": "7",
    }


@pytest.mark.parametrize("inputs", [[1], {"x": object()}, {"x": "\ud800"}])
def test_what_generate_can_not_send(inputs: Any) -> None:
    server = Server(reply(200))

    with pytest.raises(errors.InvalidRequest):
        server.client().generate("m", inputs)

    assert server.requests == []


def test_index() -> None:
    entries = [{"name": "a", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}, {"name": "b"}]
    server = Server(reply(200).__class__(200, json=entries))

    found = server.client().index(ready=True)

    assert [(e.name, e.version, e.state, e.reason) for e in found] == [
        ("a", "1", "UNAVAILABLE", "unloaded"),
        ("b", "", "", ""),
    ]
    assert json.loads(server.requests[0].content) == {"ready": True}


def test_statistics() -> None:
    entry = {"name": "m", "version": "2", "last_inference": 5, "inference_count": 8, "execution_count": 2}
    server = Server(reply(200, model_stats=[entry | {"inference_stats": {"success": {"count": 8, "ns": 1}}}]))
    client = server.client()

    (found,) = client.statistics("m", 2)
    client.statistics()

    assert server.paths == ["GET /v2/models/m/versions/2/stats", "GET /v2/models/stats"]
    assert (found.name, found.version, found.inference_count, found.execution_count) == ("m", "2", 8, 2)
    assert found.fields["inference_stats"]["success"]["count"] == 8


def test_a_load_with_a_configuration_and_files() -> None:
    server = Server(reply(200))

    server.client().load("m", config={"max_batch_size": 4}, files={"1/model.onnx": b"\x00\xff"})
    server.client().load("m")
    server.client().unload("m", unload_dependents=True)

    bodies = [json.loads(request.content) for request in server.requests]
    assert server.paths == [f"POST /v2/repository/models/m/{what}" for what in ("load", "load", "unload")]
    assert bodies[0] == {"parameters": {"config": '{"max_batch_size":4}', "file:1/model.onnx": "AP8="}}
    assert bodies[1:] == [{"parameters": {}}, {"parameters": {"unload_dependents": True}}]


def test_a_file_that_is_a_path_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="make it bytes"):
        Server(reply(200)).client().load("m", config="{}", files={"1/model.onnx": "model.onnx"})  # type: ignore[dict-item]


def test_the_package_lists_all_that_it_has() -> None:
    """A notebook's completion lists the names before any is used."""
    source = "import qinfer; print(*dir(qinfer)); qinfer.errors.Overloaded, qinfer.tensors.from_numpy"

    shown = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout

    assert {*qinfer.__all__, "errors", "tensors"} <= set(shown.split())
    assert all(hasattr(qinfer, name) for name in dir(qinfer))
