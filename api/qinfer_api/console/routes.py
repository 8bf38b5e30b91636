"""`/console`: an ASGI application that loads the pages, and Jinja2, when a browser first asks for one.

Static files need no sign-in; all else does. Addresses in pages are relative, so that a proxy may put any path before
`/console`, as long as it takes it off again.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from qinfer.models.store import ControlStore
from qinfer_api.auth import Auth
from qinfer_api.console.access import Access
from qinfer_api.console.audit import AuditTrail
from qinfer_api.console.history import CountHistory
from qinfer_api.console.live import Live
from qinfer_api.endpoints.routes import EndpointService
from qinfer_api.jobs.service import BulkJobs
from qinfer_api.labeling.service import Labeling
from qinfer_api.requests.operations import RequestOperations
from qinfer_api.rest.services import Services

if TYPE_CHECKING:
    from qinfer_api.console.site import Site

PATH = "/console"
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
        async with asyncio.TaskGroup() as group:
            group.create_task(self._parts.history.run())
            group.create_task(self._parts.audit.run())
            group.create_task(self._parts.live.run())
