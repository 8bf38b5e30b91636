"""The part that each tenant has in the evidence about a canary: no tenant alone decides where there are several. Pure.

Requests of all tenants are counted together, as the evidence against the canary needs them. Beside that the evidence
*without* each tenant is kept. The evidence of all rolls a canary back only if it is three quarters of the way (of its
logarithm) without any one tenant, too. A tenant that sends what it likes can therefore add a quarter at most, and
canaries are never rolled back more often than without this rule.

That holds for a tenant while there are others: they have sent the canary `LEAST_OF_OTHERS` requests in its step, or the
step is younger than `ALONE_S`, in which they may yet. A tenant that is alone decides alone.
"""

from collections.abc import Collection, Mapping

import msgspec

from qinfer.traffic.evidence import Block, Blocks, merged

MOST_TENANTS = 8
"""Tenants that are told apart; all further ones count as one."""

LEAST_OF_OTHERS = 5
"""Requests of the canary that the other tenants together need, so that they can tell whether it is worse."""

ALONE_S = 60.0
"""Seconds of a step in which the others need not have so many."""

_FURTHER = "*"  # no name of a tenant


class Heard(msgspec.Struct, frozen=True, array_like=True):
    """The requests of a tenant that a canary has got in its step.

    Attributes:
        requests: How many there are.
        bad: How many of them have failed.
        at_s: The time of the last, in seconds since the epoch.
    """

    requests: int = 0
    bad: int = 0
    at_s: float = 0.0


def told_apart(parts: Mapping[str, Blocks], known: Collection[str]) -> Mapping[str, Blocks]:
    """Returns the requests by tenant, those of tenants that came after `MOST_TENANTS` others as one tenant's.

    Args:
        parts: The requests by tenant.
        known: The tenants that came before.
    """
    names = [*known, *sorted(parts.keys() - known)][:MOST_TENANTS]
    further = [part for name, part in parts.items() if name not in names]
    if not further:
        return parts
    return {name: parts[name] for name in names if name in parts} | {_FURTHER: merged(further)}


def heard(before: Mapping[str, Heard], parts: Mapping[str, Blocks], now_s: float) -> dict[str, Heard]:
    """Returns the requests of each tenant that the canary has got, after further ones."""
    after = dict(before)
    for name, part in parts.items():
        new, known = sum(part.get("errors", {}).values(), Block()).canary, after.get(name, Heard())
        at_s = now_s if new.requests else known.at_s
        after[name] = Heard(known.requests + new.requests, known.bad + new.bad, at_s)
    return after


def bounded(tenants: Mapping[str, Heard], since_s: float, now_s: float, silent_s: float) -> list[str]:
    """Returns the tenants that may not decide alone, because there are others.

    Args:
        tenants: The requests of each.
        since_s: The time at which the step began.
        now_s: The time.
        silent_s: Seconds after which those who send nothing are not there any more.
    """
    there = {name: one.requests for name, one in tenants.items() if now_s - one.at_s < silent_s}
    all_, is_young = sum(there.values()), now_s - since_s < ALONE_S
    return [name for name in tenants if len(tenants) > 1 and (is_young or all_ - there.get(name, 0) >= LEAST_OF_OTHERS)]


def without(tenants: Mapping[str, Heard], name: str) -> Heard:
    """Returns the requests of all tenants but one; of an empty name, of all."""
    others = [one for other, one in tenants.items() if not name or other != name]
    return Heard(sum(one.requests for one in others), sum(one.bad for one in others))
