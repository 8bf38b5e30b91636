"""Message bodies → inference requests, by content type or route. Pure; every body is read or refused.

    application/json                                 KServe JSON; a row if the route has columns and it has no `inputs`
    application/vnd.kserve…; with the header         KServe JSON ‖ binary tensors
    inference-header-content-length: any type
    application/x-ndjson, application/jsonl          rows, by the route's columns: one request with all of them
    application/vnd.apache.arrow.stream, ….file      the same in Arrow
    anything else                                    the data of one input, such as an image or a text

Replies have the same form, unless the route says otherwise.
"""

import bz2
import lzma
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

import msgspec

from qinfer.core.messages import OutgoingRequest
from qinfer.errors import InvalidRequest, QinferError
from qinfer.models.config.to_spec import BINARY_OUTPUTS
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.submission.validate import validate
from qinfer.tabular.spec import shown
from qinfer.tensors import DATATYPES, Bytes, Tensor
from qinfer.wire.json_pieces import JsonBounds
from qinfer.wire.json_scan import LARGE_BYTES
from qinfer.wire.kserve_json import decode_infer
from qinfer.wire.outputs import NoRegions, OutputPlan, bind
from qinfer_workers.bridge.config import BodyOptions
from qinfer_workers.bridge.messages import COMPRESSION_HEADER
from qinfer_workers.bridge.replies import JSON_LENGTH_HEADER, Form, OutputColumn, ReplyEncoding, bound
from qinfer_workers.bridge.rows import RowInputs, listed

Kind = Literal["", "kserve", "json", "row", "jsonl", "arrow-stream", "arrow-file", "raw", "text"]

_KINDS: Mapping[str, Kind] = {
    "": "",
    "application/data": "",  # kombu's type of bytes
    "application/json": "json",
    "text/json": "json",
    "application/x-ndjson": "jsonl",
    "application/ndjson": "jsonl",
    "application/jsonl": "jsonl",
    "application/jsonlines": "jsonl",
    "application/x-jsonlines": "jsonl",
    "application/json-lines": "jsonl",
    "application/vnd.apache.arrow.stream": "arrow-stream",
    "application/vnd.apache.arrow.file": "arrow-file",
}
_JSON_LENGTH = re.compile(r";\s*" + JSON_LENGTH_HEADER + r'\s*=\s*"?([^";\s]*)', re.IGNORECASE)
_CHARSET = re.compile(r';\s*charset\s*=\s*"?([^";\s]*)', re.IGNORECASE)
_UTF_8 = ("utf-8", "utf8", "us-ascii", "ascii")
_PICKLE = "application/x-python-serialize"
_PLAIN = frozenset((None, "", "identity", "binary", *_UTF_8))
_COMPRESSIONS: Mapping[str, str] = {
    "gzip": "zlib", "x-gzip": "zlib", "application/x-gzip": "zlib", "application/gzip": "zlib",
    "zlib": "zlib", "application/zlib": "zlib", "deflate": "zlib",
    "bzip2": "bz2", "bzip": "bz2", "bz2": "bz2", "application/x-bz2": "bz2", "application/x-bzip2": "bz2",
    "lzma": "lzma", "xz": "lzma", "application/x-lzma": "lzma", "application/x-xz": "lzma",
    "zstd": "zstd", "zstandard": "zstd", "application/zstd": "zstd",
    "brotli": "brotli", "br": "brotli", "application/x-brotli": "brotli",
}  # fmt: skip
"""Names of kombu (kombu/compression.py) and HTTP → codec."""
_XZ_MEMORY_BYTES = 128 * 2**20  # for the dictionary; the highest preset takes 65 MiB
_DECOMPRESSORS: Mapping[str, Callable[[], Any]] = {
    "zlib": lambda: zlib.decompressobj(wbits=47),  # kombu's gzip is zlib's container; the first bytes tell
    "bz2": bz2.BZ2Decompressor,
    "lzma": lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES),
}
_MAX_TYPE_CHARACTERS = 256


class Content(NamedTuple):
    """A content type; `problem` = why its bodies can't be read."""

    kind: Kind
    json_length: str | None = None
    problem: str = ""


@lru_cache(maxsize=256)
def parse_content_type(text: str) -> Content:
    """Reads a content type; unknown = `raw` or `text`."""
    name = text.partition(";")[0].strip().lower()[:_MAX_TYPE_CHARACTERS]
    kind = _KINDS.get(name)
    if kind is None:
        kind = "kserve" if name.startswith("application/vnd.kserve") else "text" if name[:5] == "text/" else "raw"
    length = _JSON_LENGTH.search(text)
    charset = _CHARSET.search(text)
    problem = ""
    if name == _PICKLE:
        problem = "the content type is Python's pickle, which is never read; publish with serializer='json'"
    elif charset and kind not in ("raw", "arrow-stream", "arrow-file") and charset[1].lower() not in _UTF_8:
        problem = f"the character set of the content type is '{shown(charset[1])}'; send the text as UTF-8"
    return Content(kind, length[1] if length else None, problem)


