"""The answers of calls between models, from the event loop to the waiting thread: one, or a stream."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue

from qinfer.backends.base import AnsweredNotFound
from qinfer.core.messages import Failure, Response
from qinfer.errors import (
    AlreadyExists,
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    InferenceFailed,
    InvalidRequest,
    ModelNotReady,
    QinferError,
    QueueFull,
    RequestError,
    StreamBroken,
    UnknownFailure,
    UnsupportedFeature,
)
from qinfer.submission.pending import PendingCall

GRACE_S = 1.0

EXPIRED = "Request timeout expired"
_CANCELLED = "the call was cancelled"

_ANSWERED = (
    AlreadyExists,
    AnsweredNotFound,
    Cancelled,
    InvalidRequest,
    ModelNotReady,
    UnknownFailure,
    UnsupportedFeature,
)
_ALSO_HERE = (*_ANSWERED, BrokerUnavailable, DeadlineExceeded, QueueFull, StreamBroken)
_RAISED: dict[str, type[QinferError]] = {error.code: error for error in _ALSO_HERE}


class CallAnswer:
    """The sink of a call, for a waiting thread."""

    no_stream = ""

    def __init__(self) -> None:
        self.future: Future[Response] = Future()

    def submitted(self, pending: PendingCall) -> None:
        """Does nothing."""

    def fail(self, error: QinferError) -> None:
        """Fails a call that was not enqueued."""
        self.future.set_exception(error)

    def deliver(self, response: Response) -> None:
        """Delivers the final response."""
        if response.final and not self.future.done():
            self.future.set_result(response)


class StreamInbox:
    """The sink of a decoupled call, filled by the event loop for a thread."""

    no_stream = ""

    def __init__(self, cancel: Callable[[PendingCall], bool]) -> None:
        self.came: SimpleQueue[Response | QinferError] = SimpleQueue()
        self._cancel = cancel
        self._pending: PendingCall | None = None
        self._is_left = False

    def submitted(self, pending: PendingCall) -> None:
        """Notes the request."""
        self._pending = pending
        if self._is_left:
            self.cancel_request()

    def fail(self, error: QinferError) -> None:
        """Fails a call that was not enqueued."""
        self.came.put(error)

    def deliver(self, response: Response) -> None:
        """Delivers a response."""
        self.came.put(response)

    def took(self, nbytes: int) -> None:
        """Reports bytes that the thread has taken."""
        if self._pending is not None and self._pending.stream is not None:
            self._pending.stream.took(nbytes)

    def cancel(self) -> None:
        """Asks the called model to end, or ends the call at once."""
        stream = None if self._pending is None else self._pending.stream
        if stream is not None and stream.cancel():
            return
        if self._pending is None or self._cancel(self._pending):
            self._is_left = True
            self.came.put(Cancelled(_CANCELLED))

    def cancel_request(self) -> None:
        """Cancels the request."""
        self._is_left = True
        if self._pending is not None:
            self._cancel(self._pending)


class CallResponses:
    """The responses of a decoupled call, for a thread of the calling model, which sets the pace.

    The last one is `final`, and may be empty. Closing or dropping the iterator earlier cancels the call.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, inbox: StreamInbox, model: str, left_s: Callable[[], float]
    ) -> None:
        self._loop = loop
        self._inbox = inbox
        self._model = model
        self._left_s = left_s
        self._untaken_bytes = 0
        self._has_ended = False

    def __iter__(self) -> "CallResponses":
        return self

    def __next__(self) -> Response:
        """Waits for the next response."""
        if self._has_ended:
            raise StopIteration
        if self._untaken_bytes:
            self._on_loop(self._inbox.took, self._untaken_bytes)
            self._untaken_bytes = 0
        try:
            came = self._inbox.came.get(timeout=max(self._left_s(), 0.0) + GRACE_S)
        except Empty:
            self.close()
            raise DeadlineExceeded(EXPIRED) from None
        if not isinstance(came, QinferError) and came.final and came.failure is not None:
            came = raised(came.failure, self._model)
        if isinstance(came, QinferError):
            self._has_ended = True
            if isinstance(came, RequestError):  # the calling model's client has sent nothing wrong
                raise InferenceFailed(f"a call failed: {came.message}") from came
            raise came
        self._has_ended = came.final
        self._untaken_bytes = came.nbytes
        return came

    def cancel(self) -> None:
        """Asks the called model to end; for any thread. Last responses, or `Cancelled`, follow."""
        if not self._has_ended:
            self._on_loop(self._inbox.cancel)

    def close(self) -> None:
        """Cancels the call, unless it has ended."""
        if not self._has_ended:
            self._has_ended = True
            self._on_loop(self._inbox.cancel_request)

    def __del__(self) -> None:
        self.close()

    def _on_loop(self, callback: Callable[..., None], *args: int) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)


def raised(failure: Failure, model: str) -> QinferError:
    """Returns the calling model's error for a called model's failure."""
    known = _RAISED.get(failure.code)
    return known(failure.message) if known else InferenceFailed(f"model '{model}' failed: {failure.message}")
