"""The memory that a gateway or worker shares: its own, that of its machine, and that of other machines.

`TensorListener` is the TCP port at which workers of other machines read the tensors of this process, and send replies
(ADR 0041).
"""

import asyncio
import logging
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from qinfer.core.settings_sections import SegmentSettings
from qinfer.errors import BrokerUnavailable, SettingsError
from qinfer.segments.connector import TensorConnector
from qinfer.segments.link import (
    MOST_NAME_BYTES,
    MOST_READ_BYTES,
    MOST_REPLY_BYTES,
    SECRET_BYTES,
    TICK_S,
    MessageKind,
    TensorLink,
    fingerprint_of_file,
    is_proof,
    network_proof,
)
from qinfer.segments.memory import OwnMemory
from qinfer.segments.reading import SegmentReader
from qinfer.segments.shelf import GENERATION, Shelf
from qinfer.segments.slabs import HEADER_BYTES
from qinfer.tensors import Bytes

logger = logging.getLogger(__name__)

PROVEN_WITHIN_S = 5.0
_MOST_UNPROVEN = 64
_MOST_READERS = 1024
_ACCEPT_AGAIN_S = 1.0

Announce = Callable[[str], Coroutine[Any, Any, Any]]
"""Tells others `<name>@<host>:<port>` until cancelled."""


class TensorListener:
    """Serves the tensors in `memory`; `reader` is the name by which this process gets replies.

    `changed` is called when a reader comes or goes, `replied` gets the replies.
    """

    def __init__(self, memory: OwnMemory, reader: str, settings: SegmentSettings) -> None:
        self.memory = memory
        self.reader = reader
        self.secret = b""
        """Without it, no reader is accepted."""

        self.changed: Callable[[], None] = lambda: None
        self.replied: Callable[[Bytes], None] = lambda _: None
        self.links: set[ReaderAtOwner] = set()
        self._unproven: dict[asyncio.Task[None], None] = {}
        self._context, self.certificate = _tls(settings)
        try:
            address = settings.listen_host, settings.listen_port
            family = socket.AF_INET6 if ":" in settings.listen_host else socket.AF_INET
            self._socket = socket.create_server(address, family=family, backlog=128)
        except OSError as error:
            raise SettingsError(
                f"QINFER_SEGMENTS__LISTEN_HOST '{settings.listen_host}:{settings.listen_port}' can't be used: "
                f"{error.strerror}"
            ) from None
        self._socket.setblocking(False)
        port = self._socket.getsockname()[1]
        self.address = f"{settings.advertise_host or settings.listen_host}:{port}"

    @property
    def readers(self) -> frozenset[str]:
        """The names of the connected readers."""
        return frozenset([link.peer for link in self.links])

    async def run(self, announce: Announce) -> None:
        """Accepts readers until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(announce(f"{self.memory.owner}@{self.address}"))
                tasks.create_task(self._accept(tasks))
                while True:
                    await asyncio.sleep(TICK_S)
                    for link in list(self.links):
                        link.tick()
        finally:
            self.close()

    def close(self) -> None:
        """Ends all connections; may be repeated."""
        self._socket.close()
        for link in list(self.links):
            link.abort()

    async def _accept(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError:  # no descriptor is left
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            if not self.secret or len(self.links) >= _MOST_READERS:
                connection.close()
                continue
            if len(self._unproven) >= _MOST_UNPROVEN:
                next(iter(self._unproven)).cancel()
            task = tasks.create_task(self._admit(connection))
            self._unproven[task] = None
            task.add_done_callback(self._unproven.pop)
            await asyncio.sleep(0)  # accepting does not wait, and others must go on

    async def _admit(self, connection: socket.socket) -> None:
        """Waits for the proof of a reader."""
        link = ReaderAtOwner(self)
        with suppress(OSError, TimeoutError, ssl.SSLError):
            try:
                async with asyncio.timeout(PROVEN_WITHIN_S):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    loop = asyncio.get_running_loop()
                    await loop.connect_accepted_socket(lambda: link, connection, ssl=self._context)
                    await link.known.wait()
            finally:
                if link not in self.links:
                    link.abort()
                    connection.close()

    def proven(self, link: "ReaderAtOwner") -> None:
        """Adds a reader, in place of an earlier connection of it."""
        for other in [one for one in self.links if one.peer == link.peer]:
            other.abort()
        self.links.add(link)
        link.ended = lambda: self._ended(link)
        self.changed()

    def _ended(self, link: "ReaderAtOwner") -> None:
        self.links.discard(link)
        self.changed()


class ReaderAtOwner(TensorLink):
    """A reader, as its owner has it."""

    def __init__(self, listener: TensorListener) -> None:
        super().__init__()
        self._listener = listener
        self._challenge = secrets.token_bytes(SECRET_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends a challenge."""
        super().connection_made(transport)
        self.send(MessageKind.CHALLENGE, body=self._challenge)

    def is_welcome(self, nbytes: int) -> bool:
        """Returns whether a reply may come beside others."""
        return 0 < nbytes <= MOST_REPLY_BYTES - self.incoming_bytes

    def obey(self, kind: MessageKind, number: int, body: bytes) -> bool:
        """See `TensorLink.obey`."""
        if not self.peer:
            return kind is MessageKind.PROOF and self._is_proven(body)
        if not self.known.is_set():  # it knows that it is connected, and may be told of references
            self.known.set()
            self._listener.proven(self)
        if kind is MessageKind.READ:
            return self._is_sent(number, body)
        return kind is MessageKind.ALIVE

    def came(self, number: int, whole: memoryview) -> None:
        """Hands a reply over, and confirms it."""
        self._listener.replied(whole)
        self.send(MessageKind.CONFIRM, number)

    def _is_proven(self, body: bytes) -> bool:
        challenge, given = body[:SECRET_BYTES], body[SECRET_BYTES : 2 * SECRET_BYTES]
        name = body[2 * SECRET_BYTES :].decode(errors="replace")
        listener, challenges = self._listener, self._challenge + challenge
        secret, owner, certificate = listener.secret, listener.memory.owner, listener.certificate
        if not secret or not 0 < len(name) <= MOST_NAME_BYTES:
            return False
        if not is_proof(given, network_proof(secret, "reader", challenges, certificate, owner, name)):
            return False
        told = listener.reader
        own = network_proof(secret, "owner", challenges, certificate, owner, name, told)
        self.peer = name
        self.send(MessageKind.WELCOME, body=own + told.encode())
        return True

    def _is_sent(self, number: int, body: bytes) -> bool:
        try:
            place = msgspec.msgpack.decode(body, type=tuple[int, int, int, int])
        except msgspec.MsgspecError:
            return False
        segment, offset, size, generation = place
        if min(place) < 0 or not 0 < size <= MOST_READ_BYTES or not generation:
            return False
        own = self._listener.memory.segments.get(segment)
        begin = offset + HEADER_BYTES
        if own is None or begin + size > own.size:
            self.send(MessageKind.GONE, number)
            return True
        memory = own.memory
        return self.send_chunks(
            number,
            memoryview(memory)[begin : begin + size],
            lambda: bool(GENERATION.unpack_from(memory, offset)[0] == generation),
        )


