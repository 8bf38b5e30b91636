"""The steps of a call, and its repetitions: pure, so that the blocking and the asynchronous client share them.

A *flow* is a generator. It yields a `Send` and gets the reply, or the error that httpx raised instead; it yields a
`Pause` and is resumed after it. Its return value is that of the call.
"""

import random
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

import httpx

from qinfer.client.failures import Problem, problem_of_connection, problem_of_reply
from qinfer.core.clock import Clock
from qinfer.core.retry import pause_s
from qinfer.errors import ModelNotFound, QinferError

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 5.0
CONNECT_S = 5.0
"""The time limit of one attempt to connect."""
AMBIGUOUS = frozenset({400, 500, 503})
"""Statuses that, in a reply about another request, may mean a failure of either: of this call, or of that request."""


class Send(NamedTuple):
    """An HTTP request to be sent.

    Attributes:
        method: The method.
        path: The path, and query, below the gateway's URL.
        headers: Headers besides those of every request.
        content: The body.
        hold_s: How long the gateway is asked to hold the answer back, which comes on top of the call's timeout.
        timeout_s: How long to wait for the reply; set for each attempt.
    """

    method: str
    path: str
    headers: dict[str, str]
    content: bytes = b""
    hold_s: float = 0.0
    timeout_s: float = 0.0

    @property
    def http_timeout(self) -> httpx.Timeout:
        """The timeout in httpx's form."""
        return httpx.Timeout(self.timeout_s, connect=min(CONNECT_S, self.timeout_s))


class Pause(NamedTuple):
    """A step that does nothing for some seconds."""

    seconds: float


Outcome = httpx.Response | httpx.RequestError | None
"""The value that a flow is resumed with: a reply or an error after a `Send`, `None` after a `Pause`."""

T = TypeVar("T")
Flow = Generator[Send | Pause, Outcome, T]
"""A call that returns a `T`."""


class Policy(NamedTuple):
    """The limits that all calls of a client share.

    Attributes:
        url: The gateway's URL as messages show it, without user and password.
        timeout_s: How long a call may take, its repetitions included.
        max_retries: How often a call is repeated.
        clock: Measures time.
    """

    url: str
    timeout_s: float
    max_retries: int
    clock: Clock


def backoff_s(retries: int, retry_after_s: float | None, jitter: float) -> float:
    """Decides how long to wait before a repetition.

    A wait that the server asks for is kept, and up to a tenth more, so that refused callers do not all come back at
    once. Otherwise the wait doubles from 0.1 s up to 5 s, and up to a random half of it is left out.

    Args:
        retries: Repetitions so far.
        retry_after_s: The wait that the server asks for; `None` or 0 = none.
        jitter: A random number in [0, 1).
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
    """Sends a request until it succeeds, fails for good, or there is no time left.

    Repeating is safe for every call of the client: reading and cancelling change nothing twice, a submission has an id
    or a key by which the gateway knows it, and inference may be executed twice without harm.

    Args:
        policy: The limits of time and repetitions.
        send: The request.
        not_found: The error for 404.
        explain: Asks the gateway for the cause of an error reply, within the given seconds, before a repetition.

    Returns:
        A reply with a status of 2xx.

    Raises:
        QinferError: The gateway's last answer, or why it could not be reached.
    """
    now_s = policy.clock.monotonic_s
    ends_s = now_s() + policy.timeout_s + send.hold_s
    retries = 0
    while True:
        outcome = yield send._replace(timeout_s=max(0.001, ends_s - now_s()))
        if isinstance(outcome, httpx.Response):
            if outcome.is_success:
                return outcome
            problem = problem_of_reply(outcome, not_found)
            is_vague = outcome.status_code in AMBIGUOUS and (problem.error.retryable or not problem.is_exact)
            if explain is not None and is_vague:
                problem = yield from explain(problem, max(0.001, ends_s - now_s()))
        else:
            assert outcome is not None
            problem = problem_of_connection(outcome, policy.url, policy.timeout_s)
        wait_s = backoff_s(retries, problem.retry_after_s, random.random())  # noqa: S311  # spreads load, guards nothing
        if not problem.error.retryable or retries >= policy.max_retries or now_s() + wait_s >= ends_s:
            raise problem.error
        retries += 1
        yield Pause(wait_s)
