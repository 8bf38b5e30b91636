"""Routes: `/label-studio/{model}/…` is an ML backend for Label Studio, `/v1/label-studio/…` reports on pushed tasks.

Label Studio sends an API key as the password of Basic authentication, and reads only an error's status.
"""

import asyncio
import base64
import binascii
import contextlib
import logging
from collections.abc import Iterator
from functools import partial

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.errors import InvalidRequest, QinferError
from qinfer.models.repository.open import is_model_name
from qinfer_api.auth import CallerContext
from qinfer_api.http.infer import HttpReply
from qinfer_api.labeling.service import MAX_LIMIT, STATES, Labeling, LabelTaskBody, LabelTasksBody
from qinfer_api.labeling.wire import (
    MAX_ID,
    Call,
    EventCall,
    LabelEvent,
    LabelHealth,
    LabelOrder,
    LabelPredictions,
    LabelSetup,
    LabelVersions,
    PredictCall,
    SetupCall,
    read_call,
)
from qinfer_api.rest.openapi import Json, body, describe_response, errors, operation, query
from qinfer_api.rest.services import Services, authorize, context_of, read_body, send, send_json, unless_left

logger = logging.getLogger(__name__)

_DEFAULT_LIMIT = 100
_REFUSALS = errors(400, 401, 403, 404, 500, 501, 503)


def _about(summary: str, schema: type, description: str, *parameters: Json, takes: Json | None = None) -> Json:
    return operation(
        summary, {200: describe_response(description, schema), **_REFUSALS}, *parameters, takes=takes, basic=True
    )


_HEALTH = _about("Check the model", LabelHealth, "It takes tasks.")
_SETUP = _about("Connect a project", LabelSetup, "Mapping, label config and model fit.", takes=body(SetupCall))
_VERSIONS = _about("List the versions", LabelVersions, "The versions.")
_PREDICT = _about("Predict tasks", LabelPredictions, "The predictions.", takes=body(PredictCall))
_EVENT = operation(
    "Report an event",
    {201: describe_response("The event's tasks are stored.", LabelEvent), **_REFUSALS},
    takes=body(EventCall),
    basic=True,
)
_TASKS = _about(
    "List the tasks of a project",
    LabelTasksBody,
    "A page of them, by id.",
    query("state", "Only tasks in this state; a page may have fewer then.", enum=list(STATES)),
    query("after", "`next` of the page before.", type="integer", minimum=0),
    query("limit", "How many at most.", type="integer", minimum=1, maximum=MAX_LIMIT, default=_DEFAULT_LIMIT),
)
_TASK = _about("Look at a task", LabelTaskBody, "The task.")
_ORDER = operation(
    "Queue the tasks of a project",
    {202: describe_response("They are queued.", LabelOrder), **_REFUSALS, **errors(429)},
    query("page", "`next` of the call before.", type="integer", minimum=1),
    query("all", "Also tasks with predictions, unless this version made them.", type="boolean", default=False),
    basic=True,
)


def label_studio_routes(services: Services, labeling: Labeling) -> APIRouter:
    """Returns the routes of Label Studio."""
    router = APIRouter(tags=["Label Studio"])
    _add_calls(router, services, labeling)
    _add_tasks(router, services, labeling)
    return router


