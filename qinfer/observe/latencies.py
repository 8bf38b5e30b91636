"""Triton's optional summaries of latencies, and its histogram of the time to the first response.

Quantiles of workers don't add up, so workers count requests in buckets that grow by a tenth each, and a gateway reads
the quantiles from the sums, right to within `ERROR`. Quantiles of the last minute come from the growth since a scrape.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence

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
