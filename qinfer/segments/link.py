"""A TCP connection on which a process of another machine reads tensors of the owner, and sends replies (ADR 0041).

    owner    a challenge ─▶                                  reader   a challenge, its name, and a proof ─▶
             the name that replies go to, and a proof ─▶
             chunks of tensors, or that they are gone ─▶              references ─▶
             confirmations of replies ─▶                              chunks of replies ─▶

The proofs are HMACs with the secret that gateways and workers have in Redis. They name both processes, and with TLS the
owner's certificate, so that no process in between can pass them on. Messages are bounded, and come piece by piece, so
that large tensors hold up neither event loop.
"""

import asyncio
import hashlib
import hmac
import ssl
import struct
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

CHUNK_BYTES = 256 * 1024
"""The most bytes of a message, and of what the event loop copies at once."""

MOST_REPLY_BYTES = 16 * 2**20
"""The most bytes of the replies of a reader that have come in part."""

MOST_READ_BYTES = 2**29
"""The most bytes of one reference; gateways receive less."""

SECRET_BYTES = 32
"""Bytes of a challenge, and of a proof."""

SILENT_S = 6.0
"""A peer that says nothing for so long has gone."""

STALLED_S = 2.0
"""Tensors of which nothing comes for so long will not come."""

TICK_S = 1.0
MOST_NAME_BYTES = 256
_MOST_SMALL_BYTES = SECRET_BYTES * 2 + MOST_NAME_BYTES
_MOST_TRANSFERS = 256
_HEAD = struct.Struct("<IIQB")
_LENGTH = struct.Struct("<H")


class MessageKind(IntEnum):
    """The content of a message; beside it are a number, its bytes, and those of the whole that a chunk is a part of."""

    CHALLENGE = 1
    PROOF = 2
    WELCOME = 3
    READ = 4
    CHUNK = 5
    GONE = 6
    CONFIRM = 7
    ALIVE = 8


class _Transfer(msgspec.Struct):
    number: int
    rest: memoryview
    whole: int
    is_current: Callable[[], bool]


class _Incoming(msgspec.Struct):
    whole: memoryview
    rest: memoryview


