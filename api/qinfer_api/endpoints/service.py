"""Declaring endpoints: checked against the models, written by compare-and-set, and seen here before the reply."""

from collections.abc import Mapping

import msgspec

from qinfer.errors import InvalidRequest
from qinfer.traffic.endpoints import Endpoint, Role
from qinfer.traffic.routing import EndpointWatch
from qinfer.traffic.store import unknown
from qinfer.traffic.tally import TargetTally


class TargetState(msgspec.Struct, frozen=True, kw_only=True):
    """A target as it is now.

    Attributes:
        target: Its model and version in one word, such as `digits:4`.
        role: stable | canary | shadow
        weight: The share of the requests that it gets by its weight.
        version: The version that it has now; 0 = `latest`, and none is READY.
        ready: Whether it can be asked; requests for a canary that can't go to the stable target.
        requests: Requests that the gateway that was asked has given to this version since it started.
    """

    target: str
    role: Role
    weight: float
    version: int
    ready: bool
    requests: int


class EndpointState(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint as it was declared, and as it is now.

    Attributes:
        endpoint: The declaration, with its revision.
        targets: Its targets, in the order of the declaration.
        problems: What keeps it or a target from being used as declared.
    """

    endpoint: Endpoint
    targets: list[TargetState]
    problems: list[str]


class EndpointService:
    """The use case behind `/v1/endpoints`.

    Args:
        watch: Reads and writes the declarations, and has this gateway see what was written.
        tally: What this gateway counts.
    """

    def __init__(self, watch: EndpointWatch, tally: TargetTally) -> None:
        self._watch = watch
        self._tally = tally
        self._store, self._view = watch.store, watch.view

    async def list(self) -> list[EndpointState]:
        """Returns all endpoints, by name.

        Raises:
            BrokerUnavailable: Redis can't be reached.
        """
        found = (await self._store.read()).endpoints
        return [self._state(found[name]) for name in sorted(found)]

    async def find(self, name: str) -> EndpointState:
        """Returns an endpoint.

        Raises:
            EndpointNotFound: There is none of that name.
            BrokerUnavailable: Redis can't be reached.
        """
        return self._state(_of((await self._store.read()).endpoints, name))

    async def put(self, endpoint: Endpoint) -> EndpointState:
        """Writes a declaration that was checked by itself; this gateway goes by it when it returns.

        Args:
            endpoint: The declaration; with a revision it replaces that, without one whatever is there.

        Raises:
            InvalidRequest: A target is no model, or does not fit the stable one; or it hides a model unsaid.
            Conflict: Another revision is there by now.
            EndpointNotFound: It has a revision, and is not there any more.
            BrokerUnavailable: Redis can't be reached.
        """
        self._check(endpoint)
        before = (await self._store.read()).endpoints.get(endpoint.name)
        declared_by = "" if before is None else before.file
        written = await self._store.put(msgspec.structs.replace(endpoint, file=declared_by), endpoint.revision or None)
        await self._watch.look()
        return self._state(written)

    async def delete(self, name: str, seen: int | None) -> None:
        """Removes an endpoint; callers of its name ask the model of that name then, if there is one.

        Raises:
            EndpointNotFound: There is none of that name.
            Conflict: Another revision than the one given is there by now.
            BrokerUnavailable: Redis can't be reached.
        """
        await self._store.delete(name, seen)
        await self._watch.look()

    def _check(self, endpoint: Endpoint) -> None:
        if reasons := [*self._view.refusals(endpoint)]:
            raise InvalidRequest(f"endpoint '{endpoint.name}': {'; '.join(reasons)}")

    def _state(self, endpoint: Endpoint) -> EndpointState:
        view = self._view
        targets = [
            TargetState(
                target=target.label,
                role=target.role,
                weight=endpoint.weight_of(target),
                version=view.resolved(target),
                ready=view.catalog.find(target.model, view.resolved(target)) is not None,
                requests=self._tally.requests(endpoint.name, target.model, view.resolved(target)),
            )
            for target in endpoint.targets
        ]
        return EndpointState(endpoint=endpoint, targets=targets, problems=[*view.problems(endpoint)])


def _of(endpoints: Mapping[str, Endpoint], name: str) -> Endpoint:
    found = endpoints.get(name)
    if found is None:
        raise unknown(name)
    return found
