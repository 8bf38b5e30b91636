"""Each tenant's part in the evidence about a canary: of several tenants, none decides alone. Pure.

A canary is rolled back only if the evidence *without* each tenant is three quarters of the way (of its logarithm), too.
So a tenant can add a quarter at most, and no rollbacks are added.

A tenant is one of several if the others have sent the canary `LEAST_OF_OTHERS` requests in its step, or the step is
younger than `ALONE_S`.
"""

from collections.abc import Collection, Mapping

import msgspec

from qinfer.traffic.evidence import Blocks, EvidenceBlock, merged

MOST_TENANTS = 8
"""The most tenants with a part of their own; further tenants share one part."""

LEAST_OF_OTHERS = 5

ALONE_S = 60.0

_FURTHER = "*"  # never a tenant's name


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
