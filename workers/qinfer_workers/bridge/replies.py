"""Responses → bodies of reply messages: KServe (JSON, or with binary tensors), JSON lines, Arrow; and errors. Pure.

As in a bulk job's output, one element a row becomes a plain value, `[k]` a list, `[a, b]` nested lists; BYTES become
text, unless `qinfer.binary_outputs` names the output.
"""

import io
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from qinfer.core.messages import Response
from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.models.config.to_spec import BINARY_OUTPUTS
from qinfer.models.spec import ModelSpec
from qinfer.tabular.schemas import list_type, lists_of
from qinfer.tensors import Tensor, iter_bytes, to_numpy
from qinfer.wire.kserve_json import encode_infer
from qinfer.wire.outputs import OutputPlan, bind

JSON_LENGTH_HEADER = "inference-header-content-length"

_encoder = msgspec.json.Encoder()
Form = Literal["kserve", "json", "jsonl", "arrow-stream", "arrow-file"]


class OutputColumn(msgspec.Struct, frozen=True, array_like=True):
    """An output whose column can't be known from one response; -1 in `dims` is variable."""

    name: str
    dims: tuple[int, ...]
    is_binary: bool = False


def json_lines(outputs: Iterable[Tensor], columns: Mapping[str, OutputColumn], *, is_batched: bool) -> bytes:
    """Returns a JSON object for each row; NaN and infinities are null."""
    values = {}
    for tensor in outputs:
        array, dims = _rows(tensor, columns.get(tensor.name), is_batched=is_batched)
        if tensor.datatype == "BYTES":
            array = _texts(tensor.name, array)
        values[tensor.name] = (array if dims else array.reshape(len(array))).tolist()
    _check_counts(values)
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return _encoder.encode_lines(rows)


def arrow_batch(
    outputs: Iterable[Tensor], columns: Mapping[str, OutputColumn], *, is_batched: bool, is_file: bool
) -> bytes:
    """Returns a record batch with a column for each output."""
    values = {}
    for tensor in outputs:
        column = columns.get(tensor.name)
        array, dims = _rows(tensor, column, is_batched=is_batched)
        values[tensor.name] = _column(tensor, array, dims, is_binary=column is not None and column.is_binary)
    _check_counts(values)
    batch = pa.RecordBatch.from_arrays(list(values.values()), names=list(values))
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, batch.schema) if is_file else pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _rows(tensor: Tensor, column: OutputColumn | None, *, is_batched: bool) -> tuple[Any, tuple[int, ...]]:
    """Returns an array of rows, and a row's dimensions; empty = one element."""
    array = to_numpy(tensor)
    if not is_batched:
        array = array[np.newaxis]
    dims = column.dims if column is not None else array.shape[1:]
    return array, () if all(dim == 1 for dim in dims) else dims


def _texts(name: str, array: Any) -> Any:
    texts = np.empty(array.shape, object)
    try:
        texts.reshape(-1)[:] = [value.decode() for value in array.reshape(-1).tolist()]
    except UnicodeDecodeError:
        raise _no_text(name) from None
    return texts


def _no_text(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"output '{name}' has bytes that are not UTF-8; name it in the model's parameter '{BINARY_OUTPUTS}' and set "
        "'reply' of the route's 'body' to arrow, or to kserve"
    )


def _column(tensor: Tensor, array: Any, dims: tuple[int, ...], *, is_binary: bool) -> pa.Array:
    flat = array.reshape(-1)
    if tensor.datatype == "BYTES":
        values = pa.array(flat, pa.binary())
        if not is_binary:
            try:
                values = values.cast(pa.string())
            except pa.ArrowInvalid:
                raise _no_text(tensor.name) from None
    else:
        values = pa.array(flat)
    shape = array.shape[1:]
    for level in reversed(range(len(dims))):
        values = lists_of(values, list_type(values.type, dims[level]), shape[level], len(array) * prod(shape[:level]))
    return values


def _check_counts(values: Mapping[str, Any]) -> None:
    counts = {name: len(column) for name, column in values.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"'{name}' {count}" for name, count in counts.items())
        raise OutputMismatch(f"the outputs have different numbers of rows: {listed}")


