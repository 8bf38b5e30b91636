"""The OpenAPI document, helpers to describe routes, and the page `/docs`, which shows the document by Swagger UI.

A body's descriptions come from its type's docstring, with the sections `Attributes` and `Example` (JSON).
"""

import asyncio
import copy
import gzip
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.params import Security
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer.core.api_keys import Scope
from qinfer_api.http.infer import response_encoding

Json = dict[str, Any]

_SECTION = re.compile(r"\n\n([A-Z]\w+):\n")
_ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_VERSION: Json = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
_MEANING = {
    400: "The request is wrong, or too large.",
    401: "The API key is missing or unknown.",
    403: "The API key does not allow it.",
    404: "No such model, version or request.",
    409: "The id or the idempotency key belongs to a request with another body.",
    410: "The result has expired: its time to live is over.",
    429: "Too much waits, or the tenant's quota is used up: try again after `Retry-After` seconds.",
    500: "A JSON value has the wrong type, or the model failed.",
    501: "The server does not offer this.",
    503: "Not ready, overloaded, past its deadline, or shutting down: try again.",
}

_BASIC, _SCOPE = "basic", "scope"
_SCHEMES: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, where the server asks for keys."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key."},
    _BASIC: {"type": "http", "scheme": "basic", "description": "The same key as the password; any user name."},
}

