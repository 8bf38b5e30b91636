"""Shows the progress of a bulk job: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

from qinfer.client.job_flows import JobStatus, OnStatus

EVERY_S = 5.0
"""Seconds between two lines while a job's state does not change."""

PATIENCE_S = 10.0
"""Planning that takes longer hints that no bulk worker may be running."""

_BAR_WIDTH = 10
_HINT = "waits for the bulk worker, or for its inputs to be read; see its log"


def progress_observer(on_status: OnStatus | None, *, progress: bool) -> AbstractContextManager[OnStatus]:
    """Returns a context with the observer of statuses: the display on stderr, or the caller's own."""
    return shown_progress() if progress else nullcontext(on_status or (lambda _: None))


@contextmanager
def shown_progress(*, on_terminal: bool | None = None) -> Iterator[OnStatus]:
    """Shows a job's progress on stderr until the block ends; `on_terminal` `None` detects a terminal."""
    if sys.stderr.isatty() if on_terminal is None else on_terminal:
        with _bar() as show:
            yield show
    else:
        yield Lines(lambda text: sys.stderr.write(f"{text}\n"))


class Lines:
    """Writes a line when the state changes, and every `EVERY_S` seconds while there is progress."""

    def __init__(self, write: Callable[[str], object], now_s: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._now_s = now_s
        self._state, self._text, self._said_s, self._since_s = "", "", 0.0, 0.0

    def __call__(self, status: JobStatus) -> None:
        """Handles a status."""
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
    """Describes the job's progress in a line."""
    processed, failed = f"{status.rows_processed:,}", f"{status.rows_failed:,} rows failed"
    progress = [f"{processed} of {status.rows:,} rows", f"{status.shards_done} of {status.shards} shards"]
    found = _figures(status, progress, failed, "{} rows/s", "{} left")
    return ", ".join([f"{status.id}: {status.state}", *found])


def beside_bar(status: JobStatus) -> str:
    """Describes the job's progress for a terminal of 80 columns."""
    processed, failed = f"{status.rows_processed:,}", f"{status.rows_failed:,} failed"
    progress = [f"{processed}/{status.rows:,} rows", f"{status.shards_done}/{status.shards} shards"]
    return ", ".join(_figures(status, progress, failed, "{}/s", "{}"))


def _figures(status: JobStatus, progress: list[str], failed: str, speed: str, left: str) -> list[str]:
    """Returns the known figures; empty before the job is planned."""
    if not status.shards:
        return []
    found = [*progress, *([failed] if status.rows_failed else [])]
    if status.skipped_files:
        found.append(f"{status.skipped_files:,} files skipped")
    if status.rows_per_s:
        found.append(speed.format(rate(status.rows_per_s)))
    if status.eta_s is not None and not status.has_ended:
        found.append(left.format(duration(status.eta_s)))
    return found


def planning_hint(status: JobStatus, seconds: float) -> str:
    """Returns a hint for a job that is planned for too long; else empty."""
    return _HINT if status.state == "planning" and not status.shards and seconds >= PATIENCE_S else ""


def rate(rows_per_s: float) -> str:
    """Formats a rate: whole numbers from 10, two digits below, such as 0.3."""
    return f"{rows_per_s:,.0f}" if rows_per_s >= 10 else f"{rows_per_s:.2g}"


def duration(seconds: float) -> str:
    """Formats a duration, such as 0:01:30."""
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def _bar() -> Iterator[OnStatus]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.fields[state]}", markup=False),
        BarColumn(bar_width=_BAR_WIDTH),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[figures]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None, state="", figures="")
        began_s = time.monotonic()

        def show(status: JobStatus) -> None:
            figures = beside_bar(status) or planning_hint(status, time.monotonic() - began_s)
            processed = status.rows_processed
            progress.update(task, total=status.rows or None, completed=processed, state=status.state, figures=figures)

        yield show
