"""`pb_utils.TritonError` and `pb_utils.TritonModelException`: how a model says that it failed."""

from typing import ClassVar

from qinfer.errors import (
    Cancelled,
    Conflict,
    InferenceFailed,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    QinferError,
    RequestError,
    UnsupportedFeature,
)

NAMES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")
"""Triton's error codes, by number (tritonserver.h)."""

_RAISED: dict[int, type[QinferError]] = {
    2: ModelNotFound,
    3: InvalidRequest,
    4: ModelNotReady,
    5: UnsupportedFeature,
    6: Conflict,
    7: Cancelled,
}


class TritonModelException(Exception):
    """What a model raises when it can't go on."""

    def message(self) -> str:
        """Returns its text."""
        return str(self)


class TritonError:
    """Why one request failed.

    Args:
        message: What the client is told.
        code: One of the class's codes, such as `TritonError.INVALID_ARG`, which the client sees as a status.
    """

    UNKNOWN: ClassVar[int] = 0
    INTERNAL: ClassVar[int] = 1
    NOT_FOUND: ClassVar[int] = 2
    INVALID_ARG: ClassVar[int] = 3
    UNAVAILABLE: ClassVar[int] = 4
    UNSUPPORTED: ClassVar[int] = 5
    ALREADY_EXISTS: ClassVar[int] = 6
    CANCELLED: ClassVar[int] = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if not isinstance(message, str):
            raise TypeError(f"the message of a TritonError is a str, got {type(message).__name__}")
        if not isinstance(code, int) or not 0 <= code < len(NAMES):
            raise TypeError(f"the code of a TritonError is one of TritonError.{', '.join(NAMES)}, got {code!r}")
        self._message = message.encode(errors="replace").decode()  # half a surrogate pair has no UTF-8
        self._code = int(code)

    def message(self) -> str:
        """Returns its text."""
        return self._message

    def code(self) -> int:
        """Returns its code."""
        return self._code

    def __str__(self) -> str:
        return self._message


def to_qinfer(message: str, code: int) -> QinferError:
    """Returns qinfer's error for a model's `TritonError`."""
    return _RAISED.get(code, InferenceFailed)(message)


def code_of(error: QinferError) -> int:
    """Returns Triton's code for one of qinfer's errors."""
    for code, kind in _RAISED.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, RequestError):
        return TritonError.INVALID_ARG
    return TritonError.UNAVAILABLE if error.retryable else TritonError.INTERNAL
