"""Why a job can't be complete, in the words of its record. Pure."""

from collections.abc import Iterable

from qinfer.jobs.queue.records import ShardOutcome


def why_failed(outcomes: Iterable[ShardOutcome], max_errors: int, shards: int) -> str:
    """Says why a job can't be complete, whatever its parts are; empty = it can.

    Args:
        outcomes: What became of its settled shards.
        max_errors: How many rows may fail; -1 = all.
        shards: How many shards it has.
    """
    settled = list(outcomes)
    failed_rows = sum(outcome.failed_rows for outcome in settled)
    given_up = [outcome for outcome in settled if outcome.error]
    lost = ""
    if given_up:
        first = min(given_up, key=lambda outcome: outcome.index)
        lost = f"{len(given_up)} of {shards} shards were given up; the first, {first.index}: {first.error}"
    if 0 <= max_errors < failed_rows:
        return f"{too_many(failed_rows, max_errors)}; {lost or 'the column error_message of the parts says why'}"
    return lost


def too_many(failed_rows: int, max_errors: int) -> str:
    """Says that more rows of a job have failed than may."""
    return f"{failed_rows} rows failed; the job allows {max_errors} (error_threshold)"
