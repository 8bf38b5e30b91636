"""The hot way to one Redis node, kept up for as long as the process lives.

    Link ──holds──▶ Connection ──▶ socket        a Link outlives its Connections: it reconnects by itself

`send` hands over packed bytes and a callback: no task, no future, no timer per command. `call` is its coroutine form,
for commands that are not one per request. Several nodes are `router.Router`'s affair.

RESP2 is spoken on purpose: stream replies have the same shape (lists of pairs) on every server from 6.2 on, and there
are no push messages to tell from replies.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

from qinfer.delivery.address import Address
from qinfer.delivery.connection import DOWN, Connection, Refused, Reply, open_connection
from qinfer.errors import BrokerUnavailable, QinferError, SettingsError
from qinfer.settings import RedisSettings

logger = logging.getLogger(__name__)

MINIMUM_VERSION = (6, 2)

_BACKOFF_S = (0.05, 2.0)
_UNREACHABLE = "redis can't be reached"


class Link:
    """One node's connection, for as long as the process lives: reconnects with jittered exponential backoff.

    Args:
        resolve: Says where the node is; asked before each attempt to connect.
        settings: Timeouts and bounds.
        name: The connection's name in `CLIENT LIST`.
        block_s: Longest blocking read that this link is used for; its replies may take that much longer.
        on_trouble: Called whenever the connection broke or could not be made.
    """

    def __init__(
        self,
        resolve: Callable[[], Awaitable[Address]],
        settings: RedisSettings,
        *,
        name: str,
        block_s: float = 0.0,
        on_trouble: Callable[[], None] | None = None,
    ) -> None:
        self.client_id = 0
        self.resolve = resolve
        self._settings = settings
        self._name = name
        self._timeout_s = settings.command_timeout_s + block_s
        self._on_trouble = on_trouble
        self._connection: Connection | None = None
        self._told: tuple[str, str] | None = None
        self._up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether commands can be sent now."""
        return self._connection is not None

    async def open(self) -> None:
        """Connects, trying for `connect_timeout_s`, and keeps connected from then on.

        Raises:
            BrokerUnavailable: It can't be reached.
            SettingsError: It refuses the credentials, is too old, or is (no) cluster against the settings.
        """
        deadline_s = asyncio.get_running_loop().time() + self._settings.connect_timeout_s
        self._take(await self._dial(deadline_s))
        self.start()

    def start(self) -> None:
        """Keeps connected from now on, without waiting for it."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep(), name=f"redis link {self._name}")

    def send(self, packed: bytes, reply: Reply) -> None:
        """Sends a packed command with the others of this event-loop tick; `reply` gets its reply or its error.

        Raises:
            BrokerUnavailable: At once, when the connection is down or its buffer full.
        """
        connection = self._connection
        if connection is None:
            raise BrokerUnavailable(DOWN)
        connection.send(packed, reply)

    async def call(self, *command: Any, late: Reply | None = None) -> Any:
        """Sends a command, waiting for a connection where there is none; see `Connection.call`."""
        connection = self._connection
        if connection is None or connection.lost.is_set():
            connection = await self._wait_up()
        return await connection.call(*command, late=late)

    async def connected(self) -> Connection:
        """Returns the connection, waiting where there is none; for commands that must not be parted by a reconnect.

        Raises:
            BrokerUnavailable: There is none in time.
        """
        connection = self._connection
        return connection if connection is not None and not connection.lost.is_set() else await self._wait_up()

    def reset(self) -> None:
        """Reconnects, to wherever `resolve` says then."""
        if self._connection is not None:
            self._connection.abort()
            self._drop()

    async def close(self) -> None:
        """Closes the connection and stays closed; unanswered commands fail."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        connection = self._connection
        self._drop()
        if connection is not None:
            connection.abort()
            await connection.lost.wait()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        delay_s, longest_s = _BACKOFF_S
        while True:
            if self._connection is None:
                self._take(await self._dial(None))
            assert self._connection is not None
            began_s = loop.time()
            await self._connection.lost.wait()
            self._drop()
            if self._on_trouble is not None:
                self._on_trouble()
            if loop.time() - began_s > longest_s:
                delay_s = _BACKOFF_S[0]
                self._told = None
                self._tell("redis connection lost")
                continue
            self._tell("redis connection lost as soon as it was made")  # by a primary that is none any more
            await _pause(delay_s)
            delay_s = min(2 * delay_s, longest_s)

    def _tell(self, event: str, reason: str = "") -> None:
        """Logs what is wrong, once until something else is."""
        if self._told != (event, reason):
            self._told = (event, reason)
            logger.warning(event, extra={"link": self._name, "reason": reason} if reason else {"link": self._name})

    def _take(self, connection: Connection) -> None:
        if self._told is not None:
            logger.info("redis connection made again", extra={"link": self._name})
        self._connection = connection
        self._up.set()

    def _drop(self) -> None:
        self._connection = None
        self._up.clear()

    async def _wait_up(self) -> Connection:
        self._drop()
        try:
            async with asyncio.timeout(self._settings.command_timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise BrokerUnavailable(DOWN) from None
        if self._connection is None:
            raise BrokerUnavailable(DOWN)
        return self._connection

    async def _dial(self, deadline_s: float | None) -> Connection:
        """Connects; tries again until `deadline_s` (for ever without), which is when errors are raised."""
        delay_s, longest_s = _BACKOFF_S
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    return await self._connect(await self.resolve())
            except (OSError, QinferError) as error:  # TimeoutError is an OSError
                problem = error
            if deadline_s is not None and (isinstance(problem, SettingsError) or loop.time() + delay_s > deadline_s):
                raise _dial_error(problem)
            self._tell(_UNREACHABLE, _reason(problem))
            if self._on_trouble is not None:
                self._on_trouble()
            await _pause(delay_s)
            delay_s = min(2 * delay_s, longest_s)

    async def _connect(self, address: Address) -> Connection:
        connection = await open_connection(address, self._settings, self._timeout_s)
        try:
            await self._greet(connection, address)
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _greet(self, connection: Connection, address: Address) -> None:
        credentials = (b"AUTH", address.username or "default", address.password) if address.password else ()
        try:
            hello = await connection.call(b"HELLO", b"2", *credentials, b"SETNAME", self._name)
        except Refused as error:
            if "unknown command" in error.message.lower():
                raise SettingsError("Redis older than 6.2 can't be used: upgrade it to 6.2 or newer") from None
            raise
        about = dict(zip(hello[::2], hello[1::2], strict=True))
        version = about[b"version"].decode()
        if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
            raise SettingsError(f"Redis {version} can't be used: upgrade it to 6.2 or newer")
        is_cluster = about[b"mode"] == b"cluster"
        if is_cluster != self._settings.cluster:
            remedy = "true" if is_cluster else "false"
            raise SettingsError(f"Redis runs in {about[b'mode'].decode()} mode: set QINFER_REDIS__CLUSTER={remedy}")
        if address.db:
            await connection.call(b"SELECT", address.db)
        if not is_cluster:
            await _check_role(connection)
        await connection.call(b"PING")  # refused while it loads its data, which HELLO and ROLE are not
        self.client_id = about[b"id"]


async def _check_role(connection: Connection) -> None:
    try:
        role, *_ = await connection.call(b"ROLE")
    except (Refused, SettingsError):  # managed services may forbid it; a replica shows at the first write
        return
    if role != b"master":
        raise BrokerUnavailable("it is a replica, which takes no writes")


async def _pause(longest_s: float) -> None:
    await asyncio.sleep(longest_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter needs no secrecy


def _dial_error(problem: Exception) -> QinferError:
    if isinstance(problem, SettingsError):
        return problem
    return BrokerUnavailable(f"can't connect to Redis: {_reason(problem)}; see QINFER_REDIS__URL")


def _reason(problem: Exception) -> str:
    return (str(problem) or "no answer in time").removesuffix("; try again")
