"""The load of a lane, and *overtaking*, the part of a model's speed that higher lanes take from lower ones. Pure.

Each look at a lane observes how many requests ended, and whether it was empty. Each observation alone misleads: one
quick request between two looks has the rate of a flood, and a lane of slow requests that wait for one another is never
empty. The lane takes at least the smaller of the two, and few observations prove nothing.
"""

import math

import msgspec

from qinfer.queue.entries import Lane

_HORIZONS_S = (0.5, 2.0, 8.0, 32.0, 128.0)
"""A request that may wait for a minute needs the rate of a minute."""

_DOUBT = 2.0
"""Standard deviations subtracted from the count of ended requests."""

_OCCUPIED_S = 1.0


class Overtaking:
    """One lane; `occupied` is the part of the last second in which it was not empty."""

    def __init__(self) -> None:
        self.occupied = 0.0
        self._ended = [0.0] * len(_HORIZONS_S)

    def observe(self, ended: int, passed_s: float, *, is_occupied: bool) -> None:
        """Learns from one look."""
        for number, horizon_s in enumerate(_HORIZONS_S):
            self._ended[number] = self._ended[number] * math.exp(-passed_s / horizon_s) + ended
        self.occupied += (is_occupied - self.occupied) * -math.expm1(-passed_s / _OCCUPIED_S)

    def least_rps(self, wait_s: float) -> float:
        """Returns the fewest plausible requests per second ahead of this wait."""
        longest = len(_HORIZONS_S) - 1
        number = next((at for at, horizon_s in enumerate(_HORIZONS_S) if horizon_s >= wait_s), longest)
        ended = self._ended[number]
        return max(ended - _DOUBT * math.sqrt(ended), 0.0) / _HORIZONS_S[number]

    def least_part(self, wait_s: float, rps: float) -> float:
        """Returns the least part of `rps` that the lane takes."""
        return min(self.least_rps(wait_s) / rps, self.occupied)


class LaneLoad(msgspec.Struct, eq=False):
    """The load of a lane, or of a tenant's share of it; others' parts are of the last look.

    Attributes:
        left: Own requests that ended since the last look.
        most: Below this many entries no default timeout needs a judgement.
    """

    lane: Lane
    most: int
    own: int = 0
    left: int = 0
    executed: int = 0
    others: int = 0
    overtaking: Overtaking = msgspec.field(default_factory=Overtaking)
    beside: int = 0
    part: float = 1.0

    @property
    def waiting(self) -> int:
        """The entries in the stream."""
        return self.own + self.others

    @property
    def ahead(self) -> float:
        """The entries ahead of a new one, as shares take turns."""
        waiting = self.own + self.others
        return waiting + min(self.beside, (waiting + 1) * (1 - self.part) / self.part) if self.beside else waiting

    @property
    def all(self) -> int:
        """The entries in all shares of the lane."""
        return self.own + self.others + self.beside
