"""`qinfer dev`: saves under load without a failed request, and a debugger in a pseudo-terminal."""

import os
import re
import select
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinfer.testing import wait_until

HI = """
import os
import qinfer

os.environ["ACME_MARK"]


@qinfer.model
class Hi:
    def setup(self) -> None:
        {setup}

    def predict(self, text: str) -> str:
        return text + "{version}"
"""
STOPS = """
import qinfer


@qinfer.model(timeout_s=0.5, instances=2)
def hi(text: str) -> str:
    print("begins with", text)
    breakpoint()
    print("goes on")
    return text + "!"


@qinfer.model
def fails(text: str) -> float:
    return inner(text)


def inner(text: str) -> float:
    return 1 / 0
"""
REQUESTS, SAVES = 1000, 10
# Makes the pseudo-terminal of stdin the controlling one, as a terminal emulator does.
WITH_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "qinfer.cli.main", *sys.argv[1:]])
"""


class Terminal:
    """A pseudo-terminal with `qinfer dev` in the foreground."""

    def __init__(self, app: Path, data: Path) -> None:
        self._ours, self._theirs = os.openpty()
        self.modes = termios.tcgetattr(self._theirs)
        self.shown = ""
        command = [sys.executable, "-c", WITH_TERMINAL, "dev", str(app), "--data-dir", str(data)]
        command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        command += ["--model-repository", f"{data}/functions"]
        variables = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
        variables |= {"ACME_MARK": "a", "QINFER_WORKER__MODEL_ENV": '["ACME_*"]'}
        self.process = subprocess.Popen(
            command,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env=variables,
            start_new_session=True,
        )

    def until(self, pattern: str, timeout_s: float = 60.0) -> str:
        """Returns what matches on the screen, after what was returned before."""
        end_s = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.shown)) is None:
            if not select.select([self._ours], [], [], max(end_s - time.monotonic(), 0))[0]:
                raise TimeoutError(f"no {pattern!r} in:\n{self.shown}")
            self.shown += os.read(self._ours, 65536).decode(errors="replace")
        self.shown = self.shown[found.end() :]
        return found[0]

    def type(self, text: str) -> None:
        """Types a text."""
        os.write(self._ours, text.encode())

    def close(self) -> tuple[int, Any]:
        """Presses Ctrl-C; returns the exit status and the terminal's modes after it."""
        if self.process.poll() is None:
            self.type("\x03")
        end_s = time.monotonic() + 30
        while self.process.poll() is None:  # a full screen would stop it
            if select.select([self._ours], [], [], 0.1)[0]:
                self.shown += os.read(self._ours, 65536).decode(errors="replace")
            if time.monotonic() > end_s:
                self.process.kill()
        modes = termios.tcgetattr(self._theirs)
        os.close(self._ours)
        os.close(self._theirs)
        return self.process.wait(), modes


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app" / "app.py"
    path.parent.mkdir()
    return path


@pytest.fixture
def terminal(app: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    app.write_text(request.param)
    terminal = Terminal(app, tmp_path / "data")
    try:
        yield terminal
    finally:
        if terminal.process.poll() is None:
            terminal.close()


def address(terminal: Terminal) -> str:
    return re.sub(r"\s", "", terminal.until(r"http://127\.0\.0\.1:\d+\s"))


@pytest.mark.parametrize("terminal", [STOPS], indirect=True)
@pytest.mark.timeout(180)
def test_breakpoint_stops_in_the_terminal_without_a_timeout_and_the_caller_gets_its_answer(terminal: Terminal) -> None:
    url = address(terminal)
    answers: list[httpx.Response] = []
    caller = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/models/hi", json={"text": "a"}, timeout=120))
    )
    terminal.until("Stop ")

    caller.start()
    terminal.until("begins with a")
    terminal.until(r"\(Pdb\) ")
    terminal.type("p text * 3\n")
    terminal.until("'aaa'")
    # It stands longer than the model's own timeout and the first looks of the watchdog.
    terminal.type("import time; time.sleep(2)\n")
    terminal.type("p text * 4\n")
    terminal.until("'aaaa'")
    terminal.type("text = 'b'\n")
    terminal.type("c\n")
    terminal.until("goes on")
    caller.join()

    assert [(answer.status_code, answer.json()) for answer in answers] == [(200, {"output": "b!"})]


@pytest.mark.parametrize("terminal", [STOPS], indirect=True)
@pytest.mark.timeout(180)
def test_a_failure_shows_the_lines_of_the_app_and_the_request(terminal: Terminal) -> None:
    url = address(terminal)
    terminal.until("Stop ")

    answer = httpx.post(f"{url}/models/fails", json={"text": "a"}, timeout=60)
    shown = terminal.until(r"the function failed(?s:.)*?ZeroDivisionError: division by zero")

    assert answer.json() == {"error": "ZeroDivisionError: division by zero"}
    assert answer.headers["qinfer-request-id"] in shown
    assert re.findall(r"line \d+, in (\w+)", shown) == ["fails", "inner"]


@pytest.mark.parametrize("terminal", [STOPS], indirect=True)
@pytest.mark.timeout(180)
def test_ctrl_c_ends_it_at_a_breakpoint_and_the_terminal_is_as_before(terminal: Terminal) -> None:
    url = address(terminal)
    terminal.until("Stop ")

    caller = threading.Thread(
        target=lambda: httpx.post(f"{url}/models/hi", json={"text": "a"}, timeout=120), daemon=True
    )
    caller.start()
    terminal.until(r"\(Pdb\) ")

    assert terminal.close() == (0, terminal.modes)


@pytest.mark.parametrize("terminal", [HI.format(setup="pass", version=0)], indirect=True)
@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_request_fails_while_ten_saves_one_of_them_broken_are_loaded(app: Path, terminal: Terminal) -> None:
    url = address(terminal)
    terminal.until("Stop ")
    statuses: list[int] = []
    seen: set[str] = set()
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not is_over.is_set() or len(statuses) < REQUESTS:
                answer = client.post("/models/hi", json={"text": "a"})
                statuses.append(answer.status_code)
                seen.add(answer.json().get("output", answer.text))

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    try:
        for version in range(1, SAVES):
            app.write_text(HI.format(setup="pass", version=version))
            wait_until(lambda version=version: f"a{version}" in seen, 60)  # type: ignore[misc]
            if version == SAVES // 2:
                app.write_text("import nowhere_at_all\n")
                terminal.until("can't be read; the models before it go on")
    finally:
        is_over.set()
        for asker in askers:
            asker.join()

    assert len(statuses) >= REQUESTS
    assert set(statuses) == {200}
    assert seen == {f"a{version}" for version in range(SAVES)}


@pytest.mark.parametrize("terminal", [HI.format(setup="pass", version=1)], indirect=True)
@pytest.mark.timeout(180)
def test_a_model_that_cannot_be_loaded_leaves_the_one_before_until_the_next_save(app: Path, terminal: Terminal) -> None:
    url = address(terminal)
    terminal.until("Stop ")

    def ask() -> Any:
        return httpx.post(f"{url}/models/hi", json={"text": "a"}, timeout=60).json()

    app.write_text(HI.format(setup="raise RuntimeError('no weights')", version=2))
    terminal.until("RuntimeError: no weights")
    assert ask() == {"output": "a1"}

    app.write_text(HI.format(setup="pass", version=3))
    wait_until(lambda: ask() == {"output": "a3"}, 60)
