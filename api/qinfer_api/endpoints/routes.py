"""Routes of endpoints: `/v1/endpoints`, read with the scope `infer` and changed with `admin`."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer.errors import InvalidRequest
from qinfer.traffic.canary import Action
from qinfer.traffic.endpoints import Endpoint, read_endpoint
from qinfer_api.endpoints.service import EndpointDifferences, EndpointService, EndpointState
from qinfer_api.http.infer import HttpReply
from qinfer_api.rest.openapi import body, describe_response, errors, operation, query
from qinfer_api.rest.services import Services, guarded, read_json, send, send_json

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
    reading: Any = {"dependencies": guarded(services, "model-config", Scope.INFER)}
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
