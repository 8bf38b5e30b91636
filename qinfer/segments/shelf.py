"""The shelf: a Unix socket at which processes of this machine get the descriptors of a process's segments.

    owner    checks the user; a challenge ─▶         reader   its name, and a proof ─▶
             (number, bytes) with a descriptor, of each segment ─▶    generations that it has read ─▶

The proof is an HMAC with the secret that gateways and workers have in Redis: code of models may run as the same user,
and may not read the tensors of others. It names the owner and the process at the other end, so that no process in
between can pass it on.

The connection stays: its end is the end of a process. A segment's descriptor is sent before its first reference, so a
reader finds it in the socket when it has the reference. Processes that share a directory share memory.
"""

import asyncio
import hmac
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from qinfer.errors import SettingsError
from qinfer.segments.memory import OwnMemory, OwnSegment

logger = logging.getLogger(__name__)

SUFFIX = ".memory"
SEGMENT = struct.Struct("<QQ")
"""A segment's number and size, in a packet with its descriptor."""

GENERATION = struct.Struct("<Q")
"""One of those that a reader has read, in packets of `MOST_GENERATIONS` at most."""

MOST_GENERATIONS = 256
CANT_READ = b"\0"
"""Sent by a reader that could not map a segment, and lives on."""

CHALLENGE_BYTES = 32
_MAC_BYTES = 32
_PROCESS = struct.Struct("<I")
_MOST_NAME_BYTES = 256
_MOST_READERS = 1024
_MOST_UNPROVEN = 64
_ACCEPT_AGAIN_S = 1.0
AWAY_S = 30.0
"""A reader that has ended is no live worker by then."""

_CREDENTIALS = struct.Struct("3i")


class Shelf:
    """Hands out the segments of `memory`; `changed` is called when a reader comes or goes.

    `confirmed` gets the generations that a reader has read.
    """

    def __init__(self, directory: Path, memory: OwnMemory) -> None:
        self._path = socket_path(directory, memory.owner)
        self.memory = memory
        self.changed: Callable[[], None] = lambda: None
        self.confirmed: Callable[[Sequence[int]], None] = lambda _: None
        self.itself = ""
        """The name by which this process reads its own memory; empty = it does not."""

        self.secret = b""
        """Without it, no reader is accepted."""

        self._loop = asyncio.get_running_loop()
        self._readers: dict[socket.socket, str] = {}
        self._challenges: dict[socket.socket, bytes] = {}
        self._away: set[str] = set()
        self._listener = _listening(directory, self._path)
        memory.opened = self._send_to_all
        self._timer: asyncio.TimerHandle | None = None
        self._listen()

    @property
    def readers(self) -> frozenset[str]:
        """The names of the readers that have all segments."""
        return frozenset(filter(None, (self.itself, *self._readers.values())))

    @property
    def known(self) -> AbstractSet[str]:
        """The names of the readers, and of those whose connections ended lately: they have ended, or connect again."""
        return self.readers | self._away

    def close(self) -> None:
        """Ends all connections: workers then know that no request of this process is pending."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for connection in list(self._readers):
            self._forget(connection)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left, and the listener stays readable
            self._loop.remove_reader(self._listener)
            self._timer = self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
            return
        with suppress(OSError):
            connection.setblocking(False)
            if not self.secret or len(self._readers) >= _MOST_READERS or not is_own(connection):
                connection.close()
                return
            if len(self._challenges) >= _MOST_UNPROVEN:
                self._forget(next(iter(self._challenges)))
            self._readers[connection] = ""
            self._challenges[connection] = challenge = secrets.token_bytes(CHALLENGE_BYTES)
            self._loop.add_reader(connection, self._hear, connection)
            connection.send(challenge)

    def _hear(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(GENERATION.size * MOST_GENERATIONS)
        except BlockingIOError:
            return
        except OSError:  # it has closed the connection without reading all
            packet = CANT_READ
        reader = self._readers[connection]
        if reader and packet and not len(packet) % GENERATION.size:
            self.confirmed([generation for (generation,) in GENERATION.iter_unpack(packet)])
        elif reader:
            self._forget(connection, is_away=not packet)
        elif (challenge := self._challenges.pop(connection, None)) is None or (
            name := name_of(packet, self.secret, challenge, self.memory.owner, peer_of(connection).process)
        ) is None:
            self._forget(connection)
        else:
            self._take_in(connection, name)

    def _take_in(self, connection: socket.socket, name: str) -> None:
        self._readers[connection] = name
        try:
            for number, segment in self.memory.segments.items():
                self._send([connection], number, segment)
        except OSError:  # no descriptor is left
            self._forget(connection, is_away=False)
        self.changed()

    def _send_to_all(self, number: int, segment: OwnSegment) -> None:
        self._send([connection for connection, name in self._readers.items() if name], number, segment)

    def _send(self, connections: Sequence[socket.socket], number: int, segment: OwnSegment) -> None:
        descriptor = segment.open_for_readers()
        try:
            for connection in connections:
                try:
                    socket.send_fds(connection, [SEGMENT.pack(number, segment.size)], [descriptor])
                except OSError:  # it has ended, or does not read
                    self._forget(connection)
        finally:
            os.close(descriptor)

    def _forget(self, connection: socket.socket, *, is_away: bool = True) -> None:
        self._challenges.pop(connection, None)
        if (name := self._readers.pop(connection, None)) is not None:
            self._loop.remove_reader(connection)
            connection.close()
            if name and is_away:
                self._away.add(name)
                self._loop.call_later(AWAY_S, self._stays_away, name)
            self.changed()

    def _stays_away(self, name: str) -> None:
        self._away.discard(name)
        self.changed()


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Returns a short name of a socket, whose own name may have more bytes than fit (unix(7))."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def socket_path(directory: Path, owner: str) -> Path:
    """Returns the socket of a process."""
    return directory / f"{owner}{SUFFIX}"


class Peer(NamedTuple):
    """The other end of a connection; `process` is 0 if this process's namespace does not have it."""

    process: int
    user: int


