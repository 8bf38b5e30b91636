"""`/docs`: Swagger UI on `/openapi.json`, served from this package; `scripts/swagger_ui.py` fetches the files."""

import asyncio
import gzip
from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from qinfer_api.http.infer import response_encoding

_FILES = Path(__file__).parent / "swagger_ui"
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
