"""A small synchronous supervisor: starts processes, restarts them after crashes, stops them in order.

It sleeps in one `select` on the signals' wake-up socket. SIGHUP stops it if its terminal was closed; otherwise the
processes get it, to read their files again. Decisions about restarts (`after_exit`) are pure.
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

from qinfer.core.clock import Clock, SystemClock
from qinfer.core.processes import signal_name
from qinfer.core.retry import pause_s
from qinfer.errors import QinferError, SettingsError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POKE = b"\0"
"""no signal has this number"""


KILL_MARGIN_S = 5.0
"""Time beyond a program's own drain limit, before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The treatment of a process that ended by itself.

    The delay doubles with each failure in a row, until `stable_s` without one. After `give_up_after` failures (`None` =
    never), or a hopeless exit code, the process stays down.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    stable_s: float = 10.0
    give_up_after: int | None = None
    hopeless_codes: tuple[int, ...] = (2,)


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """Failures in a row, and seconds until the restart; `None` = give up."""

    failures: int
    delay_s: float | None


def after_exit(policy: RestartPolicy, *, failures: int, ran_s: float, code: int) -> RestartDecision:
    """Decides about an ended process; negative `code` = killed by that signal."""
    failures = 1 if ran_s >= policy.stable_s else failures + 1
    if policy.give_up_after is not None and (failures >= policy.give_up_after or code in policy.hopeless_codes):
        return RestartDecision(failures, None)
    return RestartDecision(failures, pause_s(failures, policy.first_delay_s, policy.max_delay_s))


