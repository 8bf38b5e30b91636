"""Endpoints: `/v1/endpoints`, read with the scope `viewer` and changed with `admin`.

Declarations, by the API and by files, and decisions about canaries are written by compare-and-set.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.core.settings import Settings
from qinfer.errors import BrokerUnavailable, Conflict, EndpointNotFound, InvalidRequest
from qinfer.traffic.canary import Action, CheckNumbers, Event, Trial, by_hand, numbers_of
from qinfer.traffic.controller import EndpointWatch
from qinfer.traffic.differences import Found, OutputDifference, Sample
from qinfer.traffic.endpoints import Endpoint, Role, Target, read_directory, read_endpoint
from qinfer.traffic.store import unknown
from qinfer.traffic.tally import ShadowCounts, TargetTally
from qinfer_api.endpoints.shadows import OnlineShadows
from qinfer_api.http.infer import HttpReply
from qinfer_api.rest.openapi import body, describe_response, errors, operation, query
from qinfer_api.rest.services import Services, guarded, read_json, send, send_json

logger = logging.getLogger(__name__)

AGAIN_S = 2.0
"""The pause before the next look for missing models of files."""

_TRIES = 5


class TargetState(msgspec.Struct, frozen=True, kw_only=True):
    """The present state of a target.

    Attributes:
        target: The model and version of the target, such as `digits:4`.
        role: stable | canary | shadow
        weight: The share of the requests that the target gets by weight.
        version: The present version of the target; 0 = `latest`, and no version is READY.
        ready: Whether it accepts requests; those for a canary that is not ready go to the stable target.
        requests: Requests that this gateway has sent to the version; 0 for a canary that is now stable.
        shadows: Requests that a shadow has executed, counted alike.
    """

    target: str
    role: Role
    weight: float
    version: int
    ready: bool
    requests: int
    shadows: ShadowCounts | None = None


class ShadowDifferences(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers of a shadow differ from those of the stable target.

    Attributes:
        target: The model and version, such as `digits:4`.
        shadows: The number of shadowed requests.
        outputs: The differences of each output.
        samples: The most different rows, of a bounded size.
    """

    target: str
    shadows: ShadowCounts
    outputs: list[OutputDifference]
    samples: list[Sample]


class EndpointDifferences(msgspec.Struct, frozen=True, kw_only=True):
    """The differences of an endpoint's shadows that this gateway has found since it started.

    Attributes:
        endpoint: The endpoint.
        gateway: The gateway.
        targets: The endpoint's shadows, including removed shadows.
    """

    endpoint: str
    gateway: str
    targets: list[ShadowDifferences]


class CanaryView(msgspec.Struct, frozen=True, kw_only=True):
    """The last trial of a canary.

    Attributes:
        version: The version on trial.
        model: The model of that version, if it differs from the stable target's model; else empty.
        stable: The stable version; after a promotion equal to `version`.
        step: The number of the present step, from 1.
        steps: The number of steps.
        requests: The canary's requests in this step.
        state: running | paused | promoted | rolling back (until every gateway has confirmed) | rolled back |
            replaced (by a new declaration)
        reason: The reason of that state.
        since_s: The time of the last transition, in seconds since the epoch.
        done_s: The time at which every gateway had confirmed the rollback; 0 = it is not confirmed.
        checks: The numbers of the checks.
    """

    version: int
    stable: int
    step: int
    steps: int
    requests: int
    state: str
    reason: str
    since_s: float
    done_s: float
    checks: list[CheckNumbers]
    model: str = ""


