"""The statistics of canaries: whether the share of bad requests is greater than stable's, and by whose requests. Pure.

The test is an *e-process*: evidence that is multiplied by a factor for each block of requests. For a harmless canary it
exceeds n with a probability of at most 1 / n, at any number of looks (Ville, 1939), so it is looked at after each
block.

A block has the requests of both targets over the same time. Given the number of bad requests, only their division
counts: where the targets are alike, the canary's number K of them is hypergeometric, for any load, time of day and
common share of bad requests. For an odds ratio r > 1 the block's factor is

    r^K / bound(r),    bound(r) ≥ E[r^K] if the targets are alike

so its expectation is at most 1. K is a sum over a sample without replacement, which the same sum with replacement
bounds (Hoeffding, 1963, theorem 4). There are two such bounds, and the lesser is taken: the canary's requests as draws
of which a share is bad, or the bad requests as draws of which a share is the canary's.

Since the odds ratio is unknown, the evidence is spread over several (method of mixtures). Blocks of two Bernoulli
streams are those of Turner, Ly & Grünwald, "Generic E-variables for exact sequential k-sample tests that allow for
optional stopping" (2024), here given the sum of both. Each step begins with its own part of the evidence, as a canary
may turn bad only in a late step.

Of several tenants, none decides alone: a canary is rolled back only if the evidence *without* each tenant is three
quarters of the way (of its logarithm), too. A tenant is one of several if the others have sent the canary
`LEAST_OF_OTHERS` requests in its step, or the step is younger than `ALONE_S`.
"""

import math
from collections.abc import Collection, Iterable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from qinfer.errors import InvalidRequest

Array = npt.NDArray[np.float64]

ODDS_RATIOS: Array = np.geomspace(1.2, 3000.0, 16)
"""The ratios of the odds of the canary's bad requests to those of stable's.

Stored evidence has a part for each: another grid needs another wire version of `TRIALS`.
"""
_LOG_ODDS = np.log(ODDS_RATIOS)
_LARGEST_LOG = 700.0

MOST_TENANTS = 8
"""The most tenants with a part of their own; further tenants share one part."""

LEAST_OF_OTHERS = 5

ALONE_S = 60.0

_FURTHER = "*"  # never a tenant's name


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """Requests, and the bad requests among them."""

    requests: int = 0
    bad: int = 0

    @property
    def share(self) -> float:
        """The share of bad requests; 0 without requests."""
        return self.bad / self.requests if self.requests else 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.requests + other.requests, self.bad + other.bad)


class EvidenceBlock(msgspec.Struct, frozen=True, array_like=True):
    """Requests of both targets that differ only in their target."""

    stable: Counts = Counts()
    canary: Counts = Counts()

    def __post_init__(self) -> None:
        if not all(0 <= one.bad <= one.requests for one in (self.stable, self.canary)):
            raise InvalidRequest(f"{self} is impossible: a target has more bad requests than requests")

    def __add__(self, other: "EvidenceBlock") -> "EvidenceBlock":
        return EvidenceBlock(self.stable + other.stable, self.canary + other.canary)


Blocks = Mapping[str, Mapping[str, EvidenceBlock]]
"""Check → stratum → requests."""


def merged(parts: Iterable[Blocks]) -> Blocks:
    """Returns the sum over tenants."""
    found: dict[str, dict[str, EvidenceBlock]] = {}
    for part in parts:
        for check, blocks in part.items():
            strata = found.setdefault(check, {})
            for stratum, block in blocks.items():
                strata[stratum] = strata.get(stratum, EvidenceBlock()) + block
    return found


