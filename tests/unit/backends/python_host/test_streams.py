"""Decoupled models: responses at any time and from any thread, the window, cancellation, and processes that die."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from qinfer.backends.python import PythonBackend
from qinfer.backends.python_host import streams
from qinfer.errors import InferenceFailed, OutputMismatch
from qinfer.observe.logs import MODELS
from qinfer.testing import wait_until
from tests.support.backends import Answers
from tests.support.python_models import DECOUPLED, Streamed, batch_of, execute, floats, loaded, run

FINAL = "pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"

# Sends 0, 1, 2, … up to the number of each request, from a thread that waits until the next batch has come.
COUNT = execute(
    """
import threading
self.batches = getattr(self, "batches", 0) + 1
for request in requests:
    threading.Thread(target=count, args=(self, request.get_response_sender(), int(x(request).flat[0]))).start()
if self.batches == 2:
    self.gate.set()
""",
    before="""
def initialize(self, args):
    import threading
    self.gate = threading.Event()
""",
) + (
    f"""
def count(model, sender, number):
    model.gate.wait(20)
    for i in range(number):
        sender.send(reply(np.array([[i]], "f4")))
    sender.send(flags={FINAL})
"""
)

# Does what the first number of a batch says, with the sender of its first request; several tests share its process.
VERSATILE = execute(
    f"""
import threading
what, sender = int(x(requests[0]).flat[0]), requests[0].get_response_sender()
send = lambda n, flags=0, **more: sender.send(reply(np.full((1, 1), n, "f4"), **more), flags)
if what == 0:
    sender.send(flags={FINAL})
if what == 1:
    send(1, {FINAL}, parameters={{"said": True}})
if what == 2:
    send(1)
    send(2)
    send(3, flags={FINAL})
if what == 3:
    error = pb_utils.TritonError("not this one", pb_utils.TritonError.INVALID_ARG)
    sender.send(pb_utils.InferenceResponse(error=error))
    send(4)
    sender.send(pb_utils.InferenceResponse(error=error), flags={FINAL})
if what == 4:
    send(1)
    return [None]
if what == 5:
    send(1)
    raise ValueError("no such thing")
if what == 6:
    sender.send(reply(np.zeros((1, 1), "c8")))
if what == 7:
    send(1)
    sender.send(reply(np.zeros((1, 1), "f4"), name="z"))
    sender.send(flags={FINAL})
if what in (8, 15):
    def finish(sender):
        try:
            for i in range(1000):
                sender.send(reply(np.full((1, 1), i, "f4")))
        except pb_utils.TritonModelException as error:
            self.last = f"{{error}} {{sender.is_cancelled()}}"
            if what == 8:
                sender.send(flags={FINAL})
    threading.Thread(target=finish, args=(sender,)).start()
if what == 15:
    time.sleep(0.1)
    raise ValueError("meanwhile")
if what == 9:
    sender.send(pb_utils.InferenceResponse(parameters={{"last": self.last}}), flags={FINAL})
if what == 16:
    self.last = ""
    sender.send(flags={FINAL})
if what == 10:
    sender.send(flags={FINAL})
    sender.send(flags={FINAL})
if what == 11:
    sender.send(flags=7)
if what == 12:
    sender.send()
if what == 13:
    sender.send(1)
if what == 14:
    for size in (100, 10, 30):
        sender.send(reply(np.full((1, size), size, "f4")))
    sender.send(flags={FINAL})
