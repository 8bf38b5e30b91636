"""Responses → the bodies of reply messages: KServe (JSON, or with binary tensors), JSON lines, Arrow; and errors."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from qinfer.core.messages import Response
from qinfer.errors import InvalidRequest
from qinfer.models.spec import ModelSpec
from qinfer.tensors import Tensor, iter_bytes
from qinfer.wire.kserve_json import encode_infer
from qinfer.wire.outputs import OutputPlan, bind
from qinfer_workers.bridge.bodies.content import JSON_LENGTH_HEADER
from qinfer_workers.bridge.reply_rows import OutputColumn, arrow_batch, json_lines

Form = Literal["kserve", "jsonl", "arrow-stream", "arrow-file"]


class ReplyEncoding(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How the reply to one message is written; small, for it is kept beside the request until that has ended.

    Attributes:
        form: The form of the body.
        client_id: The `id` of a KServe request, echoed.
        plan: How the outputs of a KServe reply travel, with the names of classes unless these are many; `None` = as
            JSON.
        columns: For rows, the outputs whose shape varies or whose BYTES are no text.
        is_batched: Whether the first dimension of outputs counts rows.
    """

    form: Form = "kserve"
    client_id: str = ""
    plan: OutputPlan | None = None
    columns: tuple[OutputColumn, ...] = ()
    is_batched: bool = True


class Encoded(NamedTuple):
    """A reply before it is published.

    Attributes:
        content_type: Its content type.
        body: Its body.
        headers: Headers that are needed to read it: `inference-header-content-length`, where tensors are binary.
    """

    content_type: str
    body: bytes
    headers: Mapping[str, str] = {}


_JSON = "application/json"
_JSON_PLAN = OutputPlan()
_ROW_TYPES: Mapping[Form, str] = {
    "jsonl": "application/x-ndjson",
    "arrow-stream": "application/vnd.apache.arrow.stream",
    "arrow-file": "application/vnd.apache.arrow.file",
}


def encode(reply: ReplyEncoding, response: Response, spec: ModelSpec | None = None) -> Encoded:
    """Encodes a response that carries outputs.

    Args:
        reply: How.
        response: The response; its failure, if any, is not looked at.
        spec: The configuration of the model that answered, if it is known: for names of classes that were too many to
            be kept.

    Raises:
        InvalidRequest: An output can't travel in this form; the message says in which it can.
        OutputMismatch: An output's bytes do not fill its shape.
    """
    if reply.form == "kserve":
        return _kserve(reply, response, spec)
    columns = {column.name: column for column in reply.columns}
    if reply.form == "jsonl":
        body = json_lines(response.outputs, columns, is_batched=reply.is_batched)
    else:
        is_file = reply.form == "arrow-file"
        body = arrow_batch(response.outputs, columns, is_batched=reply.is_batched, is_file=is_file)
    return Encoded(_ROW_TYPES[reply.form], body)


def bound(plan: OutputPlan, spec: ModelSpec) -> OutputPlan:
    """Completes a plan by the names of classes, which the model's configuration has."""
    labels = {output.name: output.labels for output in spec.outputs}
    return bind(plan, labels, batched=spec.max_batch_size > 0)


def encode_error(message: str, client_id: str = "") -> Encoded:
    """Encodes why there is no prediction: KServe's `{"error": …}`, with the request's `id` where it had one."""
    told = {"error": message, "id": client_id} if client_id else {"error": message}
    return Encoded(_JSON, msgspec.json.encode(told))


def _kserve(reply: ReplyEncoding, response: Response, spec: ModelSpec | None) -> Encoded:
    plan = reply.plan or _JSON_PLAN
    if plan.special is not None and spec is not None:
        plan = bound(plan, spec)
    try:
        encoded = encode_infer(response, reply.client_id, plan)
    except InvalidRequest:
        binary = {tensor.name: True for tensor in response.outputs if not _is_json(tensor, plan)}
        if not binary:
            raise
        # The prediction exists, and nobody can be asked again for it: what JSON can't carry follows it as it is.
        plan = msgspec.structs.replace(plan, overrides={**plan.overrides, **binary})
        encoded = encode_infer(response, reply.client_id, plan)
    if encoded.json_length is None:
        return Encoded(_JSON, encoded.body)
    return Encoded("application/octet-stream", encoded.body, {JSON_LENGTH_HEADER: str(encoded.json_length)})


def _is_json(tensor: Tensor, plan: OutputPlan) -> bool:
    """Tells whether an output travels, or can, as JSON; or as binary data already."""
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
