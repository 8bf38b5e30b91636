"""The table of errors, HTTP statuses and gRPC codes, and the errors of JSON bodies (reference §1.2).

A member of the wrong type is answered with status 500 and Triton's text, in bodies of calls other than inference.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import msgspec

from qinfer.core.messages import Failure
from qinfer.errors import ErrorCode, InvalidRequest, InvalidStep, MalformedJson, Overloaded, QinferError
from qinfer.tensors import Bytes
from qinfer.wire.json_scan import check_depth

T = TypeVar("T")

_KINDS = {"bool": "boolean", "str": "string", "int": "unsigned-integer"}
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
_WRONG = re.compile(r"Expected `(?P<kind>\w+).* - at `\$\.(?:\w+\.)*(?P<name>\w+)", re.DOTALL)

GRPC_CODES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)


class Status(NamedTuple):
    """One kind of failure in HTTP and gRPC."""

    http: int
    grpc: str


STATUSES: dict[ErrorCode, Status] = {
    ErrorCode.INVALID_REQUEST: Status(400, "INVALID_ARGUMENT"),
    ErrorCode.INPUT_MISSING: Status(400, "INVALID_ARGUMENT"),
    ErrorCode.MALFORMED_JSON: Status(500, "INTERNAL"),
    ErrorCode.UNSUPPORTED_DATATYPE: Status(400, "INVALID_ARGUMENT"),
    ErrorCode.UNSUPPORTED_FEATURE: Status(501, "UNIMPLEMENTED"),
    ErrorCode.PAYLOAD_TOO_LARGE: Status(400, "INVALID_ARGUMENT"),
    ErrorCode.MODEL_NOT_FOUND: Status(404, "NOT_FOUND"),
    ErrorCode.REQUEST_NOT_FOUND: Status(404, "NOT_FOUND"),
    ErrorCode.JOB_NOT_FOUND: Status(404, "NOT_FOUND"),
    ErrorCode.ENDPOINT_NOT_FOUND: Status(404, "NOT_FOUND"),
    ErrorCode.WORKER_NOT_FOUND: Status(404, "NOT_FOUND"),
    ErrorCode.CONFLICT: Status(409, "ALREADY_EXISTS"),
    ErrorCode.ALREADY_EXISTS: Status(400, "ALREADY_EXISTS"),
    ErrorCode.REGION_NOT_FOUND: Status(404, "NOT_FOUND"),
    ErrorCode.REGION_UNAVAILABLE: Status(500, "INTERNAL"),
    ErrorCode.QUEUE_FULL: Status(503, "UNAVAILABLE"),
    ErrorCode.QUOTA_EXCEEDED: Status(503, "UNAVAILABLE"),
    ErrorCode.DEADLINE_INFEASIBLE: Status(503, "UNAVAILABLE"),
    ErrorCode.DEADLINE_EXCEEDED: Status(503, "UNAVAILABLE"),
    ErrorCode.CANCELLED: Status(400, "CANCELLED"),
    ErrorCode.UNAUTHORIZED: Status(401, "UNAUTHENTICATED"),
    ErrorCode.FORBIDDEN: Status(403, "PERMISSION_DENIED"),
    ErrorCode.RESTRICTED: Status(403, "UNAVAILABLE"),
    ErrorCode.VALUE_REFUSED: Status(503, "UNAVAILABLE"),
    ErrorCode.MODEL_NOT_READY: Status(503, "UNAVAILABLE"),
    ErrorCode.MODEL_LOAD_FAILED: Status(500, "INTERNAL"),
    ErrorCode.VERSIONS_FAILED: Status(400, "INVALID_ARGUMENT"),
    ErrorCode.CONTROL_DISABLED: Status(503, "UNAVAILABLE"),
    ErrorCode.BACKEND_UNAVAILABLE: Status(503, "UNAVAILABLE"),
    ErrorCode.INFERENCE_FAILED: Status(500, "INTERNAL"),
    ErrorCode.OUTPUT_MISMATCH: Status(500, "INTERNAL"),
    ErrorCode.UNKNOWN: Status(400, "UNKNOWN"),
    ErrorCode.BROKER_UNAVAILABLE: Status(503, "UNAVAILABLE"),
    ErrorCode.LEASE_LOST: Status(500, "INTERNAL"),
    ErrorCode.CORRUPT_ENTRY: Status(500, "INTERNAL"),
    ErrorCode.STREAM_BROKEN: Status(503, "UNAVAILABLE"),
    ErrorCode.SEQUENCE_ENDED: Status(400, "INVALID_ARGUMENT"),
    ErrorCode.SEQUENCE_LOST: Status(503, "UNAVAILABLE"),
    ErrorCode.RESULT_NOT_FOUND: Status(404, "NOT_FOUND"),
    ErrorCode.RESULT_EXPIRED: Status(410, "NOT_FOUND"),
    ErrorCode.STORE_REFUSED: Status(400, "INVALID_ARGUMENT"),
    ErrorCode.STORE_UNAVAILABLE: Status(503, "UNAVAILABLE"),
    ErrorCode.STORE_DENIED: Status(403, "PERMISSION_DENIED"),
    ErrorCode.STORE_NOT_FOUND: Status(400, "NOT_FOUND"),
    ErrorCode.STORE_CHANGED: Status(409, "INVALID_ARGUMENT"),
    ErrorCode.SETTINGS: Status(500, "INTERNAL"),
    ErrorCode.UNREACHABLE: Status(503, "UNAVAILABLE"),
    ErrorCode.JOB_FAILED: Status(500, "INTERNAL"),
    ErrorCode.INTERNAL: Status(500, "INTERNAL"),
}


TOO_MANY = {ErrorCode.QUEUE_FULL, ErrorCode.QUOTA_EXCEEDED}
"""Failures that are 429 below `/v1`, and 503 below `/v2`, as Triton's clients expect."""

