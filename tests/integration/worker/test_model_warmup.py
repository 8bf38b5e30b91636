"""`model_warmup` of models that tell what they execute: data of every kind, as NVIDIA's server makes it."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from qinfer.tensors import CONFIG_DATATYPES, pack_bytes
from tests.support import python_models
from tests.support.models import CONTROLS, DIRECT, sequence_batching
from tests.support.served_models import ServedModels, models_served

pytestmark = pytest.mark.timeout(60)

TELL = """told = [[x(r).reshape(-1).tolist() if x(r).dtype != object else [e.decode() for e in x(r).reshape(-1)]
         for r in requests][0], len(requests), list(x(requests[0]).shape)]
with open(FILE, "a") as file:
    file.write(json.dumps(told) + "\\n")
"""
ANSWER = "return [reply(x(request)) for request in requests]"
STREAM = """for request in requests:
    sender = request.get_response_sender()
    for _ in range(2):
        sender.send(reply(x(request)))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
return None"""
TYPES = sorted(kind.removeprefix("TYPE_") for kind in CONFIG_DATATYPES if kind not in ("TYPE_STRING", "TYPE_BF16"))


class Warmed:
    """Writes models with samples, loads them, and reads what they were asked before they were READY."""

    def __init__(self, scene: ServedModels, told: Path) -> None:
        self.scene = scene
        self._told = told

    def write(self, samples: str, answer: str = ANSWER, **options: Any) -> Path:
        """Writes a model of one input; returns the directory of its warm-up files."""
        code = python_models.execute(TELL.replace("FILE", repr(str(self._told))) + answer)
        options = {"dims": 2, "max_batch_size": 4, **options, "more": options.get("more", "") + samples}
        directory = python_models.write_model(self.scene.repository, code, **options).parent / "warmup"
        directory.mkdir()
        return directory

    async def load(self) -> list[Any]:
        """Loads it; returns what each execution saw: the first request's values, how many requests, their shape."""
        await self.scene.http.load_model("m")
        return [json.loads(line) for line in self._told.read_text().splitlines()] if self._told.exists() else []

    async def refusal(self) -> str:
        """Loads what can't be; returns why."""
        with pytest.raises(InferenceServerException) as refused:
            await self.scene.http.load_model("m")
        assert not await self.scene.http.is_model_ready("m")
        return str(refused.value.message())


@pytest.fixture
async def warmed(tmp_path: Path) -> AsyncIterator[Warmed]:
    path = tmp_path / "repository"
    path.mkdir()
    async with models_served(path) as scene:
        yield Warmed(scene, tmp_path / "told")


def sample(
    data: str, datatype: str = "FP32", dims: str = "2", name: str = "s", batch_size: int = 1, count: int = 0
) -> str:
    tensor = f'inputs {{ key: "x" value {{ data_type: TYPE_{datatype} dims: [ {dims} ] {data} }} }}'
    return f'model_warmup {{ name: "{name}" batch_size: {batch_size} count: {count} {tensor} }}\n'


@pytest.mark.parametrize("datatype", TYPES)
async def test_zeros_random_data_and_files_of_a_datatype(warmed: Warmed, datatype: str) -> None:
    kinds = ("zero_data: true", "random_data: true", 'input_data_file: "f"')
    dtype = np.dtype(CONFIG_DATATYPES[f"TYPE_{datatype}"].numpy)
    files = warmed.write("".join(sample(kind, datatype) for kind in kinds), datatype=datatype)
    (files / "f").write_bytes(np.array([1, 0], dtype).tobytes())

    zeros, random, read = await warmed.load()

    assert zeros == [[0, 0], 1, [1, 2]]
    assert random[1:] == [1, [1, 2]]
    assert all(0 <= value <= 1 for value in random[0])
    assert read == [[1, 0], 1, [1, 2]]


async def test_text_of_a_file(warmed: Warmed) -> None:
    """With lengths, as it travels; zeros and random data are empty."""
    kinds = ("zero_data: true", "random_data: true", 'input_data_file: "f"')
    files = warmed.write("".join(sample(kind, "STRING") for kind in kinds), datatype="STRING")
    (files / "f").write_bytes(pack_bytes([b"a", b"bc"]))

    assert [told[0] for told in await warmed.load()] == [["", ""], ["", ""], ["a", "bc"]]