""",
    before="last = ''",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PythonBackend]:
    with loaded(tmp_path_factory.mktemp("repository"), VERSATILE, more=DECOUPLED) as backend:
        yield backend


def start(backend: PythonBackend, *numbers: float, window_bytes: int = 1 << 20, request_id: str = "") -> Streamed:
    """Executes a batch; its responses may come later."""
    responses = Streamed(window_bytes)
    backend.execute(batch_of(floats(*numbers), id=request_id), responses)
    return responses


def test_responses_after_execute_in_order(tmp_path: Path) -> None:
    """Those of two batches of one instance, which takes the second while the first is open."""
    with loaded(tmp_path, COUNT, more=DECOUPLED) as backend:
        first = start(backend, 100, 3)
        assert not first.finals
        second = start(backend, 100)

        assert (first.final(0), first.final(1), second.final(0)) == ((), (), ())

    assert first.numbers == {0: [float(n) for n in range(100)], 1: [0.0, 1.0, 2.0]}
    assert second.numbers == {0: [float(n) for n in range(100)]}


def test_no_response_one_and_several(model: PythonBackend) -> None:
    none, one, several = start(model, 0), start(model, 1), start(model, 2)

    assert (none.final(), none.numbers) == ((), {})
    assert (len(one.final()), one.numbers, one.said) == (1, {0: [1.0]}, [{"said": True}])  # type: ignore[arg-type]
    assert several.final()
    assert several.numbers == {0: [1.0, 2.0, 3.0]}


def test_errors_between_responses(model: PythonBackend) -> None:
    """An error that is not final ends nothing."""
    responses = start(model, 3)

    assert responses.failure() == "not this one"
    assert (responses.errors, responses.numbers) == (["not this one"] * 2, {0: [4.0]})


def test_a_response_lacks_an_output(model: PythonBackend) -> None:
    """The response is an error, as where `execute` returns it; outputs that the configuration lacks are left out."""
    responses = start(model, 7)

    assert responses.final() == ()
    assert responses.numbers == {0: [1.0]}


REFUSED = [
    (6, "c8"),
    (10, "TritonModelException: Unable to send response. Response sender has been closed."),
    (11, "TritonModelException: Unable to send response. Unsupported flag provided."),
    (12, "TritonModelException: Inference Response object must be provided when the response flags is set to zero."),
    (13, "TypeError: response is a pb_utils.InferenceResponse object, got int"),
]


@pytest.mark.parametrize(("what", "text"), REFUSED)
def test_what_may_not_be_sent(model: PythonBackend, what: int, text: str) -> None:
    with pytest.raises(InferenceFailed) as caught:
        start(model, what)

    assert text in caught.value.message or what == 6


def test_execute_must_return_none(model: PythonBackend) -> None:
    """As in Triton. Whoever executes knows which requests had a response, and can't be executed again."""
    responses = Streamed()

    with pytest.raises(InferenceFailed, match="'m' is using the decoupled mode and the execute function must return"):
        model.execute(batch_of(floats(4, 4)), responses)

    assert (responses.numbers, responses.finals) == ({0: [1.0]}, {})


def test_execute_that_raises(model: PythonBackend) -> None:
    with pytest.raises(InferenceFailed, match="ValueError: no such thing"):
        start(model, 5)


def test_a_batch_that_fails_frees_its_threads(model: PythonBackend) -> None:
    """One that waits for room is told that its sender is closed."""
    with pytest.raises(InferenceFailed, match="ValueError: meanwhile"):
        start(model, 15, window_bytes=10 * (256 + 4))

    assert last_words(model).startswith("Unable to send response. Response sender has been closed.")


def test_send_waits_while_the_window_is_used_up(model: PythonBackend) -> None:
    """A response larger than the window passes when nothing is on its way."""
    responses = start_in_thread(model, 14, window_bytes=3 * 256)

    responses.await_count(1)  # 400 bytes
    assert len(responses.numbers[0]) == 1
    responses.take(399)
    responses.take(1)
    responses.await_count(3)  # 40 and 120 bytes

    assert responses.final() == ()
    assert responses.numbers == {0: [100.0, 10.0, 30.0]}


def start_in_thread(backend: PythonBackend, number: float, *, window_bytes: int) -> Streamed:
    """Executes a batch whose `execute` itself waits."""
    responses = Streamed(window_bytes)
    threading.Thread(target=backend.execute, args=(batch_of(floats(number)), responses)).start()
    return responses


