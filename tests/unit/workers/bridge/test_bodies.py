"""Bodies of messages: KServe, raw data, what content types and encodings say, and how each bad one is refused."""

import bz2
import gzip
import json
import lzma
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from kombu import compression as installed
from pydantic import ValidationError

from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer_workers.bridge.config import BodyOptions
from qinfer_workers.bridge.decode import BodyCodec
from qinfer_workers.bridge.replies import ReplyEncoding

NUMBERS = TensorSpec(name="X", datatype="FP32", dims=(4,))
OUTPUTS = (TensorSpec(name="Y", datatype="FP32", dims=(2,)),)
DATA = np.array([1, 2.5, 3, 4], "<f4").tobytes()


def spec(*inputs: TensorSpec, rows: int = 8) -> ModelSpec:
    return ModelSpec(name="m", backend="b", inputs=inputs or (NUMBERS,), outputs=OUTPUTS, max_batch_size=rows)


def codec(*inputs: TensorSpec, rows: int = 8, **options: Any) -> BodyCodec:
    return BodyCodec(BodyOptions(**options), spec(*inputs, rows=rows))


def tensor(datatype: str, *dims: int, name: str = "X", optional: bool = False) -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, dims=dims, optional=optional)


def kserve(**changes: Any) -> bytes:
    entry = {"name": "X", "datatype": "FP32", "shape": [1, 4], "data": [1, 2.5, 3, 4]}
    return json.dumps({"inputs": [entry | changes.pop("entry", {})]} | changes).encode()


def binary_kserve() -> tuple[bytes, str]:
    entry = {"name": "X", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    text = json.dumps({"inputs": [entry]}).encode()
    return text + DATA, str(len(text))


def why(body: bytes | str, content_type: str = "application/json", encoding: str = "", **more: Any) -> str:
    """Returns the reason that a body is refused for."""
    reader = more.pop("codec", None) or codec()
    with pytest.raises(InvalidRequest) as refused:
        reader.decode(body, content_type, more.get("headers"), encoding)
    return refused.value.message


@pytest.mark.parametrize(
    ("content_type", "encoding"),
    [
        ("application/json", "utf-8"),
        ("Application/JSON; charset=UTF-8", ""),
        ("", "binary"),
        (None, None),
        ("application/data", "binary"),
        ("application/vnd.kserve.v2+json", ""),
    ],
)
def test_kserve_json(content_type: str | None, encoding: str | None) -> None:
    """A KServe request, under each name that messages give it."""
    body = kserve(id="q", parameters={"priority": 2, "mine": "x"})

    request, reply, rows = BodyCodec(BodyOptions(), spec(), 3).decode(body, content_type, {}, encoding)

    assert (request.model, request.version, request.client_id, request.priority) == ("m", 3, "q", 2)
    assert request.parameters == {"mine": "x"}
    assert (request.inputs[0].shape, bytes(request.inputs[0].data), rows) == ((1, 4), DATA, 1)
    assert (reply.form, reply.client_id, reply.plan) == ("kserve", "q", None)


@pytest.mark.parametrize(
    ("content_type", "headers"),
    [
        ("application/octet-stream", {"Inference-Header-Content-Length": "{}"}),
        ("application/json", {"inference-header-content-length": b"{}"}),
        ("application/vnd.kserve.v2+octet-stream; inference-header-content-length={}", {}),
    ],
)
def test_kserve_with_binary_tensors(content_type: str, headers: dict[str, Any]) -> None:
    """The header tells where the JSON ends; a parameter of the content type does, where headers can't travel."""
    body, length = binary_kserve()
    given = {
        name: value.replace(b"{}", length.encode()) if isinstance(value, bytes) else int(value.format(length))
        for name, value in headers.items()
    }

    request = codec().decode(body, content_type.replace("{}", length), {"other": 1, **given}).request

    assert bytes(request.inputs[0].data) == DATA


def test_a_text_is_taken_as_utf_8() -> None:
    """Some transports give bodies as text."""
    assert codec().decode(kserve().decode(), "application/json").rows == 1


def test_reasons_are_short() -> None:
    """However long the names in a body are."""
    assert len(why(kserve(entry={"name": "Z" * 10**5}))) < 1100


def test_what_a_reply_needs_survives_being_kept() -> None:
    """It is stored beside the request as MessagePack."""
    outputs = [{"name": "Y", "parameters": {"binary_data": True, "classification": 2}}]
    reply = codec().decode(kserve(id="q", outputs=outputs), "application/json").reply

    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=ReplyEncoding)

    assert kept == reply
    assert kept.plan is not None
    assert kept.plan.special is not None
    assert (kept.plan.is_binary("Y"), kept.plan.special["Y"].classes) == (True, 2)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate"])
