"""The connection to one Redis node for the hot path: pipelined commands, reply callbacks, one write per loop tick.

A `Link` outlives its connections. `send` needs no task, future or timer per command; `call` is its coroutine form for
rarer commands. Error replies become qinfer's errors.

RESP2 is used on purpose: stream replies have the same shape from 6.2 on, and there are no push messages.
"""

import asyncio
import logging
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from hiredis import ProtocolError, Reader, ReplyError, pack_command

from qinfer.core.retry import Backoff
from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable, DeliveryError, QinferError, QueueFull, SettingsError
from qinfer.queue import MINIMUM_VERSION
from qinfer.queue.clients import NodeAddress, Sentinels
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)


Argument = str | int | float | bytes | memoryview

pack: Callable[[tuple[Argument, ...]], bytes] = pack_command  # type: ignore[assignment]  # its stub says tuples of one
"""Encodes a command; slow for large words."""

_LARGE_BYTES = 256 * 1024
_DATA = (bytes, memoryview)


def pack_large(words: tuple[Argument, ...]) -> list[bytes]:
    """Encodes a command in parts, without copying large `bytes`."""
    parts, small = list[bytes](), [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else bytes(word) if isinstance(word, memoryview) else str(word).encode()
        small.append(b"$%d\r\n" % len(data))
        if len(data) > _LARGE_BYTES:
            parts += (b"".join(small), data)
            small = [b"\r\n"]
        else:
            small += (data, b"\r\n")
    return [*parts, b"".join(small)]


def _is_large(command: Sequence[Argument]) -> bool:
    for word in command:  # noqa: SIM110 - twice as fast as `any`, and scripts have many words
        if type(word) in _DATA and len(word) > _LARGE_BYTES:  # type: ignore[arg-type]  # it is bytes or a view
            return True
    return False


class Template:
    """A command with one variable word; the others are encoded once."""

    def __init__(self, *words: Argument, after: Sequence[Argument] = ()) -> None:
        end = pack(tuple(after)).partition(b"\r\n")[2] if after else b""  # without the number of words
        begin = pack((*words, b"", *after)).removesuffix(end)
        self._begin = begin.removesuffix(b"0\r\n\r\n")  # without the empty word's length
        self._end = b"\r\n" + end

    def pack(self, word: Bytes) -> bytes:
        """Encodes the command, copying its word once."""
        return b"".join((self._begin, b"%d\r\n" % len(word), word, self._end))


class PairTemplate:
    """A command with two variable words, `between` them and at its end; the others are encoded once."""

    def __init__(self, *words: Argument, between: Sequence[Argument]) -> None:
        middle = pack(tuple(between)).partition(b"\r\n")[2]
        command = pack((*words, b"", *between, b"")).removesuffix(middle + b"$0\r\n\r\n")
        self._begin, self._middle = command.removesuffix(b"0\r\n\r\n"), b"\r\n%b$" % middle

    def pack(self, first: Bytes, second: Bytes) -> bytes:
        """Encodes the command, copying its words once."""
        begin = (self._begin, b"%d\r\n" % len(first), first, self._middle)
        return b"".join((*begin, b"%d\r\n" % len(second), second, b"\r\n"))


Reply = Callable[[Any], None]

_NOTHING = object()
_LAST_WAIT_S = 0.5
"""Seconds for a last look at a silent server: a process that was stopped itself has not read what came meanwhile."""
DOWN = "the connection to the queue is down; try again"
_FAILING_OVER = "the queue is failing over (read-only replica); try again"
_FULL = "too much is waiting to be written to the queue; try again"
_TOO_FEW_REPLICAS = "the queue has too few replicas; try again"
_NO_DISK = "the queue can't write to its disk; try again"
_LEAVE = {_FAILING_OVER, _TOO_FEW_REPLICAS}
"""Replies that may mean that the node is no longer a primary."""
_LOST = "the connection to the queue broke before it answered; try again"

_REFUSALS: dict[str, Callable[[], QinferError]] = {
    "LOADING": lambda: BrokerUnavailable("the queue is loading its data; try again"),
    "READONLY": lambda: BrokerUnavailable(_FAILING_OVER),
    "MASTERDOWN": lambda: BrokerUnavailable("the queue is failing over (primary down); try again"),
    "CLUSTERDOWN": lambda: BrokerUnavailable("the queue's cluster is down; try again"),
    "TRYAGAIN": lambda: BrokerUnavailable("the queue is moving this model's keys; try again"),
    "BUSY": lambda: BrokerUnavailable("the queue is busy with a script; try again"),
    "NOREPLICAS": lambda: BrokerUnavailable(_TOO_FEW_REPLICAS),
    "MISCONF": lambda: BrokerUnavailable(_NO_DISK),
    "OOM": lambda: QueueFull("the queue's memory is full; try again"),
    "NOAUTH": lambda: SettingsError("QINFER_REDIS__URL: Redis asks for a password; put it into the URL"),
    "WRONGPASS": lambda: SettingsError("QINFER_REDIS__URL: Redis refuses this user name and password"),
    "NOPERM": lambda: SettingsError("QINFER_REDIS__URL: Redis forbids this user a command or key that qinfer needs"),
}
_IN_SCRIPT = re.compile(r"user_script: ?\d+: -?([A-Z]+) ")


class CommandRefused(DeliveryError):
    """An error reply about the command, not the server's state; `kind` is its first word."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def mapped(error: Exception) -> QinferError:
    """Maps an error reply, or the one inside a script's error of Redis 6.2."""
    text = str(error)
    kind = text.partition(" ")[0]
    if text.startswith("ERR Error running script") and (inner := _IN_SCRIPT.search(text)):
        kind = inner[1]
    if make := _REFUSALS.get(kind):
        return make()
    if "max number of clients" in text:
        return BrokerUnavailable("the queue takes no more connections (maxclients); try again")
    return CommandRefused(kind, text)


async def open_connection(address: NodeAddress, settings: RedisSettings, timeout_s: float) -> "RedisConnection":
    """Connects without a greeting."""
    loop = asyncio.get_running_loop()
    connection = RedisConnection(settings, timeout_s)
    if address.path:
        await loop.create_unix_connection(lambda: connection, address.path)
    else:
        tls = None if address.tls is None else await asyncio.to_thread(address.tls.context)
        transport, _ = await loop.create_connection(lambda: connection, address.host, address.port, ssl=tls)
        _keep_alive(transport.get_extra_info("socket"))
    return connection


_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Silence before the kernel probes the peer, seconds between probes, number of probes."""


def _keep_alive(sock: socket.socket | None) -> None:
    """Detects a dead peer: a long blocking read sends nothing."""
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # not every system has all three
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class RedisConnection(asyncio.Protocol):
    """A queue of callbacks beside a socket.

    It is broken after `timeout_s` without any reply, not when a server is slow but steady, nor because this process was
    stopped: the entries of a read that Redis answers just then would wait until their leases end.
    """

    def __init__(self, settings: RedisSettings, timeout_s: float) -> None:
        self.lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._max_bytes = settings.max_buffered_bytes
        self._timeout_s = timeout_s
        self._transport: asyncio.Transport | None = None
        self._reader = Reader(notEnoughData=_NOTHING)
        self._owed: deque[Reply] = deque()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._has_large = self._is_paused = False
        self._farewell: QinferError | None = None
        self._progress_at = 0.0
        self._silent_since = -1.0  # at the last look
        self._watchdog: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sets the mark at which `send` refuses commands."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._max_bytes)
        self._watchdog = self._loop.call_later(self._timeout_s, self._watch)

    def send(self, packed: bytes, reply: Reply) -> None:
        """Sends a command with the others of this event-loop tick, or raises `BrokerUnavailable`."""
        if self._transport is None:
            raise self._farewell or BrokerUnavailable(DOWN)
        if self._is_paused or self._out_bytes > self._max_bytes:
            raise BrokerUnavailable(_FULL)
        if not self._out:
            self._loop.call_soon(self._flush)
        if not self._owed:
            self._progress_at = self._loop.time()
        self._out.append(packed)
        self._out_bytes += len(packed)
        self._owed.append(reply)

    def send_large(self, command: tuple[Argument, ...], reply: Reply) -> None:
        """Sends a command without copying its large words."""
        begin, *parts = pack_large(command)
        self.send(begin, reply)
        self._out += parts
        self._out_bytes += sum(map(len, parts))
        self._has_large = True

    async def call(self, *command: Any, late: Reply | None = None) -> Any:
        """Sends a command and returns its reply; after the caller's cancellation `late` gets it."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def answered(reply: Any) -> None:
            if future.cancelled():
                if late is not None:
                    late(reply)
            elif isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)

        if _is_large(command):
            self.send_large(command, answered)
        else:
            self.send(pack(command), answered)
        try:
            return await future
        except asyncio.CancelledError:
            if late is not None and future.done() and not future.cancelled() and future.exception() is None:
                late(future.result())  # it came in the same tick as the cancellation
            raise
        except QinferError:
            del future  # breaks the cycle with this frame, which would keep the command
            raise

    def data_received(self, data: bytes) -> None:
        """Hands each reply to the oldest callback."""
        self._progress_at = self._loop.time()
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOTHING:
                self._deliver_reply(reply)
        except ProtocolError:
            logger.exception("redis sent data that is not RESP; reconnecting")
            self.abort()

    def pause_writing(self) -> None:
        """Refuses commands: the server reads too slowly."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Accepts commands again."""
        self._is_paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails every unanswered command."""
        self._transport = None
        self._out.clear()
        if self._watchdog is not None:
            self._watchdog.cancel()
        error = self._farewell or BrokerUnavailable(_LOST)
        while self._owed:
            self._deliver_reply(error)
        self.lost.set()

    def expect(self, timeout_s: float) -> None:
        """Sets the seconds of silence that break the connection."""
        self._timeout_s = timeout_s
        if self._watchdog is not None and self._transport is not None:
            self._watchdog.cancel()
            self._watchdog = self._loop.call_later(timeout_s, self._watch)

    def abort(self) -> None:
        """Drops the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _deliver_reply(self, reply: Any) -> None:
        try:
            callback = self._owed.popleft()
        except IndexError:  # an unsolicited reply says why the server closes the connection
            self._farewell = mapped(reply) if type(reply) is ReplyError else BrokerUnavailable(_LOST)
            self.abort()
            return
        if type(reply) is ReplyError:
            reply = mapped(reply)
            if reply.message in _LEAVE:
                self.abort()
        try:
            callback(reply)
        except Exception:  # one caller's mistake must not cost others their replies
            logger.exception("callback of a redis reply failed")

    def _flush(self) -> None:
        out = self._out
        if not out or self._transport is None:
            return
        self._out = []
        self._out_bytes = 0
        if self._has_large:
            self._has_large = False
            self._transport.writelines(out)
        else:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _watch(self) -> None:
        quiet_s = self._loop.time() - self._progress_at if self._owed else 0.0
        if quiet_s < self._timeout_s:
            self._watchdog = self._loop.call_later(self._timeout_s - quiet_s, self._watch)
        elif self._silent_since != self._progress_at:
            self._silent_since = self._progress_at
            self._watchdog = self._loop.call_later(_LAST_WAIT_S, self._watch)
        else:
            logger.warning("redis does not answer; reconnecting", extra={"quiet_s": round(quiet_s, 1)})
            self.abort()


