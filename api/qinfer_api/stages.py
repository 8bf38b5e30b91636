"""The stages of a gateway's requests; only those that the settings ask for are composed.

traces ─▶ quotas ─▶ access log ─▶ tenants' counts ─▶ (to an endpoint) target and shadows

Stages wrap the sinks of requests that they follow.

The access log has a line for each failed inference request, and for a share (`QINFER_LOG__ACCESS`) of the others; lines
contain no payload and no key. The first tenants have their own series of counts until the gateway restarts; all others
share one, which bounds their number.
"""

import logging
import random
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import ErrorCode, QinferError
from qinfer.observe import catalogue
from qinfer.observe.exposition import Family, family
from qinfer.observe.logs import ACCESS
from qinfer.observe.stats import QUEUE_BUCKETS_S, Durations
from qinfer.submission.pending import Counter as QuotaCounter
from qinfer.submission.pending import PendingCall, ResponseSink
from qinfer_api.auth import Auth, CallerContext
from qinfer_api.status import http_status

OTHERS = "(others)"
"""Tenants without their own series."""


class TenantTally:
    """Counts the requests of a gateway by tenant; `in_flight` returns the number of unanswered requests."""

    def __init__(self, most: int, process: str = "") -> None:
        self._most = most
        self._process = process
        self.in_flight: Callable[[], Mapping[str, int]] = dict
        self._named: dict[str, str] = {}
        self._requests: Counter[tuple[str, str]] = Counter()
        self._failures: Counter[tuple[str, str]] = Counter()
        self._durations: defaultdict[str, Durations] = defaultdict(Durations)

    def count_answered(self, tenant: str, model: str, seconds: float) -> None:
        """Counts a request with outputs."""
        name = self._tenant_label(tenant)
        self._requests[name, model] += 1
        series = self._durations[name]
        series.counts[bisect_left(QUEUE_BUCKETS_S, seconds)] += 1
        series.total_s += seconds

    def accepted(self, tenant: str, model: str) -> None:
        """Counts a request stored for later execution."""
        self._requests[self._tenant_label(tenant), model] += 1

    def failed(self, tenant: str, model: str, reason: str) -> None:
        """Counts a failed request; unknown models have no name."""
        name = self._tenant_label(tenant)
        self._requests[name, model] += 1
        self._failures[name, reason] += 1

    def families(self) -> Iterator[Family]:
        """Yields the metrics."""
        own = {"process": self._process}
        yield family(
            catalogue.TENANT_REQUESTS,
            ((count, {"tenant": name, "model": model, **own}) for (name, model), count in self._requests.items()),
        )
        yield family(
            catalogue.TENANT_FAILURES,
            ((count, {"tenant": name, "reason": reason, **own}) for (name, reason), count in self._failures.items()),
        )
        waiting = Counter(dict.fromkeys((name for name, _ in self._requests), 0))  # dashboards know tenants by it
        for tenant, count in self.in_flight().items():
            if tenant in self._named or count:
                waiting[self._tenant_label(tenant)] += count
        yield family(catalogue.TENANT_IN_FLIGHT, ((count, {"tenant": name, **own}) for name, count in waiting.items()))
        durations = Family(catalogue.TENANT_DURATION)
        for name, series in self._durations.items():
            durations.add_durations(series, tenant=name, **own)
        yield durations

    def of_shares(self, shares: Iterable[tuple[Mapping[str, str], Sequence[str], int, float]]) -> Iterator[Family]:
        """Yields the metrics of the tenants' shares of lanes.

        `shares`: labels of a lane, a share's tenants (several count for `OTHERS`), its entries, its part of the lane.
        """
        backlog: dict[tuple[tuple[str, str], ...], float] = {}
        parts: dict[tuple[tuple[str, str], ...], float] = {}
        for lane, tenants, entries, part in shares:
            key = (*lane.items(), ("tenant", self._tenant_label(tenants[0]) if len(tenants) == 1 else OTHERS))
            backlog[key] = backlog.get(key, 0) + entries
            parts[key] = parts.get(key, 0) + part
        yield family(catalogue.TENANT_BACKLOG, ((count, dict(key)) for key, count in backlog.items()))
        yield family(catalogue.TENANT_SHARE, ((part, dict(key)) for key, part in parts.items()))

    def _tenant_label(self, tenant: str) -> str:
        name = self._named.get(tenant)
        if name is None:
            if len(self._named) >= self._most:
                return OTHERS
            name = self._named[tenant] = tenant
        return name


