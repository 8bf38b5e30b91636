"""The steps of a call, with its failures and repetitions: pure, so that both clients share them.

A *flow* is a generator that returns the value of a call. It yields a `Send` and gets the reply or httpx's error; it
yields a `Pause` and is resumed after it. A reply's error code names its class of `qinfer.errors`; for Triton's replies,
with only a text and a status, `BY_STATUS` has the nearest common class.
"""

import math
import random
import ssl
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlencode

import httpx
import msgspec

from qinfer import errors
from qinfer.core.clock import Clock
from qinfer.core.retry import RetryBudget, pause_s
from qinfer.errors import ErrorCode, ModelNotFound, Overloaded, QinferError, SequenceLost, Unreachable

T = TypeVar("T")

PAGE = 500
"""The most entries of a list's page."""

_GROUPS = (errors.RequestError, errors.Overloaded, errors.ModelError, errors.DeliveryError, errors.ResultError)
"""Replies do not name these classes, whose code belongs to others."""

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


_TOO_LATE = (errors.TIMED_OUT, errors.BACKLOG_TIMED_OUT)

_BY_TEXT: tuple[tuple[int, str, type[QinferError]], ...] = (
    (500, "attempt to access JSON", errors.MalformedJson),
    (500, "poll from model repository", errors.ModelLoadFailed),
    (500, "no version is available", errors.ModelLoadFailed),
    (400, "load failed for model '", errors.VersionsFailed),
    (503, "explicit model load / unload is not allowed", errors.ControlDisabled),
)
"""Status and part of Triton's text, for failures before a model is reached (reference §1.2, §1.14)."""

_REFUSALS = (errors.Overloaded, errors.ModelNotReady)
"""Errors by which a gateway refuses a request before it is queued."""


class Problem(NamedTuple):
    """The failure of one attempt.

    `is_exact`: the server named the error's code. `is_refused`: the request was certainly not accepted. `is_final`:
    repetitions can't help.
    """

    error: QinferError
    retry_after_s: float | None = None
    is_exact: bool = False
    is_refused: bool = False
    is_final: bool = False


def problem_of_reply(reply: httpx.Response, not_found: type[QinferError]) -> Problem:
    """Returns the problem of a reply with an unexpected status; `not_found` is the class for 404."""
    text, code = _body(reply)
    retry_after_s = _retry_after_s(reply)
    named = BY_CODE.get(code)
    if named is None and reply.status_code == 503 and retry_after_s is None and text.endswith(_TOO_LATE):
        # Only the text distinguishes this case; a repetition would execute the request again.
        named = errors.DeadlineExceeded
    if named is None and text.endswith(errors.BEGIN_AGAIN):
        named = errors.SequenceLost if reply.status_code == 503 else errors.SequenceEnded
    if named is None:
        named = next((found for status, part, found in _BY_TEXT if status == reply.status_code and part in text), None)
    error_class = named or (not_found if reply.status_code == 404 else _by_status(reply.status_code))
    error = make(error_class, text, retry_after_s)
    return Problem(error, retry_after_s, named is not None, is_refused=isinstance(error, _REFUSALS))


def problem_of_connection(error: httpx.RequestError, url: str, timeout_s: float) -> Problem:
    """Returns the problem of an attempt without a reply; `url` has no password."""
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
                "ca_file, or the variable SSL_CERT_FILE, names the file of an authority of your own"
            ),
            is_final=True,
        )
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Problem(
            errors.Unreachable(
                f"no server answers at {url}; start one with `qinfer up --model-repository DIR`, or give its URL"
            ),
            is_refused=True,
        )
    hint = ""
    if isinstance(error, httpx.RemoteProtocolError) and url.startswith("http://"):
        hint = "; if the server has TLS, its URL begins with https://"
    return Problem(errors.Unreachable(f"the connection to {url} failed: {str(error) or type(error).__name__}{hint}"))


def _is_tls(error: BaseException | None) -> bool:
    """Finds an error of TLS, for which httpx has no class."""
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
    # A stream whose first response is a failure.
    text = reply.content.removeprefix(b"event: error\n").removeprefix(b"data: ").rstrip()
    try:
        body = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = None
    if isinstance(body, dict) and isinstance(body.get("error"), str):
        return body["error"], str(body.get("code", ""))
    return f"HTTP {reply.status_code} {reply.reason_phrase}".rstrip(), ""


def _retry_after_s(reply: httpx.Response) -> float | None:
    """Parses `Retry-After` in seconds; ignores dates."""
    text = reply.headers.get("Retry-After", "").strip()
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 5.0
JSON = {"Content-Type": "application/json"}
CONNECT_S = 5.0
AMBIGUOUS = frozenset({400, 500, 503})
"""Statuses that may be a failure of this call, or of the request that it asks about."""


