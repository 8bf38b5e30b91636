"""A gateway and a worker that serve a framework's models, asked over both protocols."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as over_grpc
import tritonclient.http.aio as over_http
from tritonclient.utils import np_to_triton_dtype

from qinfer.core.settings import StoreSettings
from tests.support.framework_models import Array, sample
from tests.support.served_models import ServedModels, models_served

LOAD_S = 150.0
"""A framework's import may take half a minute on a busy machine."""


@asynccontextmanager
async def framework_served(repository: Path) -> AsyncIterator[ServedModels]:
    """Runs a gateway and a worker until the block ends."""
    stores = {"stores": StoreSettings(allow=("file:///",))}  # for bulk jobs
    async with models_served(repository, stores, load_timeout_s=LOAD_S) as scene:
        yield scene


async def load(scene: ServedModels, model: str) -> None:
    """Loads a model, or raises what the server says."""
    await scene.grpc.load_model(model, client_timeout=LOAD_S)


def made(name: str, array: Array, module: Any) -> Any:
    """Makes an input of a client."""
    given = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    given.set_data_from_numpy(array)
    return given


async def asked(client: Any, module: Any, model: str, inputs: Mapping[str, Array]) -> Any:
    """Asks a model by a client."""
    return await client.infer(model, [made(name, array, module) for name, array in inputs.items()])


async def assert_as_in_process(scene: ServedModels, model: str, rtol: float, atol: float = 0.0) -> None:
    """Checks the answers to a sample over HTTP and gRPC, and those to its first row, against the framework's own."""
    inputs, outputs = sample(scene.repository, model)
    for client, module in ((scene.http, over_http), (scene.grpc, over_grpc)):
        answer = await asked(client, module, model, inputs)
        for name, expected in outputs.items():
            found = answer.as_numpy(name)
            assert found.shape == expected.shape
            if found.dtype == object:
                assert found.tolist() == expected.tolist()
            else:
                np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)
