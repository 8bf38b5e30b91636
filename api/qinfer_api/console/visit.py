"""One request for a page: its user, its form, and how handlers become routes.

A form is sent to the address of its page, with the field `do`; the answer is the page as it is then, with a message.
Every form carries the token of its session, and every act is in the audit log.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Scope as AsgiScope

from qinfer.core.api_keys import Scope
from qinfer.errors import Forbidden, InvalidRequest, QinferError
from qinfer.queue.values import Room
from qinfer_api.auth import CallerContext, administrative
from qinfer_api.console.access import TOKEN_FIELD, ConsoleUser, check_same_site
from qinfer_api.console.render import Templates, depth_root
from qinfer_api.console.routes import ConsoleParts
from qinfer_api.rest.services import Services, check_up, off_loop, peer_of, received, room_of_answer
from qinfer_api.status import http_status

MAX_FORM_BYTES = 16 * 2**20
PAGE_ROWS = 100
_MOST_PAGE = 10_000
_MOST_QUERY = 200


@dataclass(slots=True, kw_only=True)
class Visit:
    """A request of a signed-in user; `done` and `problem` are the outcome of its act, which may lead elsewhere."""

    parts: ConsoleParts
    templates: Templates
    request: Request
    user: ConsoleUser
    form: Mapping[str, list[str]] = field(default_factory=dict)
    done: str = ""
    go_to: str = ""
    problem: str = ""
    status: int = 200

    @property
    def context(self) -> CallerContext:
        """The caller, for services."""
        return self.user.context

    @property
    def root(self) -> str:
        """The relative address of the console's first page."""
        return depth_root(path_of(self.request.scope))

    def name(self, what: str) -> str:
        """Returns a parameter of the path."""
        return str(self.request.path_params[what])

    def room(self) -> Room:
        """Returns a wait for the memory of large contents, which the page gives back."""
        return room_of_answer(self.parts.services, self.request)

    def query(self, what: str) -> str:
        """Returns a parameter of the query."""
        return self.request.query_params.get(what, "")[:_MOST_QUERY]

    def value(self, what: str, default: str = "") -> str:
        """Returns a field of the form."""
        return self.form.get(what, [default])[0]

    @property
    def page_number(self) -> int:
        """The number of the list's page, from 1."""
        text = self.query("page")
        return min(max(int(text), 1), _MOST_PAGE) if text.isascii() and text.isdecimal() and len(text) < 9 else 1

    def render(self, template: str, title: str, section: str, /, **values: Any) -> HTMLResponse:
        """Renders a page of a section of the menu."""
        common = {
            "title": title,
            "section": section,
            "sections": sections_of(self.user),
            "root": self.root,
            "user": self.user,
            "done": self.done,
            "problem": self.problem,
            "q": self.query("q"),
            "sees_all": self.user.is_admin,
            "has_api": self.parts.services.settings.console.port is None,
        }
        return self.templates.page(self.request, template, {**common, **values}, self.status)


PageHandler = Callable[[Visit], Awaitable[Response]]
PageAct = Callable[[Visit], Awaitable[str]]
"""Does what a form asks, and returns the message for its user."""
PageActs = Mapping[str, tuple[PageAct, Scope]]
"""The acts of a page's forms, by the value of `do`, with the scope that each needs."""
NO_ACTS: PageActs = MappingProxyType({})

_SECTIONS = (
    ("", "Overview", Scope.VIEWER),
    ("models", "Models", Scope.VIEWER),
    ("try", "Try it", Scope.INFER),
    ("workers", "Workers", Scope.VIEWER),
    ("queues", "Queues", Scope.VIEWER),
    ("letters", "Dead letters", Scope.VIEWER),
    ("jobs", "Jobs", Scope.VIEWER),
    ("requests", "Requests", Scope.VIEWER),
    ("endpoints", "Endpoints", Scope.VIEWER),
    ("sequences", "Sequences", Scope.VIEWER),
    ("labeling", "Labeling", Scope.INFER),
    ("tenants", "Tenants", Scope.ADMIN),
    ("audit", "Audit", Scope.ADMIN),
)
"""The menu: address, title, and the scope that a page needs."""


