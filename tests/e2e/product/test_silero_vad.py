"""A real stateful model through the whole server: each frame of many calls is judged as by silero-vad's own package."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.http as triton

import qinfer
from examples.sequences.build_model import RATES, Rate, build
from tests.e2e.conftest import Stack, running
from tests.support import silero

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

CALLERS, FRAMES = 200, 20


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    repository = tmp_path_factory.mktemp("silero")
    build(repository)
    with running(repository, tmp_path_factory.mktemp("up"), 2) as stack:
        yield stack


async def listen(client: qinfer.AsyncClient, rate: Rate, call: silero.Floats) -> list[float]:
    """Sends the frames of a call as a sequence, each when the one before is answered."""
    async with client.sequence(rate.model) as sequence:
        last = len(call) - 1
        results = [
            await sequence.infer({"FRAME": frame[np.newaxis]}, end=index == last) for index, frame in enumerate(call)
        ]
    return [result["PROBABILITY"].item() for result in results]


async def listen_to_all(url: str, rate: Rate, calls: silero.Floats) -> list[list[float]]:
    async with qinfer.AsyncClient(url) as client:
        return await asyncio.gather(*(listen(client, rate, call) for call in calls))


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: rate.model)
def test_many_callers_at_once(stack: Stack, rate: Rate) -> None:
    """Their frames share batches, on two workers; no caller gets what another one's state leads to."""
    calls = silero.calls(rate, CALLERS, FRAMES)

    found = asyncio.run(listen_to_all(f"http://{stack.address}", rate, calls))

    np.testing.assert_allclose(found, silero.probabilities(rate, calls), atol=1e-5)


def test_tritons_client_with_its_flags(stack: Stack) -> None:
    """As it is written for Triton: ids of the caller's own, START and END, no numbers."""
    (rate, _), frames = RATES, 5
    (call,) = silero.calls(rate, 1, frames)
    found = []

    with triton.InferenceServerClient(stack.address) as client:
        for index, frame in enumerate(call):
            tensor = triton.InferInput("FRAME", [1, rate.frame], "FP32")
            tensor.set_data_from_numpy(frame[np.newaxis])
            result = client.infer(
                rate.model,
                [tensor],
                sequence_id=4711,
                sequence_start=index == 0,
                sequence_end=index == frames - 1,
            )
            found.append(result.as_numpy("PROBABILITY").item())

    np.testing.assert_allclose([found], silero.probabilities(rate, call[np.newaxis]), atol=1e-5)
