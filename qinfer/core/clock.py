"""Time: durations come from the monotonic clock; instants between processes are seconds of Redis `TIME`.

A deadline is thus the same instant on each machine, even if wall clocks are wrong.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def monotonic_s(self) -> float:
        """Returns seconds since an arbitrary start."""
        ...


class SystemClock:
    """The process's clock."""

    monotonic_s = staticmethod(time.monotonic)


class ServerClock:
    """Redis' clock, by its offset from the monotonic clock."""

    def __init__(self, clock: Clock | None = None, offset_s: float | None = None) -> None:
        self._clock = clock or SystemClock()
        self._offset_s = time.time() - self._clock.monotonic_s() if offset_s is None else offset_s
        self._error_s = float("inf")

    def now_s(self) -> float:
        """Returns seconds since the epoch."""
        return self._clock.monotonic_s() + self._offset_s

    def to_monotonic_s(self, instant_s: float) -> float:
        """Converts an instant to the monotonic clock."""
        return instant_s - self._offset_s

    def observe(self, broker_time_s: float, sent_s: float, received_s: float) -> None:
        """Takes one reading of Redis `TIME`, with the monotonic times of the command and its reply.

        A reading is right within half the round trip. A sharper reading replaces the offset. A blunter one does so only
        if it contradicts it; the offset's error grows by 0.1 ms a reading, for 20 ppm of drift at a reading each 5 s.
        """
        half_trip_s = (received_s - sent_s) / 2
        offset_s = broker_time_s - (sent_s + half_trip_s)
        self._error_s += 1e-4
        contradicts = abs(offset_s - self._offset_s) > half_trip_s + self._error_s
        if half_trip_s <= self._error_s or contradicts:
            self._offset_s, self._error_s = offset_s, half_trip_s