def test_compressed_bodies(encoding: str) -> None:
    """They are unpacked first."""
    packed = gzip.compress(kserve()) if encoding.lower() == "gzip" else zlib.compress(kserve())

    assert codec().decode(packed, "application/json", {}, encoding).rows == 1


def by_arrow(name: str) -> Callable[[bytes], bytes]:
    return lambda body: bytes(pa.Codec(name).compress(body, asbytes=True))


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "application/x-gzip": zlib.compress,  # which kombu calls so
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "application/x-bz2": bz2.compress,
    "bzip2": bz2.compress,
    "application/x-lzma": lzma.compress,
    "xz": lzma.compress,
    "application/zstd": by_arrow("zstd"),
    "application/x-brotli": by_arrow("brotli"),
}


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compressions_of_kombu(name: str) -> None:
    packed = COMPRESSIONS[name](kserve())

    assert codec().decode(packed, "application/json", {"compression": name}, "utf-8").rows == 1
    assert codec().decode(packed, "application/json", {}, name).rows == 1


def test_a_compression_is_around_the_content_encoding() -> None:
    packed = zlib.compress(gzip.compress(kserve()))

    assert codec().decode(packed, "application/json", {"compression": "zlib"}, "gzip").rows == 1


@pytest.mark.parametrize("name", sorted(installed.encoders()))  # type: ignore[no-untyped-call]
def test_each_compression_of_the_installed_kombu_is_read(name: str) -> None:
    packed, content_type = installed.compress(kserve(), name)  # type: ignore[no-untyped-call]

    assert codec().decode(packed, "application/json", {"compression": content_type}, "utf-8").rows == 1


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_what_becomes_too_large_is_not_decompressed(name: str) -> None:
    """Of a body of a few kilobytes come 64 MiB; memory for them is never asked for."""
    packed = COMPRESSIONS[name](bytes(2**26))
    one = codec(max_bytes=2**17)

    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="more than 131072 bytes"):
            one.decode(packed, "application/json", {"compression": name})
        assert tracemalloc.get_traced_memory()[1] < 2**25  # of which lzma's dictionary takes 8 MiB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_damaged_compressed_bodies_are_refused(name: str) -> None:
    packed = COMPRESSIONS[name](kserve())

    for body in (packed[:-9], packed + b"behind", b"\x00none", packed[5:]):
        with pytest.raises(InvalidRequest, match=r"cut off|behind its end|damaged|more than"):
            codec().decode(body, "application/json", {"compression": name})


@pytest.mark.parametrize(("headers", "encoding"), [({"compression": "application/x-lz4"}, ""), ({}, "lz4")])
def test_an_unknown_compression_is_named(headers: dict[str, str], encoding: str) -> None:
    with pytest.raises(InvalidRequest, match=r"lz4' is not known; send the body as it is, or in gzip"):
        codec().decode(kserve(), "application/json", headers, encoding)


@pytest.mark.parametrize("nothing", ["", None, "identity", False])
def test_a_header_may_say_that_nothing_is_compressed(nothing: object) -> None:
    assert codec().decode(kserve(), "application/json", {"compression": nothing}).rows == 1


def test_pickle_is_never_read() -> None:
    with pytest.raises(InvalidRequest, match="pickle, which is never read"):
        codec(tensor("BYTES", 1)).decode(b"\x80\x04N.", "application/x-python-serialize", {}, "binary")


@pytest.mark.parametrize(
    ("inputs", "rows", "body", "shape", "data"),
    [
        ((tensor("BYTES", 1),), 8, b"h\xff", (1, 1), b"\2\0\0\0h\xff"),
        ((tensor("BYTES", -1),), 0, b"h", (1,), b"\1\0\0\0h"),
        ((tensor("UINT8", -1),), 8, b"abc", (1, 3), b"abc"),
        ((tensor("UINT8", 2, 3),), 0, b"abcdef", (2, 3), b"abcdef"),
        ((tensor("UINT8", -1, optional=True), tensor("BYTES", 1, name="T")), 8, b"h", (1, 1), b"\1\0\0\0h"),
    ],
)
def test_raw_bodies(inputs: Any, rows: int, body: bytes, shape: Any, data: bytes) -> None:
    """A body is one element of BYTES, or a vector of UINT8."""
    request, reply, _ = codec(*inputs, rows=rows).decode(body, "image/png")

    (made,) = request.inputs
    assert (made.shape, bytes(made.data), reply.form) == (shape, data, "kserve")


