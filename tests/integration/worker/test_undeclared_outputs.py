"""Outputs of `model.py` that its configuration does not declare, and those that it leaves out, as Triton has them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as over_grpc
import tritonclient.http.aio as over_http
from onnx import helper
from tritonclient.utils import InferenceServerException

from qinfer.core.settings_sections import CacheSettings
from tests.support import ensembles, models, python_models
from tests.support.served_models import ServedModels, models_served, tensor

pytestmark = pytest.mark.timeout(60)

WAYS = """
def outputs(value):
    made = {
        1: [("y", np.ones((1, 3), np.float32)), ("z", np.ones(1, np.float32))],
        2: [("y", np.ones(1, np.int64)), ("z", np.ones(1, np.float32))],
        3: [("z", np.ones(1, np.float32))],
        4: [("y", np.ones(1, np.float32)), ("z", np.ones(1, np.float32))],
        5: [("y", np.ones((7, 1), np.float32)), ("z", np.ones((1, 1), np.float32))],
    }[int(value) or 1]
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in made])
"""
MODEL = python_models.HEADER + (
    WAYS
    + """
class TritonPythonModel:
    def execute(self, requests):
        return [outputs(x(request).reshape(-1)[0]) for request in requests]
"""
)
STREAM = python_models.HEADER + (
    WAYS
    + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(outputs(x(request).reshape(-1)[0]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
CALLER = python_models.execute(
    """asked = requests[0].requested_output_names()
response = pb_utils.InferenceRequest("", 0, [pb_utils.Tensor("x", x(requests[0]))], asked, "loose").exec()
if response.has_error():
    raise pb_utils.TritonModelException(response.error().message())
return [pb_utils.InferenceResponse(response.output_tensors())]"""
)
WARM = """model_warmup { name: "zeros" inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }"""
Z = 'output { name: "z" data_type: TYPE_FP32 dims: 1 }'
STRICT = 'parameters { key: "qinfer.strict_outputs" value { string_value: "true" } }'
CACHED = "response_cache { enable: true }"


def write(repository: Path, name: str, code: str = MODEL, more: str = "", **options: Any) -> None:
    options = {"max_batch_size": 0, "dims": 1, "scheduling": "", **options}
    python_models.write_model(repository, code, name, more=Z + more, **options)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[ServedModels]:
    repository = tmp_path / "repository"
    write(repository, "loose")
    write(repository, "batched", max_batch_size=8)
    write(
        repository, "split", max_batch_size=8, more='parameters { key: "qinfer.split" value { string_value: "true" } }'
    )
    write(repository, "strict", more=STRICT)
    write(repository, "cached", more=CACHED)
    write(repository, "streamed", STREAM, python_models.DECOUPLED)
    write(repository, "caller", CALLER)
    write(repository, "warm", more=WARM)
    write(repository, "sequences", max_batch_size=4, scheduling=models.sequence_batching(models.OLDEST))
    python_models.write_model(repository, python_models.ECHO, "echo", max_batch_size=0, dims=1, scheduling="")
    two = 'output { name: "z" data_type: TYPE_FP32 dims: [ 1 ] }'
    ensembles.ensemble(
        repository, "pipeline", ("loose", {"x": "x"}, {"y": "y", "z": "z"}), width=1, max_batch_size=0, more=two
    )
    ensembles.ensemble(repository, "part", ("loose", {"x": "x"}, {"y": "y"}), width=1, max_batch_size=0)
    ensembles.ensemble(
        repository, "next", ("loose", {"x": "x"}, {"y": "t"}), ("echo", {"x": "t"}, {"y": "y"}), width=1,
        max_batch_size=0,
    )  # fmt: skip
    async with models_served(repository, {"cache": CacheSettings(config="local,size=1000000")}) as one:
        yield one


def given(value: float, rows: int | None = None) -> Any:
    return np.full(1 if rows is None else (rows, 1), value, np.float32)


async def load(scene: ServedModels, *names: str) -> None:
    for name in names:
        await scene.http.load_model(name)


async def asked(scene: ServedModels, model: str, value: float, *names: str, rows: int | None = None) -> Any:
    wanted = [over_grpc.InferRequestedOutput(name) for name in names] or None
    return await scene.grpc.infer(model, [tensor("x", given(value, rows))], outputs=wanted)


def shapes(result: Any) -> dict[str, tuple[str, list[int]]]:
    return {one.name: (one.datatype, list(one.shape)) for one in result.get_response().outputs}


ONE = ("FP32", [1])


async def test_other_shapes_and_datatypes_are_passed_on(scene: ServedModels, caplog: pytest.LogCaptureFixture) -> None:
    """With one warning of the model, which tells the first difference."""
    await load(scene, "loose")

    found = [shapes(await asked(scene, "loose", value)) for value in (1, 2, 1)]
    by_http = await scene.http.infer("loose", [http_tensor(1)])

    other = {"y": ("FP32", [1, 3]), "z": ONE}
    assert found == [other, {"y": ("INT64", [1]), "z": ONE}, other]
    assert by_http.as_numpy("y").shape == (1, 3)
    lines = [line for line in caplog.records if "is passed on" in line.message]
    assert [vars(line)["reason"] for line in lines] == [
        "the model returned output 'y' as FP32[1, 3]; its configuration says [1]"
    ]


def http_tensor(value: float) -> Any:
    return tensor("x", given(value), over_http)


async def test_rows_of_a_models_own_responses_are_passed_on(scene: ServedModels) -> None:
    """A `model.py` answers each request by itself: no rows of a batch are split."""
    await load(scene, "batched")

    assert shapes(await asked(scene, "batched", 5, rows=1))["y"] == ("FP32", [7, 1])


async def test_rows_are_checked_where_a_request_is_split(scene: ServedModels) -> None:
    await load(scene, "split")

    with pytest.raises(InferenceServerException, match=r"output 'y' as FP32\[7, 1\]; its first dimension must be 8"):
        await asked(scene, "split", 5, rows=9)


async def test_an_output_that_is_left_out_is_refused_to_who_asked_for_it(scene: ServedModels) -> None:
    await load(scene, "loose")

    assert shapes(await asked(scene, "loose", 3)) == {"z": ONE}
    assert shapes(await asked(scene, "loose", 3, "z")) == {"z": ONE}
    with pytest.raises(InferenceServerException, match="the model returned no output 'y'"):
        await asked(scene, "loose", 3, "y")


async def test_a_strict_model_refuses_what_it_does_not_declare(scene: ServedModels) -> None:
    await load(scene, "strict")

    for value, text in (
        (1, r"FP32\[1, 3\]; its configuration says \[1\]"),
        (2, r"INT64\[1\]; its configuration says FP"),
    ):
        with pytest.raises(InferenceServerException, match=text):
            await asked(scene, "strict", value)
    assert shapes(await asked(scene, "strict", 3)) == {"z": ONE}


async def test_the_cache_stores_what_is_declared_only(scene: ServedModels) -> None:
    await load(scene, "cached")

    for value in (1, 2, 3, 4):
        for _ in range(2):
            await asked(scene, "cached", value)

    await scene.gateway._reporting.flush()
    (found,) = (await scene.http.get_inference_statistics("cached"))["model_stats"]
    assert found["inference_stats"]["cache_hit"]["count"] == 1


async def test_ensembles_pass_on_and_leave_out_as_their_steps_do(scene: ServedModels) -> None:
    await load(scene, "loose", "pipeline", "part")

    assert shapes(await asked(scene, "pipeline", 1))["y"] == ("FP32", [1, 3])
    assert shapes(await asked(scene, "pipeline", 3)) == {"z": ONE}
    assert shapes(await asked(scene, "part", 3)) == {}
    with pytest.raises(
        InferenceServerException, match="in ensemble 'pipeline', unexpected deadlock, output 'y' is not"
    ):
        await asked(scene, "pipeline", 3, "y")


@pytest.mark.parametrize(("value", "text"), [(1, "unexpected shape for input 'x'"), (3, "expected 1 inputs but got 0")])
async def test_a_step_that_can_not_take_it_refuses(scene: ServedModels, value: float, text: str) -> None:
    await load(scene, "loose", "echo", "next")

    with pytest.raises(InferenceServerException, match=text):
        await asked(scene, "next", value)


async def test_a_detector_by_its_file_alone_names_the_fields_to_set(scene: ServedModels) -> None:
    """Its rows are detections: the file can't tell them from a batch; with the fields it works."""
    ports = [("x", "FP32", (2,))], [("y", "INT64", (2,))]
    nodes = [
        helper.make_node("NonZero", ["x"], ["t"]),
        helper.make_node("Transpose", ["t"], ["y"], perm=[1, 0]),
    ]
    config = models.write(scene.repository, "detector", nodes, *ports).parent / "config.pbtxt"
    config.unlink()
    await load(scene, "detector")
    rows = np.ones((1, 2), np.float32)

    with pytest.raises(
        InferenceServerException, match=r"must be 1; if outputs have other rows .* 'max_batch_size: 0' with 'input'"
    ):
        await scene.grpc.infer("detector", [tensor("x", rows)])
    io = '%s { name: "%s" data_type: TYPE_%s dims: [ -1, 2 ] } '
    config.write_text("max_batch_size: 0 " + io % ("input", "x", "FP32") + io % ("output", "y", "INT64"))
    await load(scene, "detector")
    found = await scene.grpc.infer("detector", [tensor("x", rows)])

    assert found.as_numpy("y").tolist() == [[0, 0], [0, 1]]