class Passage(msgspec.Struct, eq=False):
    """A request before its entrance; stages may replace context, sink and quota."""

    context: CallerContext
    request: OutgoingRequest
    sink: ResponseSink
    asked_s: float | None
    within_s: float
    quota: QuotaCounter | None = None


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


logger = logging.getLogger(ACCESS)

OK, ACCEPTED = "ok", "accepted"
_MOST_TEXT = 256


class AccessLog(Stage):
    """Writes one gateway's lines; `share` samples successful requests."""

    def __init__(self, share: float) -> None:
        self._share = share

    def before(self, passage: Passage) -> None:
        """Wraps the sink in one that logs the end."""
        passage.sink = LoggedSink(self, passage.sink, passage.context, passage.request)

    def refused(self, context: CallerContext, model: tuple[str, int], code: str) -> None:
        """Logs a request that was not queued."""
        self._write_line(code, _who(context), {"model": model[0], "version": model[1]})

    def accepted(self, context: CallerContext, request: OutgoingRequest, request_id: str) -> None:
        """Logs a stored request, but not its end."""
        about = {"request_id": request_id, "model": request.model, "version": request.version}
        self._write_line(ACCEPTED, _who(context), {**about, **_sent(request)})

    def write_request(self, sink: "LoggedSink", code: str, response: Response | None) -> None:
        """Logs an ended request."""
        took_s = time.monotonic() - sink.began_s
        about: dict[str, Any] = {"bytes_out": sink.nbytes, "responses": sink.responses, "total_ms": _ms(took_s * 1e9)}
        if response is not None:
            about |= {"request_id": response.request_id, "model": response.model, "version": response.version}
            if (timing := response.timing) is not None:
                executed_ns = timing.input_ns + timing.infer_ns + timing.output_ns
                about |= {"queue_ms": _ms(timing.queue_ns), "execute_ms": _ms(executed_ns)}
        self._write_line(code, sink.about, about)

    def _write_line(self, code: str, who: dict[str, Any], about: dict[str, Any]) -> None:
        is_failure = code not in (OK, ACCEPTED)
        if is_failure or random.random() < self._share:  # noqa: S311  a sample
            status = {OK: 200, ACCEPTED: 202}.get(code) or http_status(code)
            logger.info("request", extra={**who, **about, "code": code, "status": status})


class LoggedSink(SinkWrapper):
    """Counts a request's responses."""

    __slots__ = ("_log", "about", "nbytes", "responses")

    def __init__(self, log: AccessLog, inner: ResponseSink, context: CallerContext, request: OutgoingRequest) -> None:
        super().__init__(inner)
        self._log: AccessLog | None = log
        self.about = {**_who(context), **_sent(request), "model": request.model[:_MOST_TEXT], "protocol": self.frontend}
        self.nbytes = self.responses = 0

    def deliver(self, response: Response) -> None:
        """Passes responses on; the last writes the line."""
        self.nbytes += response.nbytes
        self.responses += response.says_something
        try:
            self.inner.deliver(response)
        finally:
            if response.final:
                self.finish_line(OK if response.failure is None else response.failure.code, response)

    def finish_line(self, code: str, response: Response | None = None) -> None:
        """Writes the line, unless it is written already."""
        log, self._log = self._log, None
        if log is not None:
            log.write_request(self, code, response)

    def left(self, request_id: str, version: int) -> None:
        """Logs a request whose caller went away."""
        self.about |= {"request_id": request_id, "version": version}
        self.finish_line(ErrorCode.CANCELLED)


def _who(context: CallerContext) -> dict[str, Any]:
    principal = context.principal
    return {"tenant": context.tenant, "key": "" if principal is None else principal.key_id}


def _sent(request: OutgoingRequest) -> dict[str, Any]:
    about = {"id": request.client_id[:_MOST_TEXT], "bytes_in": sum(tensor.nbytes for tensor in request.inputs)}
    return {**about, "endpoint": request.endpoint} if request.endpoint else about


def _ms(ns: float) -> float:
    return round(ns / 1e6, 3)
