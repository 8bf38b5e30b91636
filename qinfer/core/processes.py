"""Child processes: messages, signals, limits and protection.

It imports nothing large, for small children.
"""

import ctypes
import os
import queue
import signal
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from qinfer.core.environments import ALLOW_INSPECTION

LENGTH = struct.Struct("<I")
"""The length in front of each message, which is msgpack."""

LINE_BYTES = 16 * 1024
"""The parent reads longer lines of output in pieces."""

SWITCH_INTERVAL_S = 0.0001
"""A thread's longest wait for the GIL. Python's 5 ms exceed many batches' time, and a small request's four steps might
each wait that long.
"""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_DUMPABLE = 4
_UNREAD = 64
_UMASK = 0o027
_YES = frozenset({"1", "true", "t", "yes", "y", "on"})


def packed(message: msgspec.Struct) -> bytes:
    """Returns a message with its length."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def parent_messages(on_end: Callable[[], object] = lambda: None) -> "queue.Queue[bytes]":
    """Returns the parent's messages, and an empty one after `on_end`; ignores signals, which the parent handles."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    messages: queue.Queue[bytes] = queue.Queue(_UNREAD)
    threading.Thread(target=_read_messages, args=(messages, on_end), name="messages", daemon=True).start()
    return messages


def _read_messages(messages: "queue.Queue[bytes]", on_end: Callable[[], object]) -> None:
    # A parent that dies with an unread answer resets the connection.
    with suppress(ConnectionError, EOFError):
        while True:
            messages.put(_read_input(*LENGTH.unpack(_read_input(LENGTH.size))))
    on_end()
    messages.put(b"")


def _read_input(size: int) -> bytes:
    """Reads without a buffer, whose lock Python would need to exit."""
    found = bytearray()
    while len(found) < size:
        if not (some := os.read(0, size - len(found))):
            raise EOFError
        found += some
    return bytes(found)


def signal_name(number: int) -> str:
    """Returns a signal's name, such as `SIGSEGV`, if it has one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process with its parent; exits if that is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def data_bytes() -> int:
    """Returns the memory that `RLIMIT_DATA` counts."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


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
