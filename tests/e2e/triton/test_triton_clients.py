"""Triton's four clients, unchanged, against one whole server in mode `explicit`: what they all can, asked of each."""

import base64
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm

from qinfer.testing import eventually
from tests.e2e.conftest import Stack, running
from tests.e2e.triton.test_tritonclient_http import SAMPLES, plain
from tests.e2e.triton_clients import KINDS, Array, TritonClient, connected, log_settings, texts, trace_settings
from tests.support import models, python_models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings(
        "ignore:Unclosed connection:ResourceWarning"
    ),  # http.aio's, after a refused `is_…_ready`
]

LABELS = ("cat", "dog", "bird", "fish")
TELL = python_models.execute(
    """answers = []
for request in requests:
    told = json.loads(request.parameters())
    answers.append(reply(x(request), parameters={"told_" + name: value for name, value in told.items()}))
return answers"""
)
A, B = np.arange(4, dtype=np.float32).reshape(1, 4), np.full((1, 4), 0.5, np.float32)
ROWS = np.zeros((models.MAX_BATCH_SIZE + 1, 4), np.float32)
INVALID, UNKNOWN = "INVALID_ARGUMENT", "Request for unknown model:"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for datatype in models.ELEMENT_TYPES:
        models.identity(path, datatype)
    models.add_sub(path)
    for name in ("counted", "never", *(f"late_{kind}" for kind in KINDS)):
        models.add_sub(path, name)
    models.add_sub(path, "labelled")
    config = path / "labelled" / "config.pbtxt"
    labelled = 'name: "sum" label_filename: "labels.txt"'
    config.write_text(config.read_text().replace('name: "sum"', labelled))
    (path / "labelled" / "labels.txt").write_text("\n".join(LABELS))
    python_models.write_model(path, TELL, "tell")
    return path


@pytest.fixture(scope="module")
def stack(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    at_start = [path.name for path in repository.iterdir() if not path.name.startswith(("late_", "never"))]
    settings = {
        "QINFER_REPOSITORY__CONTROL_MODE": "explicit",
        "QINFER_REPOSITORY__LOAD_MODELS": json.dumps(sorted(at_start)),
        "QINFER_ALLOW_CLIENT_SHM": "true",
    }
    with running(repository, tmp_path_factory.mktemp("up"), **settings) as stack:
        yield stack


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest, stack: Stack) -> AsyncIterator[TritonClient]:
    async with connected(request.param, stack) as one:
        yield one


async def test_what_the_server_says_about_itself(client: TritonClient) -> None:
    """Health, metadata and configuration."""
    assert await client.call("is_server_live")
    assert await client.call("is_server_ready")
    assert await client.call("is_model_ready", "add_sub")
    assert await client.call("is_model_ready", "add_sub", "1")

    server, model = await client.ask("get_server_metadata"), await client.ask("get_model_metadata", "add_sub")
    config = await client.ask("get_model_config", "add_sub")

    assert server["name"] == "triton"
    assert {"binary_tensor_data", "statistics", "model_repository", "system_shared_memory"} <= set(server["extensions"])
    assert (model["platform"], model["versions"]) == ("onnxruntime_onnx", ["1"])
    assert [int(size) for size in model["inputs"][0]["shape"]] == [-1, 4]
    assert [output["name"] for output in model["outputs"]] == ["sum", "difference"]
    config = config if client.is_http else config["config"]
    assert (config["max_batch_size"], config["backend"]) == (models.MAX_BATCH_SIZE, "onnxruntime")
    assert config["dynamic_batching"]["preferred_batch_size"] == [models.MAX_BATCH_SIZE]


async def test_an_unknown_model_is_not_ready(client: TritonClient) -> None:
    """To HTTP's clients that is `False`, to gRPC's an error."""
    if client.is_http:
        assert not await client.call("is_model_ready", "nothing")
        return
    code, text = await client.refusal("is_model_ready", "nothing")
    assert (code, text) == ("NOT_FOUND", "Request for unknown model: 'nothing' is not found")


