"""JSON bodies of the calls that are no inference: read with limits, decoded, their members taken by type.

A wrong type is answered with 500, in Triton's words (reference §1.2).
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from qinfer.codec.json_depth import check_depth
from qinfer.errors import InvalidRequest, MalformedJson
from qinfer_api.http.fast import MAX_FAST_BYTES
from qinfer_api.rest.bodies import read_body
from qinfer_api.rest.services import Services

JsonObject = Mapping[str, Any]
"""A decoded JSON object; its values are whatever the client sent."""


async def read_object(services: Services, request: Request, *, may_be_empty: bool = False) -> JsonObject:
    """Reads a body that is a JSON object.

    Args:
        services: Their settings have the limits.
        request: The request.
        may_be_empty: No body at all is an empty object.

    Raises:
        PayloadTooLarge: It is larger than `http.max_input_bytes`.
        UnsupportedFeature: It is in an encoding that is not known.
        InvalidRequest: It is no JSON object, or nested too deep.
    """
    body = bytes(await read_body(request, services.settings.http.max_input_bytes))
    if not body and may_be_empty:
        return {}
    max_depth = services.settings.limits.max_json_depth
    if len(body) > MAX_FAST_BYTES:
        return await asyncio.to_thread(_decode, body, max_depth)
    return _decode(body, max_depth)


def take_object(body: JsonObject, name: str) -> JsonObject:
    """Returns a member that is an object; empty where there is none.

    Raises:
        MalformedJson: It is something else.
    """
    value = body.get(name, {})
    if not isinstance(value, dict):
        raise MalformedJson(f"'{name}': attempt to get members for non-object")
    return value


def take_bool(body: JsonObject, name: str) -> bool:
    """Returns a member that is a boolean; false where there is none.

    Raises:
        MalformedJson: It is something else.
    """
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise MalformedJson(f"Unable to parse '{name}': attempt to access JSON non-boolean as boolean")
    return value


def _decode(body: bytes, max_depth: int) -> JsonObject:
    check_depth(body, max_depth)
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None
    if not isinstance(decoded, dict):
        raise InvalidRequest("failed to parse the request JSON buffer: it must be an object")
    return decoded
