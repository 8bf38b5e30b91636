"""Statistics of a model version, as the workers add them up and the gateways show them.

They travel as integer deltas of named fields (`HINCRBY` on `stats:<version>`), so that the totals only grow, whichever
worker dies and however many there are. A histogram is one field per bucket, `<histogram>:<upper bound>`, not
cumulative; the bound is in the name, so that a changed list of buckets can't misread old counts.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence

QUEUE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
EXECUTION_BUCKETS_S = QUEUE_BUCKETS_S
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

QUEUE, EXECUTION, BATCH = "queue", "execution", "batch"
"""The histograms: wait in queue (seconds), execution of a batch (seconds), rows of a batch."""

SUCCESS_COUNT = "success_count"
"""Requests answered with outputs."""
INFERENCE_COUNT = "inference_count"
"""Rows executed: Triton's inference count."""
EXECUTION_COUNT = "execution_count"
"""Batches executed."""
EXECUTION_NS = "execution_ns"
"""Nanoseconds of executing batches, each counted once."""
QUEUE_NS, INPUT_NS, INFER_NS, OUTPUT_NS = "queue_ns", "input_ns", "infer_ns", "output_ns"
"""Nanoseconds over all requests; each is charged its whole batch's, as in Triton (reference §1.13)."""
RETRIES = "retries"
"""Requests executed again because the batch that they were in raised; once for each time."""
DEAD_LETTERS = "dead_letters"
"""Entries that were given up and put with the dead letters."""
FAILURES = "failures:"
"""Requests that failed, by reason: `failures:<error code>`."""


class StatsTally:
    """Adds up what one model version did in one worker; not for several threads at once."""

    def __init__(self) -> None:
        self._deltas: defaultdict[str, int] = defaultdict(int)
        self._queue = [0] * (len(QUEUE_BUCKETS_S) + 1)
        self._execution = [0] * (len(EXECUTION_BUCKETS_S) + 1)
        self._batch = [0] * (len(BATCH_BUCKETS) + 1)

    def executed(
        self, requests: int, rows: int, queue_ns: Sequence[int], input_ns: int, infer_ns: int, output_ns: int
    ) -> None:
        """Counts one execution that answered its requests with outputs.

        Args:
            requests: How many requests it answered.
            rows: Its batch size: rows of all requests.
            queue_ns: How long each request waited, from enqueueing to the start of the execution.
            input_ns: Start of the execution → inputs ready.
            infer_ns: Inputs ready → model done.
            output_ns: Model done → outputs ready.
        """
        deltas, batch_ns = self._deltas, input_ns + infer_ns + output_ns
        deltas[SUCCESS_COUNT] += requests
        deltas[INFERENCE_COUNT] += rows
        deltas[EXECUTION_COUNT] += 1
        deltas[EXECUTION_NS] += batch_ns
        deltas[QUEUE_NS] += sum(queue_ns)
        deltas[INPUT_NS] += input_ns * requests
        deltas[INFER_NS] += infer_ns * requests
        deltas[OUTPUT_NS] += output_ns * requests
        queue = self._queue
        for waited_ns in queue_ns:
            queue[bisect_left(QUEUE_BUCKETS_S, waited_ns / 1e9)] += 1
        self._execution[bisect_left(EXECUTION_BUCKETS_S, batch_ns / 1e9)] += 1
        self._batch[bisect_left(BATCH_BUCKETS, rows)] += 1

    def retried(self, count: int) -> None:
        """Counts requests that are executed again because their batch raised."""
        self._deltas[RETRIES] += count

    def buried(self) -> None:
        """Counts an entry that became a dead letter."""
        self._deltas[DEAD_LETTERS] += 1

    def failed(self, reason: str, count: int = 1) -> None:
        """Counts requests that failed in the worker, by `ErrorCode` value."""
        self._deltas[FAILURES + reason] += count

    def drain(self) -> dict[str, int]:
        """Returns what was added since the last drain, without zeros."""
        deltas = {name: value for name, value in self._deltas.items() if value}
        self._deltas.clear()
        for name, bounds, counts in (
            (QUEUE, QUEUE_BUCKETS_S, self._queue),
            (EXECUTION, EXECUTION_BUCKETS_S, self._execution),
            (BATCH, BATCH_BUCKETS, self._batch),
        ):
            fields = zip(_bucket_fields(name, bounds), counts, strict=True)
            deltas.update((field, count) for field, count in fields if count)
            counts[:] = [0] * len(counts)
        return deltas


def buckets(stats: Mapping[str, int], histogram: str) -> list[tuple[float, int]]:
    """Returns a histogram's (upper bound, cumulative count) pairs, the last bound infinite, from statistics."""
    bounds: Sequence[float] = BATCH_BUCKETS if histogram == BATCH else QUEUE_BUCKETS_S
    counts = dict.fromkeys([*map(float, bounds), float("inf")], 0)
    prefix = f"{histogram}:"
    for field, count in stats.items():
        if field.startswith(prefix):
            bound = float(field[len(prefix) :])
            counts[bound] = counts.get(bound, 0) + count
    total, cumulative = 0, []
    for bound in sorted(counts):
        total += counts[bound]
        cumulative.append((bound, total))
    return cumulative


def _bucket_fields(histogram: str, bounds: Sequence[float]) -> list[str]:
    return [f"{histogram}:{bound:g}" for bound in (*bounds, float("inf"))]
