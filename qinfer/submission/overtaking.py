"""Overtaking: the part of a model's speed that higher lanes take from lower lanes. Pure arithmetic.

Each look at a lane observes how many requests ended, and whether it was empty. Each observation alone misleads: one
quick request between two looks has the rate of a flood, and a lane of slow requests that wait for one another is never
empty. The lane takes at least the smaller of the two, and few observations prove nothing.
"""

import math

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
