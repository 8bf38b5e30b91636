"""The python backend and model code that does what nobody would: its process answers, and goes on.

One process executes everything, so that a batch that upset the connection would fail the next.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qinfer.backends.python import PythonBackend
from qinfer.backends.python_host import channel
from qinfer.backends.python_host.messages import ModelLoaded
from qinfer.errors import InferenceFailed, ModelNotReady
from qinfer.observe.logs import MODELS
from qinfer.testing import wait_until
from tests.support.backends import Answers
from tests.support.python_models import ECHO, HEADER, execute, floats, load, loaded, run, write_model

OBEDIENT = (
    HEADER
    + """
class Broken(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def fail(error):
    raise error

class TritonPythonModel:
    def execute(self, requests):
        return [eval(json.loads(request.parameters())["what"]) for request in requests]
"""
)
ONE = "np.ones((1, 1), 'f4')"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonBackend]:
    with loaded(tmp_path_factory.mktemp("repository"), OBEDIENT) as backend:
        yield backend


def told(model: PythonBackend, what: str) -> Answers:
    """Has the model evaluate an expression, and sees that its process lives on."""
    pid = run(model, floats(0), parameters={"what": "reply(np.array([[os.getpid()]], 'f4'))"}).array().item()
    try:
        return run(model, floats(0), parameters={"what": what})
    finally:
        again = run(model, floats(0), parameters={"what": "reply(np.array([[os.getpid()]], 'f4'))"}).array().item()
        assert again == pid


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (f"reply({ONE}, name=5)", "TypeError: the name of a tensor is a str, got int"),
        (f"reply({ONE}, parameters={{'a': 2**70}})", "parameter 'a' is 1180591620717411303424, which has more than 64"),
        (f"reply({ONE}, parameters=['a'])", "Expect parameters to have type dict, found type '<class 'list'>'"),
        (r"fail(ValueError('file \udc80'))", "ValueError: file ?"),
        ("fail(Broken())", "message: Broken"),
        ("fail(KeyboardInterrupt())", "message: KeyboardInterrupt"),
        ("pb_utils.InferenceRequest('', 0, [], [], 5)", "TypeError: model_name is a str, got int"),
        ("pb_utils.InferenceRequest('', 0, [], [], 'm', timeout=-1)", "timeout is a number of microseconds, 0 or more"),
    ],
)
def test_what_the_wire_can_not_hold_fails_the_batch_only(model: PythonBackend, what: str, message: str) -> None:
    """With a message that says what it was."""
    with pytest.raises(InferenceFailed) as caught:
        told(model, what)

    assert message in caught.value.message


def test_long_messages_are_cut(model: PythonBackend) -> None:
    """What an exception quotes may be a whole array."""
    with pytest.raises(InferenceFailed) as caught:
        told(model, "fail(ValueError('x' * 1_000_000))")

    assert len(caught.value.message) < 5000


def test_names_may_be_bytes(model: PythonBackend) -> None:
    """Triton takes them for strings."""
    assert told(model, f"reply({ONE}, name=b'y')").array().item() == 1


def test_text_is_made_whole(model: PythonBackend) -> None:
    """Half of a surrogate pair, as Python has in names of files, has no UTF-8."""
    answers = told(model, r"pb_utils.InferenceResponse(error=pb_utils.TritonError('file \udc80'))")

    assert answers.error().message == "file ?"


def test_parameters_become_plain_values(model: PythonBackend) -> None:
    """Subclasses of `int` and `str`, as numpy has of the latter, are what they are."""
    answers = told(
        model, f"reply({ONE}, parameters={{'a': type('Whole', (int,), {{}})(3), 'b': np.str_('q'), 'c': True}})"
    )

    assert answers.parameters[0] == {"a": 3, "b": "q", "c": True}


def test_a_request_for_all_outputs_names_them(model: PythonBackend) -> None:
    """As in Triton, where models look whether an output is wanted."""
    answers = told(model, f"reply({ONE}, parameters={{'wanted': ' '.join(request.requested_output_names())}})")

    assert answers.parameters[0] == {"wanted": "y"}


def test_outputs_that_the_configuration_does_not_have_are_left_out(model: PythonBackend) -> None:
    """As in Triton, which prunes what was not asked for."""
    more = f"pb_utils.InferenceResponse([pb_utils.Tensor('more', {ONE}), pb_utils.Tensor('y', {ONE})])"

    outputs = told(model, more).by_item[0]

    assert isinstance(outputs, tuple)
    assert [tensor.name for tensor in outputs] == ["y"]


def test_a_model_that_prints_our_mark_is_heard_further(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The thread that listens must live: without it the model would block as soon as the pipe is full."""
    code = execute(
        "for record in ('5', '[[1], 2]', '{}', 'text'):\n"
        "    print(chr(0x1e) + 'qinfer:' + record)\n"
        "for _ in range(3000):\n"
        "    print('-' * 100)\n"
        "print('the end')\n"
        "return [reply(x(r)) for r in requests]"
    )
    caplog.set_level("INFO", MODELS)
    with loaded(tmp_path, code) as backend:
        assert run(backend, floats(1)).array().item() == 1
        wait_until(lambda: getattr(caplog.records[-1], "text", "") == "the end", description="the last line")


def test_long_records_keep_their_level(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their beginning and their end are logged."""
    code = execute(
        "pb_utils.Logger.log_error('begin ' + 'ü' * 100_000 + ' end')\nreturn [reply(x(r)) for r in requests]"
    )

    def began() -> list[logging.LogRecord]:
        """Returns its records; those of an earlier test's process may come late."""
        return [one for one in caplog.records if one.getMessage().startswith("begin ")]

    with loaded(tmp_path, code) as backend:
        run(backend, floats(1))
        wait_until(lambda: bool(began()), description="the record")

    (record,) = began()
    assert record.levelname == "ERROR"
    assert record.getMessage().endswith(" end")


def test_output_that_is_closed_costs_nothing(tmp_path: Path) -> None:
    """The model's log is lost, its answers are not."""
    code = execute("os.closerange(1, 3)\npb_utils.Logger.log_info('x')\nreturn [reply(x(r)) for r in requests]")
    with loaded(tmp_path, code) as backend:
        assert [run(backend, floats(n)).array().item() for n in range(3)] == [0, 1, 2]


def test_junk_on_the_connection_costs_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows it can't be read."""
    monkeypatch.setattr("qinfer.backends.python_host.process._DEATH_S", 0.2)
    code = execute(
        "if x(requests[0]) == 1:\n"
        "    for fd in map(int, os.listdir('/proc/self/fd')):\n"
        "        name = f'/proc/self/fd/{fd}'\n"
        "        if os.path.exists(name) and os.readlink(name).startswith('socket'):\n"
        "            os.write(fd, bytes([32, 0, 0, 0, 0, 0, 0, 0]) + b'j' * 64)\n"
        "return [reply(x(r)) for r in requests]"
    )
    with loaded(tmp_path, code) as backend:
        with pytest.raises(InferenceFailed, match="died"):
            run(backend, floats(1))
        assert run(backend, floats(2)).array().item() == 2


def test_without_shared_memory_the_batch_fails_and_the_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is out of descriptors must not kill its models."""
    large = floats(*range(20_000)).reshape(1, -1)
    with loaded(tmp_path, ECHO) as backend:
        process = backend._instance.process()

        def refuse(*_: object) -> int:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse)
            with pytest.raises(MemoryError, match="bytes of shared memory: Too many open files"):
                run(backend, large)

        assert run(backend, large).array().shape == (1, 20_000)
        assert backend._instance.process() is process


def test_a_batch_tries_few_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose processes die as soon as they are loaded must not hold its batches for ever."""
    backend = load(write_model(tmp_path, ECHO))
    process = backend._instance.process()
    assert process is not None
    tried: list[object] = []

    def refuse(*_: object) -> None:
        tried.append(process)
        raise BrokenPipeError

    monkeypatch.setattr(process.channel, "send", refuse)
    monkeypatch.setattr(backend._instance, "lost", lambda _: None)

    answers = run(backend, floats(1, 2))

    monkeypatch.undo()
    backend.unload()
    assert len(tried) == 5
    assert [type(answers.error(item)) for item in (0, 1)] == [ModelNotReady] * 2


def test_a_batch_that_an_unload_ends_is_refused_as_unloaded(tmp_path: Path) -> None:
    """And so is one that comes later."""
    backend = load(write_model(tmp_path, ECHO))
    backend.unload()

    assert run(backend, floats(1)).error().message == "model 'm' can't be started again: it was unloaded"


def test_a_sender_that_waits_does_not_keep_its_process_from_receiving() -> None:
    """Else two processes whose sockets are full would wait for one another."""
    one, other = (channel.Channel(end) for end in socket.socketpair())
    one.send(ModelLoaded(), [bytes(300_000)])
    other.receive()
    other.send(ModelLoaded())

    one._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def send() -> None:
        one.send(ModelLoaded(), [bytes(30_000)])

    def receive() -> None:
        one.receive()
        received.set()

    received = threading.Event()
    sending = threading.Thread(target=send)
    sending.start()
    wait_until(one._sending.locked, description="a sender whose socket is full")
    threading.Thread(target=receive, daemon=True).start()

    try:
        assert received.wait(10)
    finally:
        other.receive()
        sending.join()
        one.close()
        other.close()


def test_huge_memory_is_given_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the next message comes: an idle model must not hold its last batch."""
    monkeypatch.setattr(channel, "KEPT_BYTES", 100_000)
    one, other = (channel.Channel(end) for end in socket.socketpair())
    one.send(ModelLoaded(), [b"x" * 300_000])

    _, buffers = other.receive()
    (segment,) = one._used.values()
    assert segment.view[:300_000].all()
    del buffers

    assert not segment.view.any()
    one.close()
    other.close()


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_models_may_use_multiprocessing(tmp_path: Path, how: str) -> None:
    """Its pools end their processes by SIGTERM, and those that it spawns import `model.py` again."""
    code = f"""{HEADER}
import multiprocessing

def square(value):
    return value * value

class TritonPythonModel:
    def execute(self, requests):
        with multiprocessing.get_context("{how}").Pool(1) as pool:
            return [reply(np.array([pool.map(square, x(request)[0].tolist())], "f4")) for request in requests]
"""
    with loaded(tmp_path, code) as backend:
        assert run(backend, floats(3)).array().tolist() == [[9.0]]


def test_a_model_that_hangs_does_not_hold_up_the_end_of_a_worker(tmp_path: Path) -> None:
    """It had the time of the drain; only what is idle gets the time of `finalize`."""
    directory = write_model(tmp_path, execute("open(pb_utils.get_model_dir() + '/hangs', 'w')\ntime.sleep(60)"))
    program = (
        "import pathlib, sys, threading, time\n"
        "from qinfer.backends.python_host import process\n"
        "from tests.support.python_models import floats, load, run\n"
        "process.FINALIZE_S = 600\n"
        "backend = load(pathlib.Path(sys.argv[1]))\n"
        "threading.Thread(target=run, args=(backend, floats(1)), daemon=True).start()\n"
        "while not (pathlib.Path(sys.argv[1]) / 'hangs').exists(): time.sleep(0.01)\n"
    )

    root = Path(__file__).resolve().parents[4]
    subprocess.run([sys.executable, "-c", program, str(directory)], cwd=root, check=True, timeout=30)
