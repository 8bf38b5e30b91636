"""The responses of decoupled models by their index: ends and times (reference §1.13).

Fields of the statistics: `response:<index>:<what>` and `response_ns:<index>:<what>`.
"""

from collections import defaultdict
from collections.abc import Mapping
from enum import StrEnum

from qinfer.core.messages import Response
from qinfer.errors import ErrorCode

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
