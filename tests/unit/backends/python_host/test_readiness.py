"""A model's own `is_ready`: what it says is told without waiting for it, and never concerns requests."""

import threading
from pathlib import Path

import pytest

from qinfer.backends.python import PythonBackend
from qinfer.backends.python_host import readiness
from qinfer.errors import InferenceFailed
from qinfer.testing import wait_until
from tests.support.python_models import DECOUPLED, execute, floats, loaded, run

ECHO = "return [reply(x(request)) for request in requests]"


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "EVERY_S", 0.0)


def becomes(backend: PythonBackend, reason: str) -> None:
    wait_until(lambda: backend.unready() == reason)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("def is_ready(self): return True", ""),
        ("async def is_ready(self): return True", ""),
        ("def is_ready(self): return False", "its is_ready returned False"),
        ("async def is_ready(self): return False", "its is_ready returned False"),
        ("def is_ready(self): return 'yes'", "its is_ready returned a str, not a bool"),
        ("def is_ready(self): raise KeyError('weights')", "KeyError: 'weights'"),
        ("def is_ready(self): sys.exit(3)", "SystemExit: 3"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("more", ["", DECOUPLED])
def test_what_it_says_is_known_when_the_model_is_loaded(tmp_path: Path, body: str, reason: str, more: str) -> None:
    with loaded(tmp_path, execute(ECHO, body), more=more) as backend:
        assert backend.unready() == reason


def test_requests_execute_while_it_says_no(tmp_path: Path) -> None:
    with loaded(tmp_path, execute(ECHO, "def is_ready(self): return False")) as backend:
        assert run(backend, floats(3)).array() == 3.0


def test_it_may_change_its_mind(tmp_path: Path) -> None:
    body = "self.no = bool(x(requests[0]).flat[0])\n" + ECHO
    with loaded(tmp_path, execute(body, "no = False\ndef is_ready(self): return not self.no")) as backend:
        run(backend, floats(1))
        becomes(backend, "its is_ready returned False")
        run(backend, floats(0))
        becomes(backend, "")


def test_one_that_hangs_says_no_and_keeps_no_load_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "ANSWER_S", 0.2)
    with loaded(tmp_path, execute(ECHO, "def is_ready(self): time.sleep(1000)")) as backend:
        assert "gave no answer" in backend.unready()


def test_one_that_hangs_keeps_a_batch_for_its_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked again while it hangs; when it has ended, what it says counts."""
    gate, asked = tmp_path / "gate", tmp_path / "asked"
    body = (
        "def is_ready(self):\n"
        f"    with open({str(asked)!r}, 'a') as file: file.write('x')\n"
        f"    while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        "    return True"
    )
    monkeypatch.setattr(readiness, "ANSWER_S", 0.2)
    with loaded(tmp_path, execute(ECHO, body)) as backend:
        answers = [run(backend, floats(3)).array() for _ in range(3)]
        becomes(backend, "its is_ready gave no answer for 5 s")
        calls = asked.read_text()
        gate.touch()
        becomes(backend, "")

    assert answers == [3.0] * 3
    assert calls == "x"


def test_a_long_execution_is_no_missing_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process answers when it has executed the batch."""
    gate = tmp_path / "gate"
    body = f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\n" + ECHO
    with loaded(tmp_path, execute(body, "def is_ready(self): return True")) as backend:
        wait_until(lambda: backend.unready() == "")
        monkeypatch.setattr(readiness, "ANSWER_S", 0.0)
        with_batch = threading.Thread(target=run, args=(backend, floats(1)))
        with_batch.start()
        wait_until(lambda: backend._instance.is_busy)

        reasons = {backend.unready() for _ in range(100)}
        gate.touch()
        with_batch.join()

    assert reasons == {""}


def test_the_next_process_is_asked_when_one_has_died(tmp_path: Path) -> None:
    body = "if x(requests[0]).flat[0]: os._exit(1)\n" + ECHO
    marks = tmp_path / "marks"
    method = f"def is_ready(self):\n    first = not os.path.exists({str(marks)!r})\n    return first"
    with loaded(tmp_path, execute(body, method)) as backend:
        assert backend.unready() == ""
        marks.touch()
        with pytest.raises(InferenceFailed):
            run(backend, floats(1))

        becomes(backend, "its is_ready returned False")


def test_a_traceback_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model that is broken is asked every second."""
    with loaded(tmp_path, execute(ECHO, "asked = 0\ndef is_ready(self):\n    raise KeyError('weights')")) as backend:
        for _ in range(20):
            wait_until(lambda: bool(backend.unready()))
            backend.unready()
        wait_until(lambda: any(record.message == "is_ready failed" for record in caplog.records))

    assert [record.message for record in caplog.records].count("is_ready failed") == 1


def test_an_instance_that_is_not_loaded_yet_is_asked_without_harm() -> None:
    """The heartbeat and the watchdog ask while the model loads."""
    backend = PythonBackend()

    assert (backend.unready(), backend.interrupt()) == ("", False)