def test_a_caller_that_takes_nothing_holds_up_nobody(model: PythonBackend) -> None:
    """Its thread of the model waits; others are answered by the same instance."""
    slow = start(model, 8, window_bytes=10 * (256 + 4))
    slow.await_count(10)
    quick = start(model, 2)

    assert quick.final()
    assert len(slow.numbers[0]) == 10
    slow.cancel()
    last_words(model)


def last_words(model: PythonBackend) -> str:
    """Returns what became of the thread of case 8."""
    words: list[object] = []

    def said() -> bool:
        responses = start(model, 9)
        responses.final()
        words[:] = [said.get("last") for said in responses.said]
        return bool(words[0])

    wait_until(said)
    forget(model)
    return str(words[0])


def forget(model: PythonBackend) -> None:
    """Prepares for the next thread of case 8."""
    start(model, 16).final()


def test_send_of_a_cancelled_request_raises(model: PythonBackend) -> None:
    """Also one that waits already; the final flag is accepted, because there is nothing to be told about it."""
    responses = start(model, 8, window_bytes=10 * (256 + 4))
    responses.await_count(10)
    responses.cancel()

    assert last_words(model) == "Unable to send response. The request is cancelled. True"
    assert not responses.finals


# Sends without an end, but for 7, which it dies of.
ENDLESS = execute(
    """
import threading
if x(requests[0]) == 7:
    os._exit(4)
def work(sender):
    i = 0
    try:
        while not sender.is_cancelled():
            sender.send(reply(np.full((1, 1), i, "f4")))
            i += 1
    except pb_utils.TritonModelException:  # it was cancelled between the two
        assert sender.is_cancelled()
    print("it has left", flush=True)
threading.Thread(target=work, args=(requests[0].get_response_sender(),), daemon=True).start()
"""
)


def test_a_model_sees_that_a_request_is_cancelled(tmp_path: Path) -> None:
    """And leaves its loop."""
    with loaded(tmp_path, ENDLESS, more=DECOUPLED) as backend:
        responses = start(backend, 0)
        responses.await_count(5)
        responses.cancel()
        process = backend._instance.process()
        assert process is not None

        wait_until(lambda: "it has left" in process._tail)


class LeftBefore(Streamed):
    """A context whose callers have all left before it begins."""

    def on_taken(self, item: int, callback: Callable[[int], None]) -> None:
        super().on_taken(item, callback)
        self.cancel(item)


def test_requests_that_are_cancelled_before_they_begin(tmp_path: Path) -> None:
    """Are seen by the model; the instance goes on."""
    with loaded(tmp_path, ENDLESS, more=DECOUPLED) as backend:
        backend.execute(batch_of(floats(0, 0, 0)), LeftBefore())
        process = backend._instance.process()
        assert process is not None

        wait_until(lambda: "it has left" in process._tail)
        assert backend._streams is not None
        assert not backend._streams._batches


def test_a_sender_that_is_dropped_ends_its_request(tmp_path: Path) -> None:
    """With an error, also where the model never asked for the sender."""
    code = execute("if x(requests[0]) == 1: requests[0].get_response_sender().send(reply(x(requests[0])))")
    with loaded(tmp_path, code, more=DECOUPLED) as backend:
        never, once = start(backend, 0), start(backend, 1)

        assert "dropped the response sender of the request without the final flag" in never.failure()
        assert "without the final flag" in once.failure()

    assert once.numbers == {0: [1.0]}


@pytest.mark.parametrize(
    "how",
    [
        "threading.Thread(target=fail, args=(requests[0],)).start()",
        "threading.Thread(target=fail, args=(requests[0].get_response_sender(),)).start()",
        "threading.Thread(target=fail, kwargs={'held': {'one': requests[0]}}).start()",
        "threading.Thread(target=Job(requests[0]).run).start()",
        "self.pool.submit(fail, requests[0])",
        "self.pool.submit(fail, requests)",
    ],
    ids=["request", "sender", "dictionary", "object", "pool", "list"],
)
def test_an_exception_in_a_thread_ends_the_request_that_it_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The client gets its type and text, and the log its traceback, with the id of the request."""
    code = execute(
        how,
        before="""
