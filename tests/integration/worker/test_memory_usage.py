"""What models hold in memory, over HTTP and gRPC: a gateway, a worker with real models, a real Redis."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from qinfer.testing import eventually
from tests.support import python_models
from tests.support.ensembles import EnsemblesServed, chain, ensembles_served, scale

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[EnsemblesServed]:
    async with ensembles_served(tmp_path / "repository") as one:
        scale(one.repository, "twice", 2.0)
        python_models.write_model(one.repository, python_models.ECHO, "echo", dims="2", max_batch_size=8)
        chain(one.repository, "line", "twice", "echo")
        yield one


async def used(scene: EnsemblesServed, model: str) -> list[dict[str, Any]]:
    await scene.gateway.catalog.refresh()
    return list((await scene.statistics(model))["memory_usage"])


async def measured(scene: EnsemblesServed, model: str) -> dict[str, Any]:
    """Waits until a model has been measured; returns its only use."""

    async def is_told() -> bool:
        return bool(await used(scene, model))

    await eventually(is_told, description=f"the memory of {model}")
    (use,) = await used(scene, model)
    return use


async def test_the_memory_of_models_over_both_protocols(scene: EnsemblesServed) -> None:
    """An ONNX model has its weights in each instance, a Python model has its processes, and an ensemble has nothing."""
    await scene.sync()
    await scene.worker()
    await scene.ready()
    size = (scene.repository / "twice" / "1" / "model.onnx").stat().st_size

    weights, process = await measured(scene, "twice"), await measured(scene, "echo")

    instances = scene.workers["w1"]._serving["twice", 1].batcher.model.executor.count
    assert weights == {"type": "CPU", "id": 0, "byte_size": size * instances}
    assert (process["type"], process["id"]) == ("CPU", 0)
    assert process["byte_size"] > 2**20
    assert await used(scene, "line") == []
    reply = await scene.stub.ModelStatistics(pb.ModelStatisticsRequest(name="twice"))
    (usage,) = reply.model_stats[0].memory_usage
    assert (usage.type, usage.id, usage.byte_size) == ("CPU", 0, size * instances)


async def test_the_memory_of_a_model_is_that_of_all_workers(scene: EnsemblesServed) -> None:
    """As its other statistics are."""
    await scene.sync()
    await scene.worker("w1")
    await scene.ready()
    alone = (await measured(scene, "twice"))["byte_size"]
    await scene.worker("w2")

    async def is_doubled() -> bool:
        return bool((await measured(scene, "twice"))["byte_size"] == 2 * alone)

    await eventually(is_doubled, 20.0, "the memory in two workers")
