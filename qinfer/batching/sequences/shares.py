"""The slots of a model's sequences among tenants: who gives one up for whom, where all are taken. Pure.

Free slots go to the tenant that has the fewest (`own.lua`). A tenant that is alone may have all of them, and its
sequences may last: so one that waits gets a slot of the tenant with the most, until neither has more than its share.
"""

from collections.abc import Collection
from typing import NamedTuple

from qinfer.queue.sequence_records import SlotShare

PATIENCE_S = 1.0
"""A sequence waits so long for a slot to become free before another tenant gives one up."""

TURN_S = 10.0
"""Where there are more tenants than slots, each has its slot for so long at least."""


class SlotTurn(NamedTuple):
    """A slot that is to be given up: by which tenant, for which, and only where a sequence has had it for so long."""

    giver: str
    taker: str
    least_s: float


def turns(shares: Collection[SlotShare], here: Collection[str]) -> list[SlotTurn]:
    """Decides which tenants give up slots, one for each tenant that waits at most; the longest wait first.

    Args:
        shares: The tenants with open sequences.
        here: The tenants that have slots of the worker.
    """
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
