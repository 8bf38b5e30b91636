"""The examples of docs/reference/bridge-messages.md are what the bridge reads and writes."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import yaml

from qinfer.core.messages import Response
from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import from_numpy, to_numpy
from qinfer_workers.bridge import messages
from qinfer_workers.bridge.config import BodyOptions
from qinfer_workers.bridge.decode import BodyCodec
from qinfer_workers.bridge.replies import encode, encode_error

PAGE = (Path(__file__).resolve().parents[4] / "docs/reference/bridge-messages.md").read_text()
SPEC = ModelSpec(
    name="shapes",
    backend="b",
    max_batch_size=8,
    inputs=(TensorSpec(name="X", datatype="FP32", dims=(2,)),),
    outputs=(
        TensorSpec(name="LABEL", datatype="INT64", dims=(1,)),
        TensorSpec(name="SCORES", datatype="FP32", dims=(2,)),
    ),
)
LINES, STREAM = "application/x-ndjson", "application/vnd.apache.arrow.stream"


def blocks(language: str) -> list[bytes]:
    return [block.encode() for block in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)]


def codec(**changes: Any) -> BodyCodec:
    (text,) = blocks("yaml")
    return BodyCodec(BodyOptions(**(yaml.safe_load(text)["body"] | changes)), SPEC)


def response(labels: list[int], scores: list[list[float]]) -> Response:
    outputs = (
        from_numpy("LABEL", np.array(labels, "<i8").reshape(-1, 1)),
        from_numpy("SCORES", np.array(scores, "<f4")),
    )
    return Response(request_id="r", model="shapes", version=1, outputs=outputs)


def test_kserve() -> None:
    """The request can be read, and the reply is as it is printed."""
    request, reply, _ = blocks("json")

    decoded = codec(reply="same").decode(request, "application/json")

    assert encode(decoded.reply, response([1], [[0.25, 0.75]])).body == reply.strip()


def test_rows() -> None:
    """As lines and in Arrow the same request; the replies are as they are printed."""
    request, reply = blocks("jsonl")
    scope: dict[str, Any] = {}
    exec(blocks("python")[0], scope)

    for body, kind in ((request, LINES), (scope["body"], STREAM)):
        decoded = codec(reply="same").decode(body, kind)
        assert to_numpy(decoded.request.inputs[0]).tolist() == [[2.5, 4.0], [1.0, 1.5]]
        encoded = encode(decoded.reply, response([1, 0], [[0.25, 0.75], [0.5, 0.5]]))
        assert encoded.content_type == kind
        if kind == LINES:
            assert encoded.body == reply
        else:
            assert pa.ipc.open_stream(encoded.body).read_all().to_pylist() == [
                json.loads(x) for x in reply.splitlines()
            ]


def test_errors() -> None:
    """They look as they are printed."""
    error = blocks("json")[2]
    told = msgspec.json.decode(error)

    assert encode_error(told["error"], told["id"]).body == error.strip()


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b'{"width": 1, "height": 2}\n{"width": null, "height": 2}', LINES),
        (b'{"width": 1, "height": 2}\n' * 2 + b'{"width": 1}', LINES),
        (b'{"width": 1, "height": 2}\n' * 9, LINES),
    ],
)
def test_reasons(body: bytes, content_type: str) -> None:
    """The page has the words that a message is refused with."""
    with pytest.raises(InvalidRequest) as refused:
        codec().decode(body, content_type)

    assert f"`{refused.value.message}`" in " ".join(PAGE.split())


def test_options_and_headers_are_all_there() -> None:
    """Each field of `body` has its row, with its default where that is a number; each header is named."""
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", PAGE, re.MULTILINE))
    for name, field in BodyOptions.model_fields.items():
        assert name in rows
        assert not isinstance(field.default, int) or rows[name].strip() == str(field.default)
    headers = [value for name, value in vars(messages).items() if name.endswith("_HEADER")]
    assert [header for header in headers if f"`{header}`" not in PAGE] == []
