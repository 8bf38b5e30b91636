"""`pb_utils.Logger`, and log records of a model's process."""

import enum
import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

from qinfer.backends.python_host.errors import text

MARK = "\x1eqinfer:"
"""Begins a log record (JSON) on stderr."""

LINE_BYTES = 16 * 1024
"""The worker reads longer lines in pieces."""

_MOST_REQUESTS = 20
_MESSAGE = "the message of a log"

_writing = threading.Lock()


def forked() -> None:
    """Replaces a lock that a thread may have held."""
    global _writing  # noqa: PLW0603  a lock can't be released for another thread
    _writing = threading.Lock()


def emit(level: str, message: str, trace: str = "", requests: Sequence[str] = ()) -> None:
    """Sends a log record, shortened in the middle."""
    ids, kept = " ".join(requests[:_MOST_REQUESTS]), max(len(message), len(trace))
    line = _line(level, message, trace, ids)
    while len(line) > LINE_BYTES and kept:
        kept //= 2
        line = _line(level, _shortened(message, kept), _shortened(trace, kept), ids)
    with _writing, suppress(OSError):  # the model may have closed its output
        os.write(2, line)


def _shortened(words: str, kept: int) -> str:
    return words if len(words) <= kept else f"{words[: kept // 2]} … {words[-(kept // 2) :]}"


def _line(level: str, message: str, trace: str, ids: str) -> bytes:
    return f"{MARK}{json.dumps([level, text(message, 'a message'), text(trace, 'a traceback'), ids])}\n".encode()


class TritonLogLevel(enum.IntEnum):
    """Triton's levels of severity."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Writes to the worker's log."""

    LogLevel = TritonLogLevel
    INFO, WARNING, ERROR, VERBOSE = TritonLogLevel

    @staticmethod
    def log(message: str, level: TritonLogLevel = TritonLogLevel.INFO) -> None:
        """Writes a line of that level."""
        if not isinstance(level, TritonLogLevel):
            raise TypeError(f"the level of a message is one of Logger.INFO, WARNING, ERROR and VERBOSE, got {level}")
        emit("DEBUG" if level is TritonLogLevel.VERBOSE else level.name, text(message, _MESSAGE))

    @staticmethod
    def log_info(message: str) -> None:
        """Writes an INFO line."""
        emit("INFO", text(message, _MESSAGE))

    @staticmethod
    def log_warn(message: str) -> None:
        """Writes a WARNING line."""
        emit("WARNING", text(message, _MESSAGE))

    @staticmethod
    def log_error(message: str) -> None:
        """Writes an ERROR line."""
        emit("ERROR", text(message, _MESSAGE))

    @staticmethod
    def log_verbose(message: str) -> None:
        """Writes a DEBUG line."""
        emit("DEBUG", text(message, _MESSAGE))
