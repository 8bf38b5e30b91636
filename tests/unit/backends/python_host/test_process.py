"""The python backend's processes: how they die, are replaced, end, and what they say meanwhile."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from qinfer.backends import parameters
from qinfer.backends.python import PythonBackend
from qinfer.backends.python_host import process
from qinfer.errors import InferenceFailed, ModelLoadFailed, ModelNotReady
from qinfer.observe.logs import MODELS
from qinfer.testing import wait_until
from tests.support.python_models import ECHO, HEADER, execute, floats, load, loaded, run, write_model

# What a batch makes the process do: nothing, die by a signal, exit, or tell its process id.
FRAGILE = execute(
    """
what = int(x(requests[0]).flat[0])
if what == 1:
    ctypes.string_at(0)
if what == 2:
    os._exit(7)
if what == 3:
    return [reply(np.array([[os.getpid()]], "f4")) for _ in requests]
return [reply(x(request)) for request in requests]
""",
    before="""
def initialize(self, args):
    if os.path.exists(os.path.join(pb_utils.get_model_dir(), "broken")):
        os._exit(9)
""",
)


def is_running(pid: int) -> bool:
    """Tells whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pid_of(backend: PythonBackend) -> int:
    current = backend._instance.process()
    assert current is not None
    return current.pid


def test_a_crash_fails_its_batch_and_the_next_one_runs(tmp_path: Path) -> None:
    """In another process."""
    with loaded(tmp_path, FRAGILE) as backend:
        before = pid_of(backend)

        with pytest.raises(InferenceFailed) as crashed:
            run(backend, floats(1))
        with pytest.raises(InferenceFailed) as exited:
            run(backend, floats(2))

        assert crashed.value.message == "the process of model 'm' died (signal 11: SIGSEGV)"
        assert exited.value.message == "the process of model 'm' died (exit code 7)"
        assert run(backend, floats(0)).array() == 0.0
        assert pid_of(backend) != before


def test_a_death_between_batches_costs_none(tmp_path: Path) -> None:
    """The next batch is not to blame: it runs in the new process."""
    with loaded(tmp_path, FRAGILE) as backend:
        before = pid_of(backend)
        os.kill(before, signal.SIGKILL)

        assert run(backend, floats(0)).array() == 0.0
        assert pid_of(backend) != before


def test_a_model_that_can_not_start_again_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are refused as retryable, each by itself; once it starts again, they are served."""
    monkeypatch.setattr(process, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(process, "LONGEST_PAUSE_S", 0.05)
    with loaded(tmp_path, FRAGILE) as backend:
        broken = tmp_path / "m" / "1" / "broken"
        broken.touch()
        with pytest.raises(InferenceFailed):
            run(backend, floats(1))

        answers = run(backend, floats(0, 0))

        assert isinstance(answers.error(0), ModelNotReady)
        assert answers.error(1).message == (
            "model 'm' can't be started again: the process of model 'm' died while it was loaded (exit code 9)"
        )
        broken.unlink()
        wait_until(lambda: isinstance(run(backend, floats(0)).by_item[0], tuple), description="a new process")


def test_a_model_that_hangs_while_it_starts_again_can_be_unloaded(tmp_path: Path) -> None:
    """Nothing is left of it."""
    before = """
def initialize(self, args):
    while os.path.exists(os.path.join(pb_utils.get_model_dir(), "hang")):
        time.sleep(10)