def json_length(content: Content, headers: Mapping[str, object] | None, body_bytes: int) -> int | None:
    """Returns where JSON ends and binary tensors begin; `None` = unknown."""
    value: object = content.json_length
    for name, given in (headers or {}).items():
        if isinstance(name, str) and name.lower() == JSON_LENGTH_HEADER:
            value = given.decode("latin-1") if isinstance(given, bytes) else given
    if value is None:
        return None
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidRequest(
            f"header '{JSON_LENGTH_HEADER}' is '{shown(text)}'; it counts the bytes of the JSON before the tensors"
        )
    if int(text) > body_bytes:
        raise InvalidRequest(f"header '{JSON_LENGTH_HEADER}' is {text}, and the body has {body_bytes} bytes")
    return int(text)


def unpacked(body: Bytes | str, content_encoding: str | None, max_bytes: int, compression: object = None) -> Bytes:
    """Returns a body without compression and both encodings."""
    if isinstance(body, str):
        try:
            body = body.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the body is a text that UTF-8 can't hold; send bytes") from None
    if compression:
        body = _decompressed(body, COMPRESSION_HEADER, compression, max_bytes)
    if content_encoding not in _PLAIN:
        body = _decompressed(body, "content encoding", content_encoding, max_bytes)
    if not len(body):
        raise InvalidRequest("the message has no body")
    if len(body) > max_bytes:
        raise _too_large(max_bytes)
    return body


def _decompressed(body: Bytes, field: str, value: object, max_bytes: int) -> Bytes:
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    name = text.strip().lower().replace("_", "-")
    if name in _PLAIN:
        return body
    codec = _COMPRESSIONS.get(name)
    if codec is None:
        raise InvalidRequest(
            f"the {field} '{shown(name)}' is not known; send the body as it is, or in gzip, deflate, bzip2, xz, zstd "
            "or brotli"
        )
    try:
        plain, rest = _begin_of(body, codec, max_bytes + 1)
    except (zlib.error, lzma.LZMAError, OSError, EOFError, MemoryError) as error:
        raise InvalidRequest(f"the body is not {name}, or damaged: {error}") from None
    if len(plain) > max_bytes:
        raise _too_large(max_bytes)
    if rest is None:
        raise InvalidRequest(f"the {name} body is cut off; send all of it")
    if rest:
        raise InvalidRequest(f"the {name} body has data behind its end; compress it as one stream")
    return plain


def _begin_of(body: Bytes, codec: str, max_bytes: int) -> tuple[bytes, bytes | None]:
    """Returns the first decompressed bytes, and the data behind the end (`None` = no end)."""
    if codec in _DECOMPRESSORS:
        decompressor = _DECOMPRESSORS[codec]()
        plain = decompressor.decompress(body, max_bytes)
        return plain, decompressor.unused_data if decompressor.eof else None
    try:
        import pyarrow as pa
    except ImportError:
        raise InvalidRequest(
            f"the bridge reads {codec} only with pyarrow; its operator installs it with pip install 'qinfer-ml[bulk]'"
        ) from None
    with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
        return stream.read(max_bytes), b""


def _too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"the body has more than {max_bytes} bytes; send less in a message, or raise 'max_bytes' of the route's 'body'"
    )


_LENGTH = struct.Struct("<I")


