"""`grpc.health.v1.Health/Check`: what probes and load balancers ask (reference §2.1)."""

import grpc
from grpc_health.v1 import health_pb2

from qinfer.errors import QinferError
from qinfer_api.about import is_server_ready
from qinfer_api.rest.services import Services
from qinfer_api.rpc.calls import Call, Guard, parse, refuse

_KNOWN = ("", "inference.GRPCInferenceService")


class Health:
    """The handler of Check.

    Args:
        guard: Decides who may call.
        services: Tell whether the server is ready.
    """

    def __init__(self, guard: Guard, services: Services) -> None:
        self._guard = guard
        self._services = services

    async def check(self, blob: bytes, call: Call) -> bytes:
        """Answers SERVING if and only if the server is ready; it answers while the gateway shuts down, too."""
        services = self._services
        await self._guard.enter(call, "health", None, even_draining=True)
        try:
            service = parse(health_pb2.HealthCheckRequest, blob).service
        except QinferError as error:
            await refuse(call, error)
        if service not in _KNOWN:
            await call.abort(grpc.StatusCode.NOT_FOUND, f"service '{service[:100]}' is not known; ask for ''")
        is_ready = is_server_ready(services.settings, services.catalog, draining=services.dispatcher.draining)
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        return bytes(health_pb2.HealthCheckResponse(status=status).SerializeToString())
