"""A whole server of two workers that limits rates, asked by Triton's client."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput

from tests.e2e.conftest import Stack, running
from tests.support.limited_models import intervals, overlaps, write_calling, write_recording

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

MODELS = ("left", "right", "front")
"""The last one calls the first, and holds what both need meanwhile."""
LIMITED = {"QINFER_RATE_LIMIT__MODE": "execution_count", "QINFER_RATE_LIMIT__RESOURCES": '["g:1"]'}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "intervals"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[Stack]:
    repository = tmp_path_factory.mktemp("models")
    for name in MODELS[:2]:
        write_recording(repository, name, log)
    write_calling(repository, MODELS[2], callee=MODELS[0])
    with running(repository, tmp_path_factory.mktemp("up"), 2, **LIMITED) as stack:
        yield stack


def ask(stack: Stack, numbers: list[int]) -> list[float]:
    """Calls the models in turn."""
    with InferenceServerClient(stack.address, network_timeout=60.0, connection_timeout=60.0) as client:
        found = []
        for number in numbers:
            tensor = InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.full((1, 1), number, np.float32))
            answer = client.infer(MODELS[number % len(MODELS)], [tensor]).as_numpy("y")
            assert answer is not None
            found.append(float(answer.item()))
        return found


def test_models_of_a_worker_with_one_global_resource_execute_in_turn(stack: Stack, log: Path) -> None:
    """Called models execute within their callers' turns; each of the two workers has the resource once."""
    parts = [list(range(1 + part, 97, 8)) for part in range(8)]

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda numbers: ask(stack, numbers), parts))

    assert answers == [[float(number) for number in part] for part in parts]
    found = intervals(log)
    assert len(found) == 96
    workers = {one.worker for one in found}
    assert len(workers) == 2
    for worker in workers:
        assert overlaps([one for one in found if one.worker == worker]) == []
