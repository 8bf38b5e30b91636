"""Ensembles with stateful steps, which are sequences: a gateway, workers with real models, a real Redis."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferResult
from tritonclient.grpc import service_pb2 as pb

from qinfer.errors import ModelLoadFailed
from qinfer.testing import eventually
from tests.support import models, python_models
from tests.support.ensembles import EnsemblesServed, ensemble, ensembles_served, scale
from tests.support.streaming_backend import DECOUPLED

pytestmark = pytest.mark.timeout(90)

IDLE = "max_sequence_idle_microseconds: 30000000"

FUSSY = """
if float(x(requests[0]).min()) < 0:
    raise pb_utils.TritonModelException("no negative numbers")
return [reply(x(request)) for request in requests]
"""
"""A model that refuses negative numbers."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Returns a repository with an ensemble `sum`: twice, then a sum of all that its sequence has sent, then thrice."""
    path = tmp_path / "repository"
    for name, factor in (("twice", 2.0), ("thrice", 3.0)):
        scale(path, name, factor, width=1)
    models.accumulator(path, "total", strategy="oldest { max_candidate_sequences: 100 }", more=IDLE)
    sums(path, "sum", "twice", "thrice")
    return path


def sums(repository: Path, name: str, before: str, behind: str, total: str = "total") -> None:
    """Writes an ensemble of a stateful model between two others."""
    first, last = (before, {"x": "x"}, {"y": "scaled"}), (behind, {"x": "total"}, {"y": "y"})
    x, y = ("INPUT", "OUTPUT") if total == "total" else ("x", "y")
    ensemble(repository, name, first, (total, {x: "scaled"}, {y: "total"}), last, width=1, max_batch_size=4)


@pytest.fixture
async def scene(repository: Path) -> AsyncIterator[EnsemblesServed]:
    async with ensembles_served(repository) as one:
        yield one


async def start(scene: EnsemblesServed, *names: str, **options: Any) -> None:
    await scene.sync()
    await scene.worker(**options)
    await scene.ready(*names)


async def post(
    scene: EnsemblesServed, x: float, sequence: int | str = 1, *flags: str, model: str = "sum", step: int = 0
) -> Any:
    """Sends a step over HTTP; returns the reply."""
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [x]}
    parameters: dict[str, Any] = {"sequence_id": sequence} | {f"sequence_{flag}": True for flag in flags}
    if step:
        parameters["qinfer_step"] = step
    return await scene.client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor], "parameters": parameters})


async def value(scene: EnsemblesServed, x: float, sequence: int | str = 1, *flags: str, **options: Any) -> float:
    reply = await post(scene, x, sequence, *flags, **options)
    assert reply.status_code == 200, reply.text
    return float(reply.json()["outputs"][0]["data"][0])


def flags_of(position: int, count: int) -> list[str]:
    return ["start"] * (position == 0) + ["end"] * (position == count - 1)


async def whole(scene: EnsemblesServed, numbers: list[float], sequence: int | str, **options: Any) -> list[float]:
    """Sends a sequence; returns the answers."""
    return [
        await value(scene, number, sequence, *flags_of(position, len(numbers)), **options)
        for position, number in enumerate(numbers)
    ]


def expected(numbers: list[float]) -> list[float]:
    return [float(total) for total in np.cumsum(np.array(numbers) * 2) * 3]


async def test_many_sequences_at_once(scene: EnsemblesServed) -> None:
    """Each step goes through all steps of the ensemble, with the sequence's own sum."""
    await start(scene)
    numbers = {sequence: [float(sequence + step) for step in range(5)] for sequence in range(1, 41)}

    answers = await asyncio.gather(*[whole(scene, numbers[sequence], sequence) for sequence in numbers])

    assert answers == [expected(each) for each in numbers.values()]


async def test_responses_name_their_sequence(scene: EnsemblesServed) -> None:
    """As in Triton, though a single model's responses do not."""
    await start(scene)

    replies = [await post(scene, 1, sequence, *flags_of(position, 2)) for sequence in (7, "a") for position in (0, 1)]

    assert [reply.json()["parameters"] for reply in replies] == [
        {"sequence_id": sequence, "sequence_start": is_first, "sequence_end": not is_first}
        for sequence in (7, "a")
        for is_first in (True, False)
    ]


