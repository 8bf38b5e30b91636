"""The console's routes: sign-in, static files, the stream, and all pages."""

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from qinfer.errors import QinferError
from qinfer_api.console.access import TOKEN_FIELD, check_same_site
from qinfer_api.console.history import ChartPoint
from qinfer_api.console.pages.administration import administration_routes
from qinfer_api.console.pages.endpoints import endpoints_routes
from qinfer_api.console.pages.jobs import jobs_routes
from qinfer_api.console.pages.letters import letters_routes
from qinfer_api.console.pages.models import models_routes
from qinfer_api.console.pages.requests import requests_routes
from qinfer_api.console.pages.system import system_routes
from qinfer_api.console.pages.try_it import try_it_routes
from qinfer_api.console.pages.workers import workers_routes
from qinfer_api.console.prometheus import HOUR, Columns, PrometheusFailed
from qinfer_api.console.render import STATIC, Templates
from qinfer_api.console.routes import PATH, ConsoleParts
from qinfer_api.console.visit import Pages, path_of, place_after, read_form
from qinfer_api.rest.services import check_up, peer_of
from qinfer_api.status import http_status

PAGES = (
    system_routes,
    workers_routes,
    models_routes,
    try_it_routes,
    letters_routes,
    jobs_routes,
    requests_routes,
    endpoints_routes,
    administration_routes,
)
_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
MAX_KEY_FORM_BYTES = 4096
_FOREVER = "public, max-age=31536000, immutable"


class Site:
    """The loaded console."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts
        self._templates = Templates()
        self._static = {path.name: path for path in STATIC.iterdir() if path.suffix in _KINDS}
        pages = Pages(parts, self._templates)
        routes = [
            Route("/sign-in", self._sign_in, methods=["GET", "POST"]),
            Route("/sign-out", self._sign_out, methods=["POST"]),
            Route("/static/{name}", self._file),
            Route("/live", self._live),
            Route("/history", self._history),
        ]
        for page_routes in PAGES:
            routes += page_routes(pages)
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""
        if path_of(scope) in ("", PATH):
            response = RedirectResponse("console/", 307)
            await response(scope, receive, send)
            return
        await self._router(scope, receive, send)

    async def _file(self, request: Request) -> Response:
        path = self._static.get(request.path_params["name"])
        if path is None:
            return Response("no such file", 404)
        return FileResponse(path, headers={"cache-control": _FOREVER}, media_type=_KINDS[path.suffix])

    async def _sign_in(self, request: Request) -> Response:
        access, problem, status = self._parts.access, "", 200
        if request.method == "POST" or not access.has_keys:
            try:
                key = ""
                if request.method == "POST":
                    check_same_site(request)
                    key = await self._field(request, "key")
                place = place_after(request.query_params.get("to", ""))
                response: Response = RedirectResponse(place, 303)
                await access.sign_in(request, key.strip(), peer_of(request), response)
                return response
            except QinferError as error:
                problem, status = error.message, http_status(error.code, v1=True)
        return self._templates.page(request, "sign_in.html", {"root": "./", "problem": problem}, status)

    async def _sign_out(self, request: Request) -> Response:
        user = await self._parts.access.user(request)
        response: Response = RedirectResponse("sign-in", 303)
        if user is not None:
            check_same_site(request)
            user.check_token(await self._field(request, TOKEN_FIELD))
            await self._parts.access.sign_out(request, response)
        return response

    async def _field(self, request: Request, name: str) -> str:
        return (await read_form(self._parts.services, request, MAX_KEY_FORM_BYTES)).get(name, [""])[0]

    async def _live(self, request: Request) -> Response:
        user = await self._parts.access.user(request)
        if user is None:
            return Response(status_code=401)
        if self._parts.live.is_full(user.context.tenant) or self._parts.services.dispatcher.draining:
            return Response(status_code=503)
        access, dispatcher = self._parts.access, self._parts.services.dispatcher

        def is_valid() -> bool:
            return access.is_valid(user) and not dispatcher.draining

        events = self._parts.live.events(is_valid, user.context.tenant, sees_all=user.is_admin)
        return StreamingResponse(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    async def _history(self, request: Request) -> Response:
        """Returns the columns of a chart: instants, then a series' figures; or a note why they are missing."""
        if await self._parts.access.user(request) is None:
            return Response(status_code=401)
        check_up(self._parts.services)
        series, long = request.query_params.get("of", ""), self._parts.long
        chosen = long.chosen(request.query_params.get("range", ""))
        try:
            body = _json(await (long.columns(series, chosen) if chosen is not HOUR else self._hour(series)))
        except PrometheusFailed as error:
            body = msgspec.json.encode({"note": error.message})
        return Response(body, media_type="application/json")

    async def _hour(self, series: str) -> Columns:
        points = await self._parts.history.points(series)
        return {name: [getattr(point, name) for point in points] for name in ChartPoint._fields}


def _json(columns: Columns) -> bytes:
    """Encodes columns; NaN becomes `null`."""
    return msgspec.json.encode(
        {name: [round(value, 0 if name == "at_s" else 6) for value in column] for name, column in columns.items()}
    )