class ReplyEncoding(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The encoding of a reply; small, because it is kept with the request.

    `plan` is for KServe replies (`None` = JSON), `columns` for rows.
    """

    form: Form = "kserve"
    client_id: str = ""
    plan: OutputPlan | None = None
    columns: tuple[OutputColumn, ...] = ()
    is_batched: bool = True


class EncodedReply(NamedTuple):
    """A reply before it is published."""

    content_type: str
    body: bytes
    headers: Mapping[str, str] = {}


_JSON = "application/json"
_JSON_PLAN = OutputPlan()
_ROW_TYPES: Mapping[Form, str] = {
    "json": _JSON,
    "jsonl": "application/x-ndjson",
    "arrow-stream": "application/vnd.apache.arrow.stream",
    "arrow-file": "application/vnd.apache.arrow.file",
}


def encode(reply: ReplyEncoding, response: Response, spec: ModelSpec | None = None) -> EncodedReply:
    """Encodes outputs; `spec` has class names too many to keep. `InvalidRequest` = this form can't carry one."""
    if reply.form == "kserve":
        return _kserve(reply, response, spec)
    columns = {column.name: column for column in reply.columns}
    if reply.form in ("json", "jsonl"):
        body = json_lines(response.outputs, columns, is_batched=reply.is_batched)
        body = body if reply.form == "jsonl" else _object(body, response)
    else:
        is_file = reply.form == "arrow-file"
        body = arrow_batch(response.outputs, columns, is_batched=reply.is_batched, is_file=is_file)
    return EncodedReply(_ROW_TYPES[reply.form], body)


def encode_one(reply: ReplyEncoding, response: Response) -> EncodedReply:
    """Encodes a decoupled model's response, which may be an error."""
    if response.failure is None:
        return encode(reply, response)
    return encode_error(response.failure.message, reply.client_id)


def encode_list(reply: ReplyEncoding, responses: Iterable[Response]) -> EncodedReply:
    """Encodes a decoupled model's responses: `{"responses": […]}`, then binary outputs in order; Arrow is refused."""
    if reply.form.startswith("arrow"):
        raise InvalidRequest("the responses of a decoupled model can't be one reply in Arrow; send JSON or JSON lines")
    texts, binary = list[bytes](), list[bytes]()
    for response in responses:
        encoded = encode_one(reply, response)
        length = int(encoded.headers.get(JSON_LENGTH_HEADER, len(encoded.body)))
        text = encoded.body[:length]
        if encoded.content_type == _ROW_TYPES["jsonl"]:
            text = b"[%b]" % b",".join(text.splitlines())
        texts.append(text)
        binary.append(encoded.body[length:])
    text, tail = b'{"responses":[%b]}' % b",".join(texts), b"".join(binary)
    return _with_binary(text + tail, len(text) if tail else None)


def _object(lines: bytes, response: Response) -> bytes:
    if not response.outputs:
        return b"{}"
    rows = lines.splitlines()
    if len(rows) != 1:
        raise OutputMismatch(f"the model gave {len(rows)} rows for a message of one; set the reply's format to jsonl")
    return rows[0]


def bound(plan: OutputPlan, spec: ModelSpec) -> OutputPlan:
    """Adds the class names of the model's configuration to a plan."""
    labels = {output.name: output.labels for output in spec.outputs}
    return bind(plan, labels, batched=spec.max_batch_size > 0)


def encode_error(message: str, client_id: str = "") -> EncodedReply:
    """Encodes KServe's `{"error": …}`, with any `id`."""
    body = {"error": message, "id": client_id} if client_id else {"error": message}
    return EncodedReply(_JSON, msgspec.json.encode(body))


def _kserve(reply: ReplyEncoding, response: Response, spec: ModelSpec | None) -> EncodedReply:
    plan = reply.plan or _JSON_PLAN
    if plan.special is not None and spec is not None:
        plan = bound(plan, spec)
    try:
        encoded = encode_infer(response, reply.client_id, plan)
    except InvalidRequest:
        binary = {tensor.name: True for tensor in response.outputs if not _is_json(tensor, plan)}
        if not binary:
            raise
        # no second try: send binary data
        plan = msgspec.structs.replace(plan, overrides={**plan.overrides, **binary})
        encoded = encode_infer(response, reply.client_id, plan)
    return _with_binary(encoded.body, encoded.json_length)


def _with_binary(body: bytes, json_length: int | None) -> EncodedReply:
    if json_length is None:
        return EncodedReply(_JSON, body)
    return EncodedReply("application/octet-stream", body, {JSON_LENGTH_HEADER: str(json_length)})


def _is_json(tensor: Tensor, plan: OutputPlan) -> bool:
    if plan.is_binary(tensor.name) or (plan.special is not None and tensor.name in plan.special):
        return True
    if tensor.datatype != "BYTES":
        return tensor.datatype not in ("FP16", "BF16")
    try:
        for element in iter_bytes(tensor.data):
            str(element, "utf-8")
    except (UnicodeDecodeError, InvalidRequest):
        return False
    return True
