"""Traces that are made: how many requests come in each second."""

import math
import random
from collections.abc import Sequence


def counts(rates: Sequence[float], seed: int) -> list[int]:
    """Returns how many requests come in each second, at random around the rates."""
    rng = random.Random(seed)
    return [max(0, round(rng.gauss(rate, math.sqrt(rate)))) if rate else 0 for rate in rates]


def burst(seed: int = 1) -> list[int]:
    """Nothing, a minute of much, nothing again."""
    return counts([0.0] * 60 + [60.0] * 60 + [0.0] * 900, seed)


def ramp(seed: int = 2) -> list[int]:
    """Up to six workers' worth within twenty minutes, and down again, and nothing."""
    up = [60.0 * second / 1200 for second in range(1200)]
    return counts([*up, *reversed(up), *([0.0] * 600)], seed)


def diurnal(seed: int = 3) -> list[int]:
    """A day within two hours: from a fifth of a worker to five and back."""
    return counts([26.0 - 24.0 * math.cos(2 * math.pi * second / 7200) for second in range(7200)], seed)


def steady(rate: float, seconds: int = 1800, seed: int = 4) -> list[int]:
    """The same rate all the time."""
    return counts([rate] * seconds, seed)


def wandering(seed: int = 5) -> list[int]:
    """An hour as services see it: a level that wanders, noise that has a memory, spikes, and minutes of silence."""
    rng, rates, drift = random.Random(seed), [], 0.0
    for second in range(3600):
        drift = 0.99 * drift + rng.gauss(0, 0.06)
        level = 20.0 * math.exp(drift) * (1.4 if 900 <= second < 2100 else 0.7)
        spike = 40.0 if second % 700 < 20 else 0.0
        rates.append(0.0 if 2700 <= second < 3100 else level + spike)
    return counts(rates, seed)
