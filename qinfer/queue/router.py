"""Routes keys to nodes: slot → Link, learned from the cluster; a single node is the one-entry case.

The cluster's map is read at the start, after every MOVED, and while a node can't be reached; meanwhile commands follow
MOVED and ASK. With Sentinels there is one Link, whose address they resolve.

Lua scripts run by their hash, or by their text on a node that does not know them. To add one:

1. Write `lua/<subject>/<name>.lua`, or `lua/<name>.lua` in the package of its feature, with a header of KEYS, ARGV and
   reply in order. Shared functions are files beside it or in `lua/common/`.
2. In the class that alone runs it, load it with the shared files: `_DUE = load_script("requests/due", "now_ms")`.
3. Write a function that passes keys (by `keys`) and arguments in that order to `run_script`.

In headers `prefix` is that of the partition's keys, and unreferenced objects are names that the caller deletes from the
store. Full memory stops only scripts that have not written: a no-op or freeing write goes first. `each.lua` runs a
script, the function `one`, for several requests of a partition (`run_each`).
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

import msgspec

from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable, QinferError, SettingsError
from qinfer.queue.clients import NodeAddress, Sentinels, parse_place
from qinfer.queue.connection import DOWN, Argument, CommandRefused, Link, RedisConnection, Reply, SentinelResolver, pack

T = TypeVar("T")

SLOTS = 16384

_ASKING = pack((b"ASKING",))
_CHANGING = "the queue's cluster is changing; try again"
_MAX_REDIRECTS = 5
_PAUSE_S = 0.5

_ROUSE_EVERY_S = 0.02
_ROUSES = 100
"""The most attempts to unblock a read, before its connection is reset."""


class Router:
    """The nodes of one Redis, single or cluster; `troubles` counts failures of non-blocking connections."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        place = parse_place(settings.url.get_secret_value())
        if settings.cluster and isinstance(place, Sentinels):
            raise SettingsError(
                "QINFER_REDIS__URL names Sentinels: a cluster has none; set QINFER_REDIS__CLUSTER=false"
            )
        self._seed = place.node if isinstance(place, Sentinels) else place
        self._in_doubt = asyncio.Event()
        self.troubles = 0
        self._links: dict[str, Link] = {}
        first = self._link(place)
        self._table: list[Link] = [first] * SLOTS
        self._blocking: set[Link] = set()
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, settings: RedisSettings) -> "Router":
        """Connects to the node, or to every node of its cluster, which must cover all slots."""
        router = cls(settings)
        try:
            await router._table[0].open()
            if settings.cluster:
                await router._learn()
                for link in list(router._links.values()):
                    await link.call(b"PING")
                router._keeper = asyncio.create_task(router._maintain_map(), name="redis cluster map")
        except BaseException:
            await router.close()
            raise
        return router

    def send(self, slot: int, packed: bytes, reply: Reply) -> None:
        """Sends a packed command to the owner of `slot`."""
        if self._settings.cluster:
            reply = self._following(packed, reply, _MAX_REDIRECTS)
        self._table[slot].send(packed, reply)

    def check_up(self, slot: int) -> None:
        """Raises `BrokerUnavailable` without a connection to the owner of `slot`; `call` would wait."""
        if not self._table[slot].is_up:
            raise BrokerUnavailable(DOWN)

    async def call(self, slot: int, *command: Any) -> Any:
        """Sends a command to the owner of `slot`, and returns its reply."""
        link = self._table[slot]
        for _ in range(_MAX_REDIRECTS):
            try:
                return await link.call(*command)
            except CommandRefused as error:
                target = self._target(error)
                if target is None:
                    raise
                link, is_asking = target
            if is_asking:
                await link.call(b"PING")  # waits for the link: ASKING must directly precede its command
                link.send(_ASKING, _ignore)
        raise BrokerUnavailable(_CHANGING)

    def run(self, slot: int, script: "Script", names: Sequence[bytes], *arguments: Argument) -> Awaitable[Any]:
        """Runs a script at the owner of `slot`."""
        return run_script(partial(self.call, slot), script, names, *arguments)

    def blocking(self, slot: int, name: str, block_s: float) -> "BlockingLink":
        """Opens a connection for reads that block up to `block_s` seconds."""

        async def resolve() -> NodeAddress:
            return await self._table[slot].resolve()

        link = Link(resolve, self._settings, name=name, block_s=block_s, on_trouble=self._in_doubt.set)
        link.start()
        self._blocking.add(link)
        return BlockingLink(link, self._target, partial(self.send, slot), partial(self._blocking.discard, link))

    def nodes(self) -> list[Link]:
        """Returns the links to all nodes."""
        return list(self._links.values())

    def owners(self) -> dict[str, Link]:
        """Returns links to the nodes that own slots, by public label."""
        owners = set(self._table)
        return {label: link for label, link in self._links.items() if link in owners}

    async def close(self) -> None:
        """Closes every connection."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        for link in [*self._blocking, *self._links.values()]:
            await link.close()

    def _link(self, place: NodeAddress | Sentinels) -> Link:
        link = self._links.get(place.label)
        if link is None:

            async def fixed() -> NodeAddress:
                assert isinstance(place, NodeAddress)
                return place

            resolve = SentinelResolver(place, self._settings).resolve if isinstance(place, Sentinels) else fixed
            link = Link(resolve, self._settings, name="qinfer", on_trouble=self._trouble)
            self._links[place.label] = link
        return link

    def _trouble(self) -> None:
        self.troubles += 1
        self._in_doubt.set()

    def _target(self, error: CommandRefused) -> tuple[Link, bool] | None:
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
        """Returns a callback that follows redirections, so that `reply` sees neither MOVED nor ASK."""

        def follow(answer: Any) -> None:
            target = self._target(answer) if type(answer) is CommandRefused and left else None
            if target is None:
                reply(answer)
                return
            link, is_asking = target
            try:
                if is_asking:
                    link.send(_ASKING, _ignore)
                link.send(packed, self._following(packed, reply, left - 1))
            except QinferError as error:
                reply(error)

        return follow

    async def _maintain_map(self) -> None:
        while True:
            await self._in_doubt.wait()
            self._in_doubt.clear()
            try:
                await self._learn()
            except QinferError:
                self._in_doubt.set()
            await asyncio.sleep(_PAUSE_S)  # asks twice a second about a node that stays away

    async def _learn(self) -> None:
        up = [link for link in self._links.values() if link.is_up] or [self._link(self._seed)]
        asked = random.choice(up)  # noqa: S311 - the next question goes to another node: one may have a stale view
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
        wanted = {*table, self._link(self._seed)}  # the seed may lead to new nodes when all known nodes are gone
        for name, link in list(self._links.items()):
            if link not in wanted:
                del self._links[name]
                await link.close()


class BlockingLink:
    """A connection for blocking reads; follows its slot when it moves."""

    def __init__(
        self,
        link: Link,
        target: Callable[[CommandRefused], tuple[Link, bool] | None],
        beside: Callable[[bytes, Reply], None],
        on_close: Callable[[], None],
    ) -> None:
        self._link = link
        self._target = target
        self._beside = beside
        self._on_close = on_close

    @property
    def client_id(self) -> int:
        """The connection's id; changes with each reconnect."""
        return self._link.client_id

    def expect(self, block_s: float) -> None:
        """Lets the next reads block for up to `block_s` seconds."""
        self._link.expect(block_s)

    def rouse(self, is_over: Callable[[], bool], tries: int = _ROUSES) -> None:
        """Unblocks a read, repeatedly because it may not have reached Redis yet."""
        if tries and not is_over():
            with suppress(BrokerUnavailable):
                self._beside(pack((b"CLIENT", b"UNBLOCK", self.client_id)), _ignore)
            asyncio.get_running_loop().call_later(_ROUSE_EVERY_S, self.rouse, is_over, tries - 1)
        elif not is_over():
            self._link.reset()  # the connection does not react

    def send(self, packed: bytes, reply: Reply) -> None:
        """Sends a command as `Link.send` does."""
        self._link.send(packed, reply)

    async def call(self, *command: Any, late: Reply | None = None) -> Any:
        """Sends a command and returns its reply."""
        for _ in range(_MAX_REDIRECTS):
            try:
                return await self._link.call(*command, late=late)
            except CommandRefused as error:
                self._move(error)
        raise BrokerUnavailable(_CHANGING)

    async def run(
        self, operation: Callable[[Callable[..., Awaitable[Any]]], Awaitable[T]]
    ) -> tuple[RedisConnection, T]:
        """Runs `operation` with one connection's `call`, again if the slot moved; returns connection and result."""
        for _ in range(_MAX_REDIRECTS):
            connection = await self._link.connected()
            try:
                return connection, await operation(connection.call)
            except CommandRefused as error:
                self._move(error)
        raise BrokerUnavailable(_CHANGING)

    async def close(self) -> None:
        """Closes the connection."""
        self._on_close()
        await self._link.close()

    def _move(self, error: CommandRefused) -> None:
        target = self._target(error)
        if target is None:
            raise error
        if target[1]:  # its keys are on two nodes meanwhile
            raise BrokerUnavailable(_CHANGING)
        self._link.reset()


