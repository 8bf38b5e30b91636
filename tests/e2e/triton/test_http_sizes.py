"""HTTP bodies of more than 2 GiB through the whole server: what is let in works, what is not is told at once."""

import hashlib
import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import Stack, running
from tests.support import models

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

BEYOND_INT32 = 2_200_000_000
BEYOND_REDIS = 600_000_000
LIMIT = 2_500_000_000
BLOCK = bytes(range(251)) * 4000
URL = "/v2/models/identity_uint8/infer"


@contextmanager
def large(directory: Path, **more: str) -> Iterator[Stack]:
    """Runs a server that takes bodies of 2.5 GB."""
    for name in ("models", "up"):
        (directory / name).mkdir()
    models.identity(directory / "models", "UINT8")
    settings = {
        "QINFER_HTTP__MAX_INPUT_BYTES": str(LIMIT),
        "QINFER_HTTP__REQUEST_READ_TIMEOUT_S": "600",
        "QINFER_LIMITS__MAX_RECEIVING_BYTES": str(2 * LIMIT),
        "QINFER_LIMITS__DEFAULT_TIMEOUT_S": "600",
    }
    with running(directory / "models", directory / "up", **settings, **more) as one:
        yield one


class Tensor:
    """The body of a request for a tensor of so many bytes, and the digest of what was sent of it.

    It is made block by block: neither it nor the reply is ever whole in the memory of the test.
    """

    def __init__(self, size: int) -> None:
        parameters = {"binary_data_size": size}
        one = {"name": "x", "shape": [1, size], "datatype": "UINT8", "parameters": parameters}
        self.head = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
        self.size = size
        self.digest = hashlib.blake2b()

    def __iter__(self) -> Iterator[bytes]:
        yield self.head
        for begin in range(0, self.size, len(BLOCK)):
            block = BLOCK[: self.size - begin]
            self.digest.update(block)
            yield block


@contextmanager
def ask(stack: Stack, tensor: Tensor) -> Iterator[http.client.HTTPResponse]:
    """Sends a request; the reply is still to be read."""
    headers = {
        "Content-Length": str(len(tensor.head) + tensor.size),
        "Inference-Header-Content-Length": str(len(tensor.head)),
    }
    with closing(http.client.HTTPConnection("127.0.0.1", stack.port, timeout=600)) as connection:
        connection.request("POST", URL, iter(tensor), headers)
        with connection.getresponse() as reply:
            yield reply


def test_a_tensor_of_more_than_two_gibibytes_comes_back(tmp_path: Path) -> None:
    tensor, found = Tensor(BEYOND_INT32), hashlib.blake2b()

    with large(tmp_path) as stack, ask(stack, tensor) as reply:
        assert reply.status == 200, reply.read(1000)
        length = int(reply.headers["Inference-Header-Content-Length"])
        output = json.loads(reply.read(length))["outputs"][0]
        while block := reply.read(2**20):
            found.update(block)

    assert output["shape"] == [1, BEYOND_INT32]
    assert found.digest() == tensor.digest.digest()


def test_without_an_object_store_a_tensor_has_half_a_gibibyte(tmp_path: Path) -> None:
    """Redis stores no longer string; whoever asks is told, and the next request is answered."""
    with large(tmp_path, QINFER_LIMITS__PAYLOAD_URL="") as stack:
        with ask(stack, Tensor(BEYOND_REDIS)) as reply:
            status, text = reply.status, json.loads(reply.read())["error"]
        with ask(stack, Tensor(10)) as reply:
            assert reply.status == 200

    assert (status, "are more than the 536870912 that the queue takes" in text) == (400, True), text


def test_a_body_above_the_limit_is_refused_by_its_length_alone(tmp_path: Path) -> None:
    """No byte of it is sent."""
    told = {}
    with large(tmp_path) as stack:
        for size in (LIMIT + 1, 2**32, 2**63):
            with closing(http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)) as connection:
                connection.putrequest("POST", URL)
                connection.putheader("Content-Length", str(size))
                connection.endheaders()
                reply = connection.getresponse()
                told[size] = reply.status, json.loads(reply.read())["error"]

    for size, (status, text) in told.items():
        assert status == 400
        assert f"size of {size} bytes exceeds the maximum allowed value of {LIMIT} bytes" in text
