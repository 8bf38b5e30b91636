"""How the progress of a bulk job is shown: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

from qinfer.client.job_flows import JobStatus, OnStatus

EVERY_S = 5.0
"""Seconds between two lines about a job whose state has not changed."""

PATIENCE_S = 10.0
"""A job that is planned for longer gets a hint: perhaps nobody plans it."""

_BAR_WIDTH = 10
_HINT = "waits for the bulk worker, or for its inputs to be read; see its log"


def progress_observer(on_status: OnStatus | None, *, progress: bool) -> AbstractContextManager[OnStatus]:
    """Returns the context that gives what observes the status of a job: the display on stderr, or the caller's own.

    Args:
        on_status: The caller's own; `None` = nothing observes it.
        progress: Show it on stderr.
    """
    return shown_progress() if progress else nullcontext(on_status or (lambda _: None))


@contextmanager
def shown_progress(*, on_terminal: bool | None = None) -> Iterator[OnStatus]:
    """Shows what it is told of a job, on stderr, until the block ends.

    Args:
        on_terminal: Draw a bar; `None` = if stderr is a terminal.
    """
    if sys.stderr.isatty() if on_terminal is None else on_terminal:
        with _bar() as told:
            yield told
    else:
        yield Lines(lambda text: sys.stderr.write(f"{text}\n"))


class Lines:
    """Writes a line when the state changes, and every `EVERY_S` seconds while something is done.

    Args:
        write: Writes a line.
        now_s: The monotonic time.
    """

    def __init__(self, write: Callable[[str], object], now_s: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._now_s = now_s
        self._state, self._text, self._said_s, self._since_s = "", "", 0.0, 0.0

    def __call__(self, status: JobStatus) -> None:
        """Is told where the job is."""
        text, now_s = progress_line(status), self._now_s()
        if status.state != self._state:
            self._since_s = now_s
        if hint := planning_hint(status, now_s - self._since_s):
            text = f"{text}; {hint}"
        if status.state == self._state and (text == self._text or now_s - self._said_s < EVERY_S):
            return
        self._state, self._text, self._said_s = status.state, text, now_s
        self._write(text)


def progress_line(status: JobStatus) -> str:
    """Returns where a job is, in one line."""
    if not status.shards:
        return f"{status.id}: {status.state}"
    parts = [
        f"{status.id}: {status.state}",
        f"{status.rows_done + status.rows_failed:,} of {status.rows:,} rows",
        f"{status.shards_done} of {status.shards} shards",
    ]
    if status.rows_failed:
        parts.append(f"{status.rows_failed:,} rows failed")
    if status.rows_per_s:
        parts.append(f"{status.rows_per_s:,.0f} rows/s")
    if status.eta_s is not None and not status.has_ended:
        parts.append(f"{duration(status.eta_s)} left")
    return ", ".join(parts)


def beside_bar(status: JobStatus) -> str:
    """Returns how far a job is as a terminal of 80 columns has place for it beside a bar."""
    if not status.shards:
        return ""
    parts = [
        f"{status.rows_done + status.rows_failed:,}/{status.rows:,} rows",
        f"{status.shards_done}/{status.shards} shards",
    ]
    if status.rows_failed:
        parts.append(f"{status.rows_failed:,} failed")
    if status.rows_per_s:
        parts.append(f"{status.rows_per_s:,.0f}/s")
    if status.eta_s is not None and not status.has_ended:
        parts.append(duration(status.eta_s))
    return ", ".join(parts)


def planning_hint(status: JobStatus, seconds: float) -> str:
    """Returns what a user may look at when a job has been in its state for so long; empty = nothing."""
    return _HINT if status.state == "planning" and not status.shards and seconds >= PATIENCE_S else ""


def duration(seconds: float) -> str:
    """Returns a duration as people write it: 0:01:30."""
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def _bar() -> Iterator[OnStatus]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.fields[state]}", markup=False),
        BarColumn(bar_width=_BAR_WIDTH),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[told]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None, state="", told="")
        began_s = time.monotonic()

        def told(status: JobStatus) -> None:
            beside = beside_bar(status) or planning_hint(status, time.monotonic() - began_s)
            settled = status.rows_done + status.rows_failed
            progress.update(task, total=status.rows or None, completed=settled, state=status.state, told=beside)

        yield told