def peer_of(connection: socket.socket) -> Peer:
    """Returns who is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return Peer(process, user)


def is_own(connection: socket.socket) -> bool:
    """Returns whether the other end is of this process's user."""
    return peer_of(connection).user == os.geteuid()


def proof(secret: bytes, challenge: bytes, owner: str, process: int, name: str) -> bytes:
    """Returns a reader's answer to a challenge of the owner, which it sees as `process`."""
    told = _PROCESS.pack(process) + name.encode()
    return hmac.digest(secret, challenge + owner.encode() + b"\0" + told, "sha256") + told


def name_of(packet: bytes, secret: bytes, challenge: bytes, owner: str, reader: int) -> str | None:
    """Returns the name of a reader whose proof is right; `reader` is its process, as the owner sees it."""
    begin = _MAC_BYTES + _PROCESS.size
    name = packet[begin:].decode(errors="replace")
    if not 0 < len(name) <= _MOST_NAME_BYTES:
        return None
    (process,) = _PROCESS.unpack(packet[_MAC_BYTES:begin])
    is_here = process == os.getpid() or (not process and not reader)  # of another namespace, both ways
    is_right = hmac.compare_digest(packet, proof(secret, challenge, owner, process, name))
    return name if is_here and is_right else None


def connected(path: Path) -> socket.socket:
    """Connects to a shelf; raises `OSError`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        with _address(path) as address:
            connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def owners(directory: Path) -> list[str]:
    """Returns the processes that hand out segments in a directory."""
    found = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        with suppress(OSError):
            connected(path).close()
            found.append(path.name.removesuffix(SUFFIX))
    return found


def _listening(directory: Path, path: Path) -> socket.socket:
    """Makes the directory, removes what killed processes have left in it, and listens."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = directory.stat()
        if about.st_mode & 0o077 or about.st_uid != os.geteuid():
            raise SettingsError(f"QINFER_SEGMENTS__DIRECTORY '{directory}' is open to others; make it yours, and 0700")
        for left in directory.glob(f"*{SUFFIX}"):
            try:
                connected(left).close()
            except ConnectionRefusedError:
                left.unlink(missing_ok=True)
            except OSError:
                continue
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        with _address(path) as address:
            listener.bind(address)
        listener.listen(128)
    except OSError as error:
        raise SettingsError(f"QINFER_SEGMENTS__DIRECTORY '{directory}' can't be used: {error.strerror}") from None
    return listener
