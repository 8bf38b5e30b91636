"""Moves of what waits from the lanes of one version to those of another, which is to answer in its place.

An entry that came by an endpoint, and may be moved, says so in fields beside its frame: `e`, the endpoint; `t`, the
tenant; `r`, the id of the request that has a record. `move.lua` finds those that nobody has taken, a bounded number at
a time, and moves each in one step, so that it is in one lane at any moment. What a worker holds ends where it is.

A moved entry has another address. The record of its request tells it; of a request that somebody waits for, a note does
(`…:moved`), by which `Queue.cancel` and `Queue.withdraw` find the entry.
"""

from collections.abc import Sequence
from functools import partial

from qinfer.queue import keys
from qinfer.queue.entries import Lane
from qinfer.queue.router import Call, Router, load_script, run_script, ttl_ms
from qinfer.queue.submitter import PLACING

AT_ONCE = 50
"""So many entries one script looks at, for which all others wait: each that is moved costs about five commands."""

AT_ONCE_BYTES = 2**20
"""About so many bytes of frames it reads at most."""

KEPT_S = 3600.0
"""Seconds for which notes are kept after the last move; what waits for longer and is cancelled ends by its deadline."""

_MOVE = load_script("lanes/move", *PLACING)


class Moves:
    """See the module docstring.

    Args:
        router: The way to Redis.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    async def move(self, lanes: Sequence[Lane], version: int, endpoint: str) -> int:
        """Moves what came by an endpoint, and waits in lanes, to the same lanes of another version.

        Args:
            lanes: The lanes, of one version; with all their shares.
            version: The other version of that model, which has the same lanes.
            endpoint: The endpoint.

        Returns:
            How many entries were moved.

        Raises:
            BrokerUnavailable: Redis can't be reached; what was not moved is where it was.
        """
        count = 0
        for lane in lanes:
            other = Lane(lane.model, version, lane.name, lane.partition)
            call = partial(self._router.call, keys.lane_slot(lane))
            after: tuple[int, str] | None = 0, "-"
            while after is not None:
                moved, after = await _move(call, lane, other, endpoint, after)
                count += moved
        return count


async def _move(
    call: Call, lane: Lane, other: Lane, endpoint: str, start: tuple[int, str]
) -> tuple[int, tuple[int, str] | None]:
    """Moves some entries of a lane.

    Args:
        call: Sends a command to the node of the lane.
        lane: The lane.
        other: Where they go.
        endpoint: The endpoint that they came by.
        start: The number of the share to begin at, and the id to begin at there.

    Returns:
        How many were moved, and where to go on; `None` = that was all.
    """
    names = (keys.lane(lane), keys.lane(other), keys.moved(lane.model, lane.partition).encode())
    place = (keys.prefix(lane.model, lane.partition), other.version, other.name)
    limits = (AT_ONCE, AT_ONCE_BYTES, ttl_ms(KEPT_S))
    moved, *rest = await run_script(call, _MOVE, names, keys.GROUP, keys.RELEASED, endpoint, *place, *limits, *start)
    return moved, (rest[0], rest[1].decode()) if rest else None
