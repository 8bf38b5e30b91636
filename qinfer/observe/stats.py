"""Statistics of a model version: workers add them up, gateways show them.

They travel as integer deltas of named fields (`HINCRBY` on `stats:<version>`), so that totals only grow, even if a
worker dies. A histogram is one field per bucket, `<histogram>:<upper bound>`, not cumulative: a changed list of buckets
can't misread old counts. The responses of decoupled models (reference §1.13) count by their index:
`response:<index>:<what>` and `response_ns:<index>:<what>`. A killed process loses about a second of counts. Counts that
Redis did not confirm in time are sent again, and may count twice.
"""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

from qinfer.core.messages import Response
from qinfer.errors import ErrorCode
from qinfer.observe import latencies
from qinfer.observe.latencies import FIRST_RESPONSE, FIRST_RESPONSE_BUCKETS_MS, FIRST_RESPONSE_NS, field_of

MOST_INDEXES = 1000
"""The most responses that are counted by their index, because a stream may have millions."""

_COUNT, _NS = "response:", "response_ns:"
_INFER, _OUTPUT = "compute_infer", "compute_output"


class ResponseEnd(StrEnum):
    """`empty` has only the final flag."""

    SUCCESS = "success"
    FAIL = "fail"
    EMPTY = "empty_response"
    CANCEL = "cancel"


FIELDS = (_INFER, _OUTPUT, *ResponseEnd)
"""Triton's names, each with a count and nanoseconds."""


def end_of(response: Response) -> ResponseEnd:
    """Returns the end of a response."""
    if response.failure is not None:
        is_cancelled = response.failure.code == ErrorCode.CANCELLED.value
        return ResponseEnd.CANCEL if is_cancelled else ResponseEnd.FAIL
    return ResponseEnd.SUCCESS if response.outputs or response.parameters else ResponseEnd.EMPTY


class ResponseTally:
    """Adds one worker's responses of a model version to its `StatsTally`; not thread-safe."""

    def __init__(self, deltas: defaultdict[str, int]) -> None:
        self._deltas = deltas

    def responded(self, index: int, end: ResponseEnd, infer_ns: int) -> None:
        """Counts a response, `infer_ns` after the previous one."""
        if index >= MOST_INDEXES:
            return
        self._add(index, end, infer_ns)
        if end is ResponseEnd.SUCCESS:
            self._add(index, _INFER, infer_ns)
            self._add(index, _OUTPUT, 0)

    def _add(self, index: int, what: str, ns: int) -> None:
        self._deltas[f"{_COUNT}{index}:{what}"] += 1
        self._deltas[f"{_NS}{index}:{what}"] += ns


def response_counts(stats: Mapping[str, int]) -> dict[int, dict[str, tuple[int, int]]]:
    """Returns index → (count, nanoseconds) by `FIELDS`."""
    indexes = sorted({int(field.split(":")[1]) for field in stats if field.startswith(_COUNT)})
    return {
        index: {
            what: (stats.get(f"{_COUNT}{index}:{what}", 0), stats.get(f"{_NS}{index}:{what}", 0)) for what in FIELDS
        }
        for index in indexes
    }


QUEUE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
EXECUTION_BUCKETS_S = QUEUE_BUCKETS_S
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STEP_BUCKETS_S = (
    2e-05, 5e-05, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip
_QUEUE_BUCKETS_NS = tuple(round(bound_s * 1e9) for bound_s in QUEUE_BUCKETS_S)
FILL_BUCKETS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)

QUEUE, EXECUTION, BATCH = "queue", "execution", "batch"
"""Histograms: seconds in the queue, seconds of a batch, rows of a batch."""
ASSEMBLE, PUBLISH, FILL = "assemble", "publish", "fill"
"""Histograms: seconds, seconds, rows ÷ the largest batch."""
BOUNDS: Mapping[str, Sequence[float]] = {
    QUEUE: QUEUE_BUCKETS_S,
    EXECUTION: EXECUTION_BUCKETS_S,
    BATCH: BATCH_BUCKETS,
    ASSEMBLE: STEP_BUCKETS_S,
    PUBLISH: STEP_BUCKETS_S,
    FILL: FILL_BUCKETS,
    FIRST_RESPONSE: FIRST_RESPONSE_BUCKETS_MS,
}
"""Histogram → finite upper bounds."""

