"""The speed of a model version, as its statistics have it: shards are cut by it, and the time of a job is estimated."""

from collections.abc import Mapping

from qinfer.core.settings import BulkSettings
from qinfer.jobs.shards import Pace
from qinfer.observe.stats import JOB_ROWS_SCORED, JOB_SCORING_NS, batches

_ENOUGH_NS = 3 * 10**9
"""Nanoseconds of scoring before the speed of jobs is believed: small shards say little."""
_ENOUGH = 3
"""Executions of a batch size before it is believed: the first ones of a runtime are slow."""


def pace_of(settings: BulkSettings, stats: Mapping[str, int], workers: int) -> Pace:
    """Returns the speed and the bounds by which shards are cut.

    Args:
        settings: The bounds.
        stats: The statistics of the model version.
        workers: Live workers that have it.
    """
    return Pace(
        rows_per_s=rows_per_s(stats),
        shard_s=settings.shard_s,
        default_rows=settings.default_rows_per_shard,
        max_rows=settings.max_rows_per_shard,
        workers=workers,
    )


def rows_per_s(stats: Mapping[str, int]) -> float:
    """Returns how many rows of a job a worker scores in a second; 0 = nothing was measured.

    Jobs tell it best, once they took some seconds: reading and writing, and online requests, are part of it. Else it is
    that of one instance at the batch size that was fastest: bulk batches are as large as is best, so that the small
    ones of online requests say too little.

    Args:
        stats: The statistics of a model version.
    """
    if stats.get(JOB_SCORING_NS, 0) >= _ENOUGH_NS:
        return stats.get(JOB_ROWS_SCORED, 0) / stats[JOB_SCORING_NS] * 1e9
    best = 0.0
    for batch in batches(stats):
        spent_ns = batch.input_ns + batch.infer_ns + batch.output_ns
        if batch.executions >= _ENOUGH and spent_ns > 0:
            best = max(best, batch.rows * batch.executions / spent_ns * 1e9)
    return best