async def test_text_as_correlation_id_and_ensembles_within_one_another(scene: EnsemblesServed) -> None:
    steps = ("sum", {"x": "x"}, {"y": "t"}), ("twice", {"x": "t"}, {"y": "y"})
    ensemble(scene.repository, "outer", *steps, width=1, max_batch_size=4)
    await start(scene)

    answers = await whole(scene, [1, 2, 3], "one", model="outer")

    assert answers == [2 * number for number in expected([1, 2, 3])]


async def test_a_reshape_before_a_step_that_keeps_state(scene: EnsemblesServed) -> None:
    scale(scene.repository, "box", 2.0, width=(1, 1))
    ensemble(scene.repository, "boxed", ("box", {"x": "x"}, {"y": "y"}), width=1, reshape=(1, 1), max_batch_size=4)
    sums(scene.repository, "boxes", "boxed", "thrice")
    await start(scene)

    answers = await whole(scene, [1, 2, 3], 1, model="boxes")

    assert answers == expected([1, 2, 3])


async def test_steps_that_are_sent_ahead_stay_in_order(scene: EnsemblesServed) -> None:
    """Over one stream of gRPC, none waits for the answer to the one before it."""
    await start(scene)
    call = scene.stub.ModelStreamInfer()
    for position in range(20):
        request = pb.ModelInferRequest(model_name="sum")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        request.raw_input_contents.append(np.array([[position + 1]], "<f4").tobytes())
        request.parameters["sequence_id"].int64_param = 7
        for flag in flags_of(position, 20):
            request.parameters[f"sequence_{flag}"].bool_param = True
        await call.write(request)

    answers = [float(InferResult((await call.read()).infer_response).as_numpy("y")[0, 0]) for _ in range(20)]
    call.cancel()

    assert answers == expected([float(number) for number in range(1, 21)])


async def test_an_ensemble_is_a_sequence_for_its_callers(scene: EnsemblesServed) -> None:
    """A request that names none is refused, and one without START where none is open."""
    await start(scene)

    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}
    nameless = await scene.client.post("/v2/models/sum/infer", json={"inputs": [tensor]})
    stored = await scene.client.post("/v1/models/sum/requests", json={"inputs": [tensor]})
    unknown = await post(scene, 1.0, 9)

    assert "must specify a non-zero or non-empty correlation ID" in nameless.text
    assert "keeps state from request to request" in stored.text
    assert "must specify the START flag on the first request of the sequence" in unknown.text


async def test_a_sequence_goes_on_when_its_worker_dies(scene: EnsemblesServed) -> None:
    """Between steps: whoever takes it over goes on with the numbers that the stateful step has."""
    await start(scene)
    answers = [await value(scene, 1.0, 1, "start"), await value(scene, 2.0)]

    await scene.kill("w1")
    await scene.worker("w2")
    answers += [await value(scene, 3.0), await value(scene, 4.0, 1, "end")]

    assert answers == expected([1, 2, 3, 4])


async def test_a_step_that_is_run_again_changes_the_state_once(scene: EnsemblesServed) -> None:
    """Its worker has died behind the stateful step: whoever runs it again gets the response that was committed."""
    await scene.sync()
    await scene.worker("w1", models=("sum", "total"))
    await scene.worker("w2", models=("twice", "thrice"))
    await scene.ready()
    answers = [await value(scene, 1.0, 1, "start")]
    before = await counted(scene, "total")
    await hold(scene, "w2", "thrice")
    answer = asyncio.create_task(value(scene, 2.0))
    await eventually(lambda: has_counted(scene, "total", before + 1), description="the stateful step has run")

    await scene.kill("w1")
    await scene.worker("w3", models=("sum", "total"))
    scene.workers["w2"]._plain_batcher("thrice", 1).resume_batching()  # type: ignore[union-attr]
    answers += [await answer, await value(scene, 3.0, 1, "end")]

    assert answers == expected([1, 2, 3])


async def hold(scene: EnsemblesServed, worker_id: str, model: str) -> None:
    """Has a worker execute nothing of a model until it is resumed."""
    batcher = scene.workers[worker_id]._plain_batcher(model, 1)
    assert batcher is not None
    await batcher.pause_batching()


async def counted(scene: EnsemblesServed, model: str) -> int:
    """Returns how many requests a model has executed."""
    return int((await scene.statistics(model))["inference_stats"]["success"]["count"])


async def has_counted(scene: EnsemblesServed, model: str, count: int) -> bool:
    return await counted(scene, model) >= count