async def test_every_datatype_comes_back(client: TritonClient) -> None:
    """As raw bytes, each to its own model."""
    for datatype, sample in SAMPLES.items():
        inputs = [client.input("x", sample, datatype)]
        result = await client.call("infer", f"identity_{datatype.lower()}", inputs)
        assert plain(result.as_numpy("y")) == plain(sample), datatype


async def test_the_request_id_comes_back(client: TritonClient) -> None:
    """And none where there was none."""
    assert (await client.infer("add_sub", {"a": A, "b": B}, request_id="mine")).id == "mine"
    assert (await client.infer("add_sub", {"a": A, "b": B})).id == ""


async def test_classes_instead_of_values(client: TritonClient) -> None:
    """The best ones of each row, with their labels; the index alone for an output without labels."""
    rows = np.array([[0.0, 3.0, 1.0, 2.0], [9.0, 1.0, 1.5, -4.0]], np.float32)
    outputs = [client.output("sum", class_count=3), client.output("difference", class_count=1)]

    answer = await client.infer("labelled", {"a": rows, "b": np.zeros_like(rows)}, outputs=outputs)

    assert answer.array("sum").shape == (2, 3)
    assert texts(answer.array("sum")) == [
        *("3.000000:1:dog", "2.000000:3:fish", "1.000000:2:bird"),
        *("9.000000:0:cat", "1.500000:2:bird", "1.000000:1:dog"),
    ]
    assert texts(answer.array("difference")) == ["3.000000:1", "9.000000:0"]


async def test_parameters_reach_the_model_and_come_back(client: TritonClient) -> None:
    """Text, whole numbers and truth values, with those that the schedule policy knows; others' names are reserved."""
    told = {"text": "grüße", "whole": 7, "yes": True}

    answer = await client.infer("tell", {"x": A}, parameters=told, priority=1, timeout=5_000_000)

    assert {name: answer.parameters.get(f"told_{name}") for name in told} == told
    assert answer.array("y").tolist() == A.tolist()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
async def test_compressed_calls(client: TritonClient, algorithm: str) -> None:
    """Both ways."""
    sent = {"compression_algorithm": algorithm}
    if client.is_http:
        sent = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}

    answer = await client.infer("add_sub", {"a": A, "b": B}, **sent)

    assert answer.array("sum").tolist() == (A + B).tolist()


@pytest.mark.parametrize(
    ("arrays", "options", "code", "text"),
    [
        ({"a": ROWS, "b": ROWS}, {}, INVALID, "inference request batch-size must be <= 8 for 'add_sub'"),
        ({"a": A, "b": ROWS[:2]}, {}, INVALID, "batch size does not match other inputs for 'add_sub'"),
        ({"a": A, "b": B}, {"model_version": "9"}, "NOT_FOUND", f"{UNKNOWN} 'add_sub' version 9 is not found"),
        ({"a": A, "b": B}, {"model_version": "x"}, INVALID, "failed to get model version from specified version"),
        ({"a": A.astype(np.int32), "b": B}, {}, INVALID, "'INT32', but model 'add_sub' expects 'FP32'"),
        ({"a": A[:, :3], "b": B}, {}, INVALID, "unexpected shape for input 'a' for model 'add_sub'. Expected [-1,4]"),
        ({"a": A}, {}, INVALID, "expected 2 inputs but got 1 inputs for model 'add_sub'"),
        ({"a": A, "c": B}, {}, INVALID, "unexpected inference input 'c' for model 'add_sub'"),
        ({"a": A, "b": B}, {"outputs": ["z"]}, INVALID, "unexpected inference output 'z' for model 'add_sub'"),
        ({"a": A, "b": B}, {"model": "nothing"}, "NOT_FOUND", f"{UNKNOWN} 'nothing' is not found"),
        ({"a": A, "b": B}, {"model": "never"}, "NOT_FOUND", f"{UNKNOWN} 'never' is not found"),
    ],
)
async def test_what_is_refused(
    client: TritonClient, arrays: dict[str, Array], options: dict[str, Any], code: str, text: str
) -> None:
    """With Triton's status and text; the connection is as good as before."""
    model = options.get("model", "add_sub")
    options = {name: value for name, value in options.items() if name != "model"}
    if "outputs" in options:
        options["outputs"] = [client.output(name) for name in options["outputs"]]
    inputs = [client.input(name, array) for name, array in arrays.items()]

    refusal = await client.refusal("infer", model, inputs, **options)

    assert refusal[0] == code, refusal
    assert text in refusal[1]
    assert (await client.infer("add_sub", {"a": A, "b": B})).array("sum").tolist() == (A + B).tolist()


