"""Processes of frameworks and of Triton's core that are killed, crash or hang under load: no request is lost."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc.aio as over_grpc

from qinfer.backends import parameters
from qinfer.backends.parameters import use_triton_files
from qinfer.backends.triton_host.library import TritonFiles
from qinfer.testing import eventually
from tests.support import c_backends
from tests.support.framework_models import Array, build, needs, parameter, sample
from tests.support.framework_scene import asked, framework_served, load
from tests.support.python_models import ECHO, write_model
from tests.support.served_models import ServedModels

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

LIMIT_S = 3
CALLERS = 4
MODELS = {"tensorflow": "default", "litert": "signed", "forest": "binary", "jax": "classify", "mlflow": "mixer"}
KINDS = [pytest.param(kind, marks=needs(kind)) for kind in MODELS]
FAULTS = {"kill": signal.SIGKILL, "crash": signal.SIGSEGV, "hang": signal.SIGSTOP}


class Load:
    """Callers that ask a model, and callers that ask another one, until they are told to stop."""

    def __init__(self, scene: ServedModels, model: str, inputs: Mapping[str, Array], expected: Mapping[str, Array]):
        self._scene = scene
        self._of = {model: (inputs, expected), "echo": ({"x": _X}, {"y": _X})}
        self.model = model
        self.answers = dict.fromkeys(self._of, 0)
        self._is_over = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the callers; the first request without its answer fails the test."""
        async with asyncio.TaskGroup() as group:
            for model in self._of:
                for _ in range(CALLERS):
                    group.create_task(self._ask(model))
            yield
            self._is_over = True

    async def more(self, model: str, count: int = 10) -> None:
        """Waits for so many answers of a model that are not there yet."""
        wanted = self.answers[model] + count
        await eventually(lambda: self.answers[model] >= wanted, 60.0, f"answers of {model}")

    async def _ask(self, model: str) -> None:
        inputs, expected = self._of[model]
        while not self._is_over:
            answer = await asked(self._scene.grpc, over_grpc, model, inputs)
            for name, array in expected.items():
                np.testing.assert_allclose(answer.as_numpy(name), array, rtol=1e-5, atol=1e-6)
            self.answers[model] += 1


_X = np.ones((1, 1), np.float32)


def pid_of(scene: ServedModels, model: str) -> int:
    """Returns the process of a model's only instance, or 0."""
    (instance,) = scene.workers["w1"]._models._loaded[model, 1].instances
    running = instance.backend._instance.running  # type: ignore[attr-defined]
    return 0 if running is None else int(running.pid)


async def check(scene: ServedModels, load_of: Load, fault: str) -> None:
    """Ends the model's process under load, and checks that it is replaced, and that others are served meanwhile."""
    model = load_of.model
    async with load_of.running():
        await load_of.more(model)
        before = pid_of(scene, model)
        os.kill(before, FAULTS[fault])
        await load_of.more("echo")
        await eventually(lambda: pid_of(scene, model) not in (0, before), 120.0, "another process")
        await load_of.more(model)

    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("framework", KINDS)
async def test_a_framework_that_ends_loses_no_request(repositories: Path, framework: str, fault: str) -> None:
    model, repository = MODELS[framework], repositories / framework / "models"
    if not repository.exists():
        build(framework, repository)
        limit = parameter("qinfer.execute_timeout_s", str(LIMIT_S))
        (repository / model / "config.pbtxt").write_text(f'backend: "{framework}"\n{limit}')
        write_model(repository, ECHO, "echo", dims="1")
    async with framework_served(repository) as scene:
        await load(scene, model)
        await load(scene, "echo")
        inputs, outputs = sample(repository, model)

        await check(scene, Load(scene, model, _few(inputs), _few(outputs)), fault)


def _few(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    return {name: array[:2] for name, array in arrays.items()}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_c_backend_that_ends_loses_no_request(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "_engine_cache", [tmp_path / "cache"])
    backends = c_backends.compile_backends(tmp_path)
    repository = tmp_path / "models"
    limit = parameter("qinfer.execute_timeout_s", str(LIMIT_S))
    c_backends.write_model(repository, "identity", "m", more=f"{c_backends.BATCHED}\n{limit}")
    write_model(repository, ECHO, "echo", dims="1")
    use_triton_files(TritonFiles(str(c_backends.triton()), str(backends)))
    numbers = np.arange(8, dtype=np.int32).reshape(2, 4)
    try:
        async with framework_served(repository) as scene:
            await load(scene, "m")
            await load(scene, "echo")

            await check(scene, Load(scene, "m", {"INPUT": numbers}, {"OUTPUT": numbers}), fault)
    finally:
        use_triton_files(TritonFiles())
