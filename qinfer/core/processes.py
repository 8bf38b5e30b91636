"""Messages over pipes between a process and a child that it starts for itself, and the names of signals.

The module imports nothing that takes time or memory: such children are to be small.
"""

import signal
import struct
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from asyncio import StreamReader

LENGTH = struct.Struct("<I")
"""Each message is msgpack, and begins with its length."""
MAX_BYTES = 2**32 - 1
"""The longest message there can be."""


def packed(message: msgspec.Struct) -> bytes:
    """Returns a message as it travels."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


async def received(stream: "StreamReader", max_bytes: int = MAX_BYTES) -> bytes:
    """Waits for a message; returns it without its length.

    Raises:
        asyncio.IncompleteReadError: The other process is gone.
        ValueError: The message is longer than `max_bytes`.
    """
    (size,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    if size > max_bytes:
        raise ValueError(f"a message of {size} bytes; at most {max_bytes}")
    return await stream.readexactly(size)


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as `SIGSEGV`; empty for one that has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
