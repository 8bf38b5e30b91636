"""Logs: one JSON object per line on stderr, or text for people.

`{"at": "2026-01-31T09:00:00.123Z", "level": "INFO", "logger": "…", "event": "…", "process": "gateway", …extra}`: the
event is a short constant, and the record's `extra` has its data.

The switches that clients set (`Switches`) apply to all lines, except verbose lines of libraries, which need level DEBUG
at the start.
"""

import logging
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

import msgspec

from qinfer.core.settings import LogSettings

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_OURS = ("qinfer", "qinfer_api", "qinfer_workers")
ACCESS, AUDIT = "qinfer.access", "qinfer.audit"
"""The loggers that settings of their own enable, at any level."""
MODELS = "qinfer.models.output"
"""The logger of the models' own lines."""
EXCEPTION = "exception"
"""A traceback, perhaps of another process."""
_ALWAYS = frozenset((ACCESS, AUDIT))


def configure(log: LogSettings, process: str, stream: TextIO | None = None, *, unknown: Sequence[str] = ()) -> None:
    """Sets up the process's logging once.

    `process` is in every line; messages about `unknown` settings become warnings.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log.format == "json" else TextFormatter(process))
    always = _ALWAYS | {MODELS} if log.model_output else _ALWAYS
    handler.addFilter(_Switchboard(always))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(log.level)
    logging.getLogger(MODELS).setLevel(logging.NOTSET)
    for name in always:
        logging.getLogger(name).setLevel(min(logging.INFO, root.level))
    if log.format == "json":
        _catch_uncaught()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # its other lines have whole URLs, which may hold secrets
    logging.captureWarnings(True)
    for problem in unknown:
        logging.getLogger(__name__).warning("unknown setting left out", extra={"reason": problem})


def cannot_start(environ: Mapping[str, str], program: str, message: str) -> None:
    """Reports why a program can't start, perhaps in JSON."""
    if environ.get("QINFER_LOG__FORMAT", "").strip().lower() == "json":
        configure(LogSettings(format="json"), program)
        logging.getLogger(program).error("can't start", extra={"error": message})
    else:
        sys.stderr.write(f"{program}: {message}\n")


