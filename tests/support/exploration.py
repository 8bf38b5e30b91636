"""Explores a protocol in miniature: immutable states, and the moves that lead from one to the next.

It goes through every interleaving, breadth first, so that a broken promise is shown by the fewest moves. At an end,
where only faults could still happen, nothing may be missing.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

S = TypeVar("S", bound=Hashable)
M = TypeVar("M")


class Checks(NamedTuple):
    """The promises of a protocol.

    Attributes:
        is_fault: Tells of a move whether it is a fault, which need not happen.
        broken: Returns the promise that a state breaks; empty = none.
        missing: Returns what an end lacks; empty = nothing.
    """

    is_fault: Callable[..., bool]
    broken: Callable[..., str]
    missing: Callable[..., str]


def explore(begin: S, moves: Callable[[S], Iterable[tuple[M, S]]], checks: Checks) -> tuple[int, str, list[M]]:
    """Goes through all states.

    Returns:
        How many there are, the first promise that is broken (empty = none), and the moves that lead there.
    """
    came_by: dict[S, tuple[S, M] | None] = {begin: None}
    frontier = [begin]
    while frontier:
        reached: list[S] = []
        for state in frontier:
            is_end = True
            for move, after in moves(state):
                is_end = is_end and checks.is_fault(move)
                if after in came_by:
                    continue
                came_by[after] = (state, move)
                reached.append(after)
                if problem := checks.broken(after):
                    return len(came_by), problem, _path(came_by, after)
            if is_end and (problem := checks.missing(state)):
                return len(came_by), problem, _path(came_by, state)
        frontier = reached
    return len(came_by), "", []


def _path(came_by: dict[S, tuple[S, M] | None], state: S) -> list[M]:
    path: list[M] = []
    while (before := came_by[state]) is not None:
        state, move = before
        path.append(move)
    return path[::-1]
