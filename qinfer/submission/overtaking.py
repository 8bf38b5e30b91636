"""Overtaking: the part of a model's speed that the requests of higher lanes take from those below. Pure arithmetic.

Two things are observed of a lane at each look: how many of its requests have ended, and whether it was empty. Each
of them says too much after a short time, or where requests differ: one quick request that ends between two looks
has the rate of a flood, and a lane in which one slow request waits for another is never empty. The lane takes at least
the smaller part of the two, and nothing is taken for certain that few observations say.
"""

import math

_HORIZONS_S = (0.5, 2.0, 8.0, 32.0, 128.0)
"""Spans of time over which ended requests are counted. A request that may wait for a minute is overtaken by as many as
came in a minute: what came in half a second tells nothing about it."""

_DOUBT = 2.0
"""Standard deviations of the number of ended requests by which it may be too high by chance."""

_OCCUPIED_S = 1.0
"""The time over which a lane was empty or not."""


class Overtaking:
    """Observations of one lane.

    Attributes:
        occupied: The part of the last second in which the lane was not empty.
    """

    def __init__(self) -> None:
        self.occupied = 0.0
        self._ended = [0.0] * len(_HORIZONS_S)

    def observe(self, ended: int, passed_s: float, *, is_occupied: bool) -> None:
        """Learns from one look.

        Args:
            ended: Requests of the lane that were executed since the last look.
            passed_s: The time since the last look.
            is_occupied: Something is in the lane now.
        """
        for number, horizon_s in enumerate(_HORIZONS_S):
            self._ended[number] = self._ended[number] * math.exp(-passed_s / horizon_s) + ended
        self.occupied += (is_occupied - self.occupied) * -math.expm1(-passed_s / _OCCUPIED_S)

    def least_rps(self, wait_s: float) -> float:
        """Returns how many requests a second go before one that waits so long: the fewest that are plausible."""
        longest = len(_HORIZONS_S) - 1
        number = next((at for at, horizon_s in enumerate(_HORIZONS_S) if horizon_s >= wait_s), longest)
        ended = self._ended[number]
        return max(ended - _DOUBT * math.sqrt(ended), 0.0) / _HORIZONS_S[number]

    def least_part(self, wait_s: float, rps: float) -> float:
        """Returns the part of a model's speed that the lane takes while a request below it waits so long: the least.

        Args:
            wait_s: How long the request may wait.
            rps: The model's speed.
        """
        return min(self.least_rps(wait_s) / rps, self.occupied)