class Send(NamedTuple):
    """An HTTP request to be sent.

    The gateway may hold the answer back for `hold_s`, beyond the call's timeout. Each attempt sets `base`, the
    gateway's URL, and `timeout_s`. `repeats`: the request may be sent again although it may have been executed.
    `hedges`: it may be sent twice at a time, because the server executes it once. `streams`: the flow's caller reads
    and closes a successful reply.
    """

    method: str
    path: str
    headers: dict[str, str]
    content: bytes = b""
    hold_s: float = 0.0
    timeout_s: float = 0.0
    base: str = ""
    repeats: bool = True
    hedges: bool = False
    streams: bool = False

    def build(
        self, http: httpx.Client | httpx.AsyncClient, extensions: Mapping[str, Any] | None = None
    ) -> httpx.Request:
        """Builds the request in httpx's form."""
        timeout, url = httpx.Timeout(self.timeout_s, connect=min(CONNECT_S, self.timeout_s)), self.base + self.path
        return http.build_request(
            self.method, url, headers=self.headers, content=self.content, timeout=timeout, extensions=extensions
        )


class Pause(NamedTuple):
    """A step that waits for some seconds."""

    seconds: float


Outcome = httpx.Response | httpx.RequestError | None
"""A reply or an error resumes a `Send`, `None` a `Pause`."""

Flow = Generator[Send | Pause, Outcome, T]


class FlowRunner(Protocol):
    """Executes flows in the blocking client."""

    def __call__(self, flow: Flow[T]) -> T:
        """Returns the flow's result."""
        ...


class AsyncFlowRunner(Protocol):
    """Executes flows in the asynchronous client."""

    async def __call__(self, flow: Flow[T]) -> T:
        """Returns the flow's result."""
        ...


class GatewayUrl(NamedTuple):
    """A gateway; `shown` has neither user nor password."""

    base: str
    shown: str


class Gateways:
    """The gateways of a client, preferred first; all calls use one until it can't be reached."""

    def __init__(self, gateways: Sequence[GatewayUrl]) -> None:
        self._all = tuple(gateways)
        self._index = 0

    def __len__(self) -> int:
        """Returns the number of gateways."""
        return len(self._all)

    @property
    def current(self) -> GatewayUrl:
        """The gateway in use."""
        return self._all[self._index]

    def after(self, base: str) -> GatewayUrl:
        """Returns the gateway after that of a URL; the same if it is the only one."""
        index = next((number for number, one in enumerate(self._all) if one.base == base), 0)
        return self._all[(index + 1) % len(self._all)]

    def fail_over(self, gateway: GatewayUrl) -> None:
        """Moves to the next gateway, unless another call has done so."""
        if self.current is gateway:
            self._index = (self._index + 1) % len(self._all)


class Policy(NamedTuple):
    """The limits and state that all calls of a client share.

    `resend` allows repetitions of inference without a key after a broken connection. `datatypes` caches those of inputs
    by model and version, for inputs that are lists.
    """

    gateways: Gateways
    timeout_s: float
    max_retries: int | None
    clock: Clock
    resend: bool
    budget: RetryBudget
    datatypes: dict[tuple[str, int], dict[str, str]]

    @property
    def url(self) -> str:
        """The URL of the gateway in use, for messages."""
        return self.gateways.current.shown

    def within(self, timeout_s: float | None) -> "Policy":
        """Returns the policy of a call with its own timeout; `None` keeps the timeout of the client."""
        if timeout_s is None:
            return self
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise errors.InvalidRequest(f"timeout_s is {timeout_s!r}; make it a number of seconds > 0")
        return self._replace(timeout_s=timeout_s)


def backoff_s(retries: int, retry_after_s: float | None, jitter: float) -> float:
    """Returns the wait before a repetition; `jitter` is a random number in [0, 1).

    A wait that the server asks for gets up to a tenth more, so that refused callers spread. Otherwise it doubles from
    0.1 s to 5 s, less a random part of up to half.
    """
    if retry_after_s:
        return retry_after_s * (1 + jitter / 10)
    return pause_s(retries + 1, FIRST_BACKOFF_S, LAST_BACKOFF_S) * (1 - jitter / 2)


