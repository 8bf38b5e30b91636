"""Moves of waiting entries from the lanes of one version to those of another, which answers instead.

A movable entry has the fields `e`, its endpoint; `t`, the tenant; `r`, the id of a request with a record. `move.lua`
moves each atomically. The record, or a note (`…:moved`), has the new address for `Queue.cancel` and `Queue.withdraw`.
"""

from collections.abc import Sequence
from functools import partial

from qinfer.queue import keys
from qinfer.queue.entries import Lane
from qinfer.queue.router import Call, Router, load_script, run_script, ttl_ms
from qinfer.queue.submitter import PLACING

AT_ONCE = 50
"""Each moved entry costs about five commands."""

AT_ONCE_BYTES = 2**20
"""Bytes of frames per script."""

KEPT_S = 3600.0
"""How long notes are kept after the last move."""

_MOVE = load_script("lanes/move", *PLACING)


class Moves:
    """Moves waiting entries between versions."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def move(self, lanes: Sequence[Lane], version: int, endpoint: str) -> int:
        """Moves an endpoint's waiting entries, of all shares, to lanes of another version; returns how many."""
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
    """Returns how many, and where to continue (share and id)."""
    names = (keys.lane(lane), keys.lane(other), keys.moved(lane.model, lane.partition).encode())
    place = (keys.prefix(lane.model, lane.partition), other.version, other.name)
    limits = (AT_ONCE, AT_ONCE_BYTES, ttl_ms(KEPT_S))
    moved, *rest = await run_script(call, _MOVE, names, keys.GROUP, keys.RELEASED, endpoint, *place, *limits, *start)
    return moved, (rest[0], rest[1].decode()) if rest else None
