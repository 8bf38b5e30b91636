"""The whole server with a payload store that speaks S3's protocol: large tensors both ways, the store away and back."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import numpy as np
import pytest

from qinfer.testing import wait_until
from tests.e2e.conftest import Stack, running
from tests.support import models
from tests.support.servers.object_storage import BUCKET, ObjectStorage

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(120)]

ELEMENTS = 10 * 2**20  # 40 MiB
LARGE = 3 * 10**6  # elements; tensors to 8 MiB of synchronous requests do not pass through the store


@pytest.fixture(scope="module")
def storage() -> Iterator[ObjectStorage]:
    with ObjectStorage() as one:
        yield one


@pytest.fixture(scope="module")
def stack(storage: ObjectStorage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    repository = tmp_path_factory.mktemp("models")
    models.identity(repository, "FP32")
    settings = {
        "QINFER_LIMITS__PAYLOAD_URL": f"s3://{BUCKET}/qinfer",
        "QINFER_LIMITS__PAYLOAD_URL_MIN_BYTES": "2000000",
    }
    with running(repository, tmp_path_factory.mktemp("up"), **storage.environment, **settings) as one:
        yield one


def post(stack: Stack, path: str, data: bytes, elements: int) -> tuple[int, Message, bytes]:
    """Sends a tensor in Triton's binary form."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, elements], "parameters": {"binary_data_size": len(data)}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    request = urllib.request.Request(f"http://{stack.address}{path}", header + data, method="POST")
    request.add_header("Inference-Header-Content-Length", str(len(header)))
    return answer(request)


def answer(request: urllib.request.Request | str) -> tuple[int, Message, bytes]:
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def tensors(headers: Message, body: bytes) -> bytes:
    return body[int(headers["Inference-Header-Content-Length"]) :]


def infer(stack: Stack, elements: int) -> int:
    """Sends a request, checks its answer, returns the status."""
    data = np.arange(elements, dtype="<f4").tobytes()
    status, headers, body = post(stack, "/v2/models/identity_fp32/infer", data, elements)
    assert status != 200 or tensors(headers, body) == data
    return status


def test_a_tensor_of_40_mib_goes_in_and_out(stack: Stack, storage: ObjectStorage) -> None:
    """By the store, both ways, where nothing is left of it."""
    before = set(storage.names())

    assert infer(stack, ELEMENTS) == 200

    wait_until(lambda: set(storage.names()) <= before)


def test_an_asynchronous_result_stays_in_the_store(stack: Stack, storage: ObjectStorage) -> None:
    """A result can be read again and again, and is lost if somebody deletes it in the store."""
    data = np.arange(ELEMENTS // 4, dtype="<f4").tobytes()
    before = set(storage.names())

    status, headers, body = post(stack, "/v1/models/identity_fp32/requests", data, ELEMENTS // 4)
    assert status == 202, body
    url = f"http://{stack.address}{headers['Location']}/result?wait=30"
    results = [answer(url) for _ in range(2)]

    assert [(status, tensors(headers, body) == data) for status, headers, body in results] == [(200, True)] * 2
    wait_until(lambda: len(set(storage.names()) - before) == 1)
    (name,) = set(storage.names()) - before
    storage.delete(name)
    status, _, body = answer(url)
    assert (status, b"is lost: it was deleted or damaged in the payload store" in body) == (410, True)


def test_a_store_that_is_away_refuses_large_requests_only(stack: Stack, storage: ObjectStorage) -> None:
    """With 503 and when to try again; once it is back, all is well by itself."""
    storage.stop()
    try:
        data = bytes(4 * LARGE)
        refusals = [
            post(stack, path, data, LARGE)
            for path in ("/v2/models/identity_fp32/infer", "/v1/models/identity_fp32/requests")
        ]
        assert infer(stack, 4) == 200
    finally:
        storage.start()

    assert [(status, headers["Retry-After"]) for status, headers, _ in refusals] == [(503, "1")] * 2
    for _, _, body in refusals:
        assert b"the payload store can't be reached; try again" in body
        assert b"127.0.0.1" not in body
    wait_until(lambda: infer(stack, LARGE) == 200)


def test_a_server_whose_store_is_away_says_so_at_the_start(tmp_path: Path) -> None:
    """And ends."""
    models.identity(tmp_path / "models", "FP32")

    with (
        pytest.raises(AssertionError, match=r"QINFER_LIMITS__PAYLOAD_URL.*there is no such directory"),
        running(tmp_path / "models", tmp_path, QINFER_LIMITS__PAYLOAD_URL=f"file://{tmp_path}/nowhere"),
    ):
        pass
