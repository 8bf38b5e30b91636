"""Units of global resources, which hold over all workers: who has how many, and who waits for some.

    exchange ──▶ got: executions use them, until others wait ──▶ exchange, which gives them back
        └──▶ not got: the worker is in line ──news: some were freed──▶ exchange …

The promises, each a test in `tests/contract/queue/test_resources.py`:

1. Workers never hold more units of a resource together than its maximum: the largest that a live worker names.
2. All units of an execution are taken by one script, or none; a worker that waits for some holds none of those.
3. A worker holds units by a lease, which every exchange renews. When it ends, they are free, and it is out of line.
4. Those that wait get units in the order in which they came, but callees before all others; who needs nothing of what
   others wait for waits for nobody.
5. `wait` tells those in line that units were freed, and those that hold units that others wait for them.

A worker whose lease has ended while it was stopped does not know that, and ends what it executes: more units are in use
then than there are. Where Redis loses its last second, in a failover, leases may be lost with it.
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
"""Resource → how many units of it, each at least 1."""


class Exchanged(NamedTuple):
    """The outcome of an exchange.

    Attributes:
        has_got: Whether the worker got what it wanted.
        held: All units that it holds now.
        wanted: The resources that others wait for.
        retry_s: Seconds until another worker's lease ends, unless that is renewed; infinite = there is none.
    """

    has_got: bool
    held: dict[str, int]
    wanted: frozenset[str]
    retry_s: float


class Wish(NamedTuple):
    """The units of an execution that a worker waits for, or did, and whether those that hold others wait for it."""

    units: Units
    is_callee: bool = False


class News(NamedTuple):
    """The events of a span of time.

    Attributes:
        last: The place of the last of the news.
        has_freed: Units, or places in line, were freed.
        wanted: Resources that workers have begun to wait for.
    """

    last: str
    has_freed: bool
    wanted: frozenset[str]


class Resources:
    """The units of one worker; every coroutine raises `BrokerUnavailable` without Redis.

    Args:
        router: The way to Redis.
        worker_id: The worker.
        lease_s: The lease ends after so long without an exchange.
    """

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
        """The KEYS of `sequences.RENEW_OWNER`, which renews the lease of `owner`, and keeps what it needs."""
        return [*self._names[:2], *self._names]

    async def exchange(
        self, maxima: Units, back: Units, wish: Wish | None = None, given_up: Sequence[Wish] = ()
    ) -> Exchanged:
        """Gives units back, takes those of a wish if they can be had, and renews the lease.

        Args:
            maxima: The units that there are, as far as this worker's models and settings tell.
            back: Units that it gives back.
            wish: What it waits for, from now on if it does not get it.
            given_up: What it waits for no longer.
        """
        line = "" if wish is None else self._in_line(wish)
        withdrawn = msgspec.json.encode([self._in_line(one).decode() for one in given_up])
        arguments = (ttl_ms(self._lease_s), msgspec.json.encode(maxima), msgspec.json.encode(back), withdrawn, line)
        is_callee = int(wish is not None and wish.is_callee)
        reply = await self._router.run(self._slot, _EXCHANGE, self._names, self.owner, *arguments, is_callee)
        has_got, held, wanted, retry_ms = reply
        retry_s = int(retry_ms) / 1000
        units = msgspec.json.decode(held, type=dict[str, int])
        names = frozenset(name.decode() for name in wanted)
        return Exchanged(bool(has_got), units, names, retry_s if retry_s >= 0 else float("inf"))

    async def wait(self, after: str) -> News | None:
        """Waits for news after those of a place, `0` at first; `None` = there was none for half a second."""
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
        return News(entries[-1][0].decode(), any(kind == b"freed" for kind, _ in told), wanted)

    async def leave(self) -> None:
        """Ends the lease."""
        await self._router.run(self._slot, _LEAVE, self._names, self.owner)

    async def close(self) -> None:
        """Closes the connection for news."""
        if self._link is not None:
            await self._link.close()

    def _in_line(self, wish: Wish) -> bytes:
        return msgspec.json.encode([self.owner, dict(sorted(wish.units.items()))])