"""
    directory = write_model(tmp_path, execute("os._exit(1)", before=before))
    backend = load(directory)
    (directory / "hang").touch()
    with pytest.raises(InferenceFailed):
        run(backend, floats(0))
    wait_until(lambda: backend._instance._starting is not None, description="a new process")
    starting = backend._instance._starting
    assert starting is not None

    backend.unload()

    assert not is_running(starting.pid)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("os._exit(3)", "the process of model 'm' died while it was loaded (exit code 3)"),
        (
            "os.kill(os.getpid(), 9)",
            "the process of model 'm' died while it was loaded (signal 9: SIGKILL: out of memory?)",
        ),
        ("raise ValueError('no weights')", "model 'm' failed to load: ValueError: no weights"),
        ("sys.exit(1)", "model 'm' failed to load: SystemExit: 1"),
        (
            "import no_such_module",
            "model 'm' failed to load: ModuleNotFoundError: No module named 'no_such_module'; "
            "install what provides 'no_such_module' in the worker's environment",
        ),
        (
            "os.environ['ACME_TOKEN']",
            "model 'm' failed to load: KeyError: 'ACME_TOKEN' is not in the environment of the model, which has few of "
            "the worker's variables; set it there, and name it in QINFER_WORKER__MODEL_ENV",
        ),
        ("{}['ACME_TOKEN']", "model 'm' failed to load: KeyError: 'ACME_TOKEN'"),
        (
            "open(pb_utils.get_model_dir() + '/weights')",
            "model 'm' failed to load: FileNotFoundError: [Errno 2] No such file or directory: 'weights'",
        ),
    ],
)
def test_a_model_that_fails_to_initialize(tmp_path: Path, body: str, text: str) -> None:
    """The load fails with the reason."""
    code = execute("return []", before=f"def initialize(self, args):\n    {body}")

    with pytest.raises(ModelLoadFailed) as caught:
        load(write_model(tmp_path, code))

    assert caught.value.message == text


def test_a_request_that_needs_a_variable_names_the_setting(tmp_path: Path) -> None:
    with loaded(tmp_path, execute("os.environ['ACME_TOKEN']")) as model, pytest.raises(InferenceFailed) as caught:
        run(model, floats(0))

    assert "'ACME_TOKEN' is not in the environment of the model" in caught.value.message
    assert "QINFER_WORKER__MODEL_ENV" in caught.value.message


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("class Other: pass", "TritonModelException: model.py has no class TritonPythonModel"),
        ("class TritonPythonModel: pass", "Python model model.py does not implement `execute` method."),
        ("def (:", "SyntaxError: invalid syntax (model.py, line 1)"),
    ],
)
def test_a_file_that_is_no_model(tmp_path: Path, code: str, text: str) -> None:
    """The load says what is missing."""
    with pytest.raises(ModelLoadFailed, match=r"model 'm' failed to load") as caught:
        load(write_model(tmp_path, code))

    assert text in caught.value.message


def test_what_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    """A model whose file is missing."""
    directory = write_model(tmp_path, ECHO)
    (directory / "model.py").rename(directory / "other.py")
    with pytest.raises(ModelLoadFailed, match=r"has no file 'model\.py' in version 1"):
        load(directory)


def test_finalize_runs_and_the_process_ends(tmp_path: Path) -> None:
    """With what the model started itself."""
    before = """
def finalize(self):
    open(os.path.join(pb_utils.get_model_dir(), "finalized"), "w").write(str(self.child.pid))
def initialize(self, args):
    import subprocess
    self.child = subprocess.Popen(["sleep", "1000"])
"""
    directory = write_model(tmp_path, execute("return [reply(x(r)) for r in requests]", before=before))
    backend = load(directory)
    pid = pid_of(backend)

    backend.unload()

    child = int((directory / "finalized").read_text())
    assert not is_running(pid)
    wait_until(lambda: not is_running(child), description="the end of the model's own process")


def test_a_finalize_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it does about signals."""
    monkeypatch.setattr(process, "FINALIZE_S", 0.2)
    monkeypatch.setattr(process, "TERMINATE_S", 0.2)
    before = """
def finalize(self):
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True: time.sleep(10)
"""
    backend = load(write_model(tmp_path, execute("return [reply(x(r)) for r in requests]", before=before)))
    pid = pid_of(backend)

    backend.unload()

    assert not is_running(pid)


def test_only_the_worker_ends_a_model(tmp_path: Path) -> None:
    """A process manager sends SIGTERM to all processes; the worker still drains then."""
    with loaded(tmp_path, FRAGILE) as backend:
        pid = pid_of(backend)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)

        assert run(backend, floats(0)).array() == 0.0
        assert pid_of(backend) == pid