def describe_exit(code: int) -> str:
    """Returns `ended with exit code 3`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal_name(-code) or f"signal {-code}"
    hint = " (by hand, or by the system for lack of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


class Process(Protocol):
    """A process under a supervisor."""

    @property
    def name(self) -> str:
        """The name in messages."""
        ...

    def start(self) -> None:
        """Starts the process; may raise `QinferError` or `OSError`."""
        ...

    def poll(self) -> int | None:
        """Returns the exit code (negative = signal); `None` = running."""
        ...

    def send_signal(self, number: int) -> None:
        """Asks the process to end (SIGTERM) or to read its files again (SIGHUP), or ends it (SIGKILL)."""
        ...


class Program:
    """A Python module run by `qinfer.cli.local.child`.

    Settings go into `env`, because every user can read arguments. With an empty `cpus` it runs on all cores.
    """

    def __init__(self, name: str, module: str, env: Mapping[str, str], cpus: Sequence[int] = ()) -> None:
        self.name = name
        self._argv = [sys.executable, "-P", "-m", "qinfer.cli.local.child", ",".join(map(str, cpus)), module]
        self._env = env
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 before the first start."""
        return self._popen.pid if self._popen else 0

    def start(self) -> None:
        """Starts the program in its own process group: Ctrl-C reaches only the supervisor."""
        argv, env = self._argv, self._env
        self._popen = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, process_group=0)  # noqa: S603  # our own modules

    def poll(self) -> int | None:
        """Returns the exit code; `None` = running."""
        assert self._popen is not None
        code = self._popen.poll()
        if code is not None and self._popen.stdin is not None:
            self._popen.stdin.close()
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the program has ended."""
        assert self._popen is not None
        self._popen.send_signal(number)


class GaveUp(QinferError):
    """A necessary process failed repeatedly."""


@dataclass(slots=True)
class _SupervisedProcess:
    process: Process
    policy: RestartPolicy
    stop_s: float
    failures: int = 0
    started_s: float = 0.0
    restart_at_s: float | None = None
    """The time of the restart, while the process waits for it."""
    kill_at_s: float | None = None
    """The time at which the process is killed, once it is dismissed."""
    stopping: bool = False
    ended: bool = False


class Supervisor:
    """Starts, restarts and stops processes; owns the signal handlers. `say` gets each crash, restart and kill."""

    def __init__(self, say: Callable[[str], None], clock: Clock | None = None) -> None:
        self._say = say
        self._clock = clock or SystemClock()
        self._children: list[_SupervisedProcess] = []
        self._stops_asked = 0
        self._stopping = False
        self._had_terminal = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        """Takes over the signals."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGHUP, *STOP_SIGNALS):
            self._previous[number] = signal.signal(number, _ignore)
        is_detached = self._previous[signal.SIGHUP] is signal.SIG_IGN  # as by nohup
        self._had_terminal = _has_terminal() and not is_detached
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Restores the signals; kills processes left by an error."""
        for child in self._children:
            if not child.ended and child.restart_at_s is None:
                child.process.send_signal(signal.SIGKILL)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()

    @property
    def stop_asked(self) -> bool:
        """True after a signal asked to stop."""
        return self._stops_asked > 0

    def add(self, process: Process, policy: RestartPolicy, *, stop_s: float) -> None:
        """Supervises a process; `stop_s` are between SIGTERM and SIGKILL."""
        process.start()
        self._children.append(_SupervisedProcess(process, policy, stop_s, started_s=self._clock.monotonic_s()))

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits for one signal, restart or `poke`, and acts on it.

        Raises:
            GaveUp: A necessary process failed repeatedly.
            SettingsError: A necessary process can't run with these settings.
        """
        due = [at_s for c in self._children for at_s in (c.restart_at_s, c.kill_at_s) if at_s is not None]
        if due:
            until_due_s = max(0.0, min(due) - self._clock.monotonic_s())
            timeout_s = until_due_s if timeout_s is None else min(timeout_s, until_due_s)
        if select.select([self._reader], [], [], timeout_s)[0]:
            numbers = self._reader.recv(4096)
            self._stops_asked += numbers.count(signal.SIGINT)
            if signal.SIGTERM in numbers:  # as in Triton
                self._stops_asked = max(self._stops_asked, 1)
            if signal.SIGHUP in numbers:
                self._hung_up()
        for child in self._children:
            self._check_child(child)
        self._children = [child for child in self._children if not (child.stopping and child.ended)]

    def poke(self) -> None:
        """Makes `wait` return; any thread may call it."""
        # full: `wait` wakes anyway; closed: there is no waiter
        with contextlib.suppress(OSError):
            self._writer.send(_POKE)

    def dismiss(self, process: Process) -> None:
        """Asks a process to end; `wait` kills a late one."""
        for child in self._children:
            if child.process is process and not child.stopping:
                child.kill_at_s = self._clock.monotonic_s() + child.stop_s
                child.stopping = True
                if child.restart_at_s is not None:
                    # it has ended already
                    child.restart_at_s, child.kill_at_s, child.ended = None, None, True
                else:
                    child.process.send_signal(signal.SIGTERM)
                    self._check_child(child)

    def supervises(self, process: Process) -> bool:
        """Returns whether a process runs, ends, or waits for its restart."""
        return any(child.process is process and not child.ended for child in self._children)

    def run(self, step: Callable[[], None] = lambda: None) -> None:
        """Supervises until a signal asks to stop; calls `step` after each `wait`."""
        while not self.stop_asked:
            self.wait()
            step()

    def stop(self, processes: Sequence[Process], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Ends processes, and kills those that are late, or all after another Ctrl-C; supervises the others."""
        self._stopping = True
        for process in processes:
            self.dismiss(process)
        while any(map(self.supervises, processes)):
            for child in self._children if self._stops_asked > 1 else ():
                if child.process in processes and child.kill_at_s is not None:
                    child.kill_at_s = 0.0
            self.wait()
            meanwhile()

    def _hung_up(self) -> None:
        if self._had_terminal and not _has_terminal():
            self._stops_asked = max(self._stops_asked, 1)  # the shell sends another one
            return
        for child in self._children:
            if not (child.ended or child.stopping) and child.restart_at_s is None:
                child.process.send_signal(signal.SIGHUP)

    def _check_child(self, child: _SupervisedProcess) -> None:
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
                why = f": it did not end within {child.stop_s:g} s" if self._stops_asked < 2 else ""
                self._say(f"{child.process.name} is killed{why}")
                child.process.send_signal(signal.SIGKILL)
            return
        if child.stopping:
            child.ended, child.kill_at_s = True, None
            return
        self._on_child_exit(child, code, describe_exit(code))

    def _restart(self, child: _SupervisedProcess) -> None:
        child.restart_at_s = None
        child.started_s = self._clock.monotonic_s()
        try:
            child.process.start()
        except (QinferError, OSError) as error:
            self._on_child_exit(child, os.EX_SOFTWARE, f"could not be started: {error}")

    def _on_child_exit(self, child: _SupervisedProcess, code: int, how: str) -> None:
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


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Lets signals write to the wake-up socket."""
