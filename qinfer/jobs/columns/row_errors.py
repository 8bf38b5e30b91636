"""Errors of single rows of a batch: a code and a message each, without an object per row."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]

BAD_FILE = "bad_file"
"""The `error_code` of rows that can't be read, in a job that skips such files."""


class RowErrors:
    """The errors of a batch's rows; one for each batch. The first error of a row is kept.

    Args:
        rows: The rows of the batch.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._reason: npt.NDArray[np.int32] | None = None  # the number of the row's reason; 0 = it is fine
        self._reasons: list[tuple[str, str]] = []

    def mark(self, rows: Mask | Indices, code: str, message: str) -> None:
        """Marks rows as failed; those that are marked already stay as they are.

        Args:
            rows: Which rows: a mask of all, or their numbers.
            code: What `error_code` says, such as `invalid_request`.
            message: What `error_message` says.
        """
        if not rows.size or (rows.dtype == np.bool_ and not rows.any()):
            return
        if self._reason is None:
            self._reason = np.zeros(self.rows, dtype=np.int32)
        self._reasons.append((code, message))
        chosen = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        self._reason[chosen[self._reason[chosen] == 0]] = len(self._reasons)

    @property
    def count(self) -> int:
        """How many rows have failed."""
        return 0 if self._reason is None else int(np.count_nonzero(self._reason))

    @property
    def bad(self) -> Mask | None:
        """The mask of failed rows; `None` when every row is fine."""
        return None if self._reason is None else self._reason != 0

    def columns(self) -> tuple[pa.Array, pa.Array]:
        """Returns the columns `error_code` and `error_message`; null where a row is fine."""
        if self._reason is None:
            return pa.nulls(self.rows, pa.string()), pa.nulls(self.rows, pa.string())
        numbers = pa.array(self._reason - 1, mask=self._reason == 0)
        codes, messages = (pa.array(texts, pa.string()) for texts in zip(*self._reasons, strict=True))
        return codes.take(numbers), messages.take(numbers)
