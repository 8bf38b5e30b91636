"""A server that is used lightly refuses nothing, whatever its requests are like."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.models.spec import BatchingSpec
from tests.support.overload import Caller, Setting, simulate

COLD, NEWS = 3, 30
"""The first executions, which are slower than all others; and requests that come before a change is noticed."""


class Use:
    """Requests of up to three levels that come in bursts, and use less than half of the server's time.

    Args:
        seed: Of all random numbers.
        levels: The model's priority levels; 0 = none.
        slower: By how much the first executions are slower.
        change: By how much all are slower in the second half.
    """

    def __init__(self, seed: int, levels: int, slower: float, change: float) -> None:
        self._random = np.random.default_rng(seed)
        self._instances = int(self._random.integers(1, 3))
        self.setting = Setting(
            batching=BatchingSpec(preferred_sizes=(16,), priority_levels=levels, default_priority=levels),
            instances=self._instances,
            gateways=int(self._random.integers(1, 3)),
            max_rows=int(self._random.choice([1, 4, 16])),
            together=bool(self._random.integers(2)),
            known=0,
        )
        self.callers: list[Caller] = []
        self.phases: list[int] = []
        self._make(levels, slower, change)

    def _make(self, levels: int, slower: float, change: float) -> None:
        means_s, spread = 10 ** self._random.uniform(-3, 0.3, max(levels, 1)), self._random.uniform(0, 1)
        used, most = self._random.uniform(0.05, 0.5), self._random.integers(1, 13)
        # a phase has requests of all levels
        count = self._random.integers(20, 120) + (0 if change == 1.0 else 2 * NEWS)
        now_s = 0.0
        while len(self.callers) < count:
            is_cold, is_changed = len(self.callers) < COLD, change != 1.0 and len(self.callers) > count // 2
            level = int(self._random.integers(max(levels, 1)))
            mean_s = means_s[level] * (slower if is_cold else change if is_changed else 1.0)
            size = 1 if is_cold else int(self._random.integers(1, most + 1))
            takes_s = mean_s * ((1 - spread) + spread * self._random.exponential(size=size)) + 1e-4
            for each_s in takes_s:
                self.callers.append(Caller(arrives_s=now_s, level=level + 1 if levels else 0, takes_s=float(each_s)))
            is_news = is_changed and len(self.callers) <= count // 2 + NEWS
            self.phases += [0 if is_cold or is_news else 2 if is_changed else 1] * size
            now_s += float(takes_s.sum()) / self._instances / used * (1 + 0.5 * self._random.exponential())

    def patient(self) -> list[Caller]:
        """Returns the requests, with timeouts of twice the longest time that their phase takes without a door."""
        for caller in self.callers:
            caller.deadline_s = 1e9
        simulate(replace(self.setting, has_door=False), self.callers)
        took_s = [caller.answered_s - caller.arrives_s for caller in self.callers]
        longest_s = [2 * max(took_s)] + [
            2 * max((s for s, phase in zip(took_s, self.phases, strict=True) if phase == number), default=0.0)
            for number in (1, 2)
        ]
        return [
            Caller(arrives_s=c.arrives_s, level=c.level, takes_s=c.takes_s, deadline_s=longest_s[phase])
            for c, phase in zip(self.callers, self.phases, strict=True)
        ]


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32),
    levels=st.integers(0, 3),
    slower=st.sampled_from([1.0, 10.0, 100.0]),
    change=st.sampled_from([1.0, 0.2, 5.0]),
)
@settings(max_examples=20)
def test_a_lightly_used_server_refuses_nothing(seed: int, levels: int, slower: float, change: float) -> None:
    """A request may enter that takes half of its timeout at the most, on a server that has half of its time left."""
    use = Use(seed, levels, slower, change)
    callers = use.patient()

    simulate(use.setting, callers)

    assert [caller for caller in callers if caller.is_turned_away] == []
