"""How fast a model is, from what its workers measured: what the size of a job's shards follows from."""

from collections.abc import Mapping

from qinfer.observability.stats import batches

_ENOUGH = 3
"""Executions of a batch size before it is believed: the first ones of a runtime are slow."""


def rows_per_s(stats: Mapping[str, int]) -> float:
    """Returns the rows a second of one instance at the batch size that was fastest; 0 = nothing was measured.

    Bulk batches are as large as is best, so that the small ones of online requests say too little.

    Args:
        stats: The statistics of a model version.
    """
    best = 0.0
    for batch in batches(stats):
        spent_ns = batch.input_ns + batch.infer_ns + batch.output_ns
        if batch.executions >= _ENOUGH and spent_ns > 0:
            best = max(best, batch.rows * batch.executions / spent_ns * 1e9)
    return best
