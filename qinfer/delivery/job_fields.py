"""How records, outcomes and log lines of bulk jobs are spelled in Redis: text, instants as whole milliseconds."""

import re
from collections.abc import Mapping, Sequence

import msgspec

from qinfer.delivery.connection import Argument
from qinfer.delivery.job_records import MAX_LINE_CHARACTERS, JobRecord, LogLine, ShardOutcome
from qinfer.errors import InvalidRequest

_INSTANTS = frozenset({"created_at", "started_at", "ended_at", "resumed_at", "deadline_at", "updated_at"})
_TEXTS = frozenset({"model", "tenant", "state", "error", "trace", "webhook", "webhook_state"})
_BYTES = frozenset({"spec", "head"})
_KEPT = "kept_s"
_SETTABLE = frozenset(
    {
        "error",
        "version",
        "spec",
        "head",
        "rows",
        "max_errors",
        "max_parallel",
        "deadline_at",
        "resumed_at",
        "rows_before",
    }
)
_STORED = tuple(name for name in JobRecord.__struct_fields__ if name not in {"id", "updated_at"})
_PLACE = re.compile(r"([0-9]{1,15})-(.+)")


def words_of(record: JobRecord) -> list[Argument]:
    """Returns a record as fields and values, but for its id and `updated_at`."""
    return _words({name: getattr(record, name) for name in _STORED})


def settable(fields: Mapping[str, str | bytes | float]) -> list[Argument]:
    """Returns fields and values for `Jobs.move`.

    Raises:
        TypeError: A field is none that can be set.
    """
    for name in fields:
        if name not in _SETTABLE:
            raise TypeError(f"the field {name!r} of a job can't be set")
    return _words(fields)


def record_of(job_id: str, pairs: Sequence[bytes]) -> JobRecord:
    """Reads a record from fields and values; fields that are not known are left out."""
    found = dict(zip((name.decode() for name in pairs[::2]), pairs[1::2], strict=True))
    values: dict[str, str | bytes | float] = {"id": job_id}
    for name in JobRecord.__struct_fields__:
        raw = found.get("kept_ms" if name == _KEPT else name)
        if raw is None:
            continue
        if name in _INSTANTS or name == _KEPT:
            values[name] = int(raw) / 1000
        elif name in _TEXTS:
            values[name] = raw.decode()
        else:
            values[name] = raw if name in _BYTES else int(raw)
    return msgspec.convert(values, JobRecord)


def outcome_text(outcome: ShardOutcome) -> str:
    """Returns an outcome as the scripts read it: `rows failed given_up error`."""
    error = outcome.error[:MAX_LINE_CHARACTERS]
    return f"{outcome.rows} {outcome.failed_rows} {int(bool(outcome.error))} {error}"


def outcome_of(index: bytes, text: bytes) -> ShardOutcome:
    """Reads what `outcome_text` wrote."""
    rows, failed, _, error = text.decode().split(" ", 3)
    return ShardOutcome(int(index), int(rows), int(failed), error)


def line_of(text: bytes) -> LogLine:
    """Reads a line of a log: milliseconds and what."""
    at_ms, _, said = text.decode().partition(" ")
    return LogLine(int(at_ms) / 1000, said)


def cursor_of(created_ms: int, job_id: str) -> str:
    """Returns the `after` that begins behind a job."""
    return f"{created_ms}-{job_id}"


def place_of(after: str) -> tuple[int, str]:
    """Reads what `cursor_of` wrote.

    Raises:
        InvalidRequest: It is something else.
    """
    found = _PLACE.fullmatch(after)
    if found is None:
        raise InvalidRequest(f"'{after[:60]}' begins no page of jobs; give the 'next' of the page before")
    return int(found[1]), found[2]


def _words(fields: Mapping[str, str | bytes | float]) -> list[Argument]:
    words: list[Argument] = []
    for name, value in fields.items():
        if name in _INSTANTS or name == _KEPT:
            assert isinstance(value, int | float)
            words += ["kept_ms" if name == _KEPT else name, max(int(value * 1000), int(name == _KEPT))]
        else:
            words += [name, int(value) if isinstance(value, float) else value]
    return words