def initialize(self, args):
    from concurrent.futures import ThreadPoolExecutor
    self.pool = ThreadPoolExecutor(1)
""",
    ).replace("import ctypes", "import threading, ctypes", 1) + (
        """
def fail(held):
    raise RuntimeError("the generator broke")

class Job:
    def __init__(self, request):
        self.sender = request.get_response_sender()

    def run(self):
        fail(None)
"""
    )
    caplog.set_level("INFO", MODELS)
    with loaded(tmp_path, code, more=DECOUPLED) as backend:
        failure = start(backend, 0).failure()
        wait_until(lambda: any("broke" in getattr(record, "exception", "") for record in caplog.records))

    (record,) = [record for record in caplog.records if "broke" in getattr(record, "exception", "")]
    assert "RuntimeError: the generator broke" in failure
    assert "Traceback" not in failure
    assert "in fail" in vars(record)["exception"]
    assert (vars(record)["model"], vars(record)["version"]) == ("m", "1")


def test_an_exception_in_a_thread_is_the_answer_of_a_model_that_is_not_decoupled(tmp_path: Path) -> None:
    code = execute("threading.Thread(target=fail, args=(requests[0].get_response_sender(),)).start()").replace(
        "import ctypes", "import threading, ctypes", 1
    ) + ("\ndef fail(sender):\n    raise RuntimeError('the generator broke')\n")
    with loaded(tmp_path, code) as backend:
        answers = run(backend, floats(0))

    assert "RuntimeError: the generator broke" in str(answers.by_item[0])


def test_an_exception_that_the_model_handles_is_no_cause(tmp_path: Path) -> None:
    code = execute(
        """
import threading
from concurrent.futures import ThreadPoolExecutor
def fail(request):
    raise RuntimeError("never mind")
def work(request):
    try:
        ThreadPoolExecutor(1).submit(fail, request).result()
    except RuntimeError:
        request.get_response_sender().send(reply(x(request)), FINAL)
threading.Thread(target=work, args=(requests[0],)).start()
""".replace("FINAL", FINAL)
    )
    with loaded(tmp_path, code, more=DECOUPLED) as backend:
        responses = start(backend, 3)

        assert responses.final()
    assert responses.numbers == {0: [3.0]}


def test_a_coroutine_goes_on_while_other_batches_are_executed(tmp_path: Path) -> None:
    """One that raises ends its requests."""
    code = execute(
        f"""
import asyncio
number = int(x(requests[0]).flat[0])
sender = requests[0].get_response_sender()
self.came = self.__dict__.setdefault("came", asyncio.Event())
if number == 1:
    sender.send(reply(x(requests[0])))
    await self.came.wait()
    raise KeyError("it came")
self.came.set()
sender.send(flags={FINAL})
"""
    ).replace("def execute", "async def execute")
    with loaded(tmp_path, code, more=DECOUPLED) as backend:
        first = start(backend, 1)
        second = start(backend, 2)

        assert second.final() == ()
        expected = "Failed to process the request(s) for model 'm', message: KeyError: 'it came'"
        assert first.failure() == expected
        assert first.numbers == {0: [1.0]}


def test_a_process_that_dies_ends_all_its_streams(tmp_path: Path) -> None:
    """Each with an error; the next batch has a new process."""
    with loaded(tmp_path, ENDLESS, more=DECOUPLED) as backend:
        first, second = start(backend, 1, window_bytes=1000), start(backend, 2, window_bytes=1000)
        first.await_count(3)
        with pytest.raises(InferenceFailed, match=r"died \(exit code 4\)"):
            start(backend, 7)
        assert "died (exit code 4)" in first.failure()
        assert "died (exit code 4)" in second.failure()

        third = start(backend, 3)
        third.await_count(1)
        third.cancel()


def test_the_log_of_a_crash_names_the_streams_that_were_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told() -> bool:
        died = [record.__dict__ for record in caplog.records if record.message == "the model's process died"]
        return ["open", "last"] in [one["request_ids"] for one in died]

    with loaded(tmp_path, ENDLESS, more=DECOUPLED) as backend:
        start(backend, 1, window_bytes=1000, request_id="open").await_count(1)
        with pytest.raises(InferenceFailed):
            start(backend, 7, request_id="last")

        wait_until(told)


def test_an_instance_has_a_bound_of_open_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch that would exceed it waits until one has ended."""
    monkeypatch.setattr(streams, "OPEN_STREAMS", 2)
    with loaded(tmp_path, ENDLESS, more=DECOUPLED) as backend:
        first, second = start(backend, 1), start(backend, 2)
        third = start_in_thread(backend, 3, window_bytes=1000)
        second.await_count(3)
        assert not third._callbacks

        first.cancel()
        third.await_count(3)
        for responses in (second, third):
            responses.cancel()