SUCCESS_COUNT = "success_count"
SUCCESS_NS = "success_ns"
"""Nanoseconds from enqueueing, over all requests answered with outputs."""
FAIL_NS = "fail_ns"
"""Nanoseconds from enqueueing, over all failed requests."""
LAST_INFERENCE_MS = "last_inference_ms"
"""The start, since the epoch on Redis' clock."""
LATEST = frozenset((LAST_INFERENCE_MS,))
"""Fields that keep the greatest value."""
INFERENCE_COUNT = "inference_count"
"""Rows executed, as in Triton."""
EXECUTION_COUNT = "execution_count"
EXECUTION_NS = "execution_ns"
"""Each batch counts once."""
QUEUE_NS, INPUT_NS, INFER_NS, OUTPUT_NS = "queue_ns", "input_ns", "infer_ns", "output_ns"
"""Each request adds its own wait, and the whole times of its batch, as in Triton (reference §1.13)."""
PUBLISH_NS = "publish_ns"
FILL_PERMILLE = "fill_permille"
"""Thousandths of the largest batch, over all batches in the histogram."""
ROWS_DONE, ROWS_FAILED = "job_rows_done", "job_rows_failed"
"""Rows of bulk jobs in settled shards."""
PUT_OFF = "job_put_off:"
"""Postponed tries of shards, commits, plans and finishes: `job_put_off:<error code>`."""
JOB_ROWS_SCORED, JOB_SCORING_NS = "job_rows_scored", "job_scoring_ns"
"""The time includes waits, and counts once for each worker."""
CACHE_HIT_COUNT, CACHE_HIT_NS = "cache_hit_count", "cache_hit_ns"
"""Cache hits also count as requests answered with outputs."""
CACHE_MISS_COUNT, CACHE_MISS_NS = "cache_miss_count", "cache_miss_ns"
"""The time includes storing."""
REDELIVERIES = "redeliveries"
RETRIES = "retries"
DEAD_LETTERS = "dead_letters"
FAILURES = "failures:"
"""Failures in a worker: `failures:<error code>`."""
REFUSALS = "refusals:"
"""Refusals in a gateway, missed deadlines and cancellations included: `refusals:<error code>`."""
LABEL_QUEUED, LABEL_PUSHED, LABEL_RETRIES = "label_queued", "label_pushed", "label_retries"
"""Tasks stored and pushed, and pushes that are tried again."""
LABEL_FAILED = "label_failed:"
"""Failed label tasks by `LabelFailure`."""
BATCH_COUNT, BATCH_INPUT_NS, BATCH_INFER_NS, BATCH_OUTPUT_NS = (
    "batch_count:",
    "batch_input_ns:",
    "batch_infer_ns:",
    "batch_output_ns:",
)
"""Counts by batch size: `batch_count:<rows>`, …"""


LOAD_FAILURES = "load_failures"
OVERDUE = "overdue"
"""Executions, loads and warm-ups ended at their limit."""
BY_CALLERS = frozenset(
    (
        ErrorCode.INVALID_REQUEST,
        ErrorCode.MALFORMED_JSON,
        ErrorCode.UNSUPPORTED_DATATYPE,
        ErrorCode.UNSUPPORTED_FEATURE,
        ErrorCode.PAYLOAD_TOO_LARGE,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.CONFLICT,
        ErrorCode.ALREADY_EXISTS,
        ErrorCode.REGION_NOT_FOUND,
        ErrorCode.QUOTA_EXCEEDED,
        ErrorCode.CANCELLED,
        ErrorCode.UNAUTHORIZED,
        ErrorCode.FORBIDDEN,
        ErrorCode.RESTRICTED,
        ErrorCode.SEQUENCE_ENDED,
        ErrorCode.STORE_REFUSED,
    )
)
"""Failures with these codes count for no objective."""


class LabelFailure(StrEnum):
    """Why a labeling task failed."""

    NOT_QUEUED = "not_queued"
    NOT_PREDICTED = "not_predicted"
    REFUSED = "refused"
    PUSH_FAILED = "push_failed"


