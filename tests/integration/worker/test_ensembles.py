"""Ensembles over HTTP and gRPC: a gateway, workers with real models, a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.ensembles import EnsemblesServed, add, chain, ensemble, ensembles_served, scale

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Returns a repository of three models, a chain of them, two branches, and ensembles in an ensemble."""
    path = tmp_path / "repository"
    for name, factor in (("twice", 2.0), ("thrice", 3.0), ("tenth", 0.1)):
        scale(path, name, factor)
    add(path)
    chain(path, "line", "twice", "thrice", "tenth")
    branches = ("twice", {"x": "x"}, {"y": "l"}), ("thrice", {"x": "x"}, {"y": "r"})
    ensemble(path, "fork", *branches, ("add", {"a": "l", "b": "r"}, {"y": "y"}))
    chain(path, "nested", "fork", "line", "twice")
    return path


@pytest.fixture
async def scene(repository: Path) -> AsyncIterator[EnsemblesServed]:
    async with ensembles_served(repository) as one:
        yield one


async def test_ensembles_over_both_protocols(scene: EnsemblesServed) -> None:
    await scene.sync()
    await scene.worker()
    await scene.ready()

    assert await scene.infer("line") == pytest.approx([0.6, 1.2])
    assert await scene.call("fork") == [5.0, 10.0]
    assert await scene.infer("nested", rows=3) == pytest.approx([6.0, 12.0] * 3)


async def test_steps_in_other_workers(scene: EnsemblesServed) -> None:
    """The worker of an ensemble need not have the models of its steps."""
    await scene.sync()
    await scene.worker("w1", models=("line", "fork", "nested"))
    await scene.worker("w2", models=("t*", "add"))
    await scene.ready()

    answers = await asyncio.gather(*[scene.infer("nested") for _ in range(20)])

    assert answers == [pytest.approx([6.0, 12.0])] * 20
