"""Logs: one JSON object a line on stderr, or text for people.

`{"at": "2026-01-31T09:00:00.123Z", "level": "INFO", "logger": "…", "event": "…", "process": "gateway", …extra}`: the
event is a short constant, its data are the record's `extra`. Warnings and uvicorn's loggers come out the same way.
"""

import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from qinfer.settings import LogSettings

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


def configure(log: LogSettings, process: str, stream: TextIO | None = None) -> None:
    """Sets the process's logging up, in place of whatever was there; call it once, in a composition root.

    Args:
        log: Level and format.
        process: The program's name, in every line.
        stream: Where to; stderr by default.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log.format == "json" else TextFormatter(process))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(log.level)
    for name in _UVICORN:  # uvicorn's own handlers would print every line again, in another format
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.captureWarnings(True)


class JsonFormatter(logging.Formatter):
    """Prints a record as one JSON object."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's line."""
        line = {
            "at": _instant(record),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            "process": self._process,
            **{key: value for key, value in _extra(record).items() if key not in _RESERVED},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        try:
            return self._encoder.encode(line).decode()
        except (TypeError, ValueError, RecursionError):  # a value that can't be JSON must not cost the line
            return self._encoder.encode({key: str(value) for key, value in line.items()}).decode()


class TextFormatter(logging.Formatter):
    """Prints a record for people: time, level, process, event, then `key=value` pairs."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's line, with the traceback below it."""
        pairs = "".join(f" {key}={value}" for key, value in _extra(record).items())
        text = f"{_instant(record)[11:23]} {record.levelname:<7} {self._process}: {record.getMessage()}{pairs}"
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return text


_RESERVED = frozenset(("at", "level", "logger", "event", "process", "exception", "stack"))


def _instant(record: logging.LogRecord) -> str:
    """Returns the record's own time, in UTC with milliseconds."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
