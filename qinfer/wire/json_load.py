"""JSON as Triton parses it: NaN and infinities are numbers; too large numbers are an error."""

import json
import re
from typing import Any

import msgspec

from qinfer.errors import InvalidRequest
from qinfer.wire.json_scan import too_deep

# rapidjson also accepts `Inf` and `-NaN`. Strings are skipped possessively, in linear time.
_SPECIAL_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*+"?|-NaN|Inf(?:inity)?', re.DOTALL)


def load(text: bytes, max_depth: int) -> Any:
    """Parses JSON as Triton does, or raises `InvalidRequest`."""
    try:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            if b"NaN" not in text and b"Inf" not in text:
                raise
            document = json.loads(_SPECIAL_NUMBER.sub(_as_python, text), parse_float=_finite)
            msgspec.json.encode(document)  # finds lone surrogates
            return document
    except RecursionError:
        raise too_deep(max_depth) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None


def repeated_key(text: bytes, nested: str) -> str | None:
    """Returns an object's or member's first repeated key."""
    pairs: Any = json.loads(_SPECIAL_NUMBER.sub(_as_python, text), object_pairs_hook=_Pairs)
    for members in (pairs, *(value for key, value in pairs if key == nested)):
        seen: set[str] = set()
        for key, _ in members:
            if key in seen:
                return str(key)
            seen.add(key)
    return None


class _Pairs(list[tuple[str, Any]]):
    """The members of an object."""


def _as_python(match: re.Match[bytes]) -> bytes:
    token = match.group()
    return {b"-NaN": b"NaN", b"Inf": b"Infinity"}.get(token, token)


def _finite(literal: str) -> float:
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        raise ValueError("Number too big to be stored in double.")
    return value
