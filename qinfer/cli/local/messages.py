"""Messages of `qinfer up`: text, or JSON like its programs'."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from itertools import pairwise

from rich.console import Console
from rich.status import Status
from rich.text import Text


def are_json(arguments: Sequence[str]) -> bool:
    """Returns whether a possibly wrong command line asks for JSON messages."""
    if arguments[:1] != ["up"]:
        return False
    chosen = [os.environ.get("QINFER_LOG__FORMAT", "")]
    chosen += [value for option, value in pairwise(arguments) if option == "--log-format"]
    chosen += [word.partition("=")[2] for word in arguments if word.startswith("--log-format=")]
    return chosen[-1] == "json"


class Messages:
    """Lines of text, on stderr."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, soft_wrap=True)

    def say(self, line: str) -> None:
        """Reports an event."""
        self._console.print(Text(f"qinfer: {line}"))

    def warn(self, line: str) -> None:
        """Reports a problem."""
        self._console.print(Text(f"qinfer: {line}", style="yellow"))

    def show(self, lines: Sequence[str]) -> None:
        """Shows the summary in rich's markup."""
        for line in lines:
            # a wrapped command can't be pasted
            self._console.print(Text.from_markup(line), soft_wrap=True)

    def progress(self, text: str) -> AbstractContextManager[Status]:
        """Shows progress during the block."""
        return self._console.status(text)


class JsonMessages(Messages):
    """JSON objects, one a line, on stderr."""

    def say(self, line: str) -> None:
        """Reports an event."""
        self._write_event("INFO", line)

    def warn(self, line: str) -> None:
        """Reports a problem."""
        self._write_event("WARNING", line)

    def fail(self, message: str) -> None:
        """Reports the reason for the end."""
        self._write_event("ERROR", "qinfer up failed", error=message)

    def show(self, lines: Sequence[str]) -> None:
        """Shows the summary as one line."""
        plain = [" ".join(Text.from_markup(line).plain.split()) for line in lines]
        self._write_event("INFO", "running", summary=[line for line in plain if line])

    def progress(self, text: str) -> AbstractContextManager[Status]:
        """Shows nothing."""
        return nullcontext(Status(text, console=Console(quiet=True)))

    def _write_event(self, level: str, event: str, **more: object) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"at": at, "level": level, "logger": "qinfer.up", "event": event, "process": "up", **more}
        sys.stderr.write(f"{json.dumps(line, ensure_ascii=False)}\n")
        sys.stderr.flush()
