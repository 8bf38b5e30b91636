"""Text and parameters of a model's code, made fit for the wire: plain `str`, whole UTF-8, plain numbers."""

from collections.abc import Mapping

from qinfer.backends.python_host.errors import TritonModelException
from qinfer.core.messages import Scalar

MESSAGE_CHARACTERS = 4096
"""An error's text is cut to so many: what an exception quotes may be a whole array."""


def text(value: object, what: str) -> str:
    """Returns a string as a `str` of whole characters.

    Args:
        value: A string; also `bytes`, which Triton takes for one, and subclasses such as `np.str_`.
        what: What it is, for the error.

    Raises:
        TypeError: It is no string.
    """
    if type(value) is str and value.isascii():
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if not isinstance(value, str):
        raise TypeError(f"{what} is a str, got {type(value).__name__}")
    return value.encode(errors="replace").decode()  # half a surrogate pair, as in names of files, has no UTF-8


def message_of(error: BaseException) -> str:
    """Returns the text of an exception, cut to a length that a client can be sent; one may fail to tell its own."""
    try:
        told = text(str(error), "a message")
    except Exception:  # noqa: BLE001  the model's own class
        told = ""
    return told if len(told) <= MESSAGE_CHARACTERS else f"{told[:MESSAGE_CHARACTERS]}…"


def checked_parameters(parameters: Mapping[str, Scalar] | None) -> dict[str, Scalar]:
    """Returns a copy of custom parameters.

    Raises:
        TritonModelException: They are no dictionary, a key is no string, or a value no bool, int of 64 bits, float or
            string.
    """
    if not parameters:
        return {}
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to have type dict, found type '{type(parameters)}'")
    return {_key(key): _value(key, value) for key, value in parameters.items()}


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise TritonModelException(f"Expect parameters keys to have type str, found type '{type(key)}'")
    return text(key, "a key")


def _value(key: str, value: object) -> Scalar:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise TritonModelException(f"parameter '{key}' is {value}, which has more than 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return text(value, "a value")
    raise TritonModelException(f"Expect parameters values to have type bool/int/float/str, found type '{type(value)}'")
