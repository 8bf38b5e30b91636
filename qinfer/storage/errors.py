"""Translation of the errors of object-store drivers into qinfer's `StoreError`s.

Drivers' texts have endpoints, account names and key ids. A message has none of them; the driver's text is the error's
`reason`, for operators only.
"""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, TypeVar

from qinfer.core.retry import Backoff
from qinfer.errors import QinferError, StoreChanged, StoreDenied, StoreError, StoreFull, StoreNotFound, StoreUnavailable

_NO_CREDENTIALS = {
    "ClientAuthenticationError",
    "CredentialRetrievalError",
    "CredentialUnavailableError",
    "DefaultCredentialsError",
    "InvalidConfigError",
    "NoAuthTokenError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
}
_WRONG_NAMES = {"ParamValidationError"}  # botocore's
_WRONG = (ValueError, TypeError, IsADirectoryError, NotADirectoryError)
_DENIED_ERRNO = {errno.EACCES, errno.EPERM, errno.EROFS}
_WRONG_ERRNO = {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
_FORBIDDEN = "Forbidden"  # gcsfs has no class for it
_LATER = {408, 409, 412, 425, 429}
_LONGEST = 200
_TRIES = 5
_FIRST_PAUSE_S = 0.2

T = TypeVar("T")
_REASON_CHARACTERS = 300

ANSWER_TIMEOUT_S = 60
"""Bounds drivers that look for credentials, or retry, for minutes."""


class StoreAnswer(NamedTuple):
    """The HTTP status (0 = none), and the store's code, such as `SlowDown`."""

    status: int = 0
    code: str = ""


@contextmanager
def mapped(url: str) -> Iterator[None]:
    """Turns drivers' errors into `StoreError`s; qinfer's own pass."""
    try:
        yield
    except QinferError:
        raise
    except Exception as error:  # noqa: BLE001  the boundary to the drivers, each of which has errors of its own
        fail(error, url)


def fail(error: Exception, url: str) -> NoReturn:
    """Raises the `StoreError` of a driver's error."""
    raise store_error(error, url) from None


def store_error(error: Exception, url: str) -> StoreError:
    """Returns the `StoreError` of a driver's error."""
    named = _named(error, url)
    text = " ".join(str(error).split())[:_REASON_CHARACTERS]
    if isinstance(error, TimeoutError):
        text = f"no answer within {ANSWER_TIMEOUT_S} s; are there credentials, and is the store reachable?"
    named.reason = f"{type(error).__name__}: {text}"
    return named


def patiently(work: Callable[[], T]) -> T:
    """Runs `work` on one of many files, retrying while the store is busy or away."""
    backoff = Backoff(_FIRST_PAUSE_S, jitter=0.5)
    for _ in range(_TRIES - 1):
        try:
            return work()
        except StoreUnavailable:
            time.sleep(backoff.next_s())
    return work()


def answer_of(error: BaseException | None) -> StoreAnswer:
    """Finds the store's answer in an error or its causes."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore's
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return StoreAnswer(int(status or 0), str(response.get("Error", {}).get("Code", "")))
        for name in ("status_code", "code", "status"):  # azure's, gcsfs', aiohttp's
            status = getattr(error, name, None)
            if isinstance(status, int) or (isinstance(status, str) and status.isdecimal()):
                code = getattr(error, "error_code", "") or ""
                return StoreAnswer(int(status), str(getattr(code, "value", code)))
        error = error.__cause__
    return StoreAnswer()


def not_empty(size_bytes: int, url: str) -> None:
    """Raises `ValueError`: stores and drivers take empty objects for folder markers."""
    if size_bytes == 0:
        raise ValueError(f"an empty object can't be committed to '{url}'")


def _named(error: Exception, url: str) -> StoreError:
    shown = url if len(url) <= _LONGEST else f"{url[:_LONGEST]}…"
    answer = answer_of(error)
    what = ", ".join(filter(None, [type(error).__name__, answer.code, str(answer.status or "")]))
    if type(error).__name__ == "FileExpired":
        return StoreChanged(f"'{shown}' was replaced while it was read")
    if isinstance(error, FileNotFoundError) or answer.status == 404:
        return StoreNotFound(f"'{shown}' does not exist, or its bucket does not")
    if _is_denied(error, answer):
        remedy = "it needs credentials in the store's own variables that allow reading and writing there"
        if isinstance(error, OSError) and error.errno == errno.EROFS:
            remedy = "its file system is read-only here, name another folder"
        elif shown.startswith("file://"):
            remedy = "change its permissions or its owner"
        return StoreDenied(f"'{shown}' is not open to this server ({what}); {remedy}")
    if _is_wrong(error, answer):
        return StoreError(f"the store refuses '{shown}' ({what}); is the URL right?")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"there is no space left for '{shown}'")
    return StoreUnavailable(f"the store of '{shown}' can't be reached, or fails, now ({what}); try again")


def _is_denied(error: Exception, answer: StoreAnswer) -> bool:
    return (
        isinstance(error, PermissionError)
        or answer.status in (401, 403)
        or type(error).__name__ in _NO_CREDENTIALS
        or (isinstance(error, OSError) and (error.errno in _DENIED_ERRNO or str(error).startswith(_FORBIDDEN)))
    )


def _is_wrong(error: Exception, answer: StoreAnswer) -> bool:
    if answer.status:
        return 400 <= answer.status < 500 and answer.status not in _LATER
    if type(error).__name__ in _WRONG_NAMES or isinstance(error, _WRONG):
        return True
    return isinstance(error, OSError) and error.errno in _WRONG_ERRNO
