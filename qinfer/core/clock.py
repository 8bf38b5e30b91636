"""Time. Durations come from the monotonic clock; instants that cross processes are seconds of Redis `TIME`.

`ServerClock` keeps the offset between this process's monotonic clock and the broker's wall clock, so that a deadline
stamped by one machine means the same instant on another, however wrong their own wall clocks are.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds; `qinfer.testing.FakeClock` is the other implementation."""

    def monotonic_s(self) -> float:
        """Returns seconds since an arbitrary start; never goes backwards."""
        ...


class SystemClock:
    """The process's own monotonic clock."""

    def monotonic_s(self) -> float:
        """Returns `time.monotonic()`."""
        return time.monotonic()


class ServerClock:
    """Tells the broker's time from the monotonic clock, by an offset that `observe` keeps current.

    Args:
        clock: The monotonic clock to build on.
        offset_s: Broker time minus monotonic time; the wall clock's until the first `observe`.
    """

    def __init__(self, clock: Clock | None = None, offset_s: float | None = None) -> None:
        self._clock = clock or SystemClock()
        self._offset_s = time.time() - self._clock.monotonic_s() if offset_s is None else offset_s
        self._error_s = float("inf")

    def now_s(self) -> float:
        """Returns the broker's time: seconds since the epoch."""
        return self._clock.monotonic_s() + self._offset_s

    def to_monotonic_s(self, instant_s: float) -> float:
        """Converts an instant of the broker's time to this process's monotonic clock."""
        return instant_s - self._offset_s

    def observe(self, broker_time_s: float, sent_s: float, received_s: float) -> None:
        """Takes one reading of Redis `TIME`.

        The reading is right within half the round trip. A sharper reading replaces the offset; a blunter one counts
        only when it contradicts the present offset, or when that has aged: its error grows by 0.1 ms a reading, which
        at a reading each 5 s allows for 20 ppm of drift.

        Args:
            broker_time_s: What `TIME` said, in seconds.
            sent_s: The monotonic time when the command left.
            received_s: The monotonic time when its reply came.
        """
        half_trip_s = (received_s - sent_s) / 2
        offset_s = broker_time_s - (sent_s + half_trip_s)
        self._error_s += 1e-4
        contradicts = abs(offset_s - self._offset_s) > half_trip_s + self._error_s
        if half_trip_s <= self._error_s or contradicts:
            self._offset_s, self._error_s = offset_s, half_trip_s
