"""One connection to Redis: pipelined commands, callbacks for replies, one write per event-loop tick.

Error replies are mapped here, once: whoever sends a command sees qinfer's errors only.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from hiredis import ProtocolError, Reader, ReplyError, pack_command

from qinfer.delivery.address import Address
from qinfer.errors import BrokerUnavailable, DeliveryError, QinferError, QueueFull, SettingsError
from qinfer.settings import RedisSettings
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)

Argument = str | int | float | bytes | memoryview

pack: Callable[[tuple[Argument, ...]], bytes] = pack_command  # type: ignore[assignment]  # its stub says tuples of one
"""Encodes a command; its buffer grows bit by bit, which is slow where a word is large."""

_LARGE_BYTES = 256 * 1024
_DATA = (bytes, memoryview)


def pack_large(words: tuple[Argument, ...]) -> bytes:
    """Encodes a command as `pack` does, one with large words some ten times faster: each is copied once."""
    parts: list[bytes | memoryview] = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes | memoryview) else str(word).encode()
        size = data.nbytes if isinstance(data, memoryview) else len(data)
        parts += (b"$%d\r\n" % size, data, b"\r\n")
    return b"".join(parts)


def _is_large(command: Sequence[Argument]) -> bool:
    """Tells whether a word is so large that `pack` would be slow."""
    for word in command:  # noqa: SIM110 - twice as fast as `any`, and scripts have many words
        if type(word) in _DATA and len(word) > _LARGE_BYTES:  # type: ignore[arg-type]  # it is bytes or a view
            return True
    return False


class Template:
    """A command whose last word varies: the words before it are encoded once.

    Args:
        words: All words but the last.
    """

    def __init__(self, *words: Argument) -> None:
        self._begin = pack((*words, b"")).removesuffix(b"0\r\n\r\n")  # all but the empty last word's length

    def pack(self, last: Bytes) -> bytes:
        """Encodes the command with its last word, which is copied once."""
        return b"".join((self._begin, b"%d\r\n" % len(last), last, b"\r\n"))


Reply = Callable[[Any], None]
"""Gets a command's reply, or a `QinferError` as a value."""

_NOTHING = object()
DOWN = "the connection to the queue is down; try again"
_FAILING_OVER = "the queue is failing over (read-only replica); try again"
_FULL = "too much is waiting to be written to the queue; try again"
_TOO_FEW_REPLICAS = "the queue has too few replicas; try again"
_LEAVE = {_FAILING_OVER, _TOO_FEW_REPLICAS}
"""Replies of a node that may be a primary no longer: look its address up again."""
_LOST = "the connection to the queue broke before it answered; try again"

_REFUSALS: dict[str, Callable[[], QinferError]] = {
    "LOADING": lambda: BrokerUnavailable("the queue is loading its data; try again"),
    "READONLY": lambda: BrokerUnavailable(_FAILING_OVER),
    "MASTERDOWN": lambda: BrokerUnavailable("the queue is failing over (primary down); try again"),
    "CLUSTERDOWN": lambda: BrokerUnavailable("the queue's cluster is down; try again"),
    "TRYAGAIN": lambda: BrokerUnavailable("the queue is moving this model's keys; try again"),
    "BUSY": lambda: BrokerUnavailable("the queue is busy with a script; try again"),
    "NOREPLICAS": lambda: BrokerUnavailable(_TOO_FEW_REPLICAS),
    "MISCONF": lambda: BrokerUnavailable("the queue can't write to its disk; try again"),
    "OOM": lambda: QueueFull("the queue's memory is full; try again"),
    "NOAUTH": lambda: SettingsError("QINFER_REDIS__URL: Redis asks for a password; put it into the URL"),
    "WRONGPASS": lambda: SettingsError("QINFER_REDIS__URL: Redis refuses this user name and password"),
    "NOPERM": lambda: SettingsError("QINFER_REDIS__URL: Redis forbids this user a command or key that qinfer needs"),
}
_IN_SCRIPT = re.compile(r"user_script: ?\d+: -?([A-Z]+) ")