def _tls(settings: SegmentSettings) -> tuple[ssl.SSLContext | None, bytes]:
    """Returns how to speak TLS, and the digest of the certificate."""
    if not settings.tls_certfile:
        return None, b""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(settings.tls_certfile, settings.tls_keyfile)
        return context, fingerprint_of_file(settings.tls_certfile)
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise SettingsError(f"QINFER_SEGMENTS__TLS_CERTFILE '{settings.tls_certfile}' can't be used: {text}") from None


SECRET_EVERY_S = 5.0
"""Redis may have lost the secret, and have another."""


class TensorRegistry(Protocol):
    """Where processes say at which address others reach their tensors, while they live."""

    def announce_tensors(self, process: str) -> Coroutine[Any, Any, Any]:
        """Tells `<name>@<host>:<port>` until cancelled."""
        ...

    async def announced_tensors(self) -> Sequence[str]:
        """Returns what live processes tell."""
        ...


class SegmentSharing:
    """The memory of this process, `name`, and of those whose names begin with one of `kinds`.

    `reader` is the name by which they know this process, and to which replies are addressed.
    `secret` returns what these processes know and code of models does not. With a `registry`, this process listens for
    other machines if the settings say so, and a worker connects to those that do.
    """

    def __init__(
        self,
        settings: SegmentSettings,
        name: str,
        kinds: tuple[str, ...],
        secret: Callable[[], Awaitable[bytes]],
        *,
        reader: str,
        registry: TensorRegistry | None = None,
    ) -> None:
        directory = Path(settings.directory)
        self._secret, self._registry = secret, registry
        self.own = OwnMemory(name, settings.most_bytes)
        self.far: TensorConnector | None = None
        self.listener: TensorListener | None = None
        if registry is not None and name.startswith("worker-"):  # its connections bring replies to gateways
            self.far = TensorConnector(settings, reader, kinds, self._is_near, registry.announced_tensors)
        if registry is not None and settings.listen_host:
            self.listener = TensorListener(self.own, reader, settings)
        self.shelf = Shelf(directory, self.own)
        reads_own = name.startswith(kinds)
        self.shelf.itself = reader if reads_own else ""
        self.others = SegmentReader(directory, reader, kinds, self.shelf if reads_own else None)

    @property
    def readers(self) -> AbstractSet[str]:
        """The names of the processes that read the memory of this one, and of those that did until lately."""
        return self.shelf.known if self.listener is None else self.shelf.known | self.listener.readers

    def serve_readers(self, changed: Callable[[], None], replied: Callable[[Bytes], None]) -> None:
        """Calls `changed` when a reader comes or goes; `replied` gets replies of other machines."""
        self.shelf.changed = changed
        if self.listener is not None:
            self.listener.changed, self.listener.replied = changed, replied

    async def run(self) -> None:
        """Finds other processes, and gives back idle memory, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.own.run())
            tasks.create_task(self.others.run())
            if self.listener is not None and self._registry is not None:
                tasks.create_task(self.listener.run(self._registry.announce_tensors))
            if self.far is not None:
                tasks.create_task(self.far.run())
            while True:
                with suppress(BrokerUnavailable):  # the last one stays
                    self._use(await self._secret())
                await asyncio.sleep(SECRET_EVERY_S)

    def close(self) -> None:
        """Ends all connections."""
        if self.listener is not None:
            self.listener.close()
        self.shelf.close()
        self.own.close()

    def _is_near(self, owner: str) -> bool:
        return self.others.is_near(owner)

    def _use(self, secret: bytes) -> None:
        self.shelf.secret = self.others.secret = secret
        self.others.scan()
        if self.listener is not None:
            self.listener.secret = secret
        if self.far is not None:
            self.far.secret = secret
