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
from qinfer.delivery.connection import DOWN, Connection, Refused, Reply
from qinfer.errors import BrokerUnavailable, QinferError, SettingsError
from qinfer.settings import RedisSettings

logger = logging.getLogger(__name__)

MINIMUM_VERSION = (6, 2)

_BACKOFF_S = (0.05, 2.0)


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
        while True:
            if self._connection is None:
                self._take(await self._dial(None))
            assert self._connection is not None
            await self._connection.lost.wait()
            self._drop()
            logger.warning("redis connection lost", extra={"link": self._name})
            if self._on_trouble is not None:
                self._on_trouble()

    def _take(self, connection: Connection) -> None:
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
            logger.debug("can't connect to redis", extra={"link": self._name, "reason": repr(problem)})
            if self._on_trouble is not None:
                self._on_trouble()
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter needs no secrecy
            delay_s = min(2 * delay_s, longest_s)

    async def _connect(self, address: Address) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(self._settings, self._timeout_s)
        if address.path:
            await loop.create_unix_connection(lambda: connection, address.path)
        else:
            await loop.create_connection(lambda: connection, address.host, address.port, ssl=address.tls)
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
        self.client_id = about[b"id"]


def _dial_error(problem: Exception) -> QinferError:
    if isinstance(problem, SettingsError):
        return problem
    reason = str(problem) or "no answer in time"
    return BrokerUnavailable(f"can't connect to Redis: {reason}; see QINFER_REDIS__URL")
