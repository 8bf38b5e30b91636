"""CORS headers and preflights (the Fetch standard, "CORS protocol").

Preflights carry no API key, so they are answered before any route.
"""

from collections.abc import Iterable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from qinfer.core.settings_sections import ANY, CorsSettings
from qinfer_api.http.head import RequestHead, origin_in
from qinfer_api.http.infer import Headers, Writer, error_reply

_VARIES = (b"vary", b"origin")


class Cors:
    """The CORS headers of replies, by origin."""

    def __init__(self, settings: CorsSettings) -> None:
        told: list[tuple[bytes, bytes]] = []
        if settings.expose_headers:
            told.append((b"access-control-expose-headers", _listed(settings.expose_headers)))
        if settings.allow_credentials:
            told.append((b"access-control-allow-credentials", b"true"))
        self._is_open = ANY in settings.allow_origins
        self._of: dict[bytes, Headers] = {}
        for origin in () if self._is_open else settings.allow_origins:
            self._of[origin.encode()] = [(b"access-control-allow-origin", origin.encode()), *told, _VARIES]
        self._writers = {origin: Writer(headers) for origin, headers in self._of.items()}
        self._others = Writer([(b"access-control-allow-origin", b"*"), *told] if self._is_open else [_VARIES])
        self._preflight: Headers = [
            (b"access-control-allow-methods", _listed(settings.allow_methods)),
            (b"access-control-allow-headers", _listed(settings.allow_headers)),
            (b"access-control-max-age", b"%d" % settings.max_age_s),
        ]

    @classmethod
    def from_settings(cls, settings: CorsSettings) -> "Cors | None":
        """Returns the CORS headers that the settings ask for; `None` = CORS is off."""
        return cls(settings) if settings.allow_origins else None

    def writer(self, head: RequestHead | None, read: Headers) -> Writer:
        """Returns a reply's writer, by the request's head or the headers read."""
        if self._is_open:
            return self._others
        return self._writers.get(origin_in(read) if head is None else head.origin(), self._others)

    def preflight(self, origin: bytes) -> Headers | None:
        """Returns the answer to a preflight; `None` if the origin is forbidden."""
        return self._preflight if self._is_open or origin in self._of else None


class CorsApp:
    """Answers preflights; passes on other requests."""

    def __init__(self, app: ASGIApp, cors: Cors) -> None:
        self._app = app
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a preflight, or calls the wrapped application."""
        origin = origin_in(scope["headers"])
        if scope["method"] == "OPTIONS" and origin and _asks_for_a_method(scope["headers"]):
            await _preflight_response(self._cors.preflight(origin), origin)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _asks_for_a_method(headers: Headers) -> bool:
    return any(name == b"access-control-request-method" for name, _ in headers)


def _preflight_response(allowed: Headers | None, origin: bytes) -> Response:
    if allowed is None:
        text = f"pages of '{origin.decode('latin-1')[:200]}' may not call this server: QINFER_CORS__ALLOW_ORIGINS"
        return Response(error_reply(403, text).body, 403, media_type="application/json")
    response = Response(status_code=204)
    response.raw_headers = list(allowed)
    return response


def _listed(names: Iterable[str]) -> bytes:
    return ", ".join(names).encode()
