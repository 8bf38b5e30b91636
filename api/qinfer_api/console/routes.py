"""`/console`: an ASGI application that loads the pages, and Jinja2, when a browser first asks for one.

Static files need no sign-in; all else does. Addresses in pages are relative, so that a proxy may put any path before
`/console`, as long as it takes it off again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from qinfer.core.retry import REMIND_S, OutageLog
from qinfer.errors import QinferError
from qinfer.models.store import ControlStore
from qinfer_api.auth import Auth
from qinfer_api.console.access import Access
from qinfer_api.console.audit import AuditTrail
from qinfer_api.console.history import CountHistory
from qinfer_api.console.live import Live
from qinfer_api.console.prometheus import LongHistory
from qinfer_api.endpoints.routes import EndpointService
from qinfer_api.jobs.service import BulkJobs
from qinfer_api.labeling.service import Labeling
from qinfer_api.requests.operations import RequestOperations
from qinfer_api.rest.services import ERROR_HANDLERS, Services
from qinfer_api.status import http_status

if TYPE_CHECKING:
    from qinfer_api.console.site import Site

logger = logging.getLogger(__name__)

PATH = "/console"
AGAIN_S = 1.0

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; worker-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""The headers of every answer, also of errors, unless it has its own."""

_NO_JINJA = "the console needs Jinja2: `pip install jinja2`, then open this page again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleParts:
    """The services that pages use: those of the gateway's other routes."""

    services: Services
    store: ControlStore
    jobs: BulkJobs
    labeling: Labeling
    endpoints: EndpointService
    operations: RequestOperations
    auth: Auth | None
    access: Access
    history: CountHistory
    long: LongHistory
    live: Live
    audit: AuditTrail


class Console:
    """The console of a gateway."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts
        self._site: Site | None = None
        self._loading = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a page, a file or the stream; 404 with the reason where the console is off."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._serve(scope, receive, send_guarded)
        except HTTPException as error:  # no page has this path or method
            answer = PlainTextResponse(error.detail, error.status_code, error.headers)
            await answer(scope, receive, send_guarded)
        except QinferError as error:  # the session can't be read
            answer = PlainTextResponse(error.message, http_status(error.code, v1=True))
            await answer(scope, receive, send_guarded)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._parts.access.why_off:
            await PlainTextResponse(self._parts.access.why_off, 404)(scope, receive, send)
            return
        async with self._loading:
            if self._site is None:
                try:
                    self._site = await asyncio.to_thread(self._load_site)
                except ModuleNotFoundError as error:
                    if error.name != "jinja2":
                        raise
        if self._site is None:
            await PlainTextResponse(_NO_JINJA, 501)(scope, receive, send)
            return
        await self._site(scope, receive, send)

    def _load_site(self) -> "Site":
        from qinfer_api.console.site import Site

        return Site(self._parts)

    async def run(self) -> None:
        """Keeps the history, the audit trail and the live state until cancelled; nothing where the console is off."""
        if self._parts.access.why_off:
            return
        try:
            async with asyncio.TaskGroup() as group:
                for role in (self._parts.history, self._parts.audit, self._parts.live):
                    group.create_task(_kept(role.run))
        finally:
            await self._parts.long.close()


def mount_console(app: FastAPI, console: Console) -> None:
    """Serves the console at `/console` of an application."""
    app.mount(PATH, console)
    app.router.routes.append(Route(PATH, console, include_in_schema=False))


def console_app(console: Console) -> FastAPI:
    """Returns an application that serves only the console, to which its first page leads."""
    app = FastAPI(openapi_url=None, redirect_slashes=False, exception_handlers=ERROR_HANDLERS)
    app.router.routes.append(Route("/", RedirectResponse("console/", 307)))
    mount_console(app, console)
    return app


async def _kept(run: Callable[[], Awaitable[None]]) -> None:
    """Runs a role of the console until cancelled, again after an error."""
    outage = OutageLog(logger, "a part of the console failed", remind_s=REMIND_S)
    while True:
        try:
            await run()
        except Exception as error:  # noqa: BLE001 - the boundary: no figure, and no full Redis, may cost the gateway
            outage.failed(type(error).__name__, error)
        await asyncio.sleep(AGAIN_S)
