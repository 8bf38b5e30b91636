"""Many clients that load, unload and list the same models at once, and clients that do not wait for them."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from qinfer.testing import eventually
from tests.support import models, python_models
from tests.support.served_models import ServedModels, models_served

pytestmark = pytest.mark.timeout(90)

ROW = np.array([[1, 2]], np.float32)
CHANGING = ("a", "b", "c")
STATES = {"", "LOADING", "READY", "UNLOADING", "UNAVAILABLE"}
ROUNDS = 12
BAD = python_models.execute("return []", "def initialize(self, args):\n    1 / 0\n")


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[ServedModels]:
    repository = tmp_path / "repository"
    for name in ("stable", *CHANGING):
        models.add_sub(repository, name)
    python_models.write_model(repository, BAD, "bad")
    async with models_served(repository) as one:
        yield one


async def refusals(call: Callable[[], Awaitable[Any]], times: int = ROUNDS) -> Counter[str]:
    """Makes a call again and again; returns how often it was refused, by the text."""
    found: Counter[str] = Counter()
    for _ in range(times):
        try:
            await call()
        except InferenceServerException as error:
            found[str(error.message())] += 1
        await asyncio.sleep(0)
    return found


@pytest.mark.slow
async def test_everything_at_once(scene: ServedModels) -> None:
    """The index is whole at any time, a model that others leave alone answers every request, and in the end all load.

    A load of what another client unloads meanwhile is told so; NVIDIA's server has the other one wait.
    """
    chance = random.Random(7)
    await scene.http.load_model("stable")
    row = {"a": np.ones((1, 4), np.float32), "b": np.ones((1, 4), np.float32)}
    clients = (scene.http, scene.grpc)

    async def index() -> None:
        entries = await scene.http.get_model_repository_index()
        found = [(entry["name"], entry.get("version", "")) for entry in entries]
        assert len(found) == len(set(found)), found
        assert {name for name, _ in found} == {"stable", "bad", *CHANGING}
        states = {entry["name"]: entry.get("state", "") for entry in entries}
        assert set(states.values()) <= STATES
        assert states["stable"] == "READY"

    async with asyncio.TaskGroup() as tasks:
        ways = [
            tasks.create_task(refusals(lambda: chance.choice(clients).load_model(chance.choice(CHANGING))))
            for _ in range(4)
        ]
        unloads = tasks.create_task(refusals(lambda: chance.choice(clients).unload_model(chance.choice(CHANGING))))
        again = tasks.create_task(refusals(lambda: chance.choice(clients).load_model("stable")))
        failing = tasks.create_task(refusals(lambda: chance.choice(clients).load_model("bad")))
        listed = tasks.create_task(refusals(index, 5 * ROUNDS))
        asked = tasks.create_task(refusals(lambda: scene.infer("stable", **row), 10 * ROUNDS))

    assert all("it was unloaded meanwhile" in text for way in ways for text in way.result())
    assert not unloads.result() + again.result() + listed.result() + asked.result()
    assert failing.result().total() == ROUNDS
    assert all("ZeroDivisionError" in text for text in failing.result())
    for name in CHANGING:
        await scene.grpc.load_model(name)
        assert (await scene.infer(name, **row)).as_numpy("sum").tolist() == [[2, 2, 2, 2]]


async def test_a_load_goes_on_though_its_caller_gave_up(scene: ServedModels) -> None:
    """Who asks again waits for the same load."""
    gate, begun = scene.repository / "gate", scene.repository / "begun"
    code = python_models.execute(
        "return [reply(x(r)) for r in requests]",
        f"""def initialize(self, args):
    open({str(begun)!r}, "a").write("x")
    while not os.path.exists({str(gate)!r}):
        time.sleep(0.01)""",
    )
    python_models.write_model(scene.repository, code, "slow", dims=2)

    with pytest.raises(InferenceServerException, match="Deadline Exceeded") as gave_up:
        await scene.grpc.load_model("slow", client_timeout=0.2)
    again = asyncio.create_task(scene.http.load_model("slow"))
    await eventually(lambda: asyncio.to_thread(begun.exists), 20.0, description="the load")
    assert not await scene.http.is_model_ready("slow")
    gate.touch()
    await again

    assert gave_up.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert (await scene.infer("slow", x=ROW)).as_numpy("y").tolist() == ROW.tolist()
    assert begun.read_text() == "x"


CALLS: dict[str, tuple[Any, ...]] = {
    "is_server_live": (),
    "is_server_ready": (),
    "is_model_ready": ("stable",),
    "get_server_metadata": (),
    "get_model_metadata": ("stable",),
    "get_model_config": ("stable",),
    "get_model_repository_index": (),
    "get_inference_statistics": ("stable",),
    "get_trace_settings": (),
    "get_log_settings": (),
    "get_system_shared_memory_status": (),
    "get_cuda_shared_memory_status": (),
    "load_model": ("stable",),
    "unload_model": ("a",),
    "update_trace_settings": (),
    "update_log_settings": ({},),
}


@pytest.mark.parametrize("call", CALLS)
async def test_calls_that_are_no_inference_have_deadlines(scene: ServedModels, call: str) -> None:
    """One that is too short ends the call and nothing else, one that is long enough is not noticed."""
    await scene.http.load_model("stable")
    method = getattr(scene.grpc, call)

    for _ in range(20):
        try:
            await method(*CALLS[call], client_timeout=0.0001)
        except InferenceServerException as error:
            assert error.status() == "StatusCode.DEADLINE_EXCEEDED", error  # noqa: PT017  some are quick enough

    await method(*CALLS[call], client_timeout=30)
    assert await scene.http.is_server_ready()