_FILES = Path(__file__).parent / "swagger_ui"  # `scripts/swagger_ui.py` fetches them
_KINDS = {
    "start.js": "text/javascript; charset=utf-8",
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
}
_HEADERS = {
    # Swagger UI's style sheet has `data:` images.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every error: what happened, the value, and what to do.

    Example:
        {"error": "Request for unknown model: 'x' is not found"}
    """

    error: str


def operation(
    summary: str,
    responses: dict[int, Json],
    *parameters: Json,
    takes: Json | None = None,
    basic: bool = False,
    scope: Scope = Scope.INFER,
) -> Json:
    """Returns the arguments that describe a route to its decorator; `scope` is that of a route that checks the key."""
    extra: Json = {"responses": responses, "parameters": parameters, _BASIC: basic, _SCOPE: scope}
    if takes is not None:
        extra["requestBody"] = takes
    return {"summary": summary or None, "openapi_extra": extra}


def describe_response(
    description: str,
    schema: Any = None,
    *,
    headers: dict[str, str] | None = None,
    kind: str = "application/json",
    example: Any = None,
) -> Json:
    """Describes a response."""
    found: Json = {"description": description}
    if schema is not None:
        found["content"] = {kind: {"schema": schema} | ({} if example is None else {"example": example})}
    if headers:
        found["headers"] = {name: {"description": text, "schema": {"type": "string"}} for name, text in headers.items()}
    return found


def errors(*statuses: int, **meanings: str) -> dict[int, Json]:
    """Returns error responses; `s404=…` replaces a meaning."""
    return {status: describe_response(meanings.get(f"s{status}", _MEANING[status]), ErrorBody) for status in statuses}


def body(schema: Any, *, required: bool = True) -> Json:
    """Returns a JSON request body."""
    return {"required": required, "content": {"application/json": {"schema": schema}}}


def header(name: str, description: str, **schema: Any) -> Json:
    """Describes an optional header, by default a string."""
    return query(name, description, **{"type": "string"} | schema) | {"in": "header"}


def followed(description: str, event: str) -> dict[int, Json]:
    """Describes an event stream; 204 = the reader saw the end."""
    return {
        200: describe_response(description, {"type": "string"}, kind="text/event-stream", example=event),
        204: describe_response("`Last-Event-ID` was the end: do not reconnect."),
    }


def query(name: str, description: str, **schema: Any) -> Json:
    """Returns an optional query parameter."""
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


LAST_EVENT = header("Last-Event-ID", "The id of the last event received.")


def document_of(app: FastAPI, routers: Sequence[APIRouter]) -> Callable[[], Json]:
    """Returns a cached `app.openapi`."""

    def openapi() -> Json:
        if app.openapi_schema is None:
            paths: Json = {}
            for path, method, described in _operations(routers):
                paths.setdefault(path, {})[method] = described
            info = {"title": app.title, "description": app.description, "version": app.version}
            app.openapi_schema = {"openapi": "3.1.0", "info": info, "paths": paths, **_components(paths)}
        return app.openapi_schema

    return openapi


def _operations(routers: Sequence[APIRouter]) -> Iterator[tuple[str, str, Json]]:
    for route in (route for router in routers for route in router.routes):
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in sorted(route.methods or ()):
                yield route.path_format, method.lower(), _operation(route)


def _operation(route: APIRoute) -> Json:
    extra = copy.deepcopy(route.openapi_extra or {})
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _VERSION if name == "version" else {"type": "string"}}
        for name in re.findall(r"{(\w+)}", route.path_format)
    ]
    scope = _scope_of(route, extra["responses"])
    found: Json = {
        "tags": route.tags,
        "summary": route.summary or route.name.replace("_", " ").title(),
        "description": route.description + (f" Scope: `{scope}`." if scope else ""),
        "operationId": route.unique_id,
        "parameters": [*parameters, *extra["parameters"]],
        "responses": {str(status): response for status, response in sorted(extra["responses"].items())},
    }
    if scope:
        found["security"] = [{scheme: [scope.value]} for scheme in _SCHEMES if scheme != _BASIC or extra[_BASIC]]
    return found | ({"requestBody": extra["requestBody"]} if "requestBody" in extra else {})


def _scope_of(route: APIRoute, statuses: Iterable[int]) -> Scope | None:
    """Returns the scope of the dependency, or of a route that checks the key itself."""
    for check in route.dependencies:
        if isinstance(check, Security) and check.scopes:
            return Scope(check.scopes[0])
    return (route.openapi_extra or {})[_SCOPE] if 401 in statuses else None


def _components(paths: Json) -> Json:
    media = [one for one in _media(paths) if not isinstance(one["schema"], dict)]
    schemas, components = msgspec.json.schema_components(
        [one["schema"] for one in media], ref_template="#/components/schemas/{name}"
    )
    for one, schema in zip(media, schemas, strict=True):
        one["schema"] = schema
    for component in components.values():
        _describe(component)
    return {"components": {"schemas": components, "securitySchemes": _SCHEMES}}


def _media(part: Any) -> Iterator[Json]:
    if isinstance(part, dict):
        if "schema" in part:
            yield part
        else:
            for inner in part.values():
                yield from _media(inner)


def _describe(component: Json) -> None:
    about, *sections = _SECTION.split(inspect.cleandoc(component.get("description", "")))
    component["description"] = about
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        if name == "Example":
            component["example"] = msgspec.json.decode(text)
        for field, meaning in _ATTRIBUTE.findall(text) if name == "Attributes" else ():
            component["properties"][field]["description"] = " ".join(meaning.split())


def docs_routes() -> APIRouter:
    """Returns the routes of the page and its files."""
    router = APIRouter(include_in_schema=False)
    router.add_api_route("/docs", _page)
    for name in _KINDS:
        router.add_api_route(f"/docs/{name}", _part)
    return router


async def _page() -> HttpResponse:
    return _response(await _read_asset("index.html"), "text/html; charset=utf-8")


async def _part(request: Request) -> HttpResponse:
    name = request.url.path.rpartition("/")[2]
    if not name.startswith("swagger-ui"):
        return _response(await _read_asset(name), _KINDS[name])
    content, encoding = await _read_asset(f"{name}.gz"), {"vary": "accept-encoding"}
    if response_encoding(request.headers.get("accept-encoding")) == "gzip":
        encoding["content-encoding"] = "gzip"
    else:
        content = await asyncio.to_thread(gzip.decompress, content)
    return _response(content, _KINDS[name], encoding)


async def _read_asset(name: str) -> bytes:
    return await asyncio.to_thread((_FILES / name).read_bytes)


def _response(content: bytes, kind: str, more: Mapping[str, str] | None = None) -> HttpResponse:
    return HttpResponse(content, headers={**_HEADERS, **(more or {})}, media_type=kind)
