"""A small synchronous supervisor: starts processes, restarts what crashes, stops them in order.

It sleeps in one `select` on the wake-up socket that Python writes signals to: SIGCHLD when a process ended, SIGINT,
SIGTERM and SIGHUP when it should stop. Nothing is polled. Decisions about restarts are `qinfer.cli.local.restart`'s.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Protocol, Self

from qinfer.cli.local.restart import RestartPolicy, after_exit, describe_exit
from qinfer.core.clock import Clock, SystemClock
from qinfer.errors import QinferError, SettingsError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POKE = b"\0"  # the number of no signal


class Process(Protocol):
    """What a supervisor looks after."""

    @property
    def name(self) -> str:
        """How messages call it."""
        ...

    def start(self) -> None:
        """Starts it; after its end, starts it again. May raise `QinferError` or `OSError`."""
        ...

    def poll(self) -> int | None:
        """Returns its exit code (negative = killed by that signal), or `None` while it runs."""
        ...

    def terminate(self) -> None:
        """Asks it to end."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...


class Program:
    """A Python module run as a child that ends with its supervisor (`qinfer.cli.local.child`).

    Args:
        name: How messages call it.
        module: The module, run as `python -m` would.
        env: Its whole environment. Settings travel here and not as arguments, which every user of the machine can read.
        cpus: The cores it may use; empty = all.
    """

    def __init__(self, name: str, module: str, env: Mapping[str, str], cpus: Sequence[int] = ()) -> None:
        self.name = name
        self._argv = [sys.executable, "-P", "-m", "qinfer.cli.local.child", ",".join(map(str, cpus)), module]
        self._env = env
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id; 0 before the first start."""
        return self._popen.pid if self._popen else 0

    def start(self) -> None:
        """Starts it in a process group of its own, so that Ctrl-C reaches the supervisor alone."""
        self._popen = subprocess.Popen(  # noqa: S603 (our own interpreter and modules)
            self._argv,
            env=self._env,
            stdin=subprocess.PIPE,
            process_group=0,
        )

    def poll(self) -> int | None:
        """See `Process`."""
        assert self._popen is not None
        code = self._popen.poll()
        if code is not None and self._popen.stdin is not None:
            self._popen.stdin.close()
        return code

    def terminate(self) -> None:
        """See `Process`."""
        assert self._popen is not None
        self._popen.terminate()

    def kill(self) -> None:
        """See `Process`."""
        assert self._popen is not None
        self._popen.kill()


class GaveUp(QinferError):
    """A process failed again and again, and nothing works without it."""


@dataclass(slots=True)
class _Child:
    process: Process
    policy: RestartPolicy
    stop_s: float
    failures: int = 0
    started_s: float = 0.0
    restart_at_s: float | None = None  # set while it waits for its restart
    kill_at_s: float | None = None  # set while it was dismissed and has not ended
    stopping: bool = False
    ended: bool = False


class Supervisor:
    """Looks after processes; a context manager that owns the signal handlers of its process meanwhile.

    Args:
        say: Called with one line for people about each crash, restart and kill.
        clock: Tells the time.
    """

    def __init__(self, say: Callable[[str], None], clock: Clock | None = None) -> None:
        self._say = say
        self._clock = clock or SystemClock()
        self._children: list[_Child] = []
        self._stops_asked = 0
        self._stopping = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        """Takes the signals over."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *STOP_SIGNALS):
            self._previous[number] = signal.signal(number, _ignore)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Gives the signals back; kills what `stop` did not end, because an error came first."""
        for child in self._children:
            if not child.ended and child.restart_at_s is None:
                child.process.kill()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()

    @property
    def stop_asked(self) -> bool:
        """Whether a signal asked to stop."""
        return self._stops_asked > 0

    def add(self, process: Process, policy: RestartPolicy, *, stop_s: float, started: bool = False) -> None:
        """Starts a process and looks after it from now on.

        Args:
            process: The process.
            policy: How it is restarted.
            stop_s: Seconds it gets to end after `terminate`, before `kill`.
            started: It runs already.
        """
        if not started:
            process.start()
        self._children.append(_Child(process, policy, stop_s, started_s=self._clock.monotonic_s()))

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for one signal, restart or `poke`, at most `timeout_s` seconds, and acts on it.

        Raises:
            GaveUp: A process that must run does not.
            SettingsError: Nor will it with these settings.
        """
        due = [at_s for c in self._children for at_s in (c.restart_at_s, c.kill_at_s) if at_s is not None]
        if due:
            until_due_s = max(0.0, min(due) - self._clock.monotonic_s())
            timeout_s = until_due_s if timeout_s is None else min(timeout_s, until_due_s)
        if select.select([self._reader], [], [], timeout_s)[0]:
            numbers = self._reader.recv(4096)
            self._stops_asked += sum(number in STOP_SIGNALS for number in numbers)
        for child in self._children:
            self._look_after(child)
        self._children = [child for child in self._children if not (child.stopping and child.ended)]

    def poke(self) -> None:
        """Makes `wait` return; any thread may call it."""
        with contextlib.suppress(OSError):  # full: it returns anyway; closed: nobody waits
            self._writer.send(_POKE)

    def dismiss(self, process: Process) -> None:
        """Asks a process to end, and does not wait: `wait` kills it if it takes too long, and forgets it at its end."""
        for child in self._children:
            if child.process is process and not child.stopping:
                child.kill_at_s = self._clock.monotonic_s() + child.stop_s
                self._ask_to_end(child)

    def looks_after(self, process: Process) -> bool:
        """Tells whether a process runs, waits for its restart, or was asked to end and has not."""
        return any(child.process is process and not child.ended for child in self._children)

    def run(self) -> None:
        """Looks after the processes until a signal asks to stop.

        Raises:
            GaveUp: A process that must run does not.
            SettingsError: Nor will it with these settings.
        """
        while not self.stop_asked:
            self.wait()

    def stop(self, processes: Sequence[Process], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Asks processes to end and waits for them; the others are looked after meanwhile.

        One that takes too long, or a second Ctrl-C, gets it killed.

        Args:
            processes: The processes.
            meanwhile: Called after each `wait`.
        """
        self._stopping = True
        children = [c for c in self._children if c.process in processes and not c.ended]
        for child in children:
            self._ask_to_end(child)
        deadline_s = self._clock.monotonic_s() + max((c.stop_s for c in children), default=0.0)
        killed = False
        while not all(child.ended for child in children):
            if not killed and (self._stops_asked > 1 or self._clock.monotonic_s() >= deadline_s):
                killed = True
                for child in children:
                    if not child.ended:
                        self._say(f"{child.process.name} is killed")
                        child.process.kill()
            self.wait(None if killed else max(0.0, deadline_s - self._clock.monotonic_s()))
            meanwhile()

    def _ask_to_end(self, child: _Child) -> None:
        child.stopping = True
        if child.restart_at_s is not None:  # it is down already
            child.restart_at_s, child.kill_at_s, child.ended = None, None, True
        else:
            child.process.terminate()
            self._look_after(child)

    def _look_after(self, child: _Child) -> None:
        if child.ended:
            return
        now_s = self._clock.monotonic_s()
        if child.restart_at_s is not None:
            if now_s >= child.restart_at_s:
                self._restart(child)
            return
        code = child.process.poll()
        if code is None:
            if child.kill_at_s is not None and now_s >= child.kill_at_s:
                child.kill_at_s = None
                self._say(f"{child.process.name} is killed: it did not end within {child.stop_s:g} s")
                child.process.kill()
            return
        if child.stopping:
            child.ended, child.kill_at_s = True, None
            return
        self._ended(child, code, describe_exit(code))

    def _restart(self, child: _Child) -> None:
        child.restart_at_s = None
        child.started_s = self._clock.monotonic_s()
        try:
            child.process.start()
        except (QinferError, OSError) as error:
            self._ended(child, os.EX_SOFTWARE, f"could not be started: {error}")

    def _ended(self, child: _Child, code: int, how: str) -> None:
        now_s = self._clock.monotonic_s()
        verdict = after_exit(child.policy, failures=child.failures, ran_s=now_s - child.started_s, code=code)
        child.failures = verdict.failures
        if verdict.delay_s is None:
            child.ended = True
            if self._stopping:
                return
            reason = SettingsError if code in child.policy.hopeless_codes else GaveUp
            raise reason(f"{child.process.name} {how}; its own message is above")
        self._say(f"{child.process.name} {how}; restarting it in {verdict.delay_s:g} s")
        child.restart_at_s = now_s + verdict.delay_s


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Does nothing: the wake-up socket tells what happened, a handler only has to exist for it to be written."""
