"""The responses of decoupled models by their index: ends and times (reference §1.13).

They are fields of the statistics: `response:<index>:<what>` and `response_ns:<index>:<what>`.
"""

from collections import defaultdict
from collections.abc import Mapping
from enum import StrEnum

from qinfer.core.messages import Response
from qinfer.errors import ErrorCode

MOST_INDEXES = 1000
"""Later responses are not counted one by one: a stream may have millions."""

_COUNT, _NS = "response:", "response_ns:"
_INFER, _OUTPUT = "compute_infer", "compute_output"


class ResponseEnd(StrEnum):
    """The end of a response: with outputs, with an error, empty (only the final flag), or cancelled."""

    SUCCESS = "success"
    FAIL = "fail"
    EMPTY = "empty_response"
    CANCEL = "cancel"


FIELDS = (_INFER, _OUTPUT, *ResponseEnd)
"""The figures of each index in Triton's statistics: a count and nanoseconds each."""


def end_of(response: Response) -> ResponseEnd:
    """Returns the end of a response."""
    if response.failure is not None:
        is_cancelled = response.failure.code == ErrorCode.CANCELLED.value
        return ResponseEnd.CANCEL if is_cancelled else ResponseEnd.FAIL
    return ResponseEnd.SUCCESS if response.outputs or response.parameters else ResponseEnd.EMPTY


class ResponseTally:
    """Adds up the responses of one model version in one worker; not thread-safe."""

    def __init__(self) -> None:
        self._deltas: defaultdict[str, int] = defaultdict(int)

    def responded(self, index: int, end: ResponseEnd, infer_ns: int) -> None:
        """Counts a response, `infer_ns` after the previous one or the start of the execution."""
        if index >= MOST_INDEXES:
            return
        self._add(index, end, infer_ns)
        if end is ResponseEnd.SUCCESS:
            self._add(index, _INFER, infer_ns)
            self._add(index, _OUTPUT, 0)

    def drain(self) -> dict[str, int]:
        """Returns the counts since the last drain, without zeros."""
        deltas = {field: value for field, value in self._deltas.items() if value}
        self._deltas.clear()
        return deltas

    def _add(self, index: int, what: str, ns: int) -> None:
        self._deltas[f"{_COUNT}{index}:{what}"] += 1
        self._deltas[f"{_NS}{index}:{what}"] += ns


def responses(stats: Mapping[str, int]) -> dict[int, dict[str, tuple[int, int]]]:
    """Returns index → (count, nanoseconds) of each of `FIELDS`, from statistics."""
    indexes = sorted({int(field.split(":")[1]) for field in stats if field.startswith(_COUNT)})
    return {
        index: {
            what: (stats.get(f"{_COUNT}{index}:{what}", 0), stats.get(f"{_NS}{index}:{what}", 0)) for what in FIELDS
        }
        for index in indexes
    }
