"""CUDA shared memory by Triton's own clients, with a stand-in for the driver."""

import asyncio
import base64
import ctypes
from types import ModuleType

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http

from qinfer_api import shared_memory
from qinfer_api.cuda_memory import Driver
from tests.support.cuda import HANDLE, FakeCuda
from tests.support.gateway import running_gateway, settings_of

VALUES = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)


@pytest.mark.parametrize("protocol", [over_http, over_grpc])
async def test_tensors_in_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch, protocol: ModuleType) -> None:
    """Inputs are read from the region, and outputs are written to it."""
    cuda = FakeCuda()
    ctypes.memmove(cuda.memory, VALUES.tobytes(), VALUES.nbytes)
    found = Driver(cuda)
    monkeypatch.setattr(shared_memory, "driver", lambda: found)

    def use(url: str) -> None:
        with protocol.InferenceServerClient(url) as client:
            client.register_cuda_shared_memory("all", base64.b64encode(HANDLE), 0, 64)
            tensor, output = protocol.InferInput("x", [1, 4], "FP32"), protocol.InferRequestedOutput("y")
            tensor.set_shared_memory("all", 16)
            output.set_shared_memory("all", 16, 32)
            client.infer("echo", [tensor], outputs=[output])
            told = client.get_cuda_shared_memory_status()
            (region,) = told if protocol is over_http else told.regions.values()
            name = region["name"] if protocol is over_http else region.name
            assert name == "all"
            client.unregister_cuda_shared_memory()

    settings = settings_of(grpc={}).model_copy(update={"allow_client_shm": True})
    async with running_gateway(settings) as running:
        await asyncio.to_thread(use, f"127.0.0.1:{running.port}" if protocol is over_http else running.grpc_target)

    assert np.frombuffer(bytes(cuda.memory), np.float32, 4, 32).tolist() == VALUES[0].tolist()
    assert cuda.opened == 0