LABELING = (LABEL_QUEUED, LABEL_PUSHED, LABEL_RETRIES, *(LABEL_FAILED + reason for reason in LabelFailure))


class BatchTotals(NamedTuple):
    """Executions of one batch size."""

    rows: int
    executions: int
    input_ns: int
    infer_ns: int
    output_ns: int


class StatsTally:
    """Adds up one worker's statistics of a model version; not thread-safe.

    `is_streamed`: the model is decoupled, and `first_response` counts its first responses. Triton's summaries and its
    histogram are off unless `with_summaries` and `with_histogram` are set.
    """

    def __init__(self) -> None:
        self.max_rows = 0
        self.is_streamed = False
        self.with_summaries = self.with_histogram = False
        self._deltas: defaultdict[str, int] = defaultdict(int)
        self.responses = ResponseTally(self._deltas)
        self._counts = {name: [0] * (len(BOUNDS[name]) + 1) for name in (QUEUE, EXECUTION, BATCH, ASSEMBLE, FILL)}
        self._sizes: dict[int, list[int]] = {}
        self._last_s = 0.0

    def executed(
        self,
        rows: int,
        queue_ns: Sequence[int],
        input_ns: int,
        infer_ns: int,
        output_ns: int,
        begin_s: float = 0.0,
    ) -> None:
        """Counts one execution that answered its requests with outputs.

        `queue_ns` has the wait of each answered request, less `input_ns`. The phases make the inputs, execute the
        model, and make the outputs. `begin_s` is on Redis' clock; 0 = unknown.
        """
        deltas, batch_ns = self._deltas, input_ns + infer_ns + output_ns
        requests, waited_ns = len(queue_ns), sum(queue_ns)
        deltas[SUCCESS_COUNT] += requests
        deltas[SUCCESS_NS] += waited_ns + batch_ns * requests
        deltas[QUEUE_NS] += waited_ns
        deltas[INPUT_NS] += input_ns * requests
        deltas[INFER_NS] += infer_ns * requests
        deltas[OUTPUT_NS] += output_ns * requests
        counts = self._counts
        queue = counts[QUEUE]
        for item_ns in queue_ns:
            queue[bisect_left(_QUEUE_BUCKETS_NS, item_ns)] += 1
        counts[EXECUTION][bisect_left(EXECUTION_BUCKETS_S, batch_ns / 1e9)] += 1
        counts[ASSEMBLE][bisect_left(STEP_BUCKETS_S, input_ns / 1e9)] += 1
        if self.max_rows:
            counts[FILL][bisect_left(FILL_BUCKETS, rows / self.max_rows)] += 1
            deltas[FILL_PERMILLE] += 1000 * rows // self.max_rows
        if self.with_summaries:
            for which, ns in ((latencies.INPUT, input_ns), (latencies.INFER, infer_ns), (latencies.OUTPUT, output_ns)):
                deltas[field_of(which, ns)] += requests
            for item_ns in queue_ns:
                deltas[field_of(latencies.QUEUE, item_ns)] += 1
                deltas[field_of(latencies.REQUEST, item_ns + batch_ns)] += 1
        if self.with_histogram and not self.is_streamed:
            for item_ns in queue_ns:
                self.first_response(item_ns + input_ns + infer_ns)
        size = self._sizes.get(rows)
        if size is None:
            size = self._sizes[rows] = [0, 0, 0, 0]
        size[0] += 1
        size[1] += input_ns
        size[2] += infer_ns
        size[3] += output_ns
        self._last_s = max(self._last_s, begin_s)

    def lasted_longer(self, ns: int) -> None:
        """Adds an ensemble's time besides its steps; negative where steps ran in parallel."""
        self._deltas[SUCCESS_NS] += ns

    def first_response(self, ns: int) -> None:
        """Counts a first response, `ns` after enqueueing."""
        if self.with_histogram:
            self._deltas[_FIRST_FIELDS[bisect_left(FIRST_RESPONSE_BUCKETS_MS, ns / 1e6)]] += 1
            self._deltas[FIRST_RESPONSE_NS] += ns

    def retried(self, count: int) -> None:
        """Counts requests that are executed again."""
        self._deltas[RETRIES] += count

    def redelivered(self) -> None:
        """Counts a repeated delivery of a request."""
        self._deltas[REDELIVERIES] += 1

    def buried(self) -> None:
        """Counts an entry that became a dead letter."""
        self._deltas[DEAD_LETTERS] += 1

    def failed(self, reason: str, count: int = 1) -> None:
        """Counts requests that failed in the worker."""
        self._deltas[FAILURES + reason] += count

    def spent_failing(self, ns: int) -> None:
        """Adds nanoseconds from enqueueing to failing."""
        self._deltas[FAIL_NS] += ns

    def drain(self) -> dict[str, int]:
        """Returns the counts since the last drain."""
        sizes = self._drain_sizes()
        deltas = {name: value for name, value in self._deltas.items() if value}
        self._deltas.clear()
        for name, counts in self._counts.items():
            fields = zip(bucket_fields(name, BOUNDS[name]), counts, strict=True)
            deltas.update((field, count) for field, count in fields if count)
            counts[:] = [0] * len(counts)
        deltas.update(sizes)
        if self._last_s:
            deltas[LAST_INFERENCE_MS] = int(self._last_s * 1000)
            self._last_s = 0.0
        return deltas

    def _drain_sizes(self) -> dict[str, int]:
        fields: dict[str, int] = {}
        for rows, totals in self._sizes.items():
            executions, *ns = totals
            self._counts[BATCH][bisect_left(BATCH_BUCKETS, rows)] += executions
            self._deltas[INFERENCE_COUNT] += rows * executions
            self._deltas[EXECUTION_COUNT] += executions
            self._deltas[EXECUTION_NS] += sum(ns)
            fields.update((f"{name}{rows}", total) for name, total in zip(_BATCH_FIELDS, totals, strict=True) if total)
        self._sizes.clear()
        return fields