def test_raw_bodies_of_a_named_input() -> None:
    """An input that the route names may be of any datatype."""
    inputs = (tensor("FP32", -1), tensor("BYTES", 1, name="T", optional=True))

    (made,) = codec(*inputs, input="X").decode(DATA, "application/octet-stream").request.inputs

    assert (made.name, made.shape) == ("X", (1, 4))


def test_a_header_of_zero_says_raw() -> None:
    """As in Triton's raw binary requests."""
    headers = {"inference-header-content-length": "0"}
    (made,) = codec(tensor("UINT8", -1)).decode(b"{}", "application/json", headers).request.inputs

    assert made.data == b"{}"


@pytest.mark.parametrize(
    ("body", "default"), [(b"{x", "application/octet-stream"), (b"[1]", ""), (b"x {", ""), (b"{x", "text/plain")]
)
def test_bodies_without_a_content_type_are_raw(body: bytes, default: str) -> None:
    """Unless they begin with `{`; and those are, too, where the route says so."""
    (made,) = codec(tensor("BYTES", 1), content_type=default).decode(body).request.inputs

    assert bytes(made.data)[4:] == body


@pytest.mark.parametrize("body", [b" {x", kserve(entry={"name": "Z"})])
def test_a_wrong_guess_is_explained(body: bytes) -> None:
    """What has no content type, begins with `{` and is no request for the model may have been meant as raw."""
    reason = why(body, "", codec=codec(tensor("BYTES", 1)))

    assert "the message has no content type, and was read as KServe JSON: give it one, or set 'content_type'" in reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "no body"),
        (b"{", "failed to parse the request JSON"),
        (b"[1]", "Unable to parse 'inputs'"),
        (b"\xff{}", "failed to parse the request JSON"),
        (b'{"inputs": "\xff"}', "failed to parse the request JSON"),
        (b'{"inputs": ' + b"[" * 200 + b"]" * 200 + b"}", "nesting depth"),
        (b"[" * 100_000, "nesting depth"),
        (kserve(entry={"datatype": "FP64"}), "data-type is 'FP64'"),
        (kserve(entry={"datatype": "?"}), "invalid datatype"),
        (kserve(entry={"shape": [1, 3]}), "Shape does not match"),
        (kserve(entry={"shape": [2, 2]}), "unexpected shape"),
        (kserve(entry={"data": [1, 2, 3, "x"]}), "Unable to parse 'data'"),
        (kserve(entry={"name": "Z"}), "unexpected inference input 'Z'"),
        (kserve(entry={"shape": [9, 4], "data": [1.0] * 36}), "batch-size must be <= 8"),
        (kserve(entry={"shape": [2**62, 2**62]}), "causes total element count to exceed"),
        (kserve(outputs=[{"name": "Z"}]), "unexpected inference output 'Z'"),
        (kserve(entry={"parameters": {"shared_memory_region": "r"}, "data": None}), "Input must set only one"),
        (
            b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,4],"parameters":'
            b'{"shared_memory_region":"r","shared_memory_byte_size":16}}]}',
            "can't refer to shared memory",
        ),
        (kserve(outputs=[{"name": "Y", "parameters": {"shared_memory_region": "r"}}]), "can't refer to shared memory"),
        (kserve(id="x" * 5000), "more than the 4096 that are kept"),
        ("\ud800", "a text that UTF-8 can't hold"),
    ],
)
def test_bad_kserve_bodies(body: bytes | str, reason: str) -> None:
    """Each is refused with its reason."""
    assert reason in why(body)


