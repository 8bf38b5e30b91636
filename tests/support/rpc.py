"""Calls of the gateway's gRPC server, for its tests: requests as messages, and what comes back."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.support.gateway import Running, running_gateway, settings_of

ROW = np.array([[1, 2, 3, 4]], dtype="<f4")


@dataclass(kw_only=True)
class Rpc:
    """A gateway that serves gRPC, a channel to it, and the stub of Triton's service."""

    running: Running
    channel: Any
    stub: Any


@contextlib.asynccontextmanager
async def rpc(
    grpc_settings: dict[str, Any] | None = None, *, allow_client_shm: bool = False, **sections: Any
) -> AsyncIterator[Rpc]:
    """Runs a gateway with gRPC until the block ends."""
    settings = settings_of(grpc=grpc_settings or {}, **sections)
    async with (
        running_gateway(settings.model_copy(update={"allow_client_shm": allow_client_shm})) as running,
        grpc.aio.insecure_channel(running.grpc_target) as channel,
    ):
        yield Rpc(running=running, channel=channel, stub=stub_of(channel))


def stub_of(channel: Any) -> Any:
    """Returns the stub of Triton's service."""
    return GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call,unused-ignore]  # generated


def infer_request(model: str = "echo", value: float = 1.0, **fields: Any) -> Any:
    """Returns a ModelInferRequest of one row for a model `x` → `y` of FP32[4]."""
    request = pb.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append((ROW * np.float32(value)).tobytes())
    return request


def value_of(reply: Any) -> float:
    """Returns the first element of the first output of a ModelInferResponse."""
    return float(np.frombuffer(reply.raw_output_contents[0], "<f4")[0])
