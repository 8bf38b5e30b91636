"""The stages of a gateway's requests; only those that the settings ask for are composed.

traces ─▶ quotas ─▶ access log ─▶ tenants' counts ─▶ (to an endpoint) target and shadows

Stages wrap the sinks of requests that they follow.
"""

import time
from collections.abc import Iterator

import msgspec

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import QinferError
from qinfer.observe.tenants import TenantTally
from qinfer.submission.pending import Counter, PendingCall, ResponseSink
from qinfer_api.auth import Auth, CallerContext


class Passage(msgspec.Struct, eq=False):
    """A request before its entrance; stages may replace context, sink and quota."""

    context: CallerContext
    request: OutgoingRequest
    sink: ResponseSink
    asked_s: float | None
    within_s: float
    quota: Counter | None = None


class Stage:
    """One stage, on the event loop."""

    def before(self, passage: Passage) -> None:
        """Prepares or refuses a request."""

    def ended(self, pending: PendingCall, response: Response) -> None:
        """Notes the last response of a request."""

    def accepted(self, context: CallerContext, request: OutgoingRequest, request_id: str) -> None:
        """Notes a stored request."""

    def refused(self, context: CallerContext, model: tuple[str, int], code: str) -> None:
        """Notes a refused request."""


class QuotaStage(Stage):
    """Authorizes requests within quotas."""

    def __init__(self, auth: Auth) -> None:
        self._auth = auth

    def before(self, passage: Passage) -> None:
        """See `Stage.before`."""
        context = passage.context = self._auth.authorize_inference(passage.context)
        assert context.principal is not None, "it is authorized"
        passage.quota = context.principal.quota


class TenantStage(Stage):
    """Counts requests by tenant."""

    def __init__(self, tally: TenantTally) -> None:
        self._tally = tally

    def ended(self, pending: PendingCall, response: Response) -> None:
        """See `Stage.ended`."""
        if pending.quota is None:
            return
        if response.failure is not None:
            self._tally.failed(pending.quota.tenant, pending.model, response.failure.code)
        else:
            self._tally.count_answered(pending.quota.tenant, pending.model, time.monotonic() - pending.started_s)

    def accepted(self, context: CallerContext, request: OutgoingRequest, request_id: str) -> None:
        """See `Stage.accepted`."""
        if context.principal is not None:
            self._tally.accepted(context.tenant, request.model)

    def refused(self, context: CallerContext, model: tuple[str, int], code: str) -> None:
        """See `Stage.refused`."""
        if context.principal is not None:
            self._tally.failed(context.tenant, model[0], code)


class SinkWrapper:
    """The base of sinks that see a request's responses."""

    __slots__ = ("began_s", "frontend", "inner", "no_stream")

    def __init__(self, inner: ResponseSink) -> None:
        self.inner = inner
        self.no_stream = inner.no_stream
        self.frontend: str = getattr(inner, "frontend", "")
        self.began_s = time.monotonic()

    def submitted(self, request: OutgoingRequest, pending: PendingCall) -> None:
        """Notes that the request is in the queue."""

    def refused(self, error: QinferError) -> None:
        """Notes that the request was not queued."""

    def deliver(self, response: Response) -> None:
        """Passes responses on."""
        self.inner.deliver(response)

    def left(self, request_id: str, version: int) -> None:
        """Notes that the caller went away."""


def wrappers_of(sink: ResponseSink) -> Iterator[SinkWrapper]:
    """Yields the wrappers of a request's own sink."""
    while isinstance(sink, SinkWrapper):
        yield sink
        sink = sink.inner
