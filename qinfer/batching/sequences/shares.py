"""Decides which tenant gives up a slot of a model's sequences, when all are taken; pure.

Free slots go to the tenant with the fewest (`own.lua`). A waiting tenant gets a slot of the one with the most, until
neither has more than its share.
"""

from collections.abc import Collection
from typing import NamedTuple

from qinfer.queue.sequences.records import SlotShare

PATIENCE_S = 1.0
"""The wait for a free slot before another tenant gives one up."""

TURN_S = 10.0
"""The least time for which a tenant keeps its slot, with more tenants than slots."""


class SlotTurn(NamedTuple):
    """`giver` gives up a slot that a sequence has had for `least_s`."""

    giver: str
    taker: str
    least_s: float


def turns(shares: Collection[SlotShare], here: Collection[str]) -> list[SlotTurn]:
    """Decides which tenants give up slots: one per waiting tenant, longest wait first."""
    held = {share.tenant: share.held for share in shares}
    weights = {share.tenant: share.weight for share in shares}
    found: list[SlotTurn] = []
    for taker in sorted(shares, key=lambda share: -share.waited_s):
        givers = [tenant for tenant in here if tenant != taker.tenant and held.get(tenant, 0) > 0]
        if taker.waited_s < PATIENCE_S or not givers:
            continue
        giver = max(givers, key=lambda tenant: held[tenant] / weights[tenant])
        left, own = (held[giver] - 1) / weights[giver], held[taker.tenant]
        if own == 0 and held[giver] == 1:
            found.append(SlotTurn(giver, taker.tenant, TURN_S))
        elif own == 0 or left >= (own + 1) / taker.weight:
            found.append(SlotTurn(giver, taker.tenant, 0.0))
        else:
            continue
        held[giver] -= 1
        held[taker.tenant] += 1
    return found