async def test_samples_run_in_order_on_each_instance(warmed: Warmed) -> None:
    """As often as they say, with so many requests of a row; those without a batch size do not."""
    samples = [
        sample("zero_data: true", batch_size=0),
        sample('input_data_file: "f"', batch_size=3, count=2, name="three"),
        sample("zero_data: true", name="one"),
    ]
    group = "instance_group { count: 2 kind: KIND_CPU }"
    files = warmed.write("".join(samples), more=group)
    (files / "f").write_bytes(np.array([1, 2, 3], "<f4").tobytes())  # the third is not read

    assert await warmed.load() == [[[1, 2], 3, [1, 2]], [[1, 2], 3, [1, 2]], [[0, 0], 1, [1, 2]]] * 2


async def test_a_model_without_a_batch_dimension(warmed: Warmed) -> None:
    """A variable dimension has the length that the sample gives it."""
    warmed.write(sample("zero_data: true", dims="5"), max_batch_size=0, dims=-1, scheduling="")

    assert await warmed.load() == [[[0] * 5, 1, [5]]]


async def test_a_decoupled_model_streams_to_nobody(warmed: Warmed) -> None:
    warmed.write(sample("zero_data: true", batch_size=2), STREAM, more=python_models.DECOUPLED)

    assert await warmed.load() == [[[0, 0], 2, [1, 2]]]


async def test_control_inputs_are_the_samples_own(warmed: Warmed) -> None:
    """Where it gives them; otherwise each row is a sequence of one step."""
    control = 'inputs { key: "START" value { data_type: TYPE_FP32 dims: 1 zero_data: true } }'
    plain = sample("zero_data: true", batch_size=2)
    answer = 'assert x(requests[0], "START").tolist() == [[int(len(requests) == 2)]]\n' + ANSWER
    batching = sequence_batching(DIRECT, CONTROLS)
    warmed.write(plain + sample("zero_data: true").replace("inputs", f"{control} inputs"), answer, scheduling=batching)

    assert [told[1] for told in await warmed.load()] == [2, 1]


@pytest.mark.parametrize(
    ("samples", "answer", "reason"),
    [
        (sample("zero_data: true"), 'raise ValueError("cold")', "failed to run warmup sample 's': .*ValueError: cold"),
        (
            sample("zero_data: true"),
            'return [pb_utils.InferenceResponse(error=pb_utils.TritonError("cold")) for _ in requests]',
            "failed to run warmup sample 's': cold",
        ),
        (sample('input_data_file: "f"'), ANSWER, "no file 'f'"),
        (sample('input_data_file: "../config.pbtxt"'), ANSWER, "within the model's directory"),
        (sample(""), ANSWER, "zero_data, random_data or an input_data_file"),
        (sample("zero_data: true", dims="3"), ANSWER, r"dims that the model takes, \[2\], got \[3\]"),
        (sample("zero_data: true", dims="-1"), ANSWER, "fixed dims"),
        (sample("zero_data: true", datatype="INT32"), ANSWER, "the model's data_type, FP32"),
        (sample("zero_data: true", batch_size=9), ANSWER, "has batch_size 9 > 4"),
        (sample("zero_data: true").replace('"x"', '"z"'), ANSWER, r"lacks input\(s\) x"),
        ('model_warmup { name: "s" batch_size: 1 }', ANSWER, r"lacks input\(s\) x"),
    ],
)
async def test_a_sample_that_fails_keeps_its_model_from_loading(
    warmed: Warmed, samples: str, answer: str, reason: str
) -> None:
    warmed.write(samples, answer)

    refusal = await warmed.refusal()

    assert re.search(reason, refusal), refusal


@pytest.mark.parametrize("content", [b"1234", pack_bytes([b"a"])[:3]])
async def test_a_file_that_is_too_short(warmed: Warmed, content: bytes) -> None:
    files = warmed.write(sample('input_data_file: "f"'))
    (files / "f").write_bytes(content)

    assert "warm-up file 'f' can't be used for input 'x': 'x' has" in await warmed.refusal()


async def test_a_model_that_fails_to_warm_up_serves_on_as_it_was(warmed: Warmed) -> None:
    """The load says why; requests are answered by the version before."""
    files = warmed.write(sample('input_data_file: "f"'))
    (files / "f").write_bytes(bytes(8))
    await warmed.load()
    (files / "f").write_bytes(bytes(4))

    with pytest.raises(InferenceServerException, match="warm-up file 'f'"):
        await warmed.scene.http.load_model("m")

    row = np.array([[1, 2]], np.float32)
    assert (await warmed.scene.infer("m", x=row)).as_numpy("y").tolist() == row.tolist()
