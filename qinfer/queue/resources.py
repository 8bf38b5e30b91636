"""Units of global resources, shared by all workers.

    exchange ──▶ got: executions use them, until others wait ──▶ exchange, which gives them back
        └──▶ not got: the worker is in line ──news: some were freed──▶ exchange …

The guarantees, each with a test in `tests/contract/queue/test_resources.py`:

1. Workers together never hold more units than the largest maximum that a live worker names.
2. A script takes all units of an execution or none; a waiting worker holds none of them.
3. Every exchange renews a worker's lease. When it ends, the units are free, and the worker leaves the line.
4. Workers in line get units in order, callees first. A worker that needs no contended resource does not wait.
5. `wait` tells workers in line of freed units, and holders of contended units that others wait.

A worker that was stopped past its lease finishes its executions with units that others hold by then. A failover may
lose the leases of its last second.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from qinfer.queue import keys
from qinfer.queue.router import BlockingLink, Router, load_script, ttl_ms

_EXCHANGE = load_script("resources/exchange", "now_ms")
_LEAVE = load_script("resources/leave")
_BLOCK_S = 0.5

Units = Mapping[str, int]
"""Units by resource, each at least 1."""


class ExchangeOutcome(NamedTuple):
    """`retry_s` is the time until another worker's lease ends."""

    has_got: bool
    held: dict[str, int]
    wanted: frozenset[str]
    retry_s: float


class Wish(NamedTuple):
    """Units that an execution waits for; `is_callee` = executions that hold other units wait for it."""

    units: Units
    is_callee: bool = False


class ResourceEvents(NamedTuple):
    """Events up to `last`: whether units or places in line were freed, and newly wanted resources."""

    last: str
    has_freed: bool
    wanted: frozenset[str]


class Resources:
    """The units of one worker."""

    def __init__(self, router: Router, worker_id: str, lease_s: float) -> None:
        self.owner = f"{worker_id}/resources"
        self._router = router
        self._lease_s = lease_s
        self._names = [
            name.encode()
            for name in (
                keys.resource_leases(),
                keys.resource_units(),
                keys.resource_maxima(),
                keys.resource_line(),
                keys.resource_news(),
            )
        ]
        self._slot = keys.slot(self._names[0])
        self._link: BlockingLink | None = None

    @property
    def lease_keys(self) -> list[bytes]:
        """The KEYS of the lease in `sequences.RENEW_OWNER`."""
        return [*self._names[:2], *self._names]

    async def exchange(
        self, maxima: Units, back: Units, wish: Wish | None = None, given_up: Sequence[Wish] = ()
    ) -> ExchangeOutcome:
        """Gives units `back`, takes those of a wish or waits for them."""
        line = "" if wish is None else self._in_line(wish)
        withdrawn = msgspec.json.encode([self._in_line(one).decode() for one in given_up])
        arguments = (ttl_ms(self._lease_s), msgspec.json.encode(maxima), msgspec.json.encode(back), withdrawn, line)
        is_callee = int(wish is not None and wish.is_callee)
        reply = await self._router.run(self._slot, _EXCHANGE, self._names, self.owner, *arguments, is_callee)
        has_got, held, wanted, retry_ms = reply
        retry_s = int(retry_ms) / 1000
        units = msgspec.json.decode(held, type=dict[str, int])
        names = frozenset(name.decode() for name in wanted)
        return ExchangeOutcome(bool(has_got), units, names, retry_s if retry_s >= 0 else float("inf"))

    async def wait(self, after: str) -> ResourceEvents | None:
        """Waits half a second for news behind `after`, at first `0`."""
        if self._link is None:
            self._link = self._router.blocking(self._slot, "qinfer-resources", _BLOCK_S)
        block = (b"BLOCK", int(_BLOCK_S * 1000))
        reply = await self._link.call(b"XREAD", *block, b"STREAMS", self._names[-1], after)
        if not reply:
            return None
        entries = reply[0][1]
        told = [(fields[0], fields[1]) for _, fields in entries]
        wishes = [msgspec.json.decode(text) for kind, text in told if kind == b"wanted"]
        wanted = frozenset(name for owner, units in wishes if owner != self.owner for name in units)
        return ResourceEvents(entries[-1][0].decode(), any(kind == b"freed" for kind, _ in told), wanted)

    async def end_lease(self) -> None:
        """Ends the lease."""
        await self._router.run(self._slot, _LEAVE, self._names, self.owner)

    async def close(self) -> None:
        """Closes the connection for news."""
        if self._link is not None:
            await self._link.close()

    def _in_line(self, wish: Wish) -> bytes:
        return msgspec.json.encode([self.owner, dict(sorted(wish.units.items()))])
