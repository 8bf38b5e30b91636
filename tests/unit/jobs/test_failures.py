"""Why a job can't be complete: what its record says."""

import pytest

from qinfer.jobs.queue.records import ShardOutcome, why_failed

FINE, SOME = ShardOutcome(0, 10), ShardOutcome(1, 10, 3)
LOST = ShardOutcome(2, 10, 10, "'s3://b/in.parquet' was replaced")
EARLIER = ShardOutcome(1, 1, 1, "row 4 of 's3://b/in.parquet': column 'x' is null")


@pytest.mark.parametrize(
    ("outcomes", "max_errors", "text"),
    [
        ([FINE], 0, ""),
        ([FINE, SOME], 3, ""),
        ([FINE, SOME], -1, ""),
        (
            [SOME],
            2,
            "3 rows failed; the job allows 2 (error_threshold); the column error_message of the parts says why",
        ),
        ([FINE, LOST], -1, "1 of 4 shards were given up; the first, 2: 's3://b/in.parquet' was replaced"),
        (
            [LOST, EARLIER],
            0,
            "11 rows failed; the job allows 0 (error_threshold); 2 of 4 shards were given up; the first, 1: "
            "row 4 of 's3://b/in.parquet': column 'x' is null",
        ),
    ],
)
def test_what_is_said(outcomes: list[ShardOutcome], max_errors: int, text: str) -> None:
    """The reason of a shard that was given up is never hidden behind a count."""
    assert why_failed(outcomes, max_errors, 4) == text
