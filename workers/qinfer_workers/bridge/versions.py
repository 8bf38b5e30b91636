"""The model version for a route's messages: the one that it names, or its endpoint chooses.

Requests, their ids and the outbox belong to a model. So that a redelivered message finds its request, a route uses only
targets in one model; the stable target replaces targets in other models.
"""

from collections.abc import Iterator
from contextlib import suppress

from qinfer.core.messages import OutgoingRequest
from qinfer.errors import ModelNotReady, QinferError
from qinfer.models.catalog import ServedVersion
from qinfer.traffic.routing import Endpoints, Header
from qinfer_workers.bridge.config import RouteOptions


class RouteVersions:
    """Chooses the version for a route's messages; for any thread."""

    def __init__(self, route: RouteOptions, endpoints: Endpoints) -> None:
        self._route = route
        self._endpoints = endpoints
        routed = endpoints.by_name.get(route.model)
        self.model = route.model if routed is None else routed.stable.model

    @property
    def is_endpoint(self) -> bool:
        """Whether the route names an endpoint now."""
        return self._route.model in self._endpoints.by_name

    def resolve(self) -> ServedVersion:
        """Returns the version for which bodies are read: that of the route, the newest, or the stable target's version.

        Raises `ModelNotReady` if it can't be loaded, or the stable target is now in another model; `BrokerUnavailable`
        if the route names a canary's version, and endpoints can't be followed.
        """
        route, endpoints = self._route, self._endpoints
        asked = OutgoingRequest(model=route.model, version=route.version, inputs=())
        if route.version:
            endpoints.choose(asked, route.tenant)
        else:
            asked.model, asked.version = endpoints.stable(route.model, 0)
        if asked.model != self.model:
            raise ModelNotReady(
                f"'{route.model}' is answered by model '{asked.model}' now, and by '{self.model}' when the bridge "
                "started; restart the bridge once all its messages are answered"
            )
        return endpoints.catalog.accepting(asked.model, asked.version)

    def choose(self, request: OutgoingRequest, header: Header, stable: ServedVersion) -> ServedVersion:
        """Returns the version that executes a message, or else `stable`."""
        route, endpoints = self._route, self._endpoints
        if route.version:
            return stable
        request.model, request.version = route.model, 0
        endpoints.choose(request, route.tenant, header)
        model, version = request.model, request.version
        request.model, request.version = self.model, stable.version
        if model != self.model:
            return stable
        with suppress(QinferError):  # it was READY a moment ago
            return endpoints.catalog.accepting(model, version)
        return stable

    def left_out(self) -> Iterator[str]:
        """Describes targets that get no messages."""
        routed = self._endpoints.by_name.get(self._route.model)
        for target in () if routed is None else routed.endpoint.answering:
            if target.model != self.model:
                yield f"target '{target.label}' gets no messages: bridges use the versions of '{self.model}' only"
