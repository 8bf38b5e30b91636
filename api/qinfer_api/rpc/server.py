"""The gRPC server: Triton's 20 calls and the health check on one port, beside HTTP and on the same use cases."""

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from qinfer_api.forwarding import compile_forward
from qinfer_api.rest.services import Services
from qinfer_api.restrictions import Restrictions
from qinfer_api.rpc.calls import Guard
from qinfer_api.rpc.health import Health
from qinfer_api.rpc.infer import Infer, ModelInfer
from qinfer_api.rpc.models import model_calls
from qinfer_api.rpc.port import RpcPort
from qinfer_api.rpc.repository import repository_calls
from qinfer_api.rpc.server_settings import settings_calls
from qinfer_api.rpc.shared_memory import shared_memory_calls
from qinfer_api.rpc.stream import ModelStreamInfer

SERVICE: str = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
HEALTH_SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_LAST_REPLIES_S = 1.0  # to write what was answered last


class RpcServer:
    """Serves gRPC on a port that is open already.

    Args:
        port: The port.
        services: The use cases.

    Attributes:
        url: Where it serves.

    Raises:
        SettingsError: A setting of gRPC is wrong.
    """

    def __init__(self, port: RpcPort, services: Services) -> None:
        self._server, self.url = port
        self._guard = guard = _guard(services)
        infer = Infer(services.dispatcher, services.codec, services.settings.http.max_input_bytes)
        self._stream = ModelStreamInfer(guard, infer)
        calls = {
            **model_calls(guard, services),
            **repository_calls(guard, services.models),
            **shared_memory_calls(guard, services.shared_memory),
            **settings_calls(guard, services.trace_settings, services.log_settings),
        }
        handlers = {name: grpc.unary_unary_rpc_method_handler(handler) for name, handler in calls.items()}
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(ModelInfer(guard, infer).answer)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream.serve)
        health = {"Check": grpc.unary_unary_rpc_method_handler(Health(guard, services).check)}
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, handlers),
                grpc.method_handlers_generic_handler(HEALTH_SERVICE, health),
            )
        )

    async def start(self) -> None:
        """Accepts connections from now on."""
        await self._server.start()

    async def stop(self, within_s: float) -> None:
        """Ends once every call has its answer; new ones are refused meanwhile, and health answers NOT_SERVING.

        Args:
            within_s: How long that may take; the gateway refuses then what it has not answered.
        """
        self._stream.drain()
        with contextlib.suppress(TimeoutError):  # a client that does not read its answers keeps nobody
            async with asyncio.timeout(within_s + _LAST_REPLIES_S):
                await self._guard.in_flight.ended()
        await self._server.stop(_LAST_REPLIES_S)

    async def close(self) -> None:
        """Ends at once, also when it was never started."""
        await self._server.stop(None)


def _guard(services: Services) -> Guard:
    pattern = services.settings.grpc.header_forward_pattern
    forward = compile_forward("QINFER_GRPC__HEADER_FORWARD_PATTERN", pattern)
    restrictions = Restrictions.for_grpc(services.settings.grpc.restricted)
    return Guard(services.dispatcher, restrictions, forward)
