"""Senders of iterated requests, which threads of the model use between two executions."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qinfer.testing import eventually
from tests.support.python_models import DECOUPLED, HEADER, write_model
from tests.support.served_models import ServedModels, models_served, tensor

pytestmark = pytest.mark.timeout(60)

ITERATIVE = "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 8 } }"

COUNTDOWN = HEADER + (
    """
import threading

class TritonPythonModel:
    def initialize(self, args):
        self.again = {}

    def execute(self, requests):
        for request in requests:
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                again = self.again[request.correlation_id()] = threading.Event()
                arguments = (request.get_response_sender(), int(x(request).item()), again)
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                threading.Thread(target=self.send, args=arguments, daemon=True).start()
            else:
                self.again.pop(request.correlation_id()).set()

    def send(self, sender, number, again):
        for left in reversed(range(number)):
            sender.send(reply(np.array([[left]], "f4")))
            if left == number // 2:
                again.wait(20)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)
"""Reschedules a request once, whose responses a thread sends: half of them when its second execution has begun."""

ENDLESS = HEADER + (
    """
import threading
HERE = pb_utils.get_model_dir()
END = os.path.join(HERE, "end")

def note(*words):
    with open(os.path.join(HERE, "log"), "a") as log:
        print(*words, file=log)

class TritonPythonModel:
    def initialize(self, args):
        note("process", os.getpid())

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if x(request).size > 1:
                note("other")
                while not os.path.exists(END):
                    time.sleep(0.01)
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                continue
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                threading.Thread(target=self.send, args=(sender,), daemon=True).start()
            time.sleep(0.01)
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)

    def send(self, sender):
        try:
            while not os.path.exists(END):
                sender.send(reply(np.ones((1, 1), "f4")))
                time.sleep(0.01)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            note("ended")
        except pb_utils.TritonModelException as error:
            note(error)
"""
)
"""Executes a request of one number repeatedly while a thread sends its responses; more numbers block the model."""


class Scene:
    """The served model and its notes."""

    def __init__(self, served: ServedModels, directory: Path) -> None:
        self.served = served
        self.directory = directory
        self.begun = asyncio.Event()

    async def ask(self, *numbers: float) -> str:
        """Sends a request; returns how it ended."""
        x = tensor("x", np.array([numbers], np.float32))

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "m", "inputs": [x]}

        answers = self.served.grpc.stream_infer(requests())
        try:
            async for _, error in answers:
                self.begun.set()
                if error is not None:
                    return str(error)
        finally:
            answers.cancel()
        return "ended"

    async def between(self) -> tuple[asyncio.Task[str], asyncio.Task[str]]:
        """Returns a request between two executions, whose thread sends, and an executing one."""
        waiting = asyncio.create_task(self.ask(1))
        await self.begun.wait()
        holding = asyncio.create_task(self.ask(1, 2))
        await self.noted("other")
        return waiting, holding

    async def noted(self, text: str) -> None:
        """Waits until the model has noted something."""
        await eventually(lambda: text in self.notes(), 30.0, f"a note of {text!r}")

    def notes(self) -> str:
        log = self.directory / "log"
        return log.read_text() if log.exists() else ""

    def end(self) -> None:
        """Ends all requests."""
        (self.directory / "end").touch()

    async def empty(self) -> None:
        await eventually(lambda: self.served.waits("m", 0), 30.0, "an empty queue")


@pytest.fixture
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    code, more = getattr(request, "param", (ENDLESS, ""))
    options: dict[str, Any] = {"more": DECOUPLED + more, "max_batch_size": 8, "scheduling": ITERATIVE}
    directory = write_model(tmp_path / "repository", code, **options)
    async with models_served(tmp_path / "repository") as served:
        await served.http.load_model("m")
        one = Scene(served, directory)
        yield one
        one.end()


CANCELLED = "Unable to send response. The request is cancelled."
SHORT = "".join(
    f'parameters {{ key: "qinfer.{name}_timeout_s" value {{ string_value: "2" }} }} ' for name in ("default", "max")
)


@pytest.mark.parametrize("scene", [(COUNTDOWN, "")], indirect=True)
async def test_a_thread_goes_on_sending_for_a_request_that_is_executed_again(scene: Scene) -> None:
    """As in Triton, all executions of a request share a sender, which may also end it between them."""

    async def responses(numbers: list[int]) -> dict[str, list[float]]:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number in numbers:
                x = tensor("x", np.full((1, 1), number, np.float32))
                yield {"model_name": "m", "inputs": [x], "request_id": str(number)}

        found: dict[str, list[float]] = {str(number): [] for number in numbers}
        async for result, error in scene.served.grpc.stream_infer(requests()):
            assert error is None
            found[result.get_response().id].append(float(result.as_numpy("y").item()))
        return found

    for _ in range(3):
        found = await responses([4, 0, 1, 6])
        assert found == {"4": [3, 2, 1, 0], "0": [], "1": [0], "6": [5, 4, 3, 2, 1, 0]}


async def test_a_request_that_is_cancelled_between_two_executions_ends(scene: Scene) -> None:
    """Its thread learns it at once, although the model executes another request."""
    waiting, holding = await scene.between()

    waiting.cancel()

    await scene.noted(CANCELLED)
    assert not holding.done()
    scene.end()
    assert await holding == "ended"
    await scene.empty()


@pytest.mark.parametrize("scene", [(ENDLESS, SHORT)], indirect=True)
async def test_a_request_that_expires_between_two_executions_ends(scene: Scene) -> None:
    waiting, _ = await scene.between()

    await scene.noted(CANCELLED)

    assert "timeout" in (await waiting).lower()
    scene.end()
    await scene.empty()


async def test_a_request_ends_with_its_process_between_two_executions(scene: Scene) -> None:
    """The executing request fails, too; later requests get another process."""
    waiting, holding = await scene.between()

    os.kill(int(scene.notes().split()[1]), signal.SIGKILL)

    assert "died" in await waiting
    assert "died" in await holding
    scene.end()
    assert await scene.ask(1) == "ended"
    await scene.empty()


async def test_a_worker_that_stops_between_two_executions_ends_the_request(scene: Scene) -> None:
    waiting, holding = await scene.between()

    closing = asyncio.create_task(scene.served.close())
    scene.end()

    assert (await waiting, await holding) == ("ended", "ended")
    await closing
    assert CANCELLED not in scene.notes()


async def test_a_model_that_is_loaded_anew_between_two_executions_ends_the_request(scene: Scene) -> None:
    """The old instance ends when its thread has sent the last response."""
    waiting, holding = await scene.between()
    (scene.directory / "model.py").write_text(ENDLESS + "\n")

    loading = asyncio.create_task(scene.served.http.load_model("m"))
    await eventually(lambda: scene.notes().count("process") > 1, 30.0, "another process")
    scene.end()

    assert (await waiting, await holding) == ("ended", "ended")
    await loading
    old = int(scene.notes().split()[1])
    await eventually(lambda: not Path(f"/proc/{old}").exists(), 30.0, "the end of the old process")
