"""HTTP replies and broken connections → the errors of `qinfer.errors`, in two tables.

A reply that names its error code is exact. Triton's replies have a text and a status only, and one status stands for
several causes: then the table by status has the nearest common name.
"""

import ssl
from typing import NamedTuple

import httpx
import msgspec

from qinfer import errors
from qinfer.errors import ErrorCode, Overloaded, QinferError

BY_CODE: dict[str, type[QinferError]] = {
    ErrorCode.INVALID_REQUEST: errors.InvalidRequest,
    ErrorCode.MALFORMED_JSON: errors.MalformedJson,
    ErrorCode.UNSUPPORTED_DATATYPE: errors.UnsupportedDatatype,
    ErrorCode.UNSUPPORTED_FEATURE: errors.UnsupportedFeature,
    ErrorCode.PAYLOAD_TOO_LARGE: errors.PayloadTooLarge,
    ErrorCode.MODEL_NOT_FOUND: errors.ModelNotFound,
    ErrorCode.REQUEST_NOT_FOUND: errors.RequestNotFound,
    ErrorCode.JOB_NOT_FOUND: errors.JobNotFound,
    ErrorCode.CONFLICT: errors.Conflict,
    ErrorCode.ALREADY_EXISTS: errors.AlreadyExists,
    ErrorCode.REGION_NOT_FOUND: errors.RegionNotFound,
    ErrorCode.QUEUE_FULL: errors.QueueFull,
    ErrorCode.QUOTA_EXCEEDED: errors.QuotaExceeded,
    ErrorCode.DEADLINE_INFEASIBLE: errors.DeadlineInfeasible,
    ErrorCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    ErrorCode.CANCELLED: errors.Cancelled,
    ErrorCode.UNAUTHORIZED: errors.Unauthorized,
    ErrorCode.FORBIDDEN: errors.Forbidden,
    ErrorCode.RESTRICTED: errors.Restricted,
    ErrorCode.VALUE_REFUSED: errors.ValueRefused,
    ErrorCode.MODEL_NOT_READY: errors.ModelNotReady,
    ErrorCode.MODEL_LOAD_FAILED: errors.ModelLoadFailed,
    ErrorCode.CONTROL_DISABLED: errors.ControlDisabled,
    ErrorCode.BACKEND_UNAVAILABLE: errors.BackendUnavailable,
    ErrorCode.INFERENCE_FAILED: errors.InferenceFailed,
    ErrorCode.OUTPUT_MISMATCH: errors.OutputMismatch,
    ErrorCode.BROKER_UNAVAILABLE: errors.BrokerUnavailable,
    ErrorCode.LEASE_LOST: errors.LeaseLost,
    ErrorCode.CORRUPT_ENTRY: errors.CorruptEntry,
    ErrorCode.RESULT_NOT_FOUND: errors.ResultNotFound,
    ErrorCode.RESULT_EXPIRED: errors.ResultExpired,
    ErrorCode.STORE_REFUSED: errors.StoreError,
    ErrorCode.STORE_UNAVAILABLE: errors.StoreUnavailable,
    ErrorCode.STORE_DENIED: errors.StoreDenied,
    ErrorCode.STORE_NOT_FOUND: errors.StoreNotFound,
    ErrorCode.STORE_CHANGED: errors.StoreChanged,
    ErrorCode.SETTINGS: errors.SettingsError,
    ErrorCode.UNREACHABLE: errors.Unreachable,
    ErrorCode.INTERNAL: QinferError,
}

BY_STATUS: dict[int, type[QinferError]] = {
    400: errors.InvalidRequest,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.ModelNotFound,
    405: errors.UnsupportedFeature,
    409: errors.Conflict,
    410: errors.ResultExpired,
    413: errors.PayloadTooLarge,
    415: errors.UnsupportedFeature,
    422: errors.InvalidRequest,
    429: errors.Overloaded,
    500: errors.InferenceFailed,
    501: errors.UnsupportedFeature,
    502: errors.Unreachable,
    503: errors.Overloaded,
    504: errors.Unreachable,
}


