"""Charts of more than an hour, from the Prometheus that the operator has named (its API `query_range`).

Only the URL of the settings is asked, and no redirect is followed. An answer is bounded in time, bytes and points, and
kept for a while, so that the load on Prometheus does not grow with browsers: one query is asked at a time.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from qinfer.core.retry import REMIND_S, OutageLog
from qinfer.core.settings_sections import ConsoleSettings
from qinfer.errors import InvalidRequest, QinferError
from qinfer_api.console.history import TOTAL

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

WITHIN_S = 10.0
"""Seconds for all queries of a chart, with the wait for others."""
MOST_BYTES = 2**20
MOST_KEPT = 64
KEPT_S, FAILURE_KEPT_S = 30.0, 5.0
_LEAST_WINDOW_S = 240
"""The window of rates: Prometheus needs two scrapes in it, and scrapes once a minute at least."""
_URL = "QINFER_CONSOLE__PROMETHEUS_URL"
_SERIES = re.compile(r"(.{1,1000}):([0-9]{1,18})", re.DOTALL)

Columns = Mapping[str, list[float]]
"""Figure of `ChartPoint` → its values, NaN = unknown; `at_s` has the instants."""


class ChartRange(NamedTuple):
    """A range of the charts, and the seconds between their points; the hour comes from `CountHistory`."""

    name: str
    span_s: int
    step_s: int


HOUR = ChartRange("1h", 3600, 5)
RANGES = (HOUR, ChartRange("6h", 21_600, 60), ChartRange("24h", 86_400, 300), ChartRange("7d", 604_800, 1800))


class PrometheusFailed(QinferError):
    """Prometheus gave no answer that can be used; the message is the reason."""


class _QuerySeries(msgspec.Struct):
    values: list[tuple[float, str]] = []


class _QueryData(msgspec.Struct):
    result: list[_QuerySeries] = []


class _QueryAnswer(msgspec.Struct):
    data: _QueryData = msgspec.field(default_factory=_QueryData)
    error: str = ""


class LongHistory:
    """Reads charts from Prometheus; `ranges` are those that can be chosen, only the hour without its URL."""

    def __init__(self, settings: ConsoleSettings, now_s: Callable[[], float]) -> None:
        self._url, self._match = settings.prometheus_url.get_secret_value().rstrip("/"), settings.prometheus_match
        self._now_s = now_s
        self.ranges = RANGES if self._url else (HOUR,)
        self._asking = asyncio.Lock()
        self._kept: dict[tuple[str, ChartRange], tuple[float, Columns | PrometheusFailed]] = {}
        self._http: httpx.AsyncClient | None = None
        self._outage = OutageLog(logger, "prometheus gives no charts", remind_s=REMIND_S)

    def chosen(self, name: str) -> ChartRange:
        """Returns the range of a name, by default the hour."""
        return next((each for each in self.ranges if each.name == name), HOUR)

    async def columns(self, series: str, chosen: ChartRange) -> Columns:
        """Returns the columns of a chart; raises `PrometheusFailed`."""
        labels, key = self._labels(series), (series, chosen)
        try:
            async with asyncio.timeout(WITHIN_S), self._asking:
                kept = self._kept.pop(key, None)
                if kept is None or kept[0] < time.monotonic():
                    kept = await self._asked(labels, chosen)
                self._kept[key] = kept
                if len(self._kept) > MOST_KEPT:
                    del self._kept[next(iter(self._kept))]
        except TimeoutError:
            late = PrometheusFailed(f"Prometheus has not answered within {WITHIN_S:g} s")
            self._outage.failed(late.message)
            raise late from None
        if isinstance(kept[1], PrometheusFailed):
            raise kept[1]
        return kept[1]

    def _labels(self, series: str) -> str:
        matchers = [self._match] if self._match else []
        if series != TOTAL:
            found = _SERIES.fullmatch(series)
            if found is None:
                raise InvalidRequest(f"'{series[:100]}' is no model with its version, such as digits:1")
            model, version = (msgspec.json.encode(text).decode() for text in found.groups())
            matchers += [f"model={model}", f"version={version}"]  # JSON's escapes are PromQL's
        return ",".join(matchers)

    async def _asked(self, labels: str, chosen: ChartRange) -> tuple[float, Columns | PrometheusFailed]:
        """Returns a chart or a failure, and until when it is kept."""
        import httpx

        end_s = int(self._now_s()) // chosen.step_s * chosen.step_s
        grid = range(end_s - chosen.span_s, end_s + 1, chosen.step_s)
        columns = {"at_s": [float(at_s) for at_s in grid]}
        try:
            if self._http is None:
                headers = {"accept-encoding": "identity"}  # so that its bytes are those that are counted
                self._http = await asyncio.to_thread(httpx.AsyncClient, trust_env=False, headers=headers)
            for name, query in queries(labels, max(chosen.step_s, _LEAST_WINDOW_S)).items():
                columns[name] = await self._values(query, grid)
        except PrometheusFailed as error:
            self._outage.failed(error.message)
            return time.monotonic() + FAILURE_KEPT_S, error
        self._outage.over()
        return time.monotonic() + KEPT_S, columns

    async def _values(self, query: str, grid: range) -> list[float]:
        """Returns the values of a query's only series at the instants of a grid."""
        values = [math.nan] * len(grid)
        words = {"query": query, "start": str(grid[0]), "end": str(grid[-1]), "step": str(grid.step)}
        status, text = await self._get(words)
        try:
            answer = msgspec.json.decode(text, type=_QueryAnswer)
            for at_s, value in answer.data.result[0].values if answer.data.result else ():
                at, rest = divmod(at_s - grid[0], grid.step)
                if 0 <= at < len(values) and not rest:
                    values[int(at)] = float(value)
        except (ValueError, RecursionError):  # msgspec's errors, too
            raise PrometheusFailed(
                f"the server at {_URL} answered with status {status}, and not as Prometheus"
            ) from None
        if status != 200 or answer.error:
            raise PrometheusFailed(f"Prometheus answered with status {status}: {answer.error[:200]}")
        return values

    async def _get(self, words: Mapping[str, str]) -> tuple[int, bytes]:
        """Returns status and body of an answer."""
        import httpx

        assert self._http is not None
        text = bytearray()
        try:
            url = f"{self._url}/api/v1/query_range"
            async with self._http.stream("GET", url, params=words, timeout=None, follow_redirects=False) as reply:
                async for piece in reply.aiter_raw():
                    text += piece
                    if len(text) > MOST_BYTES:
                        raise PrometheusFailed(f"Prometheus sent more than {MOST_BYTES} bytes")
        except (httpx.HTTPError, OSError) as error:
            raise PrometheusFailed(f"Prometheus can't be reached ({type(error).__name__})") from None
        if reply.is_redirect:
            raise PrometheusFailed(f"Prometheus answered with a redirect, which is not followed; correct {_URL}")
        return reply.status_code, bytes(text)

    async def close(self) -> None:
        """Closes the connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None


def queries(labels: str, window_s: int) -> dict[str, str]:
    """Returns the queries of a chart's figures, each of which has one series at most.

    Gauges of the cluster may have been scraped from several gateways, which show the same.
    """
    of, window = f"{{{labels}}}", f"[{window_s}s]"
    rate = f"sum(rate(qinfer_requests_total{of}{window}))"
    buckets = f"sum by (le) (rate(qinfer_request_duration_seconds_bucket{of}{window}))"
    return {
        "rate": rate,
        "errors": f"sum(rate(qinfer_request_failures_total{of}{window})) or 0 * {rate}",
        "p50_s": f"histogram_quantile(0.5, {buckets})",
        "p99_s": f"histogram_quantile(0.99, {buckets})",
        "work_s": f"sum(max by (model, version) (qinfer_backlog_work_seconds{of}))",
    }
