"""Shows something again and again until Ctrl-C: in place on a terminal, block after block elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from qinfer.cli.console import print_error, print_json
from qinfer.errors import QinferError

T = TypeVar("T")


class Watch(Generic[T]):
    """One look after another.

    Args:
        look: Looks once; its `QinferError`s are shown, and do not end it.
        show: Makes a look readable.
        plain: Makes a look JSON.
        interval_s: Seconds between the end of a look and the next.
        console: Where to; where that is no terminal, each look is a block of lines.
    """

    def __init__(
        self,
        look: Callable[[], T],
        show: Callable[[T], RenderableType],
        plain: Callable[[T], object],
        interval_s: float,
        console: Console | None = None,
    ) -> None:
        self._look = look
        self._show = show
        self._plain = plain
        self._interval_s = interval_s
        self._console = console or Console()
        self._last: T | None = None
        self._away_since = ""
        self._trouble = ""

    def run(self, *, as_json: bool = False) -> None:
        """Goes on until Ctrl-C, which is its proper end."""
        with suppress(KeyboardInterrupt), _quiet():
            if as_json:
                self._documents()
            elif self._console.is_terminal:
                self._in_place()
            else:
                self._blocks()

    def block(self) -> RenderableType:
        """Looks once, and returns what is to be seen now: what was seen last, if the look fails."""
        now = time.strftime("%H:%M:%S")
        try:
            self._last, self._trouble, self._away_since = self._look(), "", ""
        except QinferError as error:
            self._trouble, self._away_since = error.message, self._away_since or now
        every = f"every {self._interval_s:g} s; Ctrl-C ends it"
        parts: list[RenderableType] = [Text.assemble((now, "bold"), (f"  {every}", "dim"))]
        if self._trouble:
            parts.append(Text(f"since {self._away_since}: {self._trouble}; it is tried again", style="red"))
        if self._last is not None:
            parts += [Text("what was seen before:", style="dim")] if self._trouble else []
            parts.append(self._show(self._last))
        return Group(*parts)

    def _in_place(self) -> None:
        with Live(console=self._console, auto_refresh=False, vertical_overflow="ellipsis") as live:
            while True:
                live.update(self.block(), refresh=True)
                time.sleep(self._interval_s)

    def _blocks(self) -> None:
        while True:
            self._console.print(self.block())
            self._console.file.flush()
            time.sleep(self._interval_s)

    def _documents(self) -> None:
        while True:
            try:
                print_json(self._plain(self._look()))
            except QinferError as error:
                print_error(f"{error.message}; it is tried again")
            sys.stdout.flush()
            time.sleep(self._interval_s)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps warnings of the connection, which is made anew each time, out of the picture."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
