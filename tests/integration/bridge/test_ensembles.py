"""The bridge over an ensemble: messages go from step to step as requests do, and are answered once after a death."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qinfer.testing import eventually
from tests.support.bridge_scene import PREDICTIONS, TASKS, Broker, body_of, bridge, routes, value_of
from tests.support.ensembles import EnsemblesServed, chain, ensembles_served, scale

pytestmark = pytest.mark.timeout(60)

COUNT = 30


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[EnsemblesServed]:
    """Yields `line`, y = 6 x in two steps."""
    repository = tmp_path / "repository"
    scale(repository, "twice", 2.0)
    scale(repository, "thrice", 3.0)
    chain(repository, "line", "twice", "thrice")
    async with ensembles_served(repository) as one:
        yield one


def on(scene: EnsemblesServed) -> Any:
    """Returns what a bridge needs of a scene."""
    return SimpleNamespace(store=scene.store, delivery=scene.gateway._delivery)


async def test_a_message_becomes_the_prediction_of_an_ensemble(scene: EnsemblesServed, broker: Broker) -> None:
    await scene.sync()
    await scene.worker()
    await scene.ready()
    broker.put(body_of(3.0), message_id="m1", correlation_id="c1")

    async with bridge(on(scene), routes(broker.url, model="line")):
        (prediction,) = await broker.take()

    assert value_of(prediction) == 18.0
    assert prediction.properties["correlation_id"] == "c1"
    assert prediction.headers["x-qinfer-model"] == "line"
    assert broker.size(TASKS) == 0


async def test_a_dead_worker_costs_no_message_and_doubles_none(scene: EnsemblesServed, broker: Broker) -> None:
    """It died in the middle of the steps of them all."""
    await scene.sync()
    await scene.worker("w1", models=("line",))
    steps = await scene.worker("w2", models=("t*",))
    await scene.ready("line")
    batcher = steps._serving["thrice", 1].batcher
    await batcher.pause_batching()
    for number in range(COUNT):
        broker.put(body_of(float(number)), correlation_id=str(number))

    async with bridge(on(scene), routes(broker.url, model="line")):
        await eventually(lambda: all_wait(scene), description="steps in their lane")
        await scene.kill("w1")
        batcher.resume_batching()
        await scene.worker("w3", models=("line",))
        predictions = await broker.take(COUNT)

    found = {int(one.properties["correlation_id"]): value_of(one) for one in predictions}
    assert found == {number: 6.0 * number for number in range(COUNT)}
    assert (broker.size(TASKS), broker.size(PREDICTIONS)) == (0, 0)


async def all_wait(scene: EnsemblesServed) -> bool:
    return await scene.depth("thrice") >= COUNT