async def test_a_numbered_step_that_is_sent_again(scene: EnsemblesServed) -> None:
    """It gets the response that was committed, START included, and a gap is refused."""
    await start(scene)
    first = await value(scene, 1.0, 1, "start", step=1)
    again = await value(scene, 1.0, 1, "start", step=1)
    second = await value(scene, 2.0, 1, step=2)
    gap = await post(scene, 2.0, 1, step=4)

    assert (first, again, second) == (6.0, 6.0, 18.0)
    assert "leaves a gap: send step 3 first" in gap.text


async def test_the_same_sequence_again(scene: EnsemblesServed) -> None:
    """A sequence of one request, twice with the same content, is executed twice."""
    await start(scene)

    answers = [await value(scene, 1.0, 1, "start", "end") for _ in range(3)]

    assert answers == [6.0] * 3
    await eventually(lambda: has_counted(scene, "total", 3), description="each was executed")


@pytest.mark.parametrize("behind", [True, False])
async def test_a_sequence_goes_on_after_a_failure(scene: EnsemblesServed, behind: bool) -> None:  # noqa: FBT001
    """Whether it failed before or behind the stateful step, which has or has not got the number."""
    fussy = python_models.execute(FUSSY.strip())
    python_models.write_model(scene.repository, fussy, "fussy", dims=1, max_batch_size=4, scheduling="")
    scale(scene.repository, "same", 1.0, width=1)
    sums(scene.repository, "touchy", *(("same", "fussy") if behind else ("fussy", "same")))
    await start(scene, "touchy")
    answers = [await value(scene, 5.0, 1, "start", model="touchy")]

    failed = await post(scene, -7.0, model="touchy")
    answers.append(await value(scene, 9.0, 1, "end", model="touchy"))

    assert "in ensemble 'touchy', step of model 'fussy': " in failed.text
    assert "no negative numbers" in failed.text
    assert answers == ([5.0, 7.0] if behind else [5.0, 14.0])


async def test_a_state_in_memory_ends_with_its_worker(scene: EnsemblesServed) -> None:
    """The ensemble's sequence ends with it, by an error that may be tried again from the beginning."""
    oldest = f"oldest {{ max_candidate_sequences: 100 }} {IDLE}"
    python_models.write_accumulator(scene.repository, "memory", oldest)
    sums(scene.repository, "kept", "twice", "thrice", "memory")
    await scene.sync()
    await scene.worker("w1", models=("memory",))
    await scene.worker("w2", models=("kept", "t*"))
    await scene.ready("kept")
    assert await value(scene, 1.0, 1, "start", model="kept") == 6.0

    await scene.kill("w1")
    await scene.worker("w3", models=("memory",))
    lost = await post(scene, 2.0, model="kept")
    behind = await post(scene, 3.0, model="kept")
    again = await value(scene, 4.0, 1, "start", model="kept")

    assert lost.status_code == 503
    assert "in ensemble 'kept', step of model 'memory'" in lost.text
    assert "was ended at step 2" in behind.text
    assert again == 24.0


async def test_a_drain_hands_sequences_over(scene: EnsemblesServed) -> None:
    """Unnoticed by their callers, in the middle of their steps."""
    await start(scene)
    numbers = {sequence: [float(step) for step in range(1, 20)] for sequence in range(1, 11)}
    asking = [asyncio.create_task(whole(scene, numbers[sequence], sequence)) for sequence in numbers]
    await eventually(lambda: has_counted(scene, "sum", 20), description="sequences are under way")

    await scene.worker("w2")
    await scene.stop("w1")

    assert await asyncio.gather(*asking) == [expected(each) for each in numbers.values()]


async def test_stateful_models_that_can_not_be_steps_together(scene: EnsemblesServed) -> None:
    """Twice the same one, and one beside a decoupled one."""
    repository = scene.repository
    steps = ("total", {"INPUT": "x"}, {"OUTPUT": "t"}), ("total", {"INPUT": "t"}, {"OUTPUT": "y"})
    ensemble(repository, "double", *steps, width=1, max_batch_size=4)
    source = python_models.execute("return None")
    python_models.write_model(repository, source, "source", dims=1, max_batch_size=4, more=DECOUPLED)
    steps = ("total", {"INPUT": "x"}, {"OUTPUT": "t"}), ("source", {"x": "t"}, {"y": "y"})
    ensemble(repository, "mixed", *steps, width=1, max_batch_size=4)
    await scene.worker()

    with pytest.raises(ModelLoadFailed, match=r"model total keeps state .* and is a step more than once"):
        await scene.control.load("double")
    with pytest.raises(ModelLoadFailed, match=r"model total keeps state .*, and another step is decoupled"):
        await scene.control.load("mixed")