def test_an_unload_lets_open_streams_end(tmp_path: Path) -> None:
    later = "threading.Timer(0.2, self.gate.set).start()"
    code = COUNT.replace("if self.batches == 2:\n            self.gate.set()", later)
    with loaded(tmp_path, code, more=DECOUPLED) as backend:
        responses = start(backend, 5)

    assert responses.finals == {0: ()}
    assert responses.numbers == {0: [0.0, 1.0, 2.0, 3.0, 4.0]}


def test_a_context_of_one_response_waits_for_it(model: PythonBackend, tmp_path: Path) -> None:
    """As in a warm-up: nothing is taken after `execute`, so it returns when the last request has ended."""
    with loaded(tmp_path, COUNT.replace("self.batches == 2", "True"), more=DECOUPLED) as backend:
        answers = run(backend, floats(0, 0))

    assert answers.by_item == {0: (), 1: ()}
    assert len(run(model, floats(1)).outputs()) == 1


class Refusing(Answers):
    """Takes no response."""

    def respond(self, *_: object, **__: object) -> None:
        raise OutputMismatch("not this")


def test_a_context_that_refuses_a_response_fails_the_batch(model: PythonBackend) -> None:
    """With its own error, also where `execute` raises because of it."""
    with pytest.raises(OutputMismatch, match="not this"):
        model.execute(batch_of(floats(2)), Refusing())


def test_large_responses_go_by_shared_memory(tmp_path: Path) -> None:
    code = execute(
        f"""
sender = requests[0].get_response_sender()
for i in range(20):
    sender.send(reply(np.full((1, 100_000), i, "f4")))
sender.send(flags={FINAL})
"""
    )
    with loaded(tmp_path, code, more=DECOUPLED) as backend:
        responses = start_in_thread(backend, 1, window_bytes=500_000)
        for count in range(1, 21):
            responses.await_count(count)
            responses.take(400_000)

        assert responses.final() == ()

    assert responses.numbers == {0: [float(n) for n in range(20)]}


SENDERS = execute(
    """
import threading
senders = [request.get_response_sender() for request in requests]
if x(requests[0]) < 0:
    return None
def later():
    for i, sender in enumerate(senders):
        sender.send(reply(np.array([[i]], "f4")), flags=1)
timer = threading.Timer(0.05, later)
timer.start()
return [None] * len(requests)
"""
)


def test_a_model_that_is_not_decoupled_may_send_its_response_later(tmp_path: Path) -> None:
    """From a thread, after `execute` has returned: the batch ends with the last of them."""
    with loaded(tmp_path, SENDERS) as backend:
        answers = run(backend, floats(1, 2, 3))

    assert [float(answers.array(item).item()) for item in range(3)] == [0.0, 1.0, 2.0]


def test_a_sender_that_is_dropped_without_a_response(tmp_path: Path) -> None:
    """Is an error of the request; nobody waits for ever."""
    with loaded(tmp_path, SENDERS) as backend:
        answers = run(backend, floats(-1, -1))

    assert isinstance(answers, Answers)
    assert "without the final flag" in answers.error(1).message
    assert not isinstance(answers.error(0), OutputMismatch)
    np.testing.assert_equal(len(answers.by_item), 2)
