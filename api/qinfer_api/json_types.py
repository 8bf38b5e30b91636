"""Decodes JSON bodies of calls other than inference.

A member of the wrong type is answered with status 500 and Triton's text (reference §1.2).
"""

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from qinfer.errors import InvalidRequest, MalformedJson, QinferError
from qinfer.tensors import Bytes
from qinfer.wire.json_scan import check_depth

T = TypeVar("T")

_KINDS = {"bool": "boolean", "str": "string", "int": "unsigned-integer"}
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")
_WRONG = re.compile(r"Expected `(?P<kind>\w+).* - at `\$\.(?:\w+\.)*(?P<name>\w+)", re.DOTALL)


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