def test_a_process_that_a_dead_model_started_is_ended(tmp_path: Path) -> None:
    """Though it holds the output of the dead one open."""
    body = """
import subprocess
child = subprocess.Popen(["sleep", "1000"])
open(os.path.join(pb_utils.get_model_dir(), "child"), "w").write(str(child.pid))
os._exit(1)
"""
    directory = write_model(tmp_path, execute(body.strip()))
    backend = load(directory)
    with pytest.raises(InferenceFailed, match="exit code 1"):
        run(backend, floats(0))

    child = int((directory / "child").read_text())
    wait_until(lambda: not is_running(child), description="the end of the model's own process")
    backend.unload()


def test_a_forked_process_does_not_hide_the_death_of_a_model(tmp_path: Path) -> None:
    """Though it holds the connection and the output, and left the group."""
    body = """
if os.fork() == 0:
    os.setsid()
    open(os.path.join(pb_utils.get_model_dir(), "child"), "w").write(str(os.getpid()))
    time.sleep(20)
    os._exit(0)
while not os.path.exists(os.path.join(pb_utils.get_model_dir(), "child")):
    time.sleep(0.01)
os._exit(1)
"""
    directory = write_model(tmp_path, execute(body.strip()))
    backend = load(directory)
    try:
        with pytest.raises(InferenceFailed, match="exit code 1"):
            run(backend, floats(0))
    finally:
        os.kill(int((directory / "child").read_text()), signal.SIGKILL)
        backend.unload()


def test_a_process_outlives_the_thread_that_loaded_it(tmp_path: Path) -> None:
    """The kernel ends it with its parent's thread: that must not be the one that loads, which ends soon."""
    directory = write_model(tmp_path, FRAGILE)
    backends: list[PythonBackend] = []
    thread = threading.Thread(target=lambda: backends.append(load(directory)))
    thread.start()
    thread.join()
    pid = pid_of(backends[0])
    time.sleep(0.05)  # it would die at once

    assert run(backends[0], floats(0)).array() == 0.0
    assert pid_of(backends[0]) == pid
    backends[0].unload()


def test_nothing_survives_the_parents_death(tmp_path: Path) -> None:
    """Not even by SIGKILL, and while the model computes without looking up."""
    busy = HEADER + "class TritonPythonModel:\n    def execute(self, requests):\n        while True: pass\n"
    directory = write_model(tmp_path, busy)
    program = f"""
import pathlib, threading, time
from tests.support.python_models import load, run, floats
backend = load(pathlib.Path({str(directory)!r}))
threading.Thread(target=run, args=(backend, floats(0)), daemon=True).start()
print(backend._instance.process().pid, flush=True)
time.sleep(100)
"""
    root = str(Path(__file__).resolve().parents[4])
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)

    parent.kill()
    parent.wait()
    parent.stdout.close()

    wait_until(lambda: not is_running(pid), description="the end of the model's process")


def test_a_program_that_ends_finalizes_its_models(tmp_path: Path) -> None:
    """Though nobody unloads them, or nobody waits for the thread that does."""
    before = """
def finalize(self):
    time.sleep(0.2)
    open(os.path.join(pb_utils.get_model_dir(), "finalized"), "w").close()
"""
    directory = write_model(tmp_path, execute("return []", before=before))
    unload = "threading.Thread(target=backend.unload, daemon=True).start()"
    for end in ("", unload):
        program = (
            "import pathlib, threading; from tests.support.python_models import load; "
            f"backend = load(pathlib.Path({str(directory)!r})); {end}"
        )

        subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).resolve().parents[4], check=True)

        (directory / "finalized").unlink()


def test_what_a_model_prints_and_logs_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its lines with the model's name, its log records with their level."""
    caplog.set_level(logging.DEBUG, MODELS)
    code = execute(
        "print('printed ü')\n"
        "sys.stderr.write('half a line')\n"
        "pb_utils.Logger.log_warn('look\\nout')\n"
        "pb_utils.Logger.log('verbose', pb_utils.Logger.VERBOSE)\n"
        "return [reply(x(r)) for r in requests]"
    )
    with loaded(tmp_path, code) as backend:
        run(backend, floats(0))

        def said() -> set[tuple[str, str]]:
            return {(r.levelname, getattr(r, "text", r.getMessage())) for r in caplog.records}

        expected = {("INFO", "printed ü"), ("INFO", "half a line"), ("WARNING", "look\nout"), ("DEBUG", "verbose")}
        wait_until(lambda: said() >= expected, description="the log")

    assert {getattr(record, "model", "") for record in caplog.records} == {"m"}