class TensorLink(asyncio.BufferedProtocol):
    """One end of a connection; `peer` is the name of the other process once it is proven, `ended` is called at the end.

    Messages are read into memory of their own, chunks into that of the whole.
    """

    def __init__(self) -> None:
        self.peer = ""
        self.is_open = False
        self.ended: Callable[[], None] = lambda: None
        self.known = asyncio.Event()
        """Set when the other process is proven, or the connection has ended."""

        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._head = bytearray(_HEAD.size)
        self._into = memoryview(self._head)
        self._begun: tuple[MessageKind, int, memoryview] | None = None
        self._incoming: dict[int, _Incoming] = {}
        self._outgoing = deque[_Transfer]()
        self._is_sending = self._is_paused = False
        self._heard_s = self._paused_s = self._ticked_s = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins."""
        self._transport = transport
        self._transport.set_write_buffer_limits(high=2 * CHUNK_BYTES)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends."""
        self.is_open = False
        self._outgoing.clear()
        self._incoming.clear()
        self.known.set()
        self.ended()

    def abort(self) -> None:
        """Ends the connection at once."""
        self._begun, self._into = None, memoryview(self._head)
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def pause_writing(self) -> None:
        """Sends nothing more; the other process reads slowly."""
        self._is_paused, self._paused_s = True, self._loop.time()

    def resume_writing(self) -> None:
        """Sends on."""
        self._is_paused = False
        self._send_soon()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the memory of the next bytes."""
        return self._into

    def buffer_updated(self, nbytes: int) -> None:
        """Takes bytes."""
        self._heard_s = self._loop.time()
        self._into = self._into[nbytes:]
        if self._begun is not None and self._begun[0] is MessageKind.CHUNK:
            self.progressed()
        if not self._into and not self._is_understood():
            self.abort()

    def _is_understood(self) -> bool:
        """Begins or ends a message; returns false if it breaks the rules."""
        if self._begun is None:
            nbytes, whole, number, kind = _HEAD.unpack(self._head)
            try:
                known = MessageKind(kind)
            except ValueError:
                return False
            room = self._room(known, number, nbytes, whole)
            if room is None:
                return False
            if nbytes:
                self._begun, self._into = (known, number, room), room
                return True
        else:
            known, number, room = self._begun
        self._begun, self._into = None, memoryview(self._head)
        if known is not MessageKind.CHUNK:
            return self.obey(known, number, bytes(room))
        incoming = self._incoming[number]
        if not incoming.rest:
            del self._incoming[number]
            self.came(number, incoming.whole.toreadonly())
        return True

    def _room(self, kind: MessageKind, number: int, nbytes: int, whole: int) -> memoryview | None:
        if kind is not MessageKind.CHUNK:
            return memoryview(bytearray(nbytes)) if nbytes <= _MOST_SMALL_BYTES else None
        if not self.peer or not 0 < nbytes <= CHUNK_BYTES:
            return None
        incoming = self._incoming.get(number)
        if incoming is None and self.is_welcome(whole):
            incoming = self.expect(number, whole)
        if incoming is None or nbytes > len(incoming.rest):
            return None
        room, incoming.rest = incoming.rest[:nbytes], incoming.rest[nbytes:]
        return room

    def expect(self, number: int, nbytes: int) -> _Incoming:
        """Makes room for the chunks of so many bytes."""
        memory = np.empty(nbytes, np.uint8).data
        incoming = self._incoming[number] = _Incoming(memory, memory)
        return incoming

    def forget(self, number: int) -> None:
        """Expects nothing more of a number."""
        self._incoming.pop(number, None)

    @property
    def incoming_bytes(self) -> int:
        """Bytes of all that has come in part."""
        return sum(len(one.whole) for one in self._incoming.values())

    def is_welcome(self, nbytes: int) -> bool:
        """Returns whether so many bytes may come that were not asked for."""
        return False

    def progressed(self) -> None:
        """Takes note that a part of a chunk has come."""

    @abstractmethod
    def obey(self, kind: MessageKind, number: int, body: bytes) -> bool:
        """Takes a message; returns false if it breaks the rules."""

    @abstractmethod
    def came(self, number: int, whole: memoryview) -> None:
        """Takes all chunks of one number."""

    def send(self, kind: MessageKind, number: int = 0, body: bytes = b"") -> None:
        """Sends a small message."""
        if self.is_open:
            self._transport.write(_HEAD.pack(len(body), 0, number, kind) + body)

    def send_chunks(self, number: int, whole: memoryview, is_current: Callable[[], bool]) -> bool:
        """Sends bytes piece by piece, by turns with others, as long as they are current; false = too many wait."""
        if len(self._outgoing) >= _MOST_TRANSFERS:
            return False
        self._outgoing.append(_Transfer(number, whole, len(whole), is_current))
        self._send_soon()
        return True

    def _send_soon(self) -> None:
        if self._outgoing and not self._is_sending and not self._is_paused:
            self._is_sending = True
            self._loop.call_soon(self._send_next)

    def _send_next(self) -> None:
        self._is_sending = False
        if not self._outgoing or self._is_paused or not self.is_open:
            return
        transfer = self._outgoing.popleft()
        if not transfer.is_current():
            self.send(MessageKind.GONE, transfer.number)
        else:
            chunk = bytes(transfer.rest[:CHUNK_BYTES])  # its memory may be used again before it is sent
            head = _HEAD.pack(len(chunk), transfer.whole, transfer.number, MessageKind.CHUNK)
            self._transport.writelines([head, chunk])
            transfer.rest = transfer.rest[len(chunk) :]
            if transfer.rest:
                self._outgoing.append(transfer)
        self._send_soon()

    def tick(self) -> None:
        """Says that this process lives, and ends the connection if the other one does not, or reads nothing."""
        now_s = self._loop.time()
        was_late, self._ticked_s = now_s - self._ticked_s > 2 * TICK_S, now_s
        if was_late:  # this process was stopped, and has not looked yet
            return
        if self.is_stalled(now_s):
            self.abort()
        elif not self._is_paused:
            self.send(MessageKind.ALIVE)

    def is_stalled(self, now_s: float) -> bool:
        """Returns whether the other process has gone, or reads nothing."""
        return now_s - self._heard_s > SILENT_S or (self._is_paused and now_s - self._paused_s > SILENT_S)


def network_proof(secret: bytes, role: str, challenges: bytes, certificate: bytes, *names: str) -> bytes:
    """Returns the answer to a challenge, for both names and the owner's certificate (empty without TLS)."""
    words = [role.encode(), challenges, certificate, *[name.encode() for name in names]]
    key = hmac.digest(secret, b"tensors of another machine", "sha256")
    return hmac.digest(key, b"".join([_LENGTH.pack(len(word)) + word for word in words]), "sha256")


def is_proof(given: bytes, expected: bytes) -> bool:
    """Compares proofs in constant time."""
    return hmac.compare_digest(given, expected)


def fingerprint(certificate: bytes) -> bytes:
    """Returns the digest of a certificate (DER)."""
    return hashlib.sha256(certificate).digest()


def fingerprint_of_file(path: str) -> bytes:
    """Returns the digest of the first certificate of a PEM file; raises `OSError` or `ValueError`."""
    with open(path, encoding="ascii") as file:
        text = file.read()
    begin, end = text.index(ssl.PEM_HEADER), text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
    return fingerprint(ssl.PEM_cert_to_DER_cert(text[begin:end]))