def call(
    policy: Policy,
    send: Send,
    *,
    not_found: type[QinferError] = ModelNotFound,
    explain: Callable[[Problem, float], Flow[Problem]] | None = None,
) -> Flow[httpx.Response]:
    """Sends a request until it succeeds, fails for good, or runs out of time; uses another gateway if one is gone.

    Reading and cancelling are idempotent, a submission has an id or a key, and a step of a sequence a number. Other
    requests (`Send.repeats`) are repeated only if they were not accepted. A lost sequence is not repeated, because its
    caller has to begin it again. All calls share a budget, which may delay or prevent repetitions. `explain` asks the
    gateway for the cause of an ambiguous error, within the given seconds.
    """
    attempts = _Attempts(policy, send)
    while True:
        gateway = policy.gateways.current
        outcome = yield send._replace(base=gateway.base, timeout_s=attempts.left_s())
        if isinstance(outcome, httpx.Response):
            if outcome.is_success:
                return outcome
            problem = problem_of_reply(outcome, not_found)
            is_vague = outcome.status_code in AMBIGUOUS and (problem.error.retryable or not problem.is_exact)
            if explain is not None and is_vague:
                problem = yield from explain(problem, attempts.left_s())
        else:
            assert outcome is not None
            problem = problem_of_connection(outcome, gateway.shown, policy.timeout_s)
        pause_s = attempts.pause_s(problem, gateway)
        if pause_s:
            yield Pause(pause_s)


class _Attempts:
    def __init__(self, policy: Policy, send: Send) -> None:
        self._policy, self._repeats = policy, send.repeats
        now_s = policy.clock.monotonic_s()
        self._ends_s = now_s + policy.timeout_s + send.hold_s
        policy.budget.add(now_s)
        self._retries = 0
        # Gateways not tried since the last pause.
        self._fresh = len(policy.gateways) - 1

    def left_s(self) -> float:
        """Never returns 0."""
        return max(0.001, self._ends_s - self._policy.clock.monotonic_s())

    def pause_s(self, problem: Problem, gateway: GatewayUrl) -> float:
        """Returns 0 if another gateway can be asked at once, or raises the error."""
        error, most = problem.error, self._policy.max_retries
        if isinstance(error, Unreachable):
            self._policy.gateways.fail_over(gateway)
        is_final = problem.is_final or not error.retryable or isinstance(error, SequenceLost)
        if is_final or not (self._repeats or problem.is_refused):
            raise error
        moves = isinstance(error, Unreachable) and self._fresh > 0
        # Asking another gateway after a refused connection is no repetition.
        counts = not (moves and problem.is_refused)
        wait_s = 0.0 if moves else backoff_s(self._retries, problem.retry_after_s, random.random())  # noqa: S311  # spreads load
        now_s = self._policy.clock.monotonic_s()
        left_s = self._ends_s - now_s
        if (counts and most is not None and self._retries >= most) or wait_s >= left_s:
            raise error
        if counts:
            token_s = self._policy.budget.take(now_s, left_s)
            if token_s is None:
                error.add_note(
                    "it is not repeated: so many calls have failed that the client's retry budget is used up"
                )
                raise error
            wait_s = max(wait_s, token_s)
        self._fresh = self._fresh - 1 if moves else len(self._policy.gateways) - 1
        self._retries += counts
        return wait_s


def json_object(policy: Policy, reply: httpx.Response) -> dict[str, Any]:
    """Returns a reply's JSON object, or raises `Unreachable`."""
    try:
        return msgspec.json.decode(reply.content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Unreachable(f"the server at {policy.url} sent no JSON object; is it a gateway?") from None


def objects(fields: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns the objects of a list in a reply."""
    entries = fields.get(name)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def pages(policy: Policy, path: str, name: str, query: Mapping[str, Any], limit: int) -> Flow[list[dict[str, Any]]]:
    """Returns up to `limit` objects of a list, page by page."""
    found, after = list[dict[str, Any]](), ""
    while len(found) < limit:
        asked = {"limit": min(limit - len(found), PAGE), **query} | ({"after": after} if after else {})
        reply = yield from call(policy, Send("GET", f"{path}?{urlencode(asked, doseq=True)}", {}))
        fields = json_object(policy, reply)
        found += objects(fields, name)
        after = str(fields.get("next") or "")
        if not after:
            break
    return found


def converted(policy: Policy, value: object, kind: type[T], what: str, *, strict: bool = True) -> T:
    """Converts a reply's value to a record, or raises `Unreachable`; `strict` reads no numbers from texts."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise Unreachable(f"the server at {policy.url} sent no {what} ({error}); is it a gateway?") from None


def encode_json(what: str, value: object, convert: Callable[[Any], Any] | None = None) -> bytes:
    """Encodes a request's body; `convert` handles values of other types."""
    try:
        return msgspec.json.encode(value, enc_hook=convert)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise errors.InvalidRequest(f"{what} can't be written as JSON: {error}") from None
