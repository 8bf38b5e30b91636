"""The response cache of the whole server, `qinfer up --cache-config`, as Triton's own client sees it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from qinfer.testing import wait_until
from tests.e2e.conftest import Stack, running
from tests.support.ensembles import chain, scale

pytestmark = pytest.mark.timeout(180)

ROW = np.array([[1.0, 2.0]], dtype=np.float32)
CACHED = "response_cache { enable: true }"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Serves `twice`, whose responses are cached, `thrice`, whose are not, and a cached ensemble `line` of both."""
    repository: Path = tmp_path_factory.mktemp("models")
    for name, factor in (("twice", 2.0), ("thrice", 3.0)):
        scale(repository, name, factor)
    with (repository / "twice" / "config.pbtxt").open("a") as config:
        config.write(f"\n{CACHED}\n")
    chain(repository, "line", "twice", "thrice", more=CACHED)
    with running(repository, tmp_path_factory.mktemp("up"), 1, ["--cache-config", "local,size=1000000"]) as one:
        yield one


@pytest.fixture
def client(stack: Stack) -> Iterator[tritonclient.http.InferenceServerClient]:
    with tritonclient.http.InferenceServerClient(stack.address) as one:
        yield one


def counted(client: tritonclient.http.InferenceServerClient, model: str) -> dict[str, int]:
    """Returns hits, misses, successes and executions of a model."""
    (of,) = client.get_inference_statistics(model)["model_stats"]
    inference = of["inference_stats"]
    counts = {name: inference[name]["count"] for name in ("cache_hit", "cache_miss", "success")}
    return {**counts, "execution_count": of["execution_count"]}


def ask(client: Any, kinds: Any, model: str, row: Any = ROW) -> Any:
    tensor = kinds.InferInput("x", list(row.shape), "FP32")
    tensor.set_data_from_numpy(row)
    return client.infer(model, [tensor]).as_numpy("y")


def test_models_and_ensembles_are_answered_from_the_cache(
    stack: Stack, client: tritonclient.http.InferenceServerClient
) -> None:
    """By either protocol; a cached response of an ensemble executes none of its steps."""
    for model, factor in (("twice", 2.0), ("line", 6.0)):
        with tritonclient.grpc.InferenceServerClient(stack.grpc_address) as rpc:
            answers = [ask(client, tritonclient.http, model) for _ in range(3)]
            answers += [ask(rpc, tritonclient.grpc, model) for _ in range(2)]
        for answer in answers:
            np.testing.assert_array_equal(answer, ROW * factor)

    # A step is a request of the worker, which has a cache of its own: there it was executed for the first time.
    expected = {
        "twice": {"cache_hit": 4, "cache_miss": 2, "success": 6, "execution_count": 2},
        "line": {"cache_hit": 4, "cache_miss": 1, "success": 5, "execution_count": 1},
        "thrice": {"cache_hit": 0, "cache_miss": 0, "success": 1, "execution_count": 1},
    }
    found: dict[str, dict[str, int]] = {}

    def is_counted() -> bool:
        found.update({model: counted(client, model) for model in expected})
        return found["line"]["success"] >= 5 and found["thrice"]["success"] >= 1 and found["twice"]["success"] >= 6

    wait_until(is_counted, 20.0, "the statistics")
    assert found == expected

    # One row more makes the same beginning, and is another request.
    for rows in (1, 2, 3):
        asked = np.repeat(ROW + 7, rows, axis=0)
        for _ in range(2):
            np.testing.assert_array_equal(ask(client, tritonclient.http, "line", asked), asked * 6)