def _refuse_command(_: bytes, __: Reply) -> None:
    """Sends nothing without a connection."""
    raise BrokerUnavailable(DOWN)


_BACKOFF_S = (0.05, 2.0)
_UNREACHABLE = "redis can't be reached"


class Link:
    """A node's connection for the life of the process: reconnects with jittered exponential backoff.

    `resolve` returns the address before each attempt.
    """

    def __init__(
        self,
        resolve: Callable[[], Awaitable[NodeAddress]],
        settings: RedisSettings,
        *,
        name: str,
        block_s: float = 0.0,
        on_trouble: Callable[[], None] | None = None,
    ) -> None:
        self.client_id = 0
        self.send: Callable[[bytes, Reply], None] = _refuse_command
        """Sends a command as `RedisConnection.send` does."""
        self.resolve = resolve
        self._settings = settings
        self._name = name
        self._timeout_s = settings.command_timeout_s + block_s
        self._on_trouble = on_trouble
        self._connection: RedisConnection | None = None
        self._told: tuple[str, str] | None = None
        self._up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether the link is connected."""
        return self._connection is not None and not self._connection.lost.is_set()

    async def open(self) -> None:
        """Connects within `connect_timeout_s`, and stays connected."""
        deadline_s = asyncio.get_running_loop().time() + self._settings.connect_timeout_s
        self._set_connection(await self._dial(deadline_s))
        self.start()

    def start(self) -> None:
        """Connects in the background, and stays connected."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep_connected(), name=f"redis link {self._name}")

    async def call(self, *command: Any, late: Reply | None = None) -> Any:
        """Sends a command as `RedisConnection.call` does, once the link is up."""
        connection = self._connection
        if connection is None or connection.lost.is_set():
            connection = await self._wait_up()
        return await connection.call(*command, late=late)

    async def connected(self) -> RedisConnection:
        """Waits for the connection, for commands that must share it."""
        connection = self._connection
        return connection if connection is not None and not connection.lost.is_set() else await self._wait_up()

    def expect(self, block_s: float) -> None:
        """Sets the longest blocking read."""
        timeout_s = self._settings.command_timeout_s + block_s
        if timeout_s != self._timeout_s:
            self._timeout_s = timeout_s
            if self._connection is not None:
                self._connection.expect(timeout_s)

    def reset(self) -> None:
        """Reconnects to the address that `resolve` returns then."""
        if self._connection is not None:
            self._connection.abort()
            self._drop()

    async def close(self) -> None:
        """Closes the link for good; unanswered commands fail."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        connection = self._connection
        self._drop()
        if connection is not None:
            connection.abort()
            await connection.lost.wait()

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(*_BACKOFF_S, jitter=0.5)
        while True:
            if self._connection is None:
                self._set_connection(await self._dial(None))
            assert self._connection is not None
            began_s = loop.time()
            await self._connection.lost.wait()
            self._drop()
            if self._on_trouble is not None:
                self._on_trouble()
            if loop.time() - began_s > _BACKOFF_S[1]:
                backoff.reset()
                self._told = None
                self._log_once("redis connection lost")
                continue
            self._log_once("redis connection lost as soon as it was made")  # no longer a primary
            await asyncio.sleep(backoff.next_s())

    def _log_once(self, event: str, reason: str = "") -> None:
        if self._told != (event, reason):
            self._told = (event, reason)
            logger.warning(event, extra={"link": self._name, "reason": reason} if reason else {"link": self._name})

    def _set_connection(self, connection: RedisConnection) -> None:
        if self._told is not None:
            logger.info("redis connection restored", extra={"link": self._name})
        self._connection, self.send = connection, connection.send
        self._up.set()

    def _drop(self) -> None:
        self._connection, self.send = None, _refuse_command
        self._up.clear()

    async def _wait_up(self) -> RedisConnection:
        self._drop()
        try:
            async with asyncio.timeout(self._settings.command_timeout_s):
                await self._up.wait()
        except TimeoutError:
            raise BrokerUnavailable(DOWN) from None
        if self._connection is None:
            raise BrokerUnavailable(DOWN)
        return self._connection

    async def _dial(self, deadline_s: float | None) -> RedisConnection:
        backoff = Backoff(*_BACKOFF_S, jitter=0.5)
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    return await self._connect(await self.resolve())
            except (OSError, QinferError) as error:
                problem = error
            pause_s = backoff.next_s()
            if deadline_s is not None and (isinstance(problem, SettingsError) or loop.time() + pause_s > deadline_s):
                raise _dial_error(problem)
            if deadline_s is None:  # with a deadline the caller reports it
                self._log_once(_UNREACHABLE, _reason(problem))
            if self._on_trouble is not None:
                self._on_trouble()
            await asyncio.sleep(pause_s)

    async def _connect(self, address: NodeAddress) -> RedisConnection:
        connection = await open_connection(address, self._settings, self._timeout_s)
        try:
            await self._greet(connection, address)
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _greet(self, connection: RedisConnection, address: NodeAddress) -> None:
        credentials = (b"AUTH", address.username or "default", address.password) if address.password else ()
        try:
            hello = await connection.call(b"HELLO", b"2", *credentials, b"SETNAME", self._name)
        except CommandRefused as error:
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
        try:
            await connection.call(b"PING")  # refused while the server loads its data, unlike HELLO and ROLE
        except BrokerUnavailable as error:
            if error.message != _NO_DISK:  # it still answers reads, such as those of `qinfer dlq list`
                raise
        self.client_id = about[b"id"]


async def _check_role(connection: RedisConnection) -> None:
    try:
        role, *_ = await connection.call(b"ROLE")
    except (CommandRefused, SettingsError):  # managed services may forbid it; the first write reveals a replica
        return
    if role != b"master":
        raise BrokerUnavailable("it is a replica, which takes no writes")


def _dial_error(problem: Exception) -> QinferError:
    if isinstance(problem, SettingsError):
        return problem
    return BrokerUnavailable(f"can't connect to Redis: {_reason(problem)}; see QINFER_REDIS__URL")


def _reason(problem: Exception) -> str:
    return (str(problem) or "no answer in time").removesuffix("; try again")


def packable(data: Bytes) -> bytes | memoryview:
    """Returns `data` as a type that needs no copy."""
    return memoryview(data) if isinstance(data, bytearray) else data


class SentinelResolver:
    """Asks Sentinels for the primary's address; `resolve` is a `Link`'s.

    Each query starts at another Sentinel: one that is cut off may name an old primary.
    """

    def __init__(self, sentinels: Sentinels, settings: RedisSettings) -> None:
        self._sentinels = sentinels
        self._settings = settings
        self._timeout_s = settings.connect_timeout_s / (2 * len(sentinels.places))
        self._first = 0

    async def resolve(self) -> NodeAddress:
        """Returns the primary's address."""
        places = self._sentinels.places
        self._first += 1
        problem: QinferError = BrokerUnavailable("no Sentinel answers; try again")
        for number in range(len(places)):
            host, port = places[(self._first + number) % len(places)]
            try:
                async with asyncio.timeout(self._timeout_s):
                    found = await self._ask_sentinel(host, port)
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

    async def _ask_sentinel(self, host: str, port: int) -> tuple[str, int] | None:
        place = NodeAddress(host=host, port=port, tls=self._sentinels.node.tls)
        connection = await open_connection(place, self._settings, self._timeout_s)
        try:
            if password := self._settings.sentinel_password.get_secret_value():
                await connection.call(b"AUTH", password)
            found = await connection.call(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._sentinels.service)
        except CommandRefused as error:
            if "AUTH" in error.message:
                raise SettingsError("QINFER_REDIS__SENTINEL_PASSWORD: the Sentinels use none; unset it") from None
            raise SettingsError("QINFER_REDIS__URL: the server there is not a Sentinel; check the ports") from None
        except SettingsError:
            raise SettingsError("QINFER_REDIS__SENTINEL_PASSWORD: the Sentinels refuse it, or ask for one") from None
        finally:
            connection.abort()
        return (found[0].decode(), int(found[1])) if found else None