@pytest.mark.parametrize(
    ("content_type", "headers", "reason"),
    [
        ("application/json; charset=utf-16", {}, "the character set of the content type is 'utf-16'"),
        ("text/plain; charset=latin-1", {}, "the character set of the content type is 'latin-1'"),
        ("application/json", {"inference-header-content-length": "x"}, "it counts the bytes"),
        ("application/json", {"inference-header-content-length": True}, "it counts the bytes"),
        ("application/json", {"inference-header-content-length": "-1"}, "it counts the bytes"),
        ("application/json", {"inference-header-content-length": "9" * 5000}, "it counts the bytes"),
        ("application/json", {"inference-header-content-length": 10**6}, "is 1000000, and the body has"),
        ("application/json", {"inference-header-content-length": 5}, "failed to parse"),
        ("image/png", {}, "model 'm' has no input of BYTES or UINT8"),
    ],
)
def test_bad_words_about_a_body(content_type: str, headers: dict[str, Any], reason: str) -> None:
    """A message that contradicts its body is refused."""
    assert reason in why(kserve(), content_type, headers=headers)


@pytest.mark.parametrize(
    ("body", "encoding", "reason"),
    [
        (kserve(), "lz4", "the content encoding 'lz4' is not known"),
        (kserve(), "utf-16", "the content encoding 'utf-16' is not known"),
        (kserve(), "gzip", "the body is not gzip"),
        (gzip.compress(kserve(), mtime=0)[:-4], "gzip", "the gzip body is cut off"),
        (gzip.compress(kserve(), mtime=0) + b"more", "gzip", "has data behind its end"),
        (gzip.compress(b"", mtime=0), "gzip", "no body"),
        (gzip.compress(bytes(10**6), mtime=0), "gzip", "more than 1000 bytes"),
        (bytes(1001), "", "more than 1000 bytes"),
    ],
)
def test_bad_encodings(body: bytes, encoding: str, reason: str) -> None:
    """What is not known, damaged or grows too large is refused."""
    assert reason in why(body, encoding=encoding, codec=codec(max_bytes=1000))


@pytest.mark.parametrize(
    ("inputs", "body", "content_type", "reason"),
    [
        ((tensor("BYTES", 1), tensor("UINT8", -1, name="U")), b"x", "text/plain", "has 2 inputs of BYTES or UINT8"),
        ((tensor("BYTES", 2),), b"x", "text/plain", "more than one element"),
        ((tensor("UINT8", -1, -1),), b"x", "image/png", "which a number of bytes does not tell"),
        ((tensor("UINT8", 4),), b"x", "image/png", "byte size mismatch"),
        ((tensor("BYTES", 1),), b"ok\xff", "text/plain", "not UTF-8 at byte 2"),
        ((tensor("BYTES", 1), NUMBERS), b"x", "text/plain", "missing required input"),
    ],
)
def test_bad_raw_bodies(inputs: Any, body: bytes, content_type: str, reason: str) -> None:
    """Where the one input can't be told, or the bytes do not fill it."""
    named = [TensorSpec(name=f"X{i}", datatype=t.datatype, dims=t.dims) for i, t in enumerate(inputs)]

    assert reason in why(body, content_type, codec=codec(*named))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"input": "Z"}, "field 'input' is 'Z', which model 'm' lacks; it has X"),
        ({"columns": {"Z": "a"}}, "field 'columns' names input 'Z'"),
        ({"columns": {"X": ["a", "b"]}}, "2 columns make 2 element"),
        ({"columns": {"X": {"columns": ["a"], "shape": [5]}}}, "field 'columns.X.shape' is"),
    ],
)
def test_options_that_do_not_fit_the_model(options: dict[str, Any], reason: str) -> None:
    """They are the route's mistake, and found before any message."""
    with pytest.raises(InvalidRequest, match=r"field|columns") as refused:
        codec(**options)
    assert reason in refused.value.message


def test_a_named_input_of_no_one_shape() -> None:
    """Two variable dimensions can't be told from a number of bytes."""
    with pytest.raises(InvalidRequest, match="field 'input' is 'X', and input 'X' has the dimensions"):
        codec(tensor("FP32", -1, -1), input="X")


@pytest.mark.parametrize(
    "options",
    [
        {"reply": "csv"},
        {"colums": {}},
        {"columns": {"X": []}},
        {"columns": {"X": ""}},
        {"columns": {"X": {"columns": ["a"], "shape": [0]}}},
        {"columns": {"X": {"column": "a"}}},
        {"max_bytes": 0},
    ],
)
def test_options_that_are_none(options: dict[str, Any]) -> None:
    """A field that is not known, or can't be, is refused when the configuration is read."""
    with pytest.raises(ValidationError):
        BodyOptions.model_validate(options)