async def test_statistics_count_what_was_asked(client: TritonClient) -> None:
    """Requests and rows; the three compute counts are those of the requests."""

    async def statistics() -> dict[str, Any]:
        (one,) = (await client.ask("get_inference_statistics", "counted", "1"))["model_stats"]
        return dict(one)

    def counts(of: dict[str, Any]) -> tuple[int, int]:
        success = of.get("inference_stats", {}).get("success", {})
        return int(success.get("count", 0)), int(of.get("inference_count", 0))

    after = before = await statistics()
    requests, rows = counts(before)
    await client.infer("counted", {"a": ROWS[:3], "b": ROWS[:3]})

    async def grown() -> bool:
        nonlocal after
        after = await statistics()
        return counts(after) == (requests + 1, rows + 3)

    await eventually(grown, 20.0, "the statistics")
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    assert {int(after["inference_stats"][part]["count"]) for part in parts} == {requests + 1}
    code, text = await client.refusal("get_inference_statistics", "nothing")
    assert (code, text) == ("INVALID_ARGUMENT", "requested model 'nothing' is not available")


async def test_the_life_of_a_model(client: TritonClient, repository: Path) -> None:
    """Loaded, loaded anew with another configuration, then with other files, and unloaded."""
    model = f"late_{client.kind}"

    async def index(**options: Any) -> list[dict[str, Any]]:
        found = await client.ask("get_model_repository_index", **options)
        return list(found if client.is_http else found["models"])

    async def total() -> list[float]:
        return list((await client.infer(model, {"a": A, "b": B})).array("sum")[0].tolist())

    assert {"name": model} in await index()
    await client.call("load_model", model)
    assert await client.call("is_model_ready", model)
    assert {"name": model, "version": "1", "state": "READY"} in await index()
    assert await total() == (A + B)[0].tolist()

    await client.call("load_model", model, config='{"max_batch_size": "16"}')
    changed = await client.ask("get_model_config", model)
    assert (changed if client.is_http else changed["config"])["max_batch_size"] == 16

    other = (repository / "identity_fp32" / "1" / "model.onnx").read_bytes()
    port = {"data_type": "TYPE_FP32", "dims": [-1]}
    config = {"backend": "onnxruntime", "input": [{"name": "x", **port}], "output": [{"name": "y", **port}]}
    override = json.dumps(config | {"max_batch_size": 4})
    await client.call("load_model", model, config=override, files={"file:1/model.onnx": other})
    assert (await client.infer(model, {"x": A})).array("y").tolist() == A.tolist()

    refusal = await client.refusal("load_model", model, config=override, files={"file:1/model.onnx": b"nothing"})
    assert refusal[0] == "INTERNAL"
    assert f"failed to load '{model}'" in refusal[1]
    assert (await client.infer(model, {"x": A})).array("y").tolist() == A.tolist()

    await client.call("unload_model", model)
    code, text = await client.refusal("infer", model, [client.input("x", A)])
    assert (code, text) == ("NOT_FOUND", f"Request for unknown model: '{model}' has no available versions")
    unloaded = {"name": model, "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}

    async def is_told() -> bool:
        return unloaded in await index()

    await eventually(is_told, 20.0, "the index says unloaded")
    assert not await client.call("is_model_ready", model)


async def test_models_that_can_not_be_loaded(client: TritonClient) -> None:
    """Triton's texts; to unload what nobody knows is no error."""
    code, text = await client.refusal("load_model", "nobody")
    assert (code, text) == ("INTERNAL", "failed to load 'nobody', failed to poll from model repository")
    code, text = await client.refusal("load_model", "add_sub", config="{")
    assert code == "INTERNAL"
    assert text.startswith("failed to load 'add_sub', failed to poll from model repository")
    code, text = await client.refusal("load_model", "add_sub", config="{}", files={"file:1/" + "A" * 256: b"a"})
    assert (code, text.startswith("Invalid file path: 'file:1/AAA")) == ("INTERNAL", True), text
    await client.call("unload_model", "nobody")
    assert await client.call("is_model_ready", "add_sub")


async def test_log_settings(client: TritonClient) -> None:
    """They change and come back; a file is refused."""
    changed = {"log_verbose_level": 1, "log_format": "ISO8601"}
    before = log_settings(await client.ask("get_log_settings"))
    after = log_settings(await client.ask("update_log_settings", changed))
    restored = {name: before[name] for name in changed}

    assert after == before | changed
    assert log_settings(await client.ask("update_log_settings", restored)) == before
    assert (await client.refusal("update_log_settings", {"log_file": "x.log"}))[0] == "UNIMPLEMENTED"


async def test_trace_settings(client: TritonClient) -> None:
    """A model's own, and back to the server's."""
    server = await client.ask("get_trace_settings")
    own = {"trace_count": "9", "trace_rate": "7"}

    await client.call("update_trace_settings", "add_sub", own)
    changed = await client.ask("get_trace_settings", "add_sub")
    assert trace_settings(changed) == trace_settings(server) | own
    assert await client.ask("get_trace_settings") == server

    await client.call("update_trace_settings", "add_sub", dict.fromkeys(own))
    assert await client.ask("get_trace_settings", "add_sub") == server
    code, text = await client.refusal("update_trace_settings", None, {"trace_file": "x"})
    assert (code, text) == ("UNIMPLEMENTED", "trace file location can not be updated through network protocol")


async def test_tensors_in_shared_memory(client: TritonClient) -> None:
    """Both inputs are read there and an output is written there, with the client's own helpers."""
    name = f"region_{uuid4().hex}"
    handle = shm.create_shared_memory_region(name, f"/{name}", 3 * A.nbytes)
    try:
        shm.set_shared_memory_region(handle, [A, B])
        await client.call("register_system_shared_memory", name, f"/{name}", 3 * A.nbytes)
        assert name in str(await client.ask("get_system_shared_memory_status"))
        inputs = [client.module.InferInput(one, [1, 4], "FP32") for one in "ab"]
        for number, one in enumerate(inputs):
            one.set_shared_memory(name, A.nbytes, offset=number * A.nbytes)
        total = client.output("sum")
        total.set_shared_memory(name, A.nbytes, offset=2 * A.nbytes)

        result = await client.call("infer", "add_sub", inputs, outputs=[total, client.output("difference")])

        written = shm.get_contents_as_numpy(handle, np.float32, [1, 4], offset=2 * A.nbytes)
        assert written.tolist() == (A + B).tolist()
        assert result.as_numpy("difference").tolist() == (A - B).tolist()
        code, text = await client.refusal("register_system_shared_memory", name, f"/{name}", 3 * A.nbytes)
        assert (code, text) == ("ALREADY_EXISTS" if not client.is_http else "INVALID_ARGUMENT", text)
        assert text == f"shared memory region '{name}' already in manager"
        await client.call("unregister_system_shared_memory", name)
        assert name not in str(await client.ask("get_system_shared_memory_status"))
        code, text = await client.refusal("infer", "add_sub", inputs)
        assert (code, f"Unable to find shared memory region: '{name}'" in text) == ("NOT_FOUND", True), text
    finally:
        shm.destroy_shared_memory_region(handle)


async def test_cuda_memory_is_refused_without_a_gpu(client: TritonClient) -> None:
    """The text is that of a Triton without GPUs."""
    handle = base64.b64encode(bytes(64))

    code, text = await client.refusal("register_cuda_shared_memory", "r", handle, 0, 4)

    assert code in ("400", "INVALID_ARGUMENT")
    assert text == "failed to register CUDA shared memory region: 'r', GPUs not supported"
