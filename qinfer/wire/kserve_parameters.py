"""The request parameters of the infer endpoint (reference §1.6): what the server understands, and what it hands on."""

from collections.abc import Mapping
from typing import Any

from qinfer.core.messages import Sequence
from qinfer.errors import InvalidRequest, MalformedJson

_NOT_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"
_NOT_BOOLEAN = "attempt to access JSON non-boolean as boolean"
_NOT_STRING = "attempt to access JSON non-string as string"


def apply_parameters(parameters: Mapping[str, Any], fields: dict[str, Any]) -> bool:
    """Sorts the request's parameters into the fields of an `InferRequest`.

    Args:
        parameters: What the request has; values of any JSON type.
        fields: Gets `priority`, `timeout_s`, `sequence`, and `parameters` for the custom ones.

    Returns:
        `binary_data_output`: whether outputs travel as binary data unless they say otherwise.

    Raises:
        InvalidRequest: A reserved key, or a custom value that is no scalar.
        MalformedJson: A known parameter has the wrong type.
    """
    binary = False
    custom: dict[str, Any] = {}
    sequence: dict[str, Any] = {}
    for key, value in parameters.items():
        if key == "binary_data_output":
            binary = _boolean(key, value)
        elif key == "priority":
            fields["priority"] = _unsigned(key, value)
        elif key == "timeout":
            fields["timeout_s"] = _unsigned(key, value) / 1e6
        elif key == "sequence_id":
            sequence["id"] = value if _is_unsigned(value) else _string(key, value)
        elif key in ("sequence_start", "sequence_end"):
            sequence[key.removeprefix("sequence_")] = _boolean(key, value)
        else:
            custom[key] = custom_parameter(key, value)
    if custom:
        fields["parameters"] = custom
    if sequence.get("id"):  # 0 and "" mean: no sequence
        fields["sequence"] = Sequence(**sequence)
    return binary


def custom_parameter(key: str, value: Any) -> Any:
    """Returns the value of a parameter that is handed to the backend.

    Raises:
        InvalidRequest: The key is reserved, or the value is no scalar.
    """
    if key.startswith("triton_"):
        raise InvalidRequest(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    if isinstance(value, str | bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**63):
        return value
    raise InvalidRequest(
        f"parameter '{key}' has invalid type. It should be either 'int', 'bool', 'double' or 'string'."
    )


def _is_unsigned(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def _unsigned(key: str, value: Any) -> int:
    if not _is_unsigned(value):
        raise MalformedJson(f"Unable to parse '{key}': {_NOT_UNSIGNED}")
    return int(value)


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise MalformedJson(f"Unable to parse '{key}': {_NOT_BOOLEAN}")
    return value


def _string(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedJson(f"Unable to parse '{key}': {_NOT_STRING}")
    return value
