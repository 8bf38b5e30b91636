"""HTTP replies and broken connections → the errors of `qinfer.errors`.

A reply that names its error code is exact. Triton's replies have a text and a status only, and one status stands for
several causes: then `BY_STATUS` has the nearest common class.
"""

import ssl
from typing import NamedTuple

import httpx
import msgspec

from qinfer import errors
from qinfer.errors import ErrorCode, Overloaded, QinferError

_GROUPS = (errors.RequestError, errors.Overloaded, errors.ModelError, errors.DeliveryError, errors.ResultError)
"""Classes that lend their code to others, and that no reply names."""

BY_CODE: dict[str, type[QinferError]] = {ErrorCode.INTERNAL: QinferError}
for _class in vars(errors).values():
    if isinstance(_class, type) and issubclass(_class, QinferError) and _class not in _GROUPS:
        BY_CODE.setdefault(_class.code, _class)

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
"""In a reply of status 500: Triton's text for a value of the wrong type, which has not reached the model."""


class Problem(NamedTuple):
    """The failure of one attempt.

    Attributes:
        error: The error to raise if there is no further attempt.
        retry_after_s: Seconds that the server asks to wait; `None` = it does not.
        is_exact: Whether the server named the error's code.
    """

    error: QinferError
    retry_after_s: float | None = None
    is_exact: bool = False


def problem_of_reply(reply: httpx.Response, not_found: type[QinferError]) -> Problem:
    """Returns the error of a reply whose status is neither 2xx nor expected.

    Args:
        reply: The reply.
        not_found: The class for 404 in this call.
    """
    text, code = _body(reply)
    retry_after_s = _retry_after_s(reply)
    named = BY_CODE.get(code)
    if named is None and reply.status_code == 503 and retry_after_s is None and text.endswith(errors.TIMED_OUT):
        # Only the text distinguishes this case; a repetition would have the request executed again.
        named = errors.DeadlineExceeded
    if named is None and reply.status_code == 500 and _WRONG_TYPE in text:
        named = errors.MalformedJson
    error_class = named or (not_found if reply.status_code == 404 else _by_status(reply.status_code))
    return Problem(make(error_class, text, retry_after_s), retry_after_s, named is not None)


def problem_of_connection(error: httpx.RequestError, url: str, timeout_s: float) -> Problem:
    """Returns the error of an attempt without a reply.

    Args:
        error: The error that httpx raised.
        url: The gateway's URL, without user and password.
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
    """Returns an error of a class of `qinfer.errors`."""
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
    """Returns a reply's error text and error code, which may be empty."""
    try:
        body = msgspec.json.decode(reply.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = None
    if isinstance(body, dict) and isinstance(body.get("error"), str):
        return body["error"], str(body.get("code", ""))
    return f"HTTP {reply.status_code} {reply.reason_phrase}".rstrip(), ""


def _retry_after_s(reply: httpx.Response) -> float | None:
    """Reads `Retry-After` in seconds; the form with a date is ignored."""
    text = reply.headers.get("Retry-After", "").strip()
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
