"""The end of a command about a bulk job: its status, or an interruptible wait."""

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Self

import typer

from qinfer.cli.console import gateway_url, print_json

if TYPE_CHECKING:
    from qinfer.client import Job, JobStatus

BY_SIGNAL = 128
"""Exit code, without the signal's number."""


class WaitInterrupted(BaseException):
    """A signal interrupts the wait for a job."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopSignals:
    """If `wanted`, turns SIGINT and SIGTERM into `WaitInterrupted` once the job's id is known."""

    def __init__(self, *, wanted: bool = False) -> None:
        self.wanted = wanted
        self._kept: list[int] = []
        self._keeps = True

    def __enter__(self) -> Self:
        if self.wanted:
            self._before = {each: signal.signal(each, self._on) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items() if self.wanted else ():
            signal.signal(each, handler)

    def release(self) -> None:
        """Lets signals interrupt; raises `WaitInterrupted` for an earlier signal."""
        self._keeps = False
        self.check()

    def check(self) -> None:
        """Raises `WaitInterrupted` if a signal has arrived."""
        if self._kept:
            raise WaitInterrupted(self._kept[0])

    def _on(self, signum: int, _: FrameType | None) -> None:
        if self._keeps and not self._kept:
            self._kept.append(signum)
        else:
            raise WaitInterrupted(signum)


class MissingInputs:
    """Prints the missing input at changes, and every `EVERY_S` seconds."""

    EVERY_S = 30.0

    def __init__(self, stop: StopSignals) -> None:
        self._stop = stop
        self._why, self._said_s = "", 0.0

    def __call__(self, why: str, left_s: float) -> None:
        """Takes the missing input and the seconds left."""
        from qinfer.client.job_flows import duration

        self._stop.check()
        if why != self._why or self._said_s - left_s >= self.EVERY_S:
            self._why, self._said_s = why, left_s
            sys.stderr.write(f"waits for inputs, {duration(left_s)} left: {why}\n")


def finish(job: "Job", url: str, *, wait: bool, as_json: bool, stop: StopSignals | None = None) -> None:
    """Prints the status of a job, or waits for its end, which `stop` signals cancel.

    Raises:
        typer.Exit: The job has not completed (1), or the wait was interrupted (128 and the signal's number).
    """
    if not wait:
        print_status(job.status(), as_json=as_json)
        if not as_json:
            print(f"follow it: {_command('wait', job.id, url)}")
        return
    try:
        if stop is not None:
            stop.release()
        status = job.wait(progress=True)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"job {job.id} continues; show it: {_command('show', job.id, url)}\n"
            f"or cancel it: {_command('cancel', job.id, url)}\n"
        )
        raise typer.Exit(BY_SIGNAL + signal.SIGINT) from None
    except WaitInterrupted as stopped:
        print_status(job.cancel(), as_json=as_json)
        raise typer.Exit(BY_SIGNAL + stopped.signum) from None
    print_status(status, as_json=as_json)
    if status.state != "completed":
        raise typer.Exit(1)


def print_status(status: "JobStatus", *, as_json: bool) -> None:
    """Prints the status of a job in one line or as JSON."""
    if as_json:
        print_json(dict(status.fields))
        return
    from qinfer.client.job_flows import progress_line

    line = f"job {progress_line(status)}"
    if status.state == "completed":
        line += f"; output: {status.output_url}"
    print(f"{line}: {status.error}" if status.error else line)


def _command(what: str, job_id: str, url: str) -> str:
    return f"qinfer jobs {what} {job_id}" + (f" --url {url}" if url != gateway_url() else "")
