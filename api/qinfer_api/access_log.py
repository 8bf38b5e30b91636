"""The access log: a line for each failed inference request, and for a share (`QINFER_LOG__ACCESS`) of the others.

Lines contain no payload and no key.
"""

import logging
import random
import time
from typing import Any

from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import ErrorCode
from qinfer.observe.logs import ACCESS
from qinfer.submission.pending import ResponseSink
from qinfer_api.auth import CallerContext
from qinfer_api.stages import Passage, SinkWrapper, Stage
from qinfer_api.status import http_status

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
