"""Routes keys to nodes: slot → Link, learned from the cluster; a single node is the one-entry case.

A cluster's map is asked for at the start, after every MOVED, and while a node can't be reached (its replica may have
taken over); commands follow MOVED and ASK meanwhile. With Sentinels there is one Link, and they say where its node is.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable, QinferError, SettingsError
from qinfer.queue.address import Address, Sentinels, parse_place
from qinfer.queue.connection import Connection, Link, Refused, Reply, open_connection, pack

T = TypeVar("T")

SLOTS = 16384

_ASKING = pack((b"ASKING",))
_CHANGING = "the queue's cluster is changing; try again"
_MAX_REDIRECTS = 5
_PAUSE_S = 0.5  # between two questions for the map


class Router:
    """The nodes of one Redis, single or cluster; made by `connect`."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        place = parse_place(settings.url.get_secret_value())
        if settings.cluster and isinstance(place, Sentinels):
            raise SettingsError(
                "QINFER_REDIS__URL names Sentinels: a cluster has none; set QINFER_REDIS__CLUSTER=false"
            )
        self._seed = place.node if isinstance(place, Sentinels) else place
        self._in_doubt = asyncio.Event()
        self._links: dict[str, Link] = {}
        first = self._sentinel_link(place) if isinstance(place, Sentinels) else self._link(place)
        self._table: list[Link] = [first] * SLOTS
        self._blocking: set[Link] = set()
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, settings: RedisSettings) -> "Router":
        """Connects to the node, or to every node of its cluster.

        Raises:
            BrokerUnavailable: It can't be reached, or its cluster does not cover all slots.
            SettingsError: See `Link.open`.
        """
        router = cls(settings)
        try:
            await router._table[0].open()
            if settings.cluster:
                await router._learn()
                for link in list(router._links.values()):
                    await link.call(b"PING")
                router._keeper = asyncio.create_task(router._keep(), name="redis cluster map")
        except BaseException:
            await router.close()
            raise
        return router

    def send(self, slot: int, packed: bytes, reply: Reply) -> None:
        """Sends a packed command to the owner of `slot`, with the others of this event-loop tick; see `Link.send`."""
        if self._settings.cluster:
            reply = self._following(packed, reply, _MAX_REDIRECTS)
        self._table[slot].send(packed, reply)

    async def call(self, slot: int, *command: Any) -> Any:
        """Sends a command to the owner of `slot` and returns its reply; see `Link.call`."""
        link = self._table[slot]
        for _ in range(_MAX_REDIRECTS):
            try:
                return await link.call(*command)
            except Refused as error:
                target = self._target(error)
                if target is None:
                    raise
                link, is_asking = target
            if is_asking:
                await link.call(b"PING")  # waits until it is up, for ASKING must come right before its command
                link.send(_ASKING, _ignore)
        raise BrokerUnavailable(_CHANGING)

    def blocking(self, slot: int, name: str, block_s: float) -> "BlockingLink":
        """Returns a connection of its own to the owner of `slot`, for reads that block up to `block_s` seconds."""

        async def resolve() -> Address:
            return await self._table[slot].resolve()

        link = Link(resolve, self._settings, name=name, block_s=block_s, on_trouble=self._in_doubt.set)
        link.start()
        self._blocking.add(link)
        return BlockingLink(link, self._target, partial(self._blocking.discard, link))

    def nodes(self) -> list[Link]:
        """Returns the links to the nodes that are known now."""
        return list(self._links.values())

    async def close(self) -> None:
        """Closes every connection."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        for link in [*self._blocking, *self._links.values()]:
            await link.close()

    def _sentinel_link(self, place: Sentinels) -> Link:
        resolve = SentinelResolver(place, self._settings).resolve
        link = self._links[str(place)] = Link(resolve, self._settings, name="qinfer", on_trouble=self._in_doubt.set)
        return link

    def _link(self, address: Address) -> Link:
        link = self._links.get(str(address))
        if link is None:

            async def resolve() -> Address:
                return address

            link = Link(resolve, self._settings, name="qinfer", on_trouble=self._in_doubt.set)
            self._links[str(address)] = link
        return link

    def _target(self, error: Refused) -> tuple[Link, bool] | None:
        """Reads MOVED and ASK: (where to send the command, whether after ASKING); `None` for any other error."""
        if error.kind not in {"MOVED", "ASK"}:
            return None
        _, slot, place = error.message.split(" ")
        host, _, port = place.rpartition(":")
        link = self._link(self._seed.at(host or self._seed.host, int(port)))
        link.start()
        if error.kind == "MOVED":
            self._table[int(slot)] = link
            self._in_doubt.set()
        return link, error.kind == "ASK"

    def _following(self, packed: bytes, reply: Reply, left: int) -> Reply:
        """Wraps a reply callback so that it sees no MOVED and no ASK."""

        def follow(answer: Any) -> None:
            target = self._target(answer) if type(answer) is Refused and left else None
            if target is None:
                reply(answer)
                return
            link, is_asking = target
            try:
                if is_asking:
                    link.send(_ASKING, _ignore)
                link.send(packed, self._following(packed, reply, left - 1))
            except BrokerUnavailable as error:
                reply(error)

        return follow

    async def _keep(self) -> None:
        while True:
            await self._in_doubt.wait()
            self._in_doubt.clear()
            try:
                await self._learn()
            except QinferError:
                self._in_doubt.set()
            await asyncio.sleep(_PAUSE_S)  # a node that stays away is asked about twice a second, not in a tight loop

    async def _learn(self) -> None:
        """Asks a reachable node for the cluster's map and follows it."""
        up = [link for link in self._links.values() if link.is_up] or [self._link(self._seed)]
        asked = random.choice(up)  # noqa: S311 - the next question goes to another: one node's view may be stale
        table = list(self._table)
        covered = 0
        for first, last, (host, port, *_), *_ in await asked.call(b"CLUSTER", b"SLOTS"):
            link = self._link(self._seed.at((host or b"").decode() or self._seed.host, port))
            link.start()
            table[first : last + 1] = [link] * (last + 1 - first)
            covered += last + 1 - first
        if covered != SLOTS:
            raise BrokerUnavailable(f"the queue's cluster covers {covered} of {SLOTS} slots; try again")
        self._table = table
        wanted = {*table, self._link(self._seed)}  # the seed's name may lead to new nodes when all known ones are gone
        for name, link in list(self._links.items()):
            if link not in wanted:
                del self._links[name]
                await link.close()