class RawInput:
    """Makes tensors of raw bodies for input `name`; empty = the only one of BYTES or UINT8."""

    def __init__(self, name: str, spec: ModelSpec) -> None:
        self._tensor: TensorSpec | None = None
        self._row = (1,) if spec.max_batch_size else ()
        self._problem = ""
        if name:
            self._tensor = _named(name, spec)
            self._problem = _shape_problem(self._tensor)
            if self._problem:
                raise InvalidRequest(f"field 'input' is '{shown(name)}', and {self._problem}")
            return
        fitting = [tensor for tensor in spec.inputs if tensor.datatype in ("BYTES", "UINT8")]
        fitting = [tensor for tensor in fitting if not tensor.optional] or fitting
        if len(fitting) != 1:
            number = f"{len(fitting)} inputs" if fitting else "no input"
            remedy = "name one in field 'input' of the route's 'body'" if fitting else "send KServe JSON or rows"
            self._problem = f"model '{spec.name}' has {number} of BYTES or UINT8 to take it; {remedy}"
        else:
            (self._tensor,) = fitting
            self._problem = _shape_problem(self._tensor)

    def tensor(self, body: Bytes) -> Tensor:
        """Makes the tensor of a body."""
        expected = self._tensor
        if expected is None or self._problem:
            raise InvalidRequest(f"the body is raw data, and {self._problem}")
        if expected.datatype == "BYTES":
            shape = (*self._row, *(1 for _ in expected.dims))
            return Tensor(expected.name, "BYTES", shape, b"".join((_LENGTH.pack(len(body)), body)))
        row = prod(dim for dim in expected.dims if dim != -1) * DATATYPES[expected.datatype].itemsize
        dims = tuple(len(body) // row if dim == -1 else dim for dim in expected.dims)
        return Tensor(expected.name, expected.datatype, (*self._row, *dims), body)


def _named(name: str, spec: ModelSpec) -> TensorSpec:
    for tensor in spec.inputs:
        if tensor.name == name:
            return tensor
    there = ", ".join(tensor.name for tensor in spec.inputs)
    raise InvalidRequest(f"field 'input' is '{shown(name)}', which model '{spec.name}' lacks; it has {there}")


def _shape_problem(tensor: TensorSpec) -> str:
    where = f"input '{tensor.name}' has the dimensions {list(tensor.dims)}"
    if tensor.datatype == "BYTES" and any(dim not in (-1, 1) for dim in tensor.dims):
        return f"{where}, more than one element; send KServe JSON or rows"
    if tensor.datatype != "BYTES" and tensor.dims.count(-1) > 1:
        return f"{where}, which a number of bytes does not tell; send KServe JSON or rows"
    return ""


MAX_REPLY_BYTES = 4096

_LONG_ID = 512
_MAX_REASON = 1000  # senders choose names
_PLAIN_PLAN = OutputPlan()
_FORMS: Mapping[str, Form] = {"kserve": "kserve", "jsonl": "jsonl", "arrow": "arrow-stream"}
_SAME: Mapping[Kind, Form] = {
    "row": "json",
    "jsonl": "jsonl",
    "arrow-stream": "arrow-stream",
    "arrow-file": "arrow-file",
}
_ARROW_FILE = b"ARROW1"  # https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format


class DecodedMessage(NamedTuple):
    """A message as a validated request."""

    request: OutgoingRequest
    reply: ReplyEncoding
    rows: int


class BodyCodec:
    """Reads a route's bodies for one model configuration; any thread."""

    def __init__(self, options: BodyOptions, spec: ModelSpec, version: int = 0) -> None:
        self.spec = spec
        self._options = options
        self._bounds = JsonBounds(options.max_json_depth, options.max_bytes)
        self._version = version
        self._default = parse_content_type(options.content_type)
        self._raw = RawInput(options.input, spec)
        self._rows = RowInputs(options, spec)
        self._is_batched = spec.max_batch_size > 0
        columns = _columns(spec)
        self._replies: dict[Form, ReplyEncoding] = {
            form: ReplyEncoding(form, "", None, () if form == "kserve" else columns, self._is_batched)
            for form in ("kserve", "json", "jsonl", "arrow-stream", "arrow-file")
        }

    def decode(
        self,
        body: Bytes | str,
        content_type: str | None = "",
        headers: Mapping[str, object] | None = None,
        content_encoding: str | None = "",
    ) -> DecodedMessage:
        """Makes a request of a message; binary tensors are views of the body.

        kombu may give a character set as `content_encoding`.
        """
        try:
            return self._decode(body, content_type, headers, content_encoding)
        except QinferError as error:
            text = error.message
            if len(text) > _MAX_REASON:
                text = text[:_MAX_REASON] + "…"
            raise InvalidRequest(text) from None

    def _decode(
        self,
        body: Bytes | str,
        content_type: str | None,
        headers: Mapping[str, object] | None,
        content_encoding: str | None,
    ) -> DecodedMessage:
        compression = headers.get(COMPRESSION_HEADER) if headers else None
        body = unpacked(body, content_encoding, self._options.max_bytes, compression)
        content = parse_content_type(content_type or "")
        if not content.kind:
            content = self._default
        kind, length = self._kind(body, content, headers)
        if kind == "kserve":
            is_guess = self._options.format == "auto" and not content.kind and length is None
            return self._kserve(body, length, is_guess=is_guess)
        if kind in ("raw", "text"):
            if kind == "text":
                _check_text(body)
            inputs: tuple[Tensor, ...] = (self._raw.tensor(body),)
        else:
            inputs = self._rows.decode(body, kind)
        request = OutgoingRequest(model=self.spec.name, inputs=inputs, version=self._version)
        return DecodedMessage(request, self._replies[self._form(kind)], validate(request, self.spec))

    def _kind(self, body: Bytes, content: Content, headers: Mapping[str, object] | None) -> tuple[Kind, int | None]:
        wanted = self._options.format
        if wanted == "raw":
            return "raw", None
        if wanted == "arrow":
            return ("arrow-file" if bytes(body[: len(_ARROW_FILE)]) == _ARROW_FILE else "arrow-stream"), None
        if content.problem:
            raise InvalidRequest(content.problem)
        if wanted in ("row", "jsonl"):
            return wanted, None
        length = json_length(content, headers, len(body)) if headers or content.json_length is not None else None
        if wanted == "kserve" or length:
            return "kserve", length
        if length == 0:
            return "raw", length
        kind = content.kind or ("json" if bytes(body[:64]).lstrip()[:1] == b"{" else "raw")
        if kind == "json":
            kind = "row" if self._options.columns and not _has_inputs(body) else "kserve"
        return kind, None

    def _kserve(self, body: Bytes, length: int | None, *, is_guess: bool) -> DecodedMessage:
        try:
            request, plan = decode_infer(body, length, self.spec.name, self._version, self._bounds, _REGIONS)
            rows = validate(request, self.spec)
        except QinferError as error:
            reason = error.message if length is not None else _without_inputs(body) or error.message
            if is_guess:
                reason = (
                    "the message has no content type, and was read as KServe JSON: give it one, or set 'content_type' "
                    f"or 'format' of the route's 'body'; {reason}"
                )
            raise InvalidRequest(reason) from None
        reply = self._replies[self._form("kserve")]
        if request.client_id or plan != _PLAIN_PLAN:
            reply = self._storable_reply(reply, request.client_id, plan)
        return DecodedMessage(request, reply, rows)

    def _storable_reply(self, reply: ReplyEncoding, client_id: str, plan: OutputPlan) -> ReplyEncoding:
        if plan.special is not None:
            with_labels = msgspec.structs.replace(reply, client_id=client_id, plan=bound(plan, self.spec))
            if _size_bytes(with_labels) <= MAX_REPLY_BYTES:
                return with_labels
            plan = bind(plan, {}, batched=self._is_batched)
        reply = msgspec.structs.replace(reply, client_id=client_id, plan=None if plan == _PLAIN_PLAN else plan)
        if len(client_id) > _LONG_ID or plan != _PLAIN_PLAN:
            _check_size(reply)
        return reply

    def _form(self, kind: Kind) -> Form:
        wanted = self._options.reply
        if wanted == "same" or (wanted == "arrow" and kind == "arrow-file"):
            return _SAME.get(kind, "kserve")
        return _FORMS[wanted]


def _no_shared_memory() -> InvalidRequest:
    return InvalidRequest("a message can't refer to shared memory; send the tensor's data in its body")


_REGIONS = NoRegions(_no_shared_memory)


class _Members(msgspec.Struct):
    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_members = msgspec.json.Decoder(_Members)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _has_inputs(body: Bytes) -> bool:
    try:
        return _members.decode(body).inputs is not msgspec.UNSET
    except _UNREADABLE:
        return False


def _without_inputs(body: Bytes) -> str:
    if len(body) > LARGE_BYTES:
        return ""
    try:
        found = _object.decode(body)
    except _UNREADABLE:
        return ""
    if "inputs" in found:
        return ""
    return (
        f"expected a KServe request, which has 'inputs', and got a JSON object that has {listed(found)}; to read it as "
        "a row, map its members in 'columns' of the route's 'body', or set 'format' there to row"
    )


def _check_text(body: Bytes) -> None:
    try:
        str(body, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the text is not UTF-8 at byte {error.start}; send UTF-8, or other data as application/octet-stream"
        ) from None


def _size_bytes(reply: ReplyEncoding) -> int:
    return len(msgspec.msgpack.encode(reply))


def _check_size(reply: ReplyEncoding) -> None:
    size = _size_bytes(reply)
    if size > MAX_REPLY_BYTES:
        raise InvalidRequest(
            f"the request's 'id' and 'outputs' take {size} bytes, more than the {MAX_REPLY_BYTES} that are kept for "
            "its reply; shorten the id, or ask for all outputs by leaving them out"
        )


def _columns(spec: ModelSpec) -> tuple[OutputColumn, ...]:
    binary = {name.strip() for name in spec.parameters.get(BINARY_OUTPUTS, "").split(",")}
    return tuple(
        OutputColumn(tensor.name, tensor.dims, tensor.name in binary)
        for tensor in spec.outputs
        if -1 in tensor.dims or tensor.name in binary
    )
