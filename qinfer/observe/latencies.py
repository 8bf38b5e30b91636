"""Triton's optional summaries of latencies, and its histogram of the time to the first response.

Quantiles of workers don't add up, so workers count requests in buckets that grow by a tenth each, and a gateway reads
the quantiles from the sums, right to within `ERROR`. Quantiles of the last minute come from the growth since a scrape.
"""

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pydantic is not in the environments that models bring
    from qinfer.core.settings_sections import MetricsSettings

GROWTH = 1.1
"""The ratio of adjacent upper bounds."""

ERROR = (GROWTH - 1) / (GROWTH + 1)
"""Relative, of a quantile."""

WINDOW_S = 60.0
"""The window of quantiles, as in Triton."""

FIRST_RESPONSE_BUCKETS_MS = (100, 500, 2000, 5000)
"""The bounds of buckets for first responses, as in Triton."""

REQUEST, QUEUE, INPUT, INFER, OUTPUT = "request", "queue", "input", "infer", "output"
"""Phases of requests with a summary."""

CACHE_HIT, CACHE_MISS = "cache_hit", "cache_miss"

SUMMARY = "summary:"
"""`summary:<which>:<number of the bucket>`; bucket n is up to `GROWTH` ** n microseconds."""

FIRST_RESPONSE = "first_response_ms"
FIRST_RESPONSE_NS = "first_response_ns"
"""The sum beside `first_response_ms:<upper bound>`."""

_BASE = math.log(GROWTH)
_LEAST_SAMPLE_S = 5.0
_Counts = Mapping[str, int]
_Key = tuple[str, int]


def latency_tally(metrics: "MetricsSettings") -> "LatencyTally | None":
    """Returns the tally; `None` if summaries and histogram are off."""
    if not metrics.summary_latencies and not metrics.histogram_latencies:
        return None
    return LatencyTally(summaries=metrics.summary_latencies, histogram=metrics.histogram_latencies)


class LatencyTally:
    """Adds up latencies in one worker; not thread-safe."""

    def __init__(self, *, summaries: bool, histogram: bool) -> None:
        self._summaries = summaries
        self._histogram = histogram
        self._deltas: defaultdict[str, int] = defaultdict(int)

    def executed(self, queue_ns: Sequence[int], input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Counts an execution as `StatsTally.executed` does."""
        deltas = self._deltas
        if self._summaries:
            batch_ns, count = input_ns + infer_ns + output_ns, len(queue_ns)
            for which, ns in ((INPUT, input_ns), (INFER, infer_ns), (OUTPUT, output_ns)):
                deltas[f"{SUMMARY}{which}:{bucket_of(ns)}"] += count
            for waited_ns in queue_ns:
                deltas[f"{SUMMARY}{QUEUE}:{bucket_of(waited_ns)}"] += 1
                deltas[f"{SUMMARY}{REQUEST}:{bucket_of(waited_ns + batch_ns)}"] += 1

    def first_responses(self, ns: Sequence[int]) -> None:
        """Counts first responses."""
        deltas = self._deltas
        if self._histogram:
            for first_ns in ns:
                deltas[_FIRST_FIELDS[bisect_left(FIRST_RESPONSE_BUCKETS_MS, first_ns / 1e6)]] += 1
                deltas[FIRST_RESPONSE_NS] += first_ns

    def drain(self) -> dict[str, int]:
        """Returns the counts since the last drain."""
        deltas = dict(self._deltas)
        self._deltas.clear()
        return deltas


class SlidingWindow:
    """The statistics' growth in the last minute, by this process's scrapes; at first, all counts."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Mapping[_Key, _Counts]]] = deque()

    def move(self, now_s: float, statistics: Mapping[_Key, _Counts]) -> dict[_Key, dict[str, int]]:
        """Adds statistics; returns the summaries' counts within the window."""
        now = {
            key: {name: count for name, count in fields.items() if name.startswith(SUMMARY)}
            for key, fields in statistics.items()
        }
        while len(self._seen) > 1 and self._seen[1][0] <= now_s - WINDOW_S:
            self._seen.popleft()
        base: Mapping[_Key, _Counts] = {}
        if self._seen and self._seen[0][0] <= now_s - WINDOW_S:
            base = self._seen[0][1]
        if not self._seen or self._seen[-1][0] <= now_s - _LEAST_SAMPLE_S:
            self._seen.append((now_s, now))
        return {key: _difference(fields, base.get(key, {})) for key, fields in now.items()}


def field_of(which: str, ns: int) -> str:
    """Returns a latency's field in a summary."""
    return f"{SUMMARY}{which}:{bucket_of(ns)}"


def quantiles(fields: _Counts, which: str, wanted: Sequence[float]) -> dict[float, float]:
    """Returns quantiles in microseconds, NaN without counts."""
    prefix = f"{SUMMARY}{which}:"
    counts = sorted((int(name[len(prefix) :]), count) for name, count in fields.items() if name.startswith(prefix))
    total = sum(count for _, count in counts)
    return {quantile: _value_at(counts, max(math.ceil(quantile * total), 1)) for quantile in wanted}


def bucket_of(ns: int) -> int:
    """Returns a latency's bucket; 0 = at most a microsecond."""
    return math.ceil(math.log(ns / 1000) / _BASE) if ns > 1000 else 0


def _value_at(counts: Sequence[tuple[int, int]], rank: int) -> float:
    so_far = 0
    for number, count in counts:
        so_far += count
        if so_far >= rank:
            return 2 * GROWTH**number / (GROWTH + 1) if number else 1.0
    return math.nan


def _difference(fields: _Counts, base: _Counts) -> dict[str, int]:
    """Returns everything if the statistics were restarted meanwhile."""
    if any(fields.get(name, 0) < count for name, count in base.items()):
        return dict(fields)
    return {name: count - base.get(name, 0) for name, count in fields.items()}


_FIRST_FIELDS = [f"{FIRST_RESPONSE}:{bound:g}" for bound in (*FIRST_RESPONSE_BUCKETS_MS, float("inf"))]