class BlockingLink:
    """A connection for the blocking reads of one slot; follows the slot when it moves.

    Args:
        link: The connection.
        target: Reads MOVED and ASK; see `Router`.
        on_close: Called when it is closed.
    """

    def __init__(
        self, link: Link, target: Callable[[Refused], tuple[Link, bool] | None], on_close: Callable[[], None]
    ) -> None:
        self._link = link
        self._target = target
        self._on_close = on_close

    @property
    def client_id(self) -> int:
        """The connection's id, by which Redis can be told to unblock it."""
        return self._link.client_id

    def send(self, packed: bytes, reply: Reply) -> None:
        """See `Link.send`."""
        self._link.send(packed, reply)

    async def call(self, *command: Any, late: Reply | None = None) -> Any:
        """Sends a command and returns its reply; see `Link.call`."""
        for _ in range(_MAX_REDIRECTS):
            try:
                return await self._link.call(*command, late=late)
            except Refused as error:
                self._move(error)
        raise BrokerUnavailable(_CHANGING)

    async def run(self, operation: Callable[[Callable[..., Awaitable[Any]]], Awaitable[T]]) -> tuple[Connection, T]:
        """Runs `operation` with the `call` of one connection; returns which it was, and the result.

        It is run again, elsewhere, when the slot turns out to have moved.
        """
        for _ in range(_MAX_REDIRECTS):
            connection = await self._link.connected()
            try:
                return connection, await operation(connection.call)
            except Refused as error:
                self._move(error)
        raise BrokerUnavailable(_CHANGING)

    async def close(self) -> None:
        """Closes the connection."""
        self._on_close()
        await self._link.close()

    def _move(self, error: Refused) -> None:
        """Goes to where MOVED says; raises `error` when it says something else."""
        target = self._target(error)
        if target is None:
            raise error
        if target[1]:  # the slot is on its way: its keys have two homes until it has arrived
            raise BrokerUnavailable(_CHANGING)
        self._link.reset()


class SentinelResolver:
    """Asks Sentinels where the primary is now; `resolve` is a `Link`'s.

    Each question begins at another Sentinel: one that is cut off from the others may name a primary that is none any
    more. Whether the node that was named is a primary, `Link` asks the node itself.

    Args:
        sentinels: Whom to ask.
        settings: Their password, and how long a primary's connection may take: they share it.
    """

    def __init__(self, sentinels: Sentinels, settings: RedisSettings) -> None:
        self._sentinels = sentinels
        self._settings = settings
        self._timeout_s = settings.connect_timeout_s / (2 * len(sentinels.places))
        self._first = 0

    async def resolve(self) -> Address:
        """Returns the primary's address.

        Raises:
            BrokerUnavailable: No Sentinel answers.
            SettingsError: Those that answer know no service of this name, or refuse the password.
        """
        places = self._sentinels.places
        self._first += 1
        problem: QinferError = BrokerUnavailable("no Sentinel answers; try again")
        for number in range(len(places)):
            host, port = places[(self._first + number) % len(places)]
            try:
                async with asyncio.timeout(self._timeout_s):
                    found = await self._ask(host, port)
            except (OSError, QinferError) as error:  # TimeoutError is an OSError
                if isinstance(error, SettingsError):
                    problem = error
                continue
            if found is not None:
                return self._sentinels.node.at(*found)
            problem = SettingsError(
                f"QINFER_REDIS__URL: the Sentinels know no service '{self._sentinels.service}'; "
                "use the name in their `sentinel monitor` line"
            )
        raise problem

    async def _ask(self, host: str, port: int) -> tuple[str, int] | None:
        place = Address(host=host, port=port, tls=self._sentinels.node.tls)
        connection = await open_connection(place, self._settings, self._timeout_s)
        try:
            if password := self._settings.sentinel_password.get_secret_value():
                await connection.call(b"AUTH", password)
            found = await connection.call(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._sentinels.service)
        except Refused as error:
            if "AUTH" in error.message:
                raise SettingsError("QINFER_REDIS__SENTINEL_PASSWORD: the Sentinels ask for none") from None
            raise SettingsError("QINFER_REDIS__URL: what answers there is no Sentinel; check the ports") from None
        except SettingsError:
            raise SettingsError("QINFER_REDIS__SENTINEL_PASSWORD: the Sentinels refuse it, or ask for one") from None
        finally:
            connection.abort()
        return (found[0].decode(), int(found[1])) if found else None


def _ignore(_: Any) -> None:
    """The reply to ASKING is OK."""
