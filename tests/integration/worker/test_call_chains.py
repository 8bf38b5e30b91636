"""Models in Python that call themselves by way of an ensemble: they are told before they wait for themselves."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.ensembles import EnsemblesServed, chain, ensembles_served, scale
from tests.support.python_models import execute, write_model

pytestmark = pytest.mark.timeout(60)

AROUND = execute(
    """
responses = []
for request in requests:
    if x(request).max() <= 1:
        responses.append(reply(x(request)))
        continue
    call = pb_utils.InferenceRequest(
        model_name="around", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x(request))])
    answer = call.exec()
    if answer.has_error():
        raise pb_utils.TritonModelException(answer.error().message())
    responses.append(reply(answer.output_tensors()[0].as_numpy()))
return responses
"""
)
"""Calls the ensemble `around`, whose first step halves and whose second is this model, while `x` is more than 1."""


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[EnsemblesServed]:
    async with ensembles_served(tmp_path / "repository") as one:
        scale(one.repository, "half", 0.5)
        chain(one.repository, "around", "half", "asking")
        yield one


ITSELF = AROUND.replace("x(request))])", "x(request) - 1)])").replace('model_name="around"', 'model_name="asking"')
"""Calls itself with one less, while `x` is more than 1."""


async def serve(scene: EnsemblesServed, instances: int, code: str = AROUND) -> None:
    """Serves the models with so many instances of `asking`, each of which takes one request at a time."""
    more = f"instance_group {{ count: {instances} kind: KIND_CPU }}"
    write_model(scene.repository, code, "asking", dims="2", max_batch_size=8, scheduling="", more=more)
    await scene.sync()
    await scene.worker()
    await scene.ready()


async def test_a_model_that_calls_itself_by_an_ensemble_is_told_at_once(scene: EnsemblesServed) -> None:
    """By an error that names the chain, and the step."""
    await serve(scene, 1)

    reply = await scene.post("asking")

    assert reply.status_code == 500
    assert (
        "in ensemble 'around', step of model 'asking': model 'asking' can't be called by model 'around': the only "
        "instance of 'asking' would wait for this call (asking -> around -> asking)"
    ) in reply.json()["error"]
    # 2 is halved to 1 by the ensemble that the client itself asks.
    assert await scene.infer("around") == [0.5, 1.0]


async def test_a_recursion_by_an_ensemble_that_ends_works(scene: EnsemblesServed) -> None:
    """With an instance for each time that the model is in the middle of a call."""
    await serve(scene, 2)

    assert await scene.infer("asking") == [0.5, 1.0]
    assert await asyncio.gather(*[scene.infer("around") for _ in range(4)]) == [[0.5, 1.0]] * 4


@pytest.mark.parametrize("code", [AROUND, ITSELF], ids=["ensemble", "itself"])
async def test_many_recursions_at_once_take_turns(scene: EnsemblesServed, code: str) -> None:
    """Those that would keep one another from the last instance are begun again."""
    await serve(scene, 2, code)

    answers = await asyncio.gather(*[scene.infer("asking") for _ in range(30)])

    assert answers == [answers[0]] * 30