def test_a_model_gets_the_variables_that_are_set_for_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the worker's, such as the password of Redis."""
    monkeypatch.setenv("QINFER_REDIS__URL", "redis://:secret@host")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(parameters, "_model_variables", {})
    parameters.use_model_variables({"OMP_NUM_THREADS": "1"})
    names = ["QINFER_REDIS__URL", "AWS_SECRET_ACCESS_KEY", "OMP_NUM_THREADS"]
    code = execute(f"return [reply(np.array([[name in os.environ for name in {names}]], 'f4'))]")
    with loaded(tmp_path, code) as backend:
        assert run(backend, floats(0)).array().tolist() == [[0.0, 0.0, 1.0]]


def test_instances_have_names_of_their_own(tmp_path: Path) -> None:
    """And a name that is free is taken again."""
    code = execute(
        "return [reply(x(r), parameters={'name': self.name}) for r in requests]",
        before="def initialize(self, args):\n    self.name = args['model_instance_name']",
    )
    directory = write_model(tmp_path, code, name="named")
    one, two = load(directory), load(directory)
    names = [run(backend, floats(0)).parameters[0]["name"] for backend in (one, two)]
    one.unload()
    three = load(directory)
    names.append(run(three, floats(0)).parameters[0]["name"])
    two.unload()
    three.unload()

    assert names == ["named_0", "named_1", "named_0"]


def test_the_traceback_of_a_model_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the model's own code on; clients see the exception's text only."""
    code = execute("return self.helper()", before="def helper(self):\n    raise ValueError('here')")
    with loaded(tmp_path, code) as backend:
        with pytest.raises(InferenceFailed) as caught:
            run(backend, floats(0))
        wait_until(lambda: "execute failed" in caplog.text, description="the log")

    (record,) = [r for r in caplog.records if "execute failed" in r.getMessage()]  # not what another test has left
    assert record.levelname == "ERROR"
    trace = vars(record)["exception"]
    assert (record.getMessage(), trace.splitlines()[-1]) == ("execute failed", "ValueError: here")
    assert "in helper\n    raise ValueError('here')" in trace
    assert "python_host" not in trace
    assert str(tmp_path) not in caught.value.message


def test_the_log_of_a_crash_names_the_requests_and_the_likely_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> bool:
        died = [record.__dict__ for record in caplog.records if record.message == "the model's process died"]
        expected = ("signal 9: SIGKILL: out of memory?", ["held", "held"])
        return expected in [(one["how"], one["request_ids"]) for one in died]

    code = execute("if x(requests[0]).flat[0]: os.kill(os.getpid(), 9)\nreturn [reply(x(r)) for r in requests]")
    with loaded(tmp_path, code) as backend:
        run(backend, floats(0), id="answered")
        with pytest.raises(InferenceFailed):
            run(backend, floats(1, 1), id="held")

        wait_until(told)


def test_models_are_finalised_where_python_starts_no_thread_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on an interpreter that ends refuses new threads."""

    class Live:
        is_busy = False

        def stop(self, finalize_s: float | None) -> None:
            stopped.append(finalize_s)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    stopped: list[float | None] = []
    monkeypatch.setattr(process, "_live", [Live(), Live()])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    process._stop_all()
    assert stopped == [None, None]


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ('W1129 10:57:20.123456 4711 subject.cc:250] "slow"', logging.WARNING),
        ("E0000 00:00:1795952441.123456   19537 port.cc:153] failed", logging.ERROR),
        ("I1129 10:57:20.123456 4711 subject.cc:250] fine", logging.INFO),
        ("F1129 10:57:20.123456 4711 subject.cc:250] over", logging.CRITICAL),
        ("Warning: W1129 is a room", logging.INFO),
    ],
)
def test_a_line_in_the_form_of_glog_has_its_level(line: str, level: int) -> None:
    assert process.level_of(line) == level
