"""What clients get wrong, against the whole server: the right status and text, and nothing left in Redis."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Stack

URL = "/v2/models/add_sub/infer"


def tensor(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "shape": [1, 4], "datatype": "FP32", "data": [1.0, 2.0, 3.0, 4.0]} | changes


def question(*inputs: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({"inputs": list(inputs or (tensor("a"), tensor("b")))} | changes).encode()


def binary(size: int, extra: int = 0) -> tuple[bytes, dict[str, str]]:
    """Returns a body whose two inputs announce `size` bytes each, with `extra` bytes too many, and its header."""
    inputs = [
        {"name": name, "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": size}} for name in "ab"
    ]
    head = json.dumps({"inputs": inputs}).encode()
    return head + bytes(2 * size + extra), {"Inference-Header-Content-Length": str(len(head))}


EXTRA, EXTRA_HEADERS = binary(16, extra=3)
SHORT, SHORT_HEADERS = binary(16, extra=-5)
NARROW, NARROW_HEADERS = binary(12)
NAN = question().replace(b"2.0", b"NaN")

TABLE: list[tuple[str, bytes, Mapping[str, str], int, str]] = [
    (URL, question(tensor("a", datatype="INT32", data=[1, 2, 3, 4]), tensor("b")), {}, 400, "data-type is 'INT32'"),
    (URL, question(tensor("a", shape=[1, 3], data=[1, 2, 3]), tensor("b")), {}, 400, "unexpected shape for input 'a'"),
    (URL, question(tensor("a", shape=[2, 4], data=[1] * 8), tensor("b")), {}, 400, "batch size does not match"),
    (
        URL,
        question(*(tensor(n, shape=[9, 4], data=[1] * 36) for n in "ab")),
        {},
        400,
        "inference request batch-size must be <= 8 for 'add_sub'",
    ),
    (URL, question(tensor("a")), {}, 400, "expected 2 inputs but got 1 inputs for model 'add_sub'"),
    (URL, question(tensor("a"), tensor("c")), {}, 400, "'c'"),
    (URL, question(*(tensor(n, shape=[0, 4], data=[]) for n in "ab")), {}, 400, "input byte size mismatch"),
    (URL, question(tensor("a", shape=[-1, 4]), tensor("b")), {}, 500, "non-unsigned-integer as unsigned-integer"),
    (URL, question(tensor("a", data=["x"] * 4), tensor("b")), {}, 500, "Unable to parse 'data'"),
    (URL, EXTRA, EXTRA_HEADERS, 400, "unexpected additional input data for model 'add_sub'"),
    (URL, SHORT, SHORT_HEADERS, 400, "unexpected size for input 'b', expecting 5 additional bytes"),
    (
        URL,
        NARROW,
        NARROW_HEADERS,
        400,
        "input byte size mismatch for input 'a' for model 'add_sub'. Expected 16, got 12",
    ),
    (URL, question(), {"Inference-Header-Content-Length": "99999"}, 400, "inference header size"),
    (URL, question(), {"Inference-Header-Content-Length": "many"}, 400, "Inference-Header-Content-Length"),
    (URL, question()[:-9], {}, 400, "failed to parse the request JSON buffer"),
    (URL, b"[" * 200 + b"]" * 200, {}, 400, "JSON nesting depth exceeds maximum allowed limit (100)"),
    (URL, question(outputs=[{"name": "product"}]), {}, 400, "unexpected inference output 'product'"),
    (URL, question(), {"Content-Encoding": "br"}, 501, "Unsupported compression type"),
    (URL, b" " * (64 * 2**20 + 1), {}, 400, "exceeds the maximum allowed value"),
    ("/v2/models/nobody/infer", question(), {}, 404, "Request for unknown model: 'nobody' is not found"),
    ("/v2/models/add_sub/versions/7/infer", question(), {}, 404, "'add_sub' version 7 is not found"),
    ("/v2/models/add_sub/versions/-1/infer", question(), {}, 400, "failed to get model version"),
]


@pytest.mark.parametrize(("url", "body", "headers", "status", "text"), TABLE)
def test_bad_requests(stack: Stack, url: str, body: bytes, headers: Mapping[str, str], status: int, text: str) -> None:
    """Triton's status and text, as `{"error": …}`."""
    reply = httpx.post(f"http://{stack.address}{url}", content=body, headers=dict(headers), timeout=30)

    assert reply.status_code == status, reply.text
    assert list(reply.json()) == ["error"]
    assert text in reply.json()["error"]


def test_not_a_number_is_a_number(stack: Stack) -> None:
    """NaN in JSON passes both ways, as Triton's parser and writer let it."""
    reply = httpx.post(f"http://{stack.address}{URL}", content=NAN, timeout=30)

    assert reply.status_code == 200
    assert b"NaN" in reply.content


def test_nothing_stays_in_the_queue(stack: Stack) -> None:
    """After all of the table, no request is waiting or in flight, and the server still answers."""
    for url, body, headers, _, _ in TABLE:
        httpx.post(f"http://{stack.address}{url}", content=body, headers=dict(headers), timeout=30)

    good = httpx.post(f"http://{stack.address}{URL}", content=question(), timeout=30)
    metrics = httpx.get(f"http://{stack.address}/metrics").text

    assert good.json()["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
    depths = [
        line for line in metrics.splitlines() if line.startswith("qinfer_backlog_requests{") and "add_sub" in line
    ]
    assert depths
    assert all(line.endswith(" 0.0") for line in depths)
