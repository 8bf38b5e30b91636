"""Batches of rows with their origins, and the errors of their rows, without an object per row."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]

BAD_FILE = "bad_file"
"""The `error_code` of rows in bad files that the job skips."""


class Segment(NamedTuple):
    """Rows from one row group; `first_row` counts within the file."""

    url: str
    row_group: int
    first_row: int
    rows: int


class Fault(NamedTuple):
    """Unreadable rows of a batch."""

    first: int
    rows: int
    message: str


class RowBatch(NamedTuple):
    """Rows and origins; `too_large` ones lack their largest columns, `faults` lack all."""

    record: pa.RecordBatch
    segments: tuple[Segment, ...]
    too_large: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()


class RowErrors:
    """Errors of rows; each row keeps its first."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._reason: npt.NDArray[np.int32] | None = None  # numbers of reasons; 0 = no error
        self._reasons: list[tuple[str, str]] = []

    def mark(self, rows: Mask | Indices, code: str, message: str) -> None:
        """Marks rows, by mask or numbers, as failed."""
        if not rows.size or (rows.dtype == np.bool_ and not rows.any()):
            return
        if self._reason is None:
            self._reason = np.zeros(self.rows, dtype=np.int32)
        self._reasons.append((code, message))
        chosen = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        self._reason[chosen[self._reason[chosen] == 0]] = len(self._reasons)

    @property
    def count(self) -> int:
        """The number of failed rows."""
        return 0 if self._reason is None else int(np.count_nonzero(self._reason))

    @property
    def bad(self) -> Mask | None:
        """The mask of failed rows, if any."""
        return None if self._reason is None else self._reason != 0

    def columns(self) -> tuple[pa.Array, pa.Array]:
        """Returns the columns `error_code` and `error_message`."""
        if self._reason is None:
            return pa.nulls(self.rows, pa.string()), pa.nulls(self.rows, pa.string())
        numbers = pa.array(self._reason - 1, mask=self._reason == 0)
        codes, messages = (pa.array(texts, pa.string()) for texts in zip(*self._reasons, strict=True))
        return codes.take(numbers), messages.take(numbers)