class ModelCounts:
    """Adds up counts by model version; not thread-safe."""

    def __init__(self) -> None:
        self._deltas: defaultdict[tuple[str, int], defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))

    def add(self, model: str, version: int, field: str, count: int = 1) -> None:
        """Adds to a field of a model version."""
        self._deltas[model, version][field] += count

    def published(self, model: str, version: int, ns: int) -> None:
        """Counts the answers of a batch."""
        deltas = self._deltas[model, version]
        deltas[_PUBLISH_FIELDS[bisect_left(STEP_BUCKETS_S, ns / 1e9)]] += 1
        deltas[PUBLISH_NS] += ns

    def merge(self, model: str, version: int, deltas: Mapping[str, int]) -> None:
        """Adds counts of a `StatsTally`."""
        add(self._deltas[model, version], deltas)

    def drain(self) -> dict[tuple[str, int], dict[str, int]]:
        """Returns the counts since the last drain."""
        drained = {key: dict(deltas) for key, deltas in self._deltas.items()}
        self._deltas.clear()
        return drained


class Objective(NamedTuple):
    """The share `target` of the requests should succeed within `latency_s`."""

    latency_s: float
    target: float


class Exemplar(NamedTuple):
    """A traced request that stands for its bucket; the time is since the epoch."""

    trace_id: str
    value: float
    at_s: float


