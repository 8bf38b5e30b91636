"""Child processes: messages over pipes, names of signals, and protection.

It imports nothing large, for small children.
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
"""The length in front of each message, which is msgpack."""
MAX_BYTES = 2**32 - 1

SWITCH_INTERVAL_S = 0.0001
"""A thread's longest wait for the GIL. Python's 5 ms exceed many batches' time, and a small request's four steps might
each wait that long.
"""

_PR_SET_DUMPABLE = 4  # linux/prctl.h
_UMASK = 0o027
_YES = frozenset({"1", "true", "t", "yes", "y", "on"})


def packed(message: msgspec.Struct) -> bytes:
    """Returns a message with its length."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


async def received(stream: "StreamReader", max_bytes: int = MAX_BYTES) -> bytes:
    """Waits for a message without its length; `ValueError` above `max_bytes`."""
    (size,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    if size > max_bytes:
        raise ValueError(f"a message of {size} bytes; at most {max_bytes}")
    return await stream.readexactly(size)


def signal_name(number: int) -> str:
    """Returns a signal's name, such as `SIGSEGV`, if it has one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def protect_process(environment: Mapping[str, str]) -> None:
    """Protects this process's memory, environment and files from other processes of the same user.

    A model's code runs as that user, and could read secrets in /proc or as a debugger; root still can. The kernel dumps
    no core of a protected process, and drops the protection at `exec` (prctl(2), PR_SET_DUMPABLE): each program calls
    this before it reads its settings. Only Linux has it; `QINFER_ALLOW_INSPECTION=true` switches it off.

    New files belong to tenants: they get mode 0640 at most, directories 0750; a stricter umask stays.
    """
    os.umask(os.umask(_UMASK) | _UMASK)
    allowed = next((value for name, value in environment.items() if name.upper() == ALLOW_INSPECTION), "")
    if sys.platform == "linux" and allowed.strip().lower() not in _YES:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