class EndpointState(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint's declaration and present state.

    Attributes:
        endpoint: The declaration, with its revision.
        targets: The targets of the endpoint, in the order of the declaration.
        problems: The reasons why the endpoint or a target can't be used as declared.
        canary: The last trial of the endpoint's canary; `null` = there was no trial.
        events: Events of the endpoint's canaries, newest first; only if one endpoint is requested.
    """

    endpoint: Endpoint
    targets: list[TargetState]
    problems: list[str]
    canary: CanaryView | None = None
    events: list[Event] = []


class EndpointService:
    """The use case behind `/v1/endpoints`."""

    def __init__(
        self,
        watch: EndpointWatch,
        tally: TargetTally,
        now_s: Callable[[], float],
        check_url: Callable[[str], Awaitable[object]],
        shadows: OnlineShadows,
    ) -> None:
        self._watch = watch
        self._shadows = shadows
        self._tally = tally
        self._now_s = now_s
        self._check_url = check_url
        self._store, self._trials, self._view = watch.store, watch.store.trials, watch.view

    async def list(self) -> list[EndpointState]:
        """Returns all endpoints, by name."""
        trials = await self._trials.read()
        found = (await self._store.read()).endpoints
        return [self._state(found[name], trials[name].trial if name in trials else None) for name in sorted(found)]

    async def find(self, name: str) -> EndpointState:
        """Returns an endpoint."""
        stored = await self._trials.find(name)
        endpoint = await self._declared(name)
        return self._state(endpoint, None if stored is None else stored.trial, await self._trials.events(name))

    async def decide(self, name: str, action: Action, reason: str) -> EndpointState:
        """Decides about the canary on trial."""
        for _ in range(_TRIES):
            stored = await self._trials.find(name)
            endpoint = await self._declared(name)
            trial = None if stored is None else stored.trial
            ready = self._view.ready_to_try(endpoint)
            change = by_hand(endpoint, trial, action, reason, ready, self._now_s())
            if await self._trials.change(endpoint, stored, change):
                await self._watch.refresh_endpoints()
                return await self.find(name)
        raise Conflict(f"endpoint '{name}' is being changed by others; try again")

    async def differences(self, name: str) -> EndpointDifferences:
        """Returns how shadows differ from the stable target."""
        endpoint, found = await self._declared(name), await self._shadows.found(name)
        declared = [self._label(target) for target in endpoint.targets if target.role is Role.SHADOW]
        targets = []
        for target in dict.fromkeys((*declared, *found)):
            one, counts = found.get(target, Found()), self._tally.shadows(name, target)
            targets.append(ShadowDifferences(target=target, shadows=counts, outputs=one.outputs, samples=one.samples))
        return EndpointDifferences(endpoint=name, gateway=self._tally.process, targets=targets)

    def _label(self, target: Target) -> str:
        return f"{target.model}:{self._view.resolved(target)}"

    async def put(self, endpoint: Endpoint) -> EndpointState:
        """Writes a valid declaration over the revision that it names, or over the present revision."""
        if reasons := [*self._view.refusals(endpoint)]:
            raise InvalidRequest(f"endpoint '{endpoint.name}': {'; '.join(reasons)}")
        if endpoint.webhook:
            await self._check_url(endpoint.webhook)
        before = (await self._store.read()).endpoints.get(endpoint.name)
        declared_by = "" if before is None else before.file
        written = await self._store.put(msgspec.structs.replace(endpoint, file=declared_by), endpoint.revision or None)
        await self._watch.refresh_endpoints()
        return self._state(written, None)

    async def delete(self, name: str, seen: int | None) -> None:
        """Removes an endpoint."""
        await self._store.delete(name, seen)
        await self._watch.refresh_endpoints()

    async def _declared(self, name: str) -> Endpoint:
        found = (await self._store.read()).endpoints.get(name)
        if found is None:
            raise unknown(name)
        return found

    def _requests(self, endpoint: Endpoint, target: Target) -> int:
        version = self._view.resolved(target)
        if target is not endpoint.stable and (target.model, version) == endpoint.stable.place:
            return 0
        return self._tally.requests(endpoint.name, target.model, version)

    def _state(self, endpoint: Endpoint, trial: Trial | None, events: Sequence[Event] = ()) -> EndpointState:
        view = self._view
        targets = [
            TargetState(
                target=target.label,
                role=target.role,
                weight=endpoint.weight_of(target),
                version=view.resolved(target),
                ready=view.catalog.find(target.model, view.resolved(target)) is not None,
                requests=self._requests(endpoint, target),
                shadows=self._tally.shadows(endpoint.name, self._label(target)) if target.role is Role.SHADOW else None,
            )
            for target in endpoint.targets
        ]
        return EndpointState(
            endpoint=endpoint,
            targets=targets,
            problems=[*view.problems(endpoint)],
            canary=None if trial is None else _canary_of(endpoint, trial),
            events=[*events],
        )


def declared_here(settings: Settings) -> list[Endpoint]:
    """Reads the declarations of this gateway's directory."""
    return read_directory(settings.endpoints.path) if settings.endpoints.path else []


class EndpointFiles:
    """Declarations of files: a gateway stores each content of a file once, at its start.

    Later changes by the API or a promotion survive a restart; an edited file replaces them. An endpoint outlives its
    file.
    """

    def __init__(self, watch: EndpointWatch, declared: Iterable[Endpoint]) -> None:
        self._watch = watch
        self._left = {endpoint.name: endpoint for endpoint in declared}
        self._reasons: dict[str, str] = {}

    async def run(self) -> None:
        """Writes declarations until all are written."""
        while self._left:
            await asyncio.sleep(AGAIN_S)
            with suppress(BrokerUnavailable):  # other tasks log the outage
                await self.write()

    async def write(self) -> None:
        """Writes declarations whose models exist, once per file."""
        for name, endpoint in list(self._left.items()):
            reason = "; ".join(self._watch.view.refusals(endpoint))
            if not reason and await self._write_endpoint(endpoint):
                del self._left[name]
            elif reason and self._reasons.get(name) != reason:
                self._reasons[name] = reason
                logger.error("endpoint of a file can't be used yet", extra={"endpoint": name, "reason": reason})
        await self._watch.refresh_endpoints()

    async def _write_endpoint(self, endpoint: Endpoint) -> bool:
        before = (await self._watch.store.read()).endpoints.get(endpoint.name)
        if before is not None and before.file == endpoint.file:
            return True
        try:
            await self._watch.store.put(endpoint, 0 if before is None else before.revision)
        except (Conflict, EndpointNotFound):
            return False
        logger.info("endpoint of a file written", extra={"endpoint": endpoint.name})
        return True


def _canary_of(endpoint: Endpoint, trial: Trial) -> CanaryView:
    state, plan = trial.state, endpoint.canary
    return CanaryView(
        version=state.canary,
        stable=state.stable,
        step=state.step + 1,
        steps=0 if plan is None else len(plan.steps),
        requests=state.requests,
        state=_word(endpoint, trial),
        reason=trial.reason,
        since_s=trial.at_s,
        done_s=trial.done_s,
        checks=[*numbers_of(plan, state)],
        model=trial.model,
    )


def _word(endpoint: Endpoint, trial: Trial) -> str:
    if trial.is_rolled_back:
        return "rolled back" if trial.done_s else "rolling back"
    if trial.state.ended:
        return "promoted"
    if trial.state.revision != endpoint.revision:
        return "replaced"
    return "paused" if trial.state.paused else "running"


_STATE = describe_response("The endpoint, its present targets, and their problems.", EndpointState)
_REVISION = query("revision", "Only if this is the present revision.", type="integer", minimum=1, examples=[7])
_LIST = operation(
    "List the endpoints",
    {200: describe_response("The endpoints, by name.", list[EndpointState]), **errors(401, 403, 503)},
)
_SHOW = operation("Look at an endpoint", {200: _STATE, **errors(401, 403, 404, 503)})
_DIFFERENCES = operation(
    "Look at the differences of shadows",
    {
        200: describe_response("The differences that this gateway has found.", EndpointDifferences),
        **errors(401, 403, 404, 503),
    },
)
_PUT = operation("Declare an endpoint", {200: _STATE, **errors(400, 401, 403, 404, 409, 503)}, takes=body(Endpoint))
_DELETE = operation(
    "Remove an endpoint", {200: describe_response("Done."), **errors(400, 401, 403, 404, 409, 503)}, _REVISION
)
_DECIDE = operation("Decide about a canary on trial", {200: _STATE, **errors(400, 401, 403, 404, 409, 503)})
_ACTIONS = {"promote": Action.PROMOTE, "rollback": Action.ROLL_BACK, "pause": Action.PAUSE, "resume": Action.RESUME}


def endpoint_routes(services: Services, endpoints: EndpointService) -> APIRouter:
    """Returns the routes of endpoints."""
    router = APIRouter(tags=["endpoints"])
    reading: Any = {"dependencies": guarded(services, "model-config", Scope.VIEWER)}
    secret: Any = {"dependencies": guarded(services, "model-config", Scope.ADMIN)}
    changing: Any = {"dependencies": guarded(services, "model-repository", Scope.ADMIN)}

    @router.get("/v1/endpoints", name="endpoints", **reading, **_LIST)
    async def list_endpoints() -> HttpResponse:
        """Lists the endpoints, with the state of their targets."""
        return send_json(await endpoints.list())

    @router.get("/v1/endpoints/{endpoint}", name="endpoint", **reading, **_SHOW)
    async def show_endpoint(endpoint: str) -> HttpResponse:
        """Shows an endpoint, with the state of its targets."""
        return send_json(await endpoints.find(endpoint))

    @router.get("/v1/endpoints/{endpoint}/differences", name="endpoint_differences", **secret, **_DIFFERENCES)
    async def show_differences(endpoint: str) -> HttpResponse:
        """Shows how the answers of an endpoint's shadows differ from its stable target's, with samples of values."""
        return send_json(await endpoints.differences(endpoint))

    @router.put("/v1/endpoints/{endpoint}", name="put_endpoint", **changing, **_PUT)
    async def put_endpoint(endpoint: str, request: Request) -> HttpResponse:
        """Declares or changes an endpoint; every gateway applies it within a second."""
        document = await read_json(services, request, dict[str, Any])
        return send_json(await endpoints.put(read_endpoint(document, endpoint)))

    @router.delete("/v1/endpoints/{endpoint}", name="delete_endpoint", **changing, **_DELETE)
    async def delete_endpoint(endpoint: str, request: Request) -> HttpResponse:
        """Removes an endpoint; its name then means the model of that name, if there is one."""
        await endpoints.delete(endpoint, _revision(request))
        return send(HttpReply(200, b""))

    @router.post("/v1/endpoints/{endpoint}/{decision}", name="decide_endpoint", **changing, **_DECIDE)
    async def decide_endpoint(endpoint: str, decision: str) -> HttpResponse:
        """Applies `promote`, `rollback`, `pause` or `resume` to a canary.

        `promote` starts the next step, and after the last one makes the canary the stable target; `resume` also repeats
        a trial that was rolled back.
        """
        action = _ACTIONS.get(decision)
        if action is None:
            raise InvalidRequest(f"'{decision[:60]}' can't be done to a canary; use {', '.join(_ACTIONS)}")
        return send_json(await endpoints.decide(endpoint, action, "by hand"))

    return router


def _revision(request: Request) -> int | None:
    text = request.query_params.get("revision")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest(f"revision is a number, such as that of GET /v1/endpoints/<name>; got '{text[:60]}'")
    return int(text)