class Durations:
    """One series of the duration histogram."""

    __slots__ = ("counts", "exemplars", "late", "total_s", "within_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(QUEUE_BUCKETS_S) + 1)
        self.total_s = 0.0
        self.within_s = float("inf")
        self.late = 0
        self.exemplars: dict[int, Exemplar] = {}

    def add(self, seconds: float) -> None:
        """Counts a duration."""
        self.counts[bisect_left(QUEUE_BUCKETS_S, seconds)] += 1
        self.total_s += seconds


class GatewayTally:
    """Counts the requests of one gateway, on its event loop.

    Attributes:
        in_flight: Returns the number of unanswered requests; the gateway sets it.
    """

    def __init__(self, process: str = "") -> None:
        self.in_flight: Callable[[], int] = lambda: 0
        self.refusals = ModelCounts()
        self.process = process
        self.durations: dict[tuple[str, int], Durations] = {}
        self.failures: dict[tuple[str, int, str], int] = {}
        self.objectives: Mapping[tuple[str, int], Objective] = {}

    def aim(self, objectives: Mapping[tuple[str, int], Objective]) -> None:
        """Sets the objectives from now on."""
        self.objectives = objectives
        for key, objective in objectives.items():
            self._series(key).within_s = objective.latency_s

    def count_answered(self, model: str, version: int, seconds: float) -> None:
        """Counts a request with outputs."""
        series = self.durations.get((model, version)) or self._series((model, version))
        series.counts[bisect_left(QUEUE_BUCKETS_S, seconds)] += 1
        series.total_s += seconds
        if seconds > series.within_s:
            series.late += 1

    def traced(self, model: str, version: int, seconds: float, trace_id: str) -> None:
        """Records the trace of a request with outputs."""
        exemplar = Exemplar(trace_id, seconds, time.time())
        self._series((model, version)).exemplars[bisect_left(QUEUE_BUCKETS_S, seconds)] = exemplar

    @property
    def has_exemplars(self) -> bool:
        """Tells whether any request was traced."""
        return any(series.exemplars for series in self.durations.values())

    def failed(self, model: str, version: int, reason: str) -> None:
        """Counts a failed request; unknown models share one series."""
        key = (model, version, reason)
        self.failures[key] = self.failures.get(key, 0) + 1

    def count_ended(self, model: str, version: int, reason: str, started_s: float | None = None) -> None:
        """Counts a request that this gateway ended; `started_s` is monotonic."""
        seconds = 0.0 if started_s is None else time.monotonic() - started_s
        self.refusals.add(model, version, REFUSALS + reason)
        self.refusals.add(model, version, FAIL_NS, int(seconds * 1e9))

    def _series(self, key: tuple[str, int]) -> Durations:
        if (series := self.durations.get(key)) is None:
            series = self.durations[key] = Durations()
            if key in self.objectives:
                series.within_s = self.objectives[key].latency_s
        return series


def add(totals: MutableMapping[str, int], deltas: Mapping[str, int]) -> None:
    """Adds deltas to totals; for an instant, keeps the later one."""
    for name, value in deltas.items():
        so_far = totals.get(name, 0)
        totals[name] = max(so_far, value) if name in LATEST else so_far + value


def failure_count(stats: Mapping[str, int]) -> int:
    """Returns the number of failed requests."""
    return sum(count for field, count in stats.items() if field.startswith((FAILURES, REFUSALS)))


def batches(stats: Mapping[str, int]) -> list[BatchTotals]:
    """Returns the executions by batch size, ascending."""
    sizes = sorted(int(field[len(BATCH_COUNT) :]) for field in stats if field.startswith(BATCH_COUNT))
    return [BatchTotals(rows, *(stats.get(f"{name}{rows}", 0) for name in _BATCH_FIELDS)) for rows in sizes]


def buckets(stats: Mapping[str, int], histogram: str) -> list[tuple[float, int]]:
    """Returns a histogram's (upper bound, cumulative count) pairs."""
    counts = dict.fromkeys([*map(float, BOUNDS[histogram]), float("inf")], 0)
    prefix = f"{histogram}:"
    for field, count in stats.items():
        if field.startswith(prefix):
            bound = float(field[len(prefix) :])
            counts[bound] = counts.get(bound, 0) + count
    bounds = sorted(counts)
    return list(zip(bounds, accumulate(counts[bound] for bound in bounds), strict=True))


def bucket_fields(histogram: str, bounds: Sequence[float]) -> list[str]:
    """Returns a histogram's fields, ascending, the infinite one last."""
    return [f"{histogram}:{bound:g}" for bound in (*bounds, float("inf"))]


_BATCH_FIELDS = (BATCH_COUNT, BATCH_INPUT_NS, BATCH_INFER_NS, BATCH_OUTPUT_NS)
_FIRST_FIELDS = bucket_fields(FIRST_RESPONSE, FIRST_RESPONSE_BUCKETS_MS)
_PUBLISH_FIELDS = bucket_fields(PUBLISH, STEP_BUCKETS_S)
