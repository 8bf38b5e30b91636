"""The supervisor with real, tiny processes."""

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qinfer.cli.local.supervisor import (
    GaveUp,
    Program,
    RestartDecision,
    RestartPolicy,
    Supervisor,
    after_exit,
    describe_exit,
)
from qinfer.errors import SettingsError

QUICK = RestartPolicy(first_delay_s=0.01)
SLEEPS = "import signal; signal.pause()"
STUBBORN = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdout.write("up"); sys.stdout.flush()
while True: signal.pause()
"""


ENDS_SLOWLY = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0 if signal.sigtimedwait([signal.SIGUSR1], 0.3) is None else 1))
sys.stdout.write("up"); sys.stdout.flush()
while True: signal.pause()
"""


class Script:
    """A supervised `python -c`."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.starts = 0
        self._source = source

    def start(self) -> None:
        self.starts += 1
        self.popen = subprocess.Popen([sys.executable, "-c", self._source], stdout=subprocess.PIPE)

    def poll(self) -> int | None:
        code = self.popen.poll()
        if code is not None and self.popen.stdout:
            self.popen.stdout.close()
        return code

    def send_signal(self, number: int) -> None:
        self.popen.send_signal(number)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(said: list[str]) -> Iterator[Supervisor]:
    with Supervisor(said.append) as supervisor:
        yield supervisor


def test_crashed_process_is_restarted(supervisor: Supervisor, said: list[str]) -> None:
    """A process that was killed runs again, and people are told how it ended."""
    script = Script("worker 1", SLEEPS)
    supervisor.add(script, QUICK, stop_s=5)

    script.send_signal(signal.SIGKILL)
    while script.starts < 2:
        supervisor.wait(5)

    assert said == [
        "worker 1 was killed by SIGKILL (by hand, or by the system for lack of memory); restarting it in 0.01 s"
    ]
    assert script.poll() is None
    supervisor.stop([script])


def test_settings_that_a_process_refuses_end_it_at_once(supervisor: Supervisor) -> None:
    """As settings, so that `qinfer up` ends with 2 and no service manager starts it again and again."""
    supervisor.add(Script("gateway", "raise SystemExit(2)"), RestartPolicy(give_up_after=3), stop_s=5)

    with pytest.raises(SettingsError, match="gateway ended with exit code 2; its own message is above"):
        supervisor.run()


def test_essential_process_that_fails_again_and_again_ends_it(supervisor: Supervisor) -> None:
    """The gateway's failure is the whole's, after a few tries."""
    script = Script("gateway", "raise SystemExit(3)")
    supervisor.add(script, RestartPolicy(first_delay_s=0.01, give_up_after=3), stop_s=5)

    with pytest.raises(GaveUp, match="gateway ended with exit code 3"):
        supervisor.run()

    assert script.starts == 3


def test_stop_signal_ends_the_run(supervisor: Supervisor) -> None:
    """SIGTERM to the supervisor makes `run` return; the process lives on until it is stopped."""
    script = Script("worker", SLEEPS)
    supervisor.add(script, QUICK, stop_s=5)

    os.kill(os.getpid(), signal.SIGTERM)
    supervisor.run()

    assert supervisor.stop_asked
    assert script.poll() is None
    supervisor.stop([script])
    assert script.poll() == -signal.SIGTERM


def test_process_that_does_not_end_is_killed(supervisor: Supervisor, said: list[str]) -> None:
    """A drain is bounded."""
    script = Script("worker", STUBBORN)
    supervisor.add(script, QUICK, stop_s=0.01)
    assert script.popen.stdout is not None
    assert script.popen.stdout.read(2) == b"up"

    supervisor.stop([script])

    assert script.poll() == -signal.SIGKILL
    assert said == ["worker is killed: it did not end within 0.01 s"]


TOLD = """
import signal, sys
signal.signal(signal.SIGHUP, lambda *_: print("reload", flush=True))
print("up", flush=True)
while True: signal.pause()
"""


def test_a_hang_up_is_passed_on_to_those_that_run(supervisor: Supervisor) -> None:
    """It stops nothing; there is no terminal that was closed."""
    script, down = Script("gateway", TOLD), Script("worker", "raise SystemExit(1)")
    supervisor.add(script, QUICK, stop_s=5)
    supervisor.add(down, RestartPolicy(first_delay_s=600), stop_s=5)
    assert script.popen.stdout is not None
    assert script.popen.stdout.readline() == b"up\n"
    down.popen.wait()
    supervisor.wait(5)

    os.kill(os.getpid(), signal.SIGHUP)
    supervisor.wait(5)

    assert script.popen.stdout.readline() == b"reload\n"
    assert not supervisor.stop_asked
    supervisor.stop([script, down])


UNDER_A_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1:] else signal.SIG_DFL)  # whatever the tests run under
from qinfer.cli.local.supervisor import Supervisor
class Worker:
    name = "worker"
    def start(self): pass
    def poll(self): return None
    def send_signal(self, number):
        if number == signal.SIGHUP: print("reload", file=sys.stderr, flush=True)
        else: self.poll = lambda: 0
with Supervisor(print) as supervisor:
    worker = Worker()
    supervisor.add(worker, None, stop_s=5)
    print("up", file=sys.stderr, flush=True)
    supervisor.run()
    print("stop", file=sys.stderr, flush=True)
    supervisor.stop([worker])
"""


