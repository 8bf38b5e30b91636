"""Connections to processes of other machines, whose tensors this worker reads, and which get its replies (ADR 0041).

An address comes from the registry in Redis, never from an entry.
"""

import asyncio
import itertools
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec

from qinfer.core.messages import MemoryReference
from qinfer.core.settings_sections import SegmentSettings
from qinfer.errors import BrokerUnavailable, CorruptEntry, SettingsError
from qinfer.segments.link import (
    MOST_NAME_BYTES,
    MOST_READ_BYTES,
    MOST_REPLY_BYTES,
    SECRET_BYTES,
    STALLED_S,
    TICK_S,
    MessageKind,
    TensorLink,
    fingerprint,
    is_proof,
    network_proof,
)
from qinfer.segments.reading import AGAIN_S, OVER, PROCESS_NAME, TensorsGone, TensorsUnreachable
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)

CONNECTED_WITHIN_S = 3.0
READ_WITHIN_S = 10.0
LEAST_BYTES_PER_S = 2**20
"""Large reads have so much more time; one of which nothing comes is given up before."""

REGISTRY_EVERY_S = 3.0
_MOST_READS = 64
_MOST_OWNERS = 1024


class TensorConnector:
    """Connects to the owners that `announced` names as `<name>@<host>:<port>`, except to those that are near."""

    def __init__(
        self,
        settings: SegmentSettings,
        reader: str,
        kinds: tuple[str, ...],
        is_near: Callable[[str], bool],
        announced: Callable[[], Awaitable[Sequence[str]]],
    ) -> None:
        self.reader = reader
        self.secret = b""
        """Without it, no connection is made."""

        self._kinds = kinds
        self._is_near = is_near
        self._announced = announced
        self._context = _tls(settings)
        self._addresses: dict[str, str] = {}
        self._links: dict[str, OwnerAtReader] = {}
        self._connecting: set[str] = set()
        self._left_until_s: dict[str, float] = {}

    def knows(self, owner: str) -> bool:
        """Returns whether a process listens for other machines, and shares no directory with this one."""
        return (owner in self._links or owner in self._addresses) and not self._is_near(owner)

    async def read(self, reference: MemoryReference) -> Bytes:
        """Returns a copy of a request's tensors.

        Raises:
            TensorsGone: The request has ended.
            TensorsUnreachable: The tensors do not come, here and now.
            CorruptEntry: The reference is too large.
        """
        if not 0 < reference.size <= MOST_READ_BYTES:
            raise CorruptEntry(f"{reference.size} bytes of tensors are no part of a request")
        link = self._links.get(reference.owner)
        if link is None:
            raise TensorsUnreachable(f"{reference.owner} is on another machine, and not connected")
        return await link.read(reference)

    def send_reply(self, reader: str, encode: Callable[[], bytes]) -> "asyncio.Future[bool] | None":
        """Sends a reply to a caller by name; the result tells whether it came. `None` = it can't be sent."""
        link = next((link for link in self._links.values() if link.replies_to == reader), None)
        return None if link is None else link.send_reply(encode())

    async def run(self) -> None:
        """Connects until cancelled."""
        loop = asyncio.get_running_loop()
        asked_s = 0.0
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    if loop.time() >= asked_s + REGISTRY_EVERY_S:
                        asked_s = loop.time()
                        with suppress(BrokerUnavailable):  # the last ones stay
                            self._addresses = self._read_registry(await self._announced())
                    for name in self._missing(loop.time()):
                        self._connecting.add(name)
                        tasks.create_task(self._connect(name, self._addresses[name]))
                    await asyncio.sleep(TICK_S)
                    for link in list(self._links.values()):
                        link.tick()
        finally:
            for link in list(self._links.values()):
                link.abort()

    def _read_registry(self, announced: Sequence[str]) -> dict[str, str]:
        found = [one.partition("@") for one in announced[:_MOST_OWNERS]]
        addresses = {name: at for name, _, at in found if PROCESS_NAME.fullmatch(name) and name.startswith(self._kinds)}
        self._left_until_s = {name: until_s for name, until_s in self._left_until_s.items() if name in addresses}
        return addresses

    def _missing(self, now_s: float) -> list[str]:
        if not self.secret:
            return []
        taken = self._links.keys() | self._connecting
        return [
            name
            for name in self._addresses
            if name not in taken and not self._is_near(name) and now_s >= self._left_until_s.get(name, 0.0)
        ]

    async def _connect(self, name: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        link = OwnerAtReader(self, name)
        reason = "it gave no proof"
        try:
            async with asyncio.timeout(CONNECTED_WITHIN_S):
                await loop.create_connection(lambda: link, host, int(port), ssl=self._context)
                await link.known.wait()
        except TimeoutError:
            reason = f"no answer within {CONNECTED_WITHIN_S:g} s"
        except (OSError, OverflowError, ValueError) as error:
            reason = str(error)
        finally:
            self._connecting.discard(name)
            if not link.peer:
                link.abort()
        if link.peer:
            logger.info("tensors on another machine are read", extra={"owner": name, "address": address})
        else:
            self._left_until_s[name] = loop.time() + AGAIN_S
            logger.warning("no connection to tensors", extra={"owner": name, "address": address, "reason": reason})

    def proven(self, name: str, link: "OwnerAtReader") -> None:
        """Adds an owner."""
        self._links[name] = link
        link.ended = lambda: self._ended(name, link)

    def _ended(self, name: str, link: "OwnerAtReader") -> None:
        del self._links[name]
        if link.has_stalled:
            self._left_until_s[name] = asyncio.get_running_loop().time() + AGAIN_S
        logger.warning("connection to tensors ended", extra={"owner": name, "stalled": link.has_stalled})


class OwnerAtReader(TensorLink):
    """An owner, as its reader has it; `replies_to` is the name by which it gets replies."""

    def __init__(self, connector: TensorConnector, owner: str) -> None:
        super().__init__()
        self.replies_to = ""
        self.has_stalled = False
        self._connector, self._owner = connector, owner
        self._certificate = self._challenges = b""
        self._numbers = itertools.count(1)
        self._turns = asyncio.Semaphore(_MOST_READS)
        self._reads: dict[int, asyncio.Future[memoryview]] = {}
        self._replies: dict[int, tuple[asyncio.Future[bool], int]] = {}
        self._progressed_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Looks at the certificate, to which the proofs are bound."""
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        self._certificate = b"" if tls is None else fingerprint(tls.getpeercert(binary_form=True))

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all reads, and tells that no reply came."""
        reads, self._reads = self._reads, {}
        for read in reads.values():
            if not read.done():
                read.set_exception(TensorsUnreachable(f"the connection to {self._owner} ended"))
        replies, self._replies = self._replies, {}
        for came, _ in replies.values():
            if not came.done():
                came.set_result(False)
        super().connection_lost(exc)

    async def read(self, reference: MemoryReference) -> Bytes:
        """See `TensorConnector.read`."""
        async with self._turns:
            if not self.is_open:
                raise TensorsUnreachable(f"the connection to {self._owner} ended")
            number = next(self._numbers)
            if not self._reads:
                self.progressed()
            read: asyncio.Future[memoryview] = self._loop.create_future()
            self._reads[number] = read
            self.expect(number, reference.size)
            place = reference.segment, reference.offset, reference.size, reference.generation
            self.send(MessageKind.READ, number, msgspec.msgpack.encode(place))
            try:
                async with asyncio.timeout(READ_WITHIN_S + self.incoming_bytes / LEAST_BYTES_PER_S):
                    return await read
            except TimeoutError:
                self.has_stalled = True
                self.abort()
                raise TensorsUnreachable(f"tensors of {self._owner} came too slowly") from None
            finally:
                self._reads.pop(number, None)  # a cancelled one still comes

    def send_reply(self, reply: bytes) -> "asyncio.Future[bool] | None":
        """See `TensorConnector.send_reply`."""
        unconfirmed = sum(size for _, size in self._replies.values())
        if not self.is_open or not 0 < len(reply) <= MOST_REPLY_BYTES - unconfirmed:
            return None
        number = next(self._numbers)
        if not self.send_chunks(number, memoryview(reply), lambda: True):
            return None
        came: asyncio.Future[bool] = self._loop.create_future()
        self._replies[number] = came, len(reply)
        return came

    def is_stalled(self, now_s: float) -> bool:
        """Returns whether tensors that were asked for do not come, too."""
        if super().is_stalled(now_s) or (self._reads and now_s - self._progressed_s > STALLED_S):
            self.has_stalled = True
        return self.has_stalled

    def progressed(self) -> None:
        """Takes note that tensors come."""
        self._progressed_s = self._loop.time()

    def obey(self, kind: MessageKind, number: int, body: bytes) -> bool:
        """See `TensorLink.obey`."""
        if not self.peer:
            return self._is_greeted(kind, body)
        if kind is MessageKind.GONE:
            self.progressed()
            self.forget(number)
            read = self._reads.get(number)
            if read is not None and not read.done():
                read.set_exception(TensorsGone(OVER))
        elif kind is MessageKind.CONFIRM:
            came, _ = self._replies.pop(number, (None, 0))
            if came is not None and not came.done():
                came.set_result(True)
        else:
            return kind is MessageKind.ALIVE
        return True

    def came(self, number: int, whole: memoryview) -> None:
        """Ends a read."""
        read = self._reads.get(number)
        if read is not None and not read.done():
            read.set_result(whole)

    def _is_greeted(self, kind: MessageKind, body: bytes) -> bool:
        secret, name = self._connector.secret, self._connector.reader
        if kind is MessageKind.CHALLENGE and not self._challenges and len(body) == SECRET_BYTES:
            own = secrets.token_bytes(SECRET_BYTES)
            self._challenges = body + own
            given = network_proof(secret, "reader", self._challenges, self._certificate, self._owner, name)
            self.send(MessageKind.PROOF, body=own + given + name.encode())
            return True
        told = body[SECRET_BYTES:].decode(errors="replace")
        expected = network_proof(secret, "owner", self._challenges, self._certificate, self._owner, name, told)
        is_right = kind is MessageKind.WELCOME and bool(self._challenges) and 0 < len(told) <= MOST_NAME_BYTES
        if not is_right or not is_proof(body[:SECRET_BYTES], expected):
            return False
        self.peer, self.replies_to = self._owner, told
        self._connector.proven(self._owner, self)
        self.known.set()
        self.send(MessageKind.ALIVE)
        return True


def _tls(settings: SegmentSettings) -> ssl.SSLContext | None:
    """Returns how to speak TLS; the proofs name the certificate, so its host need not match."""
    if not settings.tls_ca_file:
        return None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        context.load_verify_locations(settings.tls_ca_file)
    except (OSError, ssl.SSLError) as error:
        text = error.strerror or str(error)
        raise SettingsError(f"QINFER_SEGMENTS__TLS_CA_FILE '{settings.tls_ca_file}' can't be used: {text}") from None
    return context