def _catch_uncaught() -> None:
    logger = logging.getLogger("qinfer")

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        logger.critical("uncaught exception", exc_info=(kind, error, trace))

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            thread = args.thread.name if args.thread is not None else ""
            exc_info = (args.exc_type, args.exc_value, args.exc_traceback)
            logger.critical("uncaught exception", exc_info=exc_info, extra={"in_thread": thread})

    def in_cleanup(args: "sys.UnraisableHookArgs") -> None:
        exc_info = (args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
        logger.error("exception ignored", exc_info=exc_info, extra={"within": str(args.object)})

    sys.excepthook, threading.excepthook, sys.unraisablehook = uncaught, in_thread, in_cleanup


class Switches(msgspec.Struct, frozen=True, kw_only=True):
    """The kinds of lines that are logged, as in the protocol's logging extension (reference §1.17).

    Attributes:
        verbose_level: Above 0, lines of level DEBUG.
    """

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    iso8601: bool = False

    @classmethod
    def from_settings(cls, log: LogSettings) -> "Switches":
        """Returns the switches at the start."""
        return cls(
            info=log.level in ("DEBUG", "INFO"),
            warning=log.level != "ERROR",
            verbose_level=int(log.level == "DEBUG"),
        )

    def allow(self, level: int) -> bool:
        """Tells whether lines of a level are logged."""
        if level < logging.INFO:
            return self.verbose_level > 0
        if level < logging.WARNING:
            return self.info
        return self.warning if level < logging.ERROR else self.error


def apply(switches: Switches) -> None:
    """Applies the switches after `configure`."""
    root = logging.getLogger()
    for handler in root.handlers:
        for board in handler.filters:
            if isinstance(board, _Switchboard):
                board.switches = switches
                root.setLevel(min(root.level, logging.INFO))
                level = logging.DEBUG if switches.verbose_level else logging.NOTSET
                for name in _OURS:
                    logging.getLogger(name).setLevel(level)
        if isinstance(handler.formatter, TextFormatter):
            handler.formatter.iso8601 = switches.iso8601


class _Switchboard(logging.Filter):
    def __init__(self, always: frozenset[str]) -> None:
        super().__init__()
        self._always = always
        self.switches: Switches | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        return self.switches is None or record.name in self._always or self.switches.allow(record.levelno)


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
            line[EXCEPTION] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        try:
            return self._encoder.encode(line).decode()
        except (TypeError, ValueError, RecursionError):  # a value that is no JSON must not cost the line
            return self._encoder.encode({_utf8(key): _utf8(str(value)) for key, value in line.items()}).decode()


class TextFormatter(logging.Formatter):
    """Prints a record for people: time, level, process, event, `key=value` pairs."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self.iso8601 = False

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, with the traceback below it."""
        extra = _extra(record)
        trace = self.formatException(record.exc_info) if record.exc_info else str(extra.get(EXCEPTION, ""))
        pairs = "".join(f" {key}={_one_line(str(value))}" for key, value in extra.items() if key != EXCEPTION)
        at = _instant(record) if self.iso8601 else _instant(record)[11:23]
        text = f"{at} {record.levelname:<7} {self._process}: {_one_line(record.getMessage().rstrip())}{pairs}"
        return f"{text}\n{trace.rstrip()}" if trace else text


_RESERVED = frozenset(("at", "level", "logger", "event", "process", "stack"))


def _instant(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _one_line(text: str) -> str:
    """Escapes control characters, by which clients could forge lines."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _utf8(text: str) -> str:
    """Names of files may have bytes that can't be encoded."""
    return text.encode(errors="backslashreplace").decode()


EVERY_S = 60.0
"""Between two lines of a fence."""


class ErrorLogger:
    """A context for observers, which logs an `Exception` and continues after the `with`; each module has one.

    The first error is logged as `event`, then at most one each `EVERY_S`, with their number.
    """

    __slots__ = ("_event", "_logger", "_next_s", "_untold")

    def __init__(self, logger: logging.Logger, event: str) -> None:
        self._logger = logger
        self._event = event
        self._next_s = 0.0
        self._untold = 0

    def __enter__(self) -> None:
        """Begins."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._untold += 1
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + EVERY_S
            self._logger.warning(self._event, exc_info=error, extra={"errors": self._untold})
            self._untold = 0
        return True


MOST_LINES, MOST_BYTES = 50, 64 * 1024
"""The most lines of a `LogRing`, and their bytes in JSON."""
_MOST_TEXT, _MOST_TRACE, _MOST_FIELDS = 500, 8000, 30
_SECRET = re.compile(
    r"(://[^\s/@:]{0,200}:)[^\s@]{1,500}(?=@)"
    r"|((?i:\b(?:bearer\s|(?:api[_-]?key|passwd|password|secret|token)[\"']?\s?[=:]))\s?)[^\s,;]{1,500}"
)


class RecentLine(msgspec.Struct, frozen=True):
    """A warning or an error of a worker's log; `at` is RFC 3339, `about` the event's data as texts.

    Example:
        {"at": "2026-01-31T09:00:00.123Z", "level": "ERROR", "logger": "qinfer_workers.inference.models",
         "event": "load failed", "about": {"model": "digits"}, "exception": ""}
    """

    at: str
    level: str
    logger: str
    event: str
    about: dict[str, str] = {}
    exception: str = ""


class WorkerLog(msgspec.Struct, frozen=True):
    """The last warnings and errors of a worker, newest first."""

    lines: list[RecentLine]


class LogRing(logging.Handler):
    """Keeps the last warnings and errors of a process, bounded in lines and bytes, for readers elsewhere.

    Long texts are cut, and passwords are left out. Of the models' own lines it keeps only tracebacks. `number` counts
    all lines.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: deque[tuple[RecentLine, int]] = deque()
        self._nbytes = self.number = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line, in the thread that logs."""
        if record.name == MODELS and EXCEPTION not in vars(record):
            return
        try:
            line = recent_line(record)
            nbytes = len(msgspec.json.encode(line))
        except Exception:  # noqa: BLE001 - the boundary: a line that can't be shown must not fail its work
            self.handleError(record)
            return
        self._lines.append((line, nbytes))
        self._nbytes += nbytes
        self.number += 1
        while len(self._lines) > MOST_LINES or self._nbytes > MOST_BYTES:
            self._nbytes -= self._lines.popleft()[1]

    def kept_lines(self) -> WorkerLog:
        """Returns the lines."""
        return WorkerLog([line for line, _ in reversed(self._lines.copy())])


def recent_line(record: logging.LogRecord) -> RecentLine:
    """Returns a record as it is shown, without secrets and cut to some kilobytes."""
    extra = _extra(record)
    trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else str(extra.get(EXCEPTION, ""))
    rows = trace[-_MOST_TRACE:].splitlines()[len(trace) > _MOST_TRACE :]  # without the rest of a cut one
    return RecentLine(
        at=_instant(record),
        level=record.levelname,
        logger=record.name,
        event=_shown(record.getMessage()),
        about={key: _shown(value) for key, value in list(extra.items())[:_MOST_FIELDS] if key != EXCEPTION},
        exception="\n".join(map(_shown, rows)),
    )


def _shown(value: object) -> str:
    text = _utf8(str(value)[: 4 * _MOST_TEXT])  # a password is left out before the text is cut
    return _SECRET.sub(lambda found: f"{found[1] or found[2]}…", text)[:_MOST_TEXT]
