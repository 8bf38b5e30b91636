"""The speed of a model version by its statistics."""

from collections.abc import Mapping

from qinfer.core.settings import BulkSettings
from qinfer.jobs.shards import ShardPace
from qinfer.observe.stats import JOB_ROWS_SCORED, JOB_SCORING_NS, batches

_ENOUGH_NS = 3 * 10**9
"""The time after which the speed of jobs counts."""
_ENOUGH = 3
"""A batch size counts after this many executions, since the first executions are slow."""


def pace_of(settings: BulkSettings, stats: Mapping[str, int], workers: int) -> ShardPace:
    """Returns a version's speed, and the bounds of its shards."""
    return ShardPace(
        rows_per_s=rows_per_s(stats),
        shard_s=settings.shard_s,
        default_rows=settings.default_rows_per_shard,
        max_rows=settings.max_rows_per_shard,
        workers=workers,
    )


def rows_per_s(stats: Mapping[str, int]) -> float:
    """Returns the rows of a job that a worker scores per second; 0 = unknown.

    The statistics of jobs, which include reading and writing, count after some seconds; before, the fastest batch size.
    """
    if stats.get(JOB_SCORING_NS, 0) >= _ENOUGH_NS:
        return stats.get(JOB_ROWS_SCORED, 0) / stats[JOB_SCORING_NS] * 1e9
    best = 0.0
    for batch in batches(stats):
        spent_ns = batch.input_ns + batch.infer_ns + batch.output_ns
        if batch.executions >= _ENOUGH and spent_ns > 0:
            best = max(best, batch.rows * batch.executions / spent_ns * 1e9)
    return best
