"""Errors of a model, and checks of its texts and parameters."""

from collections.abc import Mapping

from qinfer.core.messages import Failure, Scalar
from qinfer.errors import (
    AlreadyExists,
    Cancelled,
    InferenceFailed,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    QinferError,
    RequestError,
    UnknownFailure,
    UnsupportedFeature,
)

NAMES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")
"""Triton's error codes, by number (tritonserver.h)."""

_RAISED: dict[int, type[QinferError]] = {
    0: UnknownFailure,
    2: ModelNotFound,
    3: InvalidRequest,
    4: ModelNotReady,
    5: UnsupportedFeature,
    6: AlreadyExists,
    7: Cancelled,
}
_CODES = {kind.code.value: code for code, kind in _RAISED.items()}
MESSAGE_CHARACTERS = 4096
"""An exception may quote a whole array."""


class TritonModelException(Exception):
    """Raised by a model that cannot continue."""

    def message(self) -> str:
        """Returns the text of the exception."""
        return str(self)


class TritonError:
    """The error of one request; a `code` such as `TritonError.INVALID_ARG` becomes the client's status."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if not isinstance(message, str):
            raise TypeError(f"the message of a TritonError is a str, got {type(message).__name__}")
        if not isinstance(code, int) or not 0 <= code < len(NAMES):
            raise TypeError(f"the code of a TritonError is one of TritonError.{', '.join(NAMES)}, got {code!r}")
        self._message = message.encode(errors="replace").decode()  # half a surrogate pair
        self._code = int(code)

    def message(self) -> str:
        """Returns the text of the error."""
        return self._message

    def code(self) -> int:
        """Returns the code of the error."""
        return self._code

    def __str__(self) -> str:
        return self._message


def to_qinfer(message: str, code: int) -> QinferError:
    """Returns qinfer's error for a model's `TritonError`."""
    return _RAISED.get(code, InferenceFailed)(message)


def code_of(error: QinferError) -> int:
    """Returns Triton's code for an error of qinfer."""
    for code, kind in _RAISED.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, RequestError):
        return TritonError.INVALID_ARG
    return TritonError.UNAVAILABLE if error.retryable else TritonError.INTERNAL


def code_of_failure(failure: Failure) -> int:
    """Returns Triton's code for a failure."""
    return _CODES.get(failure.code, TritonError.UNAVAILABLE if failure.retryable else TritonError.INTERNAL)


def text(value: object, what: str) -> str:
    """Returns a string, or `bytes` as in Triton, as a `str`."""
    if type(value) is str and value.isascii():
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if not isinstance(value, str):
        raise TypeError(f"{what} is a str, got {type(value).__name__}")
    return value.encode(errors="replace").decode()  # half a surrogate pair, as in file names


def message_of(error: BaseException) -> str:
    """Returns an exception's text for clients."""
    try:
        message = text(str(error), "a message") + environment_remedy(error)
    except Exception:  # noqa: BLE001  the model's own class
        message = ""
    return message if len(message) <= MESSAGE_CHARACTERS else f"{message[:MESSAGE_CHARACTERS]}…"


def environment_remedy(error: BaseException) -> str:
    """Returns what to add to the text of an absent environment variable's error; empty for others."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if not isinstance(error, KeyError) or trace is None or trace.tb_frame.f_globals.get("__name__") != "os":
        return ""
    return (
        " is not in the environment of the model, which has few of the worker's variables; set it there, and "
        "name it in QINFER_WORKER__MODEL_ENV"
    )


class GivenParameters(dict[str, Scalar]):
    """Received parameters: unchecked, perhaps floats."""


def checked_parameters(parameters: Mapping[str, Scalar] | None) -> dict[str, Scalar]:
    """Returns a copy of custom parameters."""
    if not parameters:
        return {}
    if isinstance(parameters, GivenParameters):
        return parameters
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to have type dict, found type '{type(parameters)}'")
    return {_check_key(key): _check_value(key, value) for key, value in parameters.items()}


def _check_key(key: object) -> str:
    if not isinstance(key, str):
        raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
    return text(key, "a key")


def _check_value(key: str, value: object) -> Scalar:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise TritonModelException(f"parameter '{key}' is {value}, which has more than 64 bits")
        return int(value)
    if isinstance(value, str):
        return text(value, "a value")
    raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