_WRONG_TYPE = "attempt to access JSON"
"""How Triton tells, with status 500, that a value in the request is of the wrong type: the model has not seen it."""


class Problem(NamedTuple):
    """Why a try failed.

    Attributes:
        error: To be raised when there is no further try.
        retry_after_s: What the server asked to wait; `None` when it did not.
        is_exact: Whether the server named the error's code.
    """

    error: QinferError
    retry_after_s: float | None = None
    is_exact: bool = False


def problem_of_reply(reply: httpx.Response, not_found: type[QinferError]) -> Problem:
    """Names the error of a reply whose status is neither 2xx nor expected.

    Args:
        reply: The reply.
        not_found: What 404 means for the call that was made.
    """
    text, code = _body(reply)
    retry_after_s = _retry_after_s(reply)
    named = BY_CODE.get(code)
    if named is None and reply.status_code == 503 and retry_after_s is None and text.endswith(errors.TIMED_OUT):
        named = errors.DeadlineExceeded  # to be told by its text only; to ask again would have it executed again
    if named is None and reply.status_code == 500 and _WRONG_TYPE in text:
        named = errors.MalformedJson
    error_class = named or (not_found if reply.status_code == 404 else _by_status(reply.status_code))
    return Problem(make(error_class, text, retry_after_s), retry_after_s, named is not None)


def problem_of_connection(error: httpx.RequestError, url: str, timeout_s: float) -> Problem:
    """Names the error of a try that got no reply.

    Args:
        error: What httpx raised.
        url: The gateway's URL, without what is secret in it.
        timeout_s: How long the whole call may take.
    """
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return Problem(
            errors.DeadlineExceeded(
                f"no answer within {timeout_s:g} s; give the client a longer timeout_s, or submit()"
            )
        )
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        return Problem(errors.InvalidRequest(f"the request to {url} can't be sent: {error}"))
    if _is_tls(error):
        return Problem(
            errors.Unreachable(
                f"no secure connection to {url}: {error}; check the URL's scheme and the certificate; "
                "the variable SSL_CERT_FILE names the file of an authority of your own"
            )
        )
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Problem(
            errors.Unreachable(
                f"no server answers at {url}; start one with `qinfer up --model-repository DIR`, or give its URL"
            )
        )
    hint = ""
    if isinstance(error, httpx.RemoteProtocolError) and url.startswith("http://"):
        hint = "; if the server has TLS, its URL begins with https://"
    return Problem(errors.Unreachable(f"the connection to {url} failed: {str(error) or type(error).__name__}{hint}"))


def _is_tls(error: BaseException | None) -> bool:
    """Tells whether TLS failed: httpx has no class of its own for that."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def make(error_class: type[QinferError], message: str, retry_after_s: float | None = None) -> QinferError:
    """Makes an error of a class of the tree."""
    if issubclass(error_class, Overloaded) and retry_after_s is not None:
        return error_class(message, retry_after_s)
    return error_class(message)


def _by_status(status: int) -> type[QinferError]:
    known = BY_STATUS.get(status)
    if known is not None:
        return known
    if 400 <= status < 500:
        return errors.RequestError
    return QinferError if status >= 500 else errors.Unreachable


def _body(reply: httpx.Response) -> tuple[str, str]:
    """Returns a reply's error text and error code; the code is mostly not there."""
    try:
        body = msgspec.json.decode(reply.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = None
    if isinstance(body, dict) and isinstance(body.get("error"), str):
        return body["error"], str(body.get("code", ""))
    return f"HTTP {reply.status_code} {reply.reason_phrase}".rstrip(), ""


def _retry_after_s(reply: httpx.Response) -> float | None:
    """Reads `Retry-After` in seconds; the form with a date is as good as none."""
    text = reply.headers.get("Retry-After", "").strip()
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