def _add_calls(router: APIRouter, services: Services, labeling: Labeling) -> None:
    @router.get("/label-studio/{model}/health", name="label_studio_health", **_HEALTH)
    async def health(model: str, request: Request) -> HttpResponse:
        """Checks that a model accepts tasks."""
        _context(services, request)
        return send_json(await labeling.health(model))

    @router.post("/label-studio/{model}/setup", name="label_studio_setup", **_SETUP)
    async def setup(model: str, request: Request) -> HttpResponse:
        """Checks that a project's mapping fits its label config and the model."""
        context = _context(services, request)
        with _log_errors(model, "setup"):
            asked = await _read_call(services, request, SetupCall)
            return send_json(await labeling.setup(context, model, asked))

    @router.get("/label-studio/{model}/versions", name="label_studio_versions", **_VERSIONS)
    async def versions(model: str, request: Request) -> HttpResponse:
        """Lists the versions that are ready."""
        _context(services, request)
        return send_json(await labeling.versions(model))

    @router.post("/label-studio/{model}/predict", name="label_studio_predict", **_PREDICT)
    async def predict(model: str, request: Request) -> HttpResponse:
        """Returns a prediction for each task, in order."""
        context = _context(services, request)
        with _log_errors(model, "predict"):
            asked = await _read_call(services, request, PredictCall)
            found = await unless_left(request.receive, labeling.predict(context, model, asked))
        if len(found.results) > 100:
            return send(HttpReply(200, await asyncio.to_thread(msgspec.json.encode, found)))
        return send_json(found)

    @router.post("/label-studio/{model}/webhook", name="label_studio_webhook", **_EVENT)
    async def webhook(model: str, request: Request) -> HttpResponse:
        """Handles Label Studio's events: queues new tasks of projects whose predictions are pushed."""
        context = _context(services, request)
        with _log_errors(model, "webhook"):  # it goes on if its sender leaves: Label Studio waits only for a second
            event = await _read_call(services, request, EventCall)
            return send_json(await labeling.event(context, model, event), 201)


def _add_tasks(router: APIRouter, services: Services, labeling: Labeling) -> None:
    path = "/v1/label-studio/{model}/projects/{project}/tasks"

    @router.get(path, name="label_studio_tasks", **_TASKS)
    async def tasks(model: str, project: str, request: Request) -> HttpResponse:
        """Lists the tasks of a project, and counts them by state."""
        context, query = _context(services, request), request.query_params
        state = query.get("state", "")
        if state and state not in STATES:
            raise InvalidRequest(f"'{state[:40]}' is not a state of a task; use one of {', '.join(STATES)}")
        after = _number("after", query.get("after", "0"), least=0)
        limit = _number("limit", query.get("limit", str(_DEFAULT_LIMIT)), most=MAX_LIMIT)
        board = await labeling.board(context, model, _number("project", project))
        return send_json(await labeling.statuses.page(board, state, after, limit))

    @router.get(path + "/{task}", name="label_studio_task", **_TASK)
    async def task(model: str, project: str, task: str, request: Request) -> HttpResponse:
        """Returns the state of a task."""
        context = _context(services, request)
        number = _number("task", task)
        board = await labeling.board(context, model, _number("project", project))
        return send_json(await labeling.statuses.one(board, number))

    @router.post(path, name="label_studio_order", **_ORDER)
    async def order(model: str, project: str, request: Request) -> HttpResponse:
        """Queues the tasks of a project that have no prediction in Label Studio."""
        context, query = _context(services, request), request.query_params
        page, every = _number("page", query.get("page", "1")), query.get("all", "false")
        if every not in ("true", "false"):
            raise InvalidRequest(f"all is true or false; got '{every[:40]}'")
        ordering = labeling.order(context, model, _number("project", project), page, every=every == "true")
        return send_json(await ordering, 202)


async def _read_call(services: Services, request: Request, kind: type[Call]) -> Call:
    depth, most = services.settings.limits.max_json_depth, services.settings.http.max_input_bytes
    return await read_body(services, request, most, partial(read_call, max_depth=depth, kind=kind))


def _context(services: Services, request: Request) -> CallerContext:
    context = context_of(request)
    scheme, _, credentials = request.headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "basic":
        try:
            _, _, password = base64.b64decode(credentials.strip(), validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            password = ""
        context = msgspec.structs.replace(context, key=password)
    return authorize(services, request, context=context)


@contextlib.contextmanager
def _log_errors(model: str, name: str) -> Iterator[None]:
    try:
        yield
    except QinferError as error:
        shown = model if is_model_name(model) else model[:40]
        logger.warning("call of Label Studio refused", extra={"model": shown, "route": name, "error": error.message})
        raise


def _number(name: str, text: str, *, least: int = 1, most: int = MAX_ID) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and least <= int(text) <= most):
        raise InvalidRequest(f"{name} is a number from {least} to {most}; got '{text[:40]}'")
    return int(text)