class Evidence(msgspec.Struct, frozen=True, array_like=True):
    """The evidence that a canary is worse than stable in one respect.

    Attributes:
        waiting: Stratum → requests for the next block, while one target has had no requests.
        kept: The part of the evidence that has not begun.
        logs: Logarithms of the begun parts, one for each of `ODDS_RATIOS`.
    """

    seen: EvidenceBlock = EvidenceBlock()
    waiting: dict[str, EvidenceBlock] = {}
    kept: float = 1.0
    logs: tuple[float, ...] = ()

    @property
    def log(self) -> float:
        """The logarithm of the evidence; 0 at the beginning."""
        parts = [*self.logs, *([math.log(self.kept)] if self.kept > 0.0 else [])]
        return float(np.logaddexp.reduce(parts))

    @property
    def value(self) -> float:
        """Returns the evidence `n`: chance exceeds it in at most one of `n` cases."""
        return math.exp(min(self.log, _LARGEST_LOG))

    def begun(self, part: float) -> "Evidence":
        """Begins another part of the evidence."""
        part = min(part, self.kept)
        if part <= 0.0:
            return Evidence(self.seen, {}, self.kept, self.logs)
        fresh = np.full(len(ODDS_RATIOS), math.log(part / len(ODDS_RATIOS)))
        logs = np.logaddexp(self.logs, fresh) if self.logs else fresh
        # a remainder by rounding must not become a part
        kept = self.kept - part
        return Evidence(self.seen, {}, kept if kept > 1e-9 else 0.0, tuple(logs.tolist()))

    def against_stable(self, blocks: Mapping[str, EvidenceBlock], tolerated: float = 1.0) -> "Evidence":
        """Adds requests by stratum; requests of one target wait for those of the other.

        A stratum is, for example, a batch size. The division into blocks must not depend on which requests are bad.
        `tolerated` is an odds ratio.
        """
        seen, waiting, logs = self.seen, dict(self.waiting), np.array(self.logs)
        for stratum, new in blocks.items():
            seen += new
            block = waiting.pop(stratum, EvidenceBlock()) + new
            if not (block.stable.requests and block.canary.requests):
                waiting[stratum] = block
            elif logs.size:
                logs += _log_factors(block, tolerated)
        return Evidence(seen, waiting, self.kept, tuple(logs.tolist()))

    def against_share(self, blocks: Mapping[str, EvidenceBlock], allowed: float) -> "Evidence":
        """Adds requests, against an allowed share."""
        seen, logs = self.seen, np.array(self.logs)
        for block in blocks.values():
            seen += block
            if logs.size:
                canary = block.canary
                logs += canary.bad * _LOG_ODDS - canary.requests * np.log1p(allowed * (ODDS_RATIOS - 1.0))
        return Evidence(seen, self.waiting, self.kept, tuple(logs.tolist()))


def _log_factors(block: EvidenceBlock, tolerated: float) -> Array:
    """Returns float64[odds ratios].

    With a tolerance t the hypothesis is an odds ratio of at most t, under which (by monotone likelihood ratios) the
    factor r^K · E[t^K] / E[(t·r)^K] has an expectation of at most 1; the expectations are those of alike targets, and
    E[t^K] ≥ t^E[K].
    """
    canary, both = block.canary, block.stable + block.canary
    beyond = tolerated * ODDS_RATIOS - 1.0
    share_of_canary = canary.requests / both.requests
    as_requests = canary.requests * np.log1p(both.share * beyond)
    as_bad_ones = both.bad * np.log1p(share_of_canary * beyond)
    expected = both.bad * share_of_canary
    factors: Array = canary.bad * _LOG_ODDS + expected * math.log(tolerated) - np.minimum(as_requests, as_bad_ones)
    return factors


class Heard(msgspec.Struct, frozen=True, array_like=True):
    """A tenant's requests of a canary in its step."""

    requests: int = 0
    bad: int = 0
    at_s: float = 0.0


def told_apart(parts: Mapping[str, Blocks], known: Collection[str]) -> Mapping[str, Blocks]:
    """Returns requests by tenant, those beyond `MOST_TENANTS` as one."""
    names = [*known, *sorted(parts.keys() - known)][:MOST_TENANTS]
    further = [part for name, part in parts.items() if name not in names]
    if not further:
        return parts
    return {name: parts[name] for name in names if name in parts} | {_FURTHER: merged(further)}


def heard(before: Mapping[str, Heard], parts: Mapping[str, Blocks], now_s: float) -> dict[str, Heard]:
    """Adds requests to those of each tenant."""
    after = dict(before)
    for name, part in parts.items():
        new, known = sum(part.get("errors", {}).values(), EvidenceBlock()).canary, after.get(name, Heard())
        at_s = now_s if new.requests else known.at_s
        after[name] = Heard(known.requests + new.requests, known.bad + new.bad, at_s)
    return after


def bounded(tenants: Mapping[str, Heard], since_s: float, now_s: float, silent_s: float) -> list[str]:
    """Returns the tenants that may not decide alone, given others within `silent_s`."""
    there = {name: one.requests for name, one in tenants.items() if now_s - one.at_s < silent_s}
    all_, is_young = sum(there.values()), now_s - since_s < ALONE_S
    return [name for name in tenants if len(tenants) > 1 and (is_young or all_ - there.get(name, 0) >= LEAST_OF_OTHERS)]


def without(tenants: Mapping[str, Heard], name: str) -> Heard:
    """Returns the requests of all but one tenant; empty = of all."""
    others = [one for other, one in tenants.items() if not name or other != name]
    return Heard(sum(one.requests for one in others), sum(one.bad for one in others))
