"""Puts answers into the order of their questions: what the streams of both clients share."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from qinfer.errors import InvalidRequest

T = TypeVar("T")


class Reorder(Generic[T]):
    """Holds answers back until those before them are there.

    Args:
        ordered: False hands every answer out at once.
    """

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._next = 0
        self._held: dict[int, T] = {}

    @property
    def held(self) -> int:
        """The number of answers that wait for an earlier one."""
        return len(self._held)

    def take(self, index: int, value: T) -> Iterator[tuple[int, T]]:
        """Takes an answer; yields those whose turn it is.

        Args:
            index: The question's place, from 0 on; each comes once.
            value: The answer.
        """
        if not self._ordered:
            yield index, value
            return
        self._held[index] = value
        while self._next in self._held:
            index = self._next
            self._next += 1
            yield index, self._held.pop(index)


def check_concurrency(concurrency: int) -> None:
    """Checks a stream's argument.

    Raises:
        InvalidRequest: It is not positive.
    """
    if concurrency < 1:
        raise InvalidRequest(f"concurrency is {concurrency}; expected at least 1")