@pytest.mark.parametrize("detached", [False, True], ids=["attached", "nohup"])
def test_a_terminal_that_is_closed_stops_it(detached: bool) -> None:  # noqa: FBT001
    """A hang-up while the terminal is there is passed on; so are all where the shell was told to leave it alone."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", UNDER_A_TERMINAL, *(["nohup"] if detached else [])]
    with subprocess.Popen(command, stdin=theirs, stderr=subprocess.PIPE, start_new_session=True) as process:
        os.close(theirs)
        assert process.stderr is not None
        assert process.stderr.readline() == b"up\n"

        process.send_signal(signal.SIGHUP)
        assert process.stderr.readline() == b"reload\n"
        os.close(ours)

        if detached:
            assert process.stderr.readline() == b"reload\n"
            process.terminate()
        assert process.stderr.readline() == b"stop\n"
        assert process.wait(20) == 0


def test_a_second_request_to_end_changes_nothing(supervisor: Supervisor) -> None:
    """A service manager may repeat it, and what is accepted is answered first; as Triton has it."""
    script = Script("worker", ENDS_SLOWLY)
    supervisor.add(script, QUICK, stop_s=600)
    assert script.popen.stdout is not None
    assert script.popen.stdout.read(2) == b"up"

    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
        supervisor.wait(5)
    assert supervisor.stop_asked
    supervisor.stop([script])

    assert script.poll() == 0


def test_second_stop_signal_kills(supervisor: Supervisor) -> None:
    """Who presses Ctrl-C twice does not want to wait."""
    script = Script("worker", STUBBORN)
    supervisor.add(script, QUICK, stop_s=600)
    assert script.popen.stdout is not None
    assert script.popen.stdout.read(2) == b"up"

    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    supervisor.wait(5)
    supervisor.stop([script])

    assert script.poll() == -signal.SIGKILL


def test_others_are_looked_after_while_one_stops(supervisor: Supervisor) -> None:
    """A worker that crashes while the gateway drains is started again: the drain needs it."""
    gateway, worker = Script("gateway", SLEEPS), Script("worker", SLEEPS)
    supervisor.add(gateway, QUICK, stop_s=5)
    supervisor.add(worker, RestartPolicy(first_delay_s=0.0), stop_s=5)
    worker.send_signal(signal.SIGKILL)
    worker.popen.wait()

    supervisor.stop([gateway])

    assert worker.starts == 2
    supervisor.stop([worker])


def test_process_waiting_for_its_restart_is_not_started_by_stop(supervisor: Supervisor) -> None:
    """Stopping what is down means leaving it down."""
    script = Script("worker", "raise SystemExit(1)")
    supervisor.add(script, RestartPolicy(first_delay_s=600), stop_s=5)
    script.popen.wait()
    supervisor.wait(5)

    supervisor.stop([script])

    assert script.starts == 1


def test_signal_handlers_are_given_back(said: list[str]) -> None:
    """A supervisor leaves its process as it found it."""
    before = signal.getsignal(signal.SIGTERM)

    with Supervisor(said.append):
        assert signal.getsignal(signal.SIGTERM) is not before

    assert signal.getsignal(signal.SIGTERM) is before


def test_child_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the supervisor leaves no orphan: the child drains as after SIGTERM."""
    (tmp_path / "child_program.py").write_text(
        "import os, signal\n"
        "def drained(*_): os.write(1, b'drained'); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, drained)\n"
        "os.write(1, b'ready')\n"
        "while True: signal.pause()\n"
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, signal\n"
            "from qinfer.cli.local.supervisor import Program\n"
            "program = Program('child', 'child_program', os.environ)\n"
            "program.start()\n"
            "signal.pause()\n",
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert parent.stdout.read(5) == b"ready"

    parent.kill()
    parent.wait()

    assert parent.stdout.read() == b"drained"  # EOF: the child's end of the pipe is closed, it is gone
    parent.stdout.close()


def test_program_gets_its_settings_by_environment_only() -> None:
    """A password in a URL must not show in the process list."""
    program = Program("gateway", "this", {**os.environ, "QINFER_REDIS__URL": "redis://:hunter2@127.0.0.1"})
    with Supervisor(lambda _line: None) as supervisor:
        supervisor.add(program, RestartPolicy(first_delay_s=600), stop_s=5)

        arguments = Path(f"/proc/{program.pid}/cmdline").read_bytes()

        assert b"hunter2" not in arguments
        supervisor.stop([program])


def test_dismissed_process_ends_without_being_waited_for(supervisor: Supervisor, said: list[str]) -> None:
    """The others go on, and it is not restarted."""
    one, other = Script("worker 1", SLEEPS), Script("worker 2", SLEEPS)
    for script in (one, other):
        supervisor.add(script, QUICK, stop_s=60)

    supervisor.dismiss(one)
    assert supervisor.supervises(one)
    while supervisor.supervises(one):
        supervisor.wait(5)

    assert (one.poll(), one.starts, other.poll()) == (-signal.SIGTERM, 1, None)
    assert said == []
    supervisor.stop([one, other])
    assert other.poll() == -signal.SIGTERM


def test_dismissed_process_that_does_not_end_is_killed(supervisor: Supervisor, said: list[str]) -> None:
    """By `wait`, at its time."""
    script = Script("worker", STUBBORN)
    supervisor.add(script, QUICK, stop_s=0.05)
    assert script.popen.stdout is not None
    assert script.popen.stdout.read(2) == b"up"

    supervisor.dismiss(script)
    supervisor.dismiss(script)
    while supervisor.supervises(script):
        supervisor.wait()

    assert script.poll() == -signal.SIGKILL
    assert said == ["worker is killed: it did not end within 0.05 s"]


def test_process_that_waits_for_its_restart_is_dismissed(supervisor: Supervisor) -> None:
    """It never comes back."""
    script = Script("worker", "raise SystemExit(1)")
    supervisor.add(script, RestartPolicy(first_delay_s=600), stop_s=60)
    script.popen.wait()
    supervisor.wait(5)

    supervisor.dismiss(script)

    assert not supervisor.supervises(script)
    assert script.starts == 1


def test_poke_ends_a_wait(supervisor: Supervisor) -> None:
    """From any thread; it is no signal to stop."""
    threading.Timer(0.01, supervisor.poke).start()

    supervisor.wait()

    assert not supervisor.stop_asked


WORKER = RestartPolicy(first_delay_s=0.5, max_delay_s=30.0, stable_s=10.0)
GATEWAY = RestartPolicy(give_up_after=3)


def test_delay_doubles_with_each_failure_in_a_row() -> None:
    """A process that fails at once is tried less and less often."""
    delays = [after_exit(WORKER, failures=n, ran_s=0.1, code=1).delay_s for n in range(5)]

    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("failures", [10, 10_000])
def test_delay_is_bounded(failures: int) -> None:
    """However often it failed, the next try comes."""
    assert after_exit(WORKER, failures=failures, ran_s=0.1, code=1).delay_s == 30.0


def test_stable_run_is_forgiven() -> None:
    """A crash after a long run is restarted as the first one was."""
    assert after_exit(WORKER, failures=7, ran_s=10.0, code=-9) == RestartDecision(1, 0.5)


def test_gives_up_after_the_limit() -> None:
    """What nothing works without ends the whole after a few tries in a row."""
    verdicts = [after_exit(GATEWAY, failures=n, ran_s=0.1, code=1) for n in range(3)]

    assert [v.delay_s is None for v in verdicts] == [False, False, True]


def test_hopeless_code_gives_up_at_once() -> None:
    """Wrong settings stay wrong."""
    assert after_exit(GATEWAY, failures=0, ran_s=0.1, code=2).delay_s is None


def test_without_a_limit_no_code_is_hopeless() -> None:
    """A worker keeps being tried: its cause may be cured from outside."""
    assert after_exit(WORKER, failures=0, ran_s=0.1, code=2).delay_s == 0.5


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-63, "was killed by signal 63"),
    ],
)
def test_end_is_described(code: int, text: str) -> None:
    """People read names, not negative numbers."""
    assert describe_exit(code) == text


def test_sigkill_hints_at_memory() -> None:
    """The kernel's out-of-memory killer is the likeliest sender."""
    assert "memory" in describe_exit(-signal.SIGKILL)