class Refused(DeliveryError):
    """An error reply that says something about the command, not about the server's state.

    Attributes:
        kind: Its first word, such as `MOVED` or `NOGROUP`.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def mapped(error: ReplyError) -> QinferError:
    """Returns what an error reply means; in a script's error of Redis 6.2, that of the command that failed in it."""
    text = str(error)
    kind = text.partition(" ")[0]
    if text.startswith("ERR Error running script") and (inner := _IN_SCRIPT.search(text)):
        kind = inner[1]
    if make := _REFUSALS.get(kind):
        return make()
    if "max number of clients" in text:
        return BrokerUnavailable("the queue takes no more connections (maxclients); try again")
    return Refused(kind, text)


async def open_connection(address: Address, settings: RedisSettings, timeout_s: float) -> "Connection":
    """Connects to a node, without greeting it; see `Connection` for `timeout_s`.

    Raises:
        OSError: It can't be reached.
    """
    loop = asyncio.get_running_loop()
    connection = Connection(settings, timeout_s)
    if address.path:
        await loop.create_unix_connection(lambda: connection, address.path)
    else:
        await loop.create_connection(lambda: connection, address.host, address.port, ssl=address.tls)
    return connection


class Connection(asyncio.Protocol):
    """One connection: a first-in first-out line of callbacks beside a socket.

    Args:
        settings: For the bounds.
        timeout_s: Seconds without any reply, while one is owed, after which the connection counts as broken. A server
            that answers slowly but steadily is never cut off: that would add to its load.
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
        self._is_paused = False
        self._farewell: QinferError | None = None
        self._progress_at = 0.0
        self._watchdog: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport; its high-water mark is what `send` refuses at."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._max_bytes)
        self._watchdog = self._loop.call_later(self._timeout_s, self._watch)

    def send(self, packed: bytes, reply: Reply) -> None:
        """Sends a packed command with the other commands of this event-loop tick.

        Raises:
            BrokerUnavailable: The connection is down, or its buffer full.
        """
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

    async def call(self, *command: Any, late: Reply | None = None) -> Any:
        """Sends a command and returns its reply.

        Args:
            command: Its words.
            late: Gets the reply that comes after the caller was cancelled; without it such a reply is dropped.

        Raises:
            Refused: The command is wrong, or wrong at this node.
            QinferError: As `send`; or the connection broke; or the server can't serve now.
        """
        future: asyncio.Future[Any] = self._loop.create_future()

        def answered(reply: Any) -> None:
            if future.cancelled():
                if late is not None:
                    late(reply)
            elif isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)

        self.send((pack_large if _is_large(command) else pack)(command), answered)
        try:
            return await future
        except asyncio.CancelledError:
            if late is not None and future.done() and not future.cancelled() and future.exception() is None:
                late(future.result())  # it came in the very tick of the cancellation
            raise

    def data_received(self, data: bytes) -> None:
        """Hands each reply to the callback that waits longest."""
        self._progress_at = self._loop.time()
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOTHING:
                self._answer(reply)
        except ProtocolError:
            logger.exception("redis sent what is not RESP; reconnecting")
            self.abort()

    def pause_writing(self) -> None:
        """The server reads too slowly: refuse what comes."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """The buffer has drained."""
        self._is_paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails every command that was not answered."""
        self._transport = None
        self._out.clear()
        if self._watchdog is not None:
            self._watchdog.cancel()
        error = self._farewell or BrokerUnavailable(_LOST)
        while self._owed:
            self._answer(error)
        self.lost.set()

    def abort(self) -> None:
        """Drops the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _answer(self, reply: Any) -> None:
        try:
            callback = self._owed.popleft()
        except IndexError:  # why it closes, before it was asked anything
            self._farewell = mapped(reply) if type(reply) is ReplyError else BrokerUnavailable(_LOST)
            self.abort()
            return
        if type(reply) is ReplyError:
            reply = mapped(reply)
            if reply.message in _LEAVE:
                self.abort()
        try:
            callback(reply)
        except Exception:  # the loop boundary: one caller's mistake must not cost the others their replies
            logger.exception("callback of a redis reply failed")

    def _flush(self) -> None:
        out = self._out
        if not out or self._transport is None:
            return
        self._out = []
        self._out_bytes = 0
        self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _watch(self) -> None:
        quiet_s = self._loop.time() - self._progress_at if self._owed else 0.0
        if quiet_s >= self._timeout_s:
            logger.warning("redis does not answer; reconnecting", extra={"quiet_s": round(quiet_s, 1)})
            self.abort()
            return
        self._watchdog = self._loop.call_later(self._timeout_s - quiet_s, self._watch)