MISTAKES = {ErrorCode.MALFORMED_JSON, ErrorCode.REGION_UNAVAILABLE}
"""Callers' mistakes that are 400 below `/v1`, and 500 below `/v2`, as in Triton."""

_OF_QUEUE = {*TOO_MANY, ErrorCode.DEADLINE_INFEASIBLE}
"""Refusals of queues begin with the request's id, as Triton's."""

AGAIN = {
    ErrorCode.QUEUE_FULL,
    ErrorCode.QUOTA_EXCEEDED,
    ErrorCode.DEADLINE_INFEASIBLE,
    ErrorCode.BROKER_UNAVAILABLE,
    ErrorCode.MODEL_NOT_READY,
    ErrorCode.STORE_UNAVAILABLE,
    ErrorCode.UNREACHABLE,
}
"""Failures whose reply has a `Retry-After`."""


def of_request(client_id: str) -> str:
    """Returns a prefix of errors (reference §1.2)."""
    return f"[request id: {client_id or '<id_unknown>'}] "


def has_id(error: QinferError) -> bool:
    """Returns whether an error begins with the request's id."""
    return isinstance(error, InvalidRequest | Overloaded) and not isinstance(error, InvalidStep)


def told(failure: Failure, client_id: str) -> Failure:
    """Returns a failure as its client sees it."""
    if failure.code not in _OF_QUEUE:
        return failure
    return Failure(failure.code, of_request(client_id) + failure.message, failure.retryable)


def http_status(code: str, *, v1: bool = False) -> int:
    """Returns the HTTP status of a code; 500 for unknown codes."""
    try:
        known = ErrorCode(code)
    except ValueError:
        return 500
    if v1 and known in MISTAKES:
        return 400
    return 429 if v1 and known in TOO_MANY else STATUSES[known].http


def grpc_status(code: str) -> str:
    """Returns the gRPC code of a code; INTERNAL for unknown codes."""
    try:
        return STATUSES[ErrorCode(code)].grpc
    except ValueError:
        return "INTERNAL"


def retry_after_s(code: str, error: BaseException | None = None) -> int:
    """Returns whole seconds before a retry; 0 = unknown."""
    if isinstance(error, Overloaded):
        return max(math.ceil(error.retry_after_s), 1)
    return 1 if code in AGAIN else 0


def decode_json(body: Bytes, kind: type[T], max_depth: int, *, prefix: str = "", call: str = "") -> T:
    """Decodes a JSON object.

    Errors about a wrong type begin with `prefix`; those about a missing member call the object `call`.
    """
    check_depth(body, max_depth)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if call and str(error).startswith("Expected `object`") and " - at " not in str(error):
            return convert_json({}, kind, prefix=prefix, call=call)
        raise _explained(error, prefix, call) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None


def convert_json(values: Mapping[str, object], kind: type[T], *, prefix: str = "", call: str = "") -> T:
    """Converts a decoded JSON object as `decode_json` does."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _explained(error, prefix, call) from None


def _explained(error: msgspec.ValidationError, prefix: str, call: str) -> QinferError:
    if missing := _MISSING.match(str(error)):
        return InvalidRequest(f"{call or 'the request'} has no '{missing['name']}' field")
    wrong = _WRONG.match(str(error))
    if wrong is None:
        return InvalidRequest("failed to parse the request JSON buffer: it must be an object")
    if wrong["kind"] == "object":
        return MalformedJson(f"'{wrong['name']}': attempt to get members for non-object")
    kind = _KINDS.get(wrong["kind"], wrong["kind"])
    return MalformedJson(f"{prefix}'{wrong['name']}': attempt to access JSON non-{kind} as {kind}")