def path_of(scope: AsgiScope) -> str:
    """Returns the path below the console's own."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def sections_of(user: ConsoleUser) -> list[tuple[str, str]]:
    """Returns the sections that a user may open."""
    return [(page, title) for page, title, scope in _SECTIONS if user.has(scope)]


class Pages:
    """Makes routes of handlers."""

    def __init__(self, parts: ConsoleParts, templates: Templates) -> None:
        self._parts, self._templates = parts, templates

    def route(
        self,
        path: str,
        handler: PageHandler,
        scope: Scope = Scope.INFER,
        acts: PageActs = NO_ACTS,
        *,
        needs_redis: bool = True,
    ) -> Route:
        """Returns the route of a page, with the acts of its forms and the scope that each needs.

        A page that `needs_redis` is refused at once while Redis is unreachable.
        """

        async def serve(request: Request) -> Response:
            user = await self._parts.access.user(request)
            if user is None:
                return _to_sign_in(request)
            request.state.caller = user.context
            visit = Visit(parts=self._parts, templates=self._templates, request=request, user=user)
            try:
                user.need(scope)
                if needs_redis:
                    check_up(self._parts.services)
                if request.method == "POST":
                    await self._act(visit, acts)
                    if visit.go_to:
                        return _go_to(visit)
                return await handler(visit)
            except QinferError as error:
                return _error_page(visit, error)

        return Route(path, serve, methods=["GET", "POST"] if acts else ["GET"])

    async def _act(self, visit: Visit, acts: PageActs) -> None:
        request, user = visit.request, visit.user
        check_same_site(request)
        visit.form = await read_form(self._parts.services, request)
        user.check_token(visit.value(TOKEN_FIELD))
        act, needed = acts.get(visit.value("do"), (None, Scope.ADMIN))
        if act is None:
            raise InvalidRequest("the form asks for nothing that this page does; reload it")
        try:
            where = f"{request.scope['path']} {visit.value('do')}"
            with administrative(user.context, "console", where, peer_of(request)):
                user.need(needed)
                visit.done = await act(visit)
        except Forbidden:
            raise
        except QinferError as error:
            visit.problem, visit.status = error.message, http_status(error.code, v1=True)
        finally:
            self._parts.live.recount()


async def read_form(services: Services, request: Request, most_bytes: int = MAX_FORM_BYTES) -> dict[str, list[str]]:
    """Reads a form; raises `InvalidRequest` for a large one, or one of another kind."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/x-www-form-urlencoded":
        raise InvalidRequest("the console takes forms only")
    async with received(services, request, most_bytes, is_inference=False) as body:
        return await off_loop(len(body), _parsed_form, bytes(body))


def _parsed_form(body: bytes) -> dict[str, list[str]]:
    try:
        return parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=2000, errors="strict")
    except ValueError:
        raise InvalidRequest("the form is not in UTF-8, or has too many fields") from None


def _to_sign_in(request: Request) -> Response:
    """Asks a user to sign in, and then to come back; htmx, which replaces a part of a page, to load it as a whole."""
    if "hx-request" in request.headers:
        return Response(status_code=204, headers={"hx-refresh": "true"})
    path = path_of(request.scope)
    to = path.lstrip("/") + (f"?{request.url.query}" if request.url.query else "")
    place = f"{depth_root(path)}sign-in" + (f"?to={quote(to, safe='')}" if to else "")
    return RedirectResponse(place, 303)


def place_after(to: str) -> str:
    """Returns the relative address of a page after the sign-in, which never leaves the console."""
    path, question, query = to.partition("?")
    is_within = not path.startswith(("/", "\\")) and ".." not in path.split("/") and ":" not in path
    return f"./{quote(path)}{question}{quote(query, safe='=&%+')}" if is_within else "./"


def _go_to(visit: Visit) -> Response:
    place = f"{visit.root}{visit.go_to}"
    if "hx-request" in visit.request.headers:
        return Response(headers={"hx-redirect": place})
    return RedirectResponse(place, 303)


def _error_page(visit: Visit, error: QinferError) -> Response:
    visit.status = http_status(error.code, v1=True)
    visit.problem = error.message
    return visit.render("error.html", "Not possible", "?")