def _ignore(_: Any) -> None:
    """Ignores a reply."""


Call = Callable[..., Awaitable[Any]]


class Script(msgspec.Struct, frozen=True):
    """A Lua script with its SHA-1."""

    text: bytes
    sha: bytes


def load_script(name: str, *parts: str, package: str = "qinfer.queue") -> Script:
    """Reads a package's script; `parts` are shared files there or in the queue's `lua/common/`."""
    own, common = files(package).joinpath("lua"), files("qinfer.queue").joinpath("lua", "common")
    places = ((own.joinpath(f"{file}.lua"), common.joinpath(f"{file}.lua")) for file in (*parts, name))
    text = b"\n".join((place if place.is_file() else shared).read_bytes() for place, shared in places)
    return Script(text, sha1(text, usedforsecurity=False).hexdigest().encode())


async def run_script(call: Call, script: Script, keys: Sequence[bytes], *arguments: Argument) -> Any:
    """Runs a script on KEYS of one cluster slot."""
    try:
        return await call(b"EVALSHA", script.sha, len(keys), *keys, *arguments)
    except CommandRefused as error:
        if error.kind != "NOSCRIPT":
            raise
    return await call(b"EVAL", script.text, len(keys), *keys, *arguments)


def ttl_ms(seconds: float) -> int:
    """Returns milliseconds, at least 1: Redis refuses 0."""
    return max(1, int(seconds * 1000))


class ScriptArguments(NamedTuple):
    """KEYS and ARGV of a script."""

    keys: Sequence[bytes]
    arguments: Sequence[Argument]


async def run_each(call: Call, script: Script, requests: Sequence[ScriptArguments]) -> Any:
    """Runs a script of `each.lua` for requests of one slot with equally many keys; returns their replies."""
    keys: list[bytes] = []
    arguments: list[Argument] = [len(requests), len(requests[0].keys)]
    for words in requests:
        keys += words.keys
        arguments.append(len(words.arguments))
        arguments += words.arguments
    return await run_script(call, script, keys, *arguments)