async def test_responses_of_streams_are_passed_on_too(scene: ServedModels) -> None:
    await load(scene, "streamed")

    found = []
    for value in (1, 2, 3):

        async def requests(value: float = value) -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "streamed", "inputs": [tensor("x", given(value))]}

        async for result, error in scene.grpc.stream_infer(requests()):
            assert error is None
            found.append(shapes(result))

    assert found == [{"y": ("FP32", [1, 3]), "z": ONE}, {"y": ("INT64", [1]), "z": ONE}, {"z": ONE}]


async def test_steps_of_sequences_are_passed_on_and_leave_out_too(scene: ServedModels) -> None:
    await load(scene, "sequences")

    found = []
    for value in (1, 2, 3):
        inputs = [tensor("x", given(value, 1))]
        flags = {"sequence_id": 7, "sequence_start": value == 1, "sequence_end": value == 3}
        found.append(shapes(await scene.grpc.infer("sequences", inputs, **flags)))

    assert found == [{"y": ("FP32", [1, 3]), "z": ONE}, {"y": ("INT64", [1]), "z": ONE}, {"z": ONE}]


async def test_a_calling_model_gets_what_the_called_one_gives(scene: ServedModels) -> None:
    """An output that the call names, and that is left out, fails the call."""
    await load(scene, "loose", "caller")

    assert shapes(await asked(scene, "caller", 1)) == {"y": ("FP32", [1, 3]), "z": ONE}
    assert shapes(await asked(scene, "caller", 3, "z")) == {"z": ONE}
    with pytest.raises(InferenceServerException, match="the model returned no output 'y'"):
        await asked(scene, "caller", 3)


async def test_a_warm_up_takes_what_is_not_declared(scene: ServedModels) -> None:
    await load(scene, "warm")

    assert shapes(await asked(scene, "warm", 4)) == {"y": ONE, "z": ONE}
