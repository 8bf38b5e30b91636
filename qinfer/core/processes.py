"""Child processes: messages over pipes, the names of signals, and what others may see of a process.

The module imports nothing that takes time or memory: such children are to be small.
"""

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from qinfer.core.environments import ALLOW_INSPECTION

if TYPE_CHECKING:
    from asyncio import StreamReader

LENGTH = struct.Struct("<I")
"""Each message is msgpack, and begins with its length."""
MAX_BYTES = 2**32 - 1
"""The longest message there can be."""

SWITCH_INTERVAL_S = 0.0001
"""How long a thread of a gateway or worker may wait for the GIL. Python's own 5 ms is longer than many a batch, and
each of a small request's four steps could wait so long for a thread that decodes or encodes."""

_PR_SET_DUMPABLE = 4  # linux/prctl.h
_UMASK = 0o027
_YES = frozenset({"1", "true", "t", "yes", "y", "on"})


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


def protect_process(environment: Mapping[str, str]) -> None:
    """Keeps others from this process's memory, environment and open files, and from the files that it makes.

    A model's code runs as the user of the programs, and could otherwise take their secrets from /proc, or as a debugger
    does. Root still may. The kernel dumps no core of such a process, and forgets all this with `exec` (prctl(2),
    PR_SET_DUMPABLE): each program calls this first, before it reads its settings. Other systems than Linux ignore it.
    Files of models, outputs of jobs and traces are those of tenants: what this process and its children make has mode
    0640, directories 0750, at most; a stricter umask stays.

    Args:
        environment: The variables of this process; `QINFER_ALLOW_INSPECTION=true` leaves memory, environment and open
            files as they are.
    """
    os.umask(os.umask(_UMASK) | _UMASK)
    allowed = next((value for name, value in environment.items() if name.upper() == ALLOW_INSPECTION), "")
    if sys.platform == "linux" and allowed.strip().lower() not in _YES:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
