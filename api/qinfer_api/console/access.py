"""Users of the console: sign-in with an API key, the session, tokens against forged requests, and what scopes allow.

The cookie has a random id; Redis has, under the hash of the id, the hash of the API key, and the key file says what the
key allows now. So a session holds at every gateway, and ends with its key. Without keys there is no session in Redis,
and the id serves only as the secret of the token that forms send back.
"""

import asyncio
import hmac
import re
import secrets
import time
from functools import partial
from hashlib import sha256

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qinfer.core.api_keys import Scope, why_no_console
from qinfer.core.settings import Settings
from qinfer.errors import Forbidden, Unauthorized
from qinfer.queue import keys
from qinfer.queue.router import Router, ttl_ms
from qinfer_api.auth import ANONYMOUS, Auth, CallerContext

COOKIE = "qinfer_console"
TOKEN_FIELD = "csrf"  # noqa: S105  the name of a form's field
_ID_CHARACTERS = 43

MOST_SESSIONS = 100
"""The most sessions of an API key."""


class ConsoleUser(msgspec.Struct, frozen=True):
    """A signed-in user; `is_anyone` where no keys are required. `token` is what forms send back."""

    context: CallerContext
    token: str
    is_anyone: bool

    def has(self, scope: Scope | str) -> bool:
        """Returns whether the user's key allows a scope."""
        principal = self.context.principal
        return self.is_anyone or (principal is not None and principal.allows(Scope(scope)))

    @property
    def is_admin(self) -> bool:
        """Whether the user sees and changes everything."""
        return self.has(Scope.ADMIN)

    @property
    def name(self) -> str:
        """The key's id."""
        return "" if self.context.principal is None else self.context.principal.key_id

    def need(self, scope: Scope) -> None:
        """Raises `Forbidden` without a scope."""
        if not self.has(scope):
            raise Forbidden(f"key '{self.name}' does not have the scope '{scope}'; sign in with one that has")

    def check_token(self, sent: str) -> None:
        """Raises `Forbidden` for a form that this session's pages did not make."""
        if not hmac.compare_digest(sent.encode(), self.token.encode()):
            raise Forbidden("the form is not of this session; reload the page and try again")


class Access:
    """Finds the user of a request; `auth` is `None` without keys."""

    def __init__(self, settings: Settings, auth: Auth | None, router: Router) -> None:
        self._auth, self._router = auth, router
        self._ttl_ms = ttl_ms(settings.console.session_s)
        self.why_off = why_no_console(settings)

    @property
    def has_keys(self) -> bool:
        """Whether users sign in."""
        return self._auth is not None

    async def user(self, request: Request) -> ConsoleUser | None:
        """Returns the user, `None` before the sign-in."""
        session = request.cookies.get(COOKIE, "")
        if len(session) != _ID_CHARACTERS or not session.isascii():
            return None
        if self._auth is None:
            return ConsoleUser(ANONYMOUS, _token(session), is_anyone=True)
        key = keys.console_session(_hashed(session)).encode()
        self._router.check_up(keys.slot(key))
        found = await self._router.call(keys.slot(key), b"GETEX", key, b"PX", self._ttl_ms)
        context = None if found is None else self._auth.holder(found.decode())
        return None if context is None else ConsoleUser(context, _token(session), is_anyone=False)

    def is_valid(self, user: ConsoleUser) -> bool:
        """Returns whether a user's key still allows what it did, for streams that outlast it."""
        if self._auth is None:
            return True
        known = user.context.principal
        held = None if known is None else self._auth.holder(known.sha256)
        now = None if held is None else held.principal
        return known is not None and now is not None and (now.tenant, now.scopes) == (known.tenant, known.scopes)

    async def sign_in(self, request: Request, key: str, peer: str, response: Response) -> None:
        """Opens a session, whose cookie goes into the response; raises `Unauthorized`."""
        session = secrets.token_urlsafe(32)
        if self._auth is not None:
            if not key:
                raise Unauthorized("enter an API key; `qinfer keys new` makes one")
            context = self._auth.sign_in(key, peer)
            assert context.principal is not None, "it has a key"
            await self._open(_hashed(session), context.principal.sha256)
        # No path: the browser takes the folder of the sign-in page, also where a proxy has put it below another path.
        response.set_cookie(COOKIE, session, path=None, httponly=True, samesite="strict", secure=_is_secure(request))

    async def _open(self, session: str, holder: str) -> None:
        """Stores a session, and ends the key's oldest ones beyond `MOST_SESSIONS`."""
        name, known = keys.console_session(session).encode(), keys.console_sessions(holder).encode()
        self._router.check_up(keys.slot(name))
        call = partial(self._router.call, keys.slot(name))
        await asyncio.gather(  # in one write
            call(b"SET", name, holder.encode(), b"PX", self._ttl_ms),
            call(b"ZADD", known, time.time_ns() // 1000, session),
            call(b"PEXPIRE", known, self._ttl_ms),
        )
        if oldest := await call(b"ZRANGE", known, 0, -1 - MOST_SESSIONS):
            ended = [keys.console_session(each.decode()).encode() for each in oldest]
            await asyncio.gather(call(b"DEL", *ended), call(b"ZREM", known, *oldest))

    async def sign_out(self, request: Request, response: Response) -> None:
        """Ends the session."""
        key = keys.console_session(_hashed(request.cookies.get(COOKIE, ""))).encode()
        await self._router.call(keys.slot(key), b"DEL", key)
        response.set_cookie(
            COOKIE, "", max_age=0, path=None, httponly=True, samesite="strict", secure=_is_secure(request)
        )


def check_same_site(request: Request) -> None:
    """Raises `Forbidden` for a form that a page of another site sent.

    Browsers send Fetch Metadata (W3C) over TLS and to this machine; else the origin must have the name of this server.
    """
    headers = request.headers
    site = headers.get("sec-fetch-site")
    if site is not None:
        is_own = site in ("same-origin", "none")
    else:
        origin, own = headers.get("origin", ""), (headers.get("host", ""), headers.get("x-forwarded-host", ""))
        is_own = not origin or _host_of(origin.partition("://")[2]) in [_host_of(each) for each in own if each]
    if not is_own:
        raise Forbidden("pages of other sites may not use the console; a proxy must pass on the header Host")


def _host_of(address: str) -> str:
    """Returns the name without the port, which proxies may leave out."""
    return re.sub(r":[0-9]*\Z", "", address.lower())


def _is_secure(request: Request) -> bool:
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))


def _hashed(session: str) -> str:
    return sha256(session.encode()).hexdigest()


def _token(session: str) -> str:
    return sha256(b"form " + session.encode()).hexdigest()
