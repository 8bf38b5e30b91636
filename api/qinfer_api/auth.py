"""Authentication and authorization: API keys, scopes, the quotas of tenants, and restricted groups of calls.

A presented key is hashed and compared with every known hash in constant time, so that the time it takes discloses
nothing.
"""

import hmac
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from qinfer.core.api_keys import ApiKey, Scope, check_exposure, hash_key, read_keys
from qinfer.core.clock import Clock, SystemClock
from qinfer.core.settings import AuthSettings
from qinfer.errors import Forbidden, Restricted, SettingsError, Unauthorized
from qinfer.observe.tracing import context_text
from qinfer.queue.quotas import Quotas
from qinfer_api.quotas import Quota, QuotaLeases


class Principal(NamedTuple):
    """An authenticated caller.

    Attributes:
        key_id: Which key it was.
        tenant: Whose it is.
        scopes: What it allows.
        quota: Shared by all keys of the tenant.
        sha256: The hash of the key, in hexadecimal.
        expires_at_s: The instant from which the key is refused, in seconds since the epoch.
    """

    key_id: str
    tenant: str
    scopes: frozenset[Scope]
    quota: Quota
    sha256: str
    expires_at_s: float

    def allows(self, scope: Scope) -> bool:
        """Tells whether the key allows a scope; `admin` allows all."""
        return scope in self.scopes or Scope.ADMIN in self.scopes


class Context(msgspec.Struct, frozen=True, gc=False):
    """The caller of a request: all that the transport knows besides the body.

    Attributes:
        tenant: Whose request it is; `authorize` sets it.
        trace: W3C `traceparent`, with its `tracestate` behind a blank; empty when the request is not traced.
        key: The API key that was presented; empty without one.
        principal: Who it belongs to, once `authorize` knows.
        scope: What it was authorized for.
    """

    tenant: str = ""
    trace: str = ""
    key: str = ""
    principal: Principal | None = None
    scope: Scope = Scope.INFER


ANONYMOUS = Context()


class Auth:
    """The known keys.

    Args:
        keys: The entries of the file.
        clock: The monotonic clock of the rates.
        epoch_s: Returns the time of day, by which keys expire, in seconds since the epoch.

    Attributes:
        refused: Called with each key that is refused: the reason, its id if it is known, and who sent it, if known.
    """

    def __init__(
        self, keys: Iterable[ApiKey], clock: Clock | None = None, epoch_s: Callable[[], float] = time.time
    ) -> None:
        self._now_s = (clock or SystemClock()).monotonic_s
        self._epoch_s = epoch_s
        self._quotas: dict[str, Quota] = {}
        self._wake: Callable[[Quota], None] = lambda _: None
        self._known: dict[str, Principal] = {}
        self._tenants: set[str] = set()
        self.refused: Callable[[str, str, str], None] = lambda _, __, ___: None
        self.use(keys)

    def use(self, keys: Iterable[ApiKey]) -> None:
        """Replaces the known keys; tenants that remain keep what they have used, under their new quotas."""
        quotas: dict[str, Quota] = {}
        known: dict[str, Principal] = {}
        for key in keys:
            if key.tenant not in quotas:
                quota = quotas[key.tenant] = self._quotas.get(key.tenant) or Quota(key, self._now_s())
                quota.limit(key)
                quota.wake = self._wake
            expires_at_s = key.expires_at.timestamp() if key.expires_at else math.inf
            scopes = frozenset(key.scopes)
            known[key.sha256] = Principal(key.id, key.tenant, scopes, quotas[key.tenant], key.sha256, expires_at_s)
        self._quotas, self._known = quotas, known
        self._tenants |= quotas.keys()

    def lease(self, quotas: Quotas) -> QuotaLeases:
        """Has quotas hold over all gateways, while the leases that are returned run."""
        leases = QuotaLeases(quotas, self._now_s)
        self._wake = leases.wake
        for quota in self._quotas.values():
            quota.wake = leases.wake
        return leases

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants that have a key, or had one since the start: their files do not become those of the others."""
        return frozenset(self._tenants)

    def authorize(self, context: Context, scope: Scope, peer: str = "") -> Context:
        """Finds out who presents a key that allows `scope`.

        Args:
            context: The caller.
            scope: What the key must allow.
            peer: The address of the connection; empty = not known.

        Returns:
            The context, with tenant and principal, and without the key.

        Raises:
            Unauthorized: No key was presented, or none that is known, or it has expired.
            Forbidden: The key does not allow it.
        """
        if not context.key:
            self.refused("missing", "", peer)
            raise Unauthorized(
                "this server asks for an API key; send it as 'Authorization: Bearer <key>' or 'X-API-Key: <key>'"
            )
        found = self._find(context.key)
        if found is None:
            self.refused("unknown", "", peer)
            raise Unauthorized("the API key is not known; ask for another")
        self._check(found, scope, peer)
        return Context(found.tenant, context.trace, "", found, scope)

    def identify(self, context: Context) -> Context:
        """Finds out who presents a key, whatever it allows; the context as it is if nobody is known by it."""
        found = self._find(context.key) if context.key else None
        return context if found is None else Context(found.tenant, context.trace, "", found, context.scope)

    def recheck(self, context: Context) -> None:
        """Checks that a caller who was authorized still would be: connections and streams outlast keys.

        Raises:
            Unauthorized: The key was revoked, or has expired.
            Forbidden: The key does not allow any more what it did.
        """
        before = context.principal
        if before is None:
            return
        principal = self._known.get(before.sha256)
        if principal is None or principal.tenant != before.tenant:
            self.refused("revoked", before.key_id, "")
            raise Unauthorized(f"key '{before.key_id}' was revoked; use another")
        self._check(principal, context.scope)

    def _find(self, presented: str) -> Principal | None:
        digest = hash_key(presented)
        found: Principal | None = None
        for sha256, principal in self._known.items():  # all of them, whichever it is
            if hmac.compare_digest(sha256, digest):
                found = principal
        return found

    def _check(self, principal: Principal, scope: Scope, peer: str = "") -> None:
        if principal.expires_at_s <= self._epoch_s():
            self.refused("expired", principal.key_id, peer)
            raise Unauthorized(f"key '{principal.key_id}' has expired; use another")
        if not principal.allows(scope):
            self.refused("scope", principal.key_id, peer)
            raise Forbidden(f"key '{principal.key_id}' does not have the scope '{scope}'; use one that has")

    def in_flight(self) -> dict[str, int]:
        """Returns each tenant's requests that wait for an answer."""
        return {tenant: quota.in_flight for tenant, quota in self._quotas.items()}

    def weight(self, tenant: str) -> int:
        """Returns the weight of a tenant's share of a model; 0 = it has no key."""
        return self._quotas[tenant].weight if tenant in self._quotas else 0

    def has_key(self, tenant: str) -> bool:
        """Tells whether a tenant has a key that is valid now."""
        now_s = self._epoch_s()
        return any(known.tenant == tenant and known.expires_at_s > now_s for known in self._known.values())

    def charge(self, principal: Principal) -> None:
        """Counts one request against the rate of the tenant.

        Raises:
            QuotaExceeded: The rate is used up.
        """
        principal.quota.charge(self._now_s())

    def charge_tenant(self, tenant: str) -> None:
        """Counts a request that the server makes for a tenant; one that has no key any more has no rate.

        Raises:
            QuotaExceeded: The rate is used up.
        """
        if tenant in self._quotas:
            self._quotas[tenant].charge(self._now_s())

    def give_back(self, tenant: str) -> None:
        """Takes the last charge of a tenant back: its request was not accepted."""
        if tenant in self._quotas:
            self._quotas[tenant].give_back()

    def spare(self, tenant: str) -> float:
        """Returns how many requests of a tenant that nobody waits for have room now: see `Quota.spare`."""
        return self._quotas[tenant].spare(self._now_s()) if tenant in self._quotas else math.inf

    def admit(self, context: Context) -> Context:
        """Authorizes an infer request, anew if that was done before, and checks the quotas of its tenant.

        Raises:
            Unauthorized: As `authorize`.
            Forbidden: As `authorize`.
            QuotaExceeded: The tenant has as many requests in flight as it may, or its rate is used up.
        """
        if context.principal is None:
            context = self.authorize(context, Scope.INFER)
        else:
            self.recheck(context)
        assert context.principal is not None
        context.principal.quota.check_in_flight(self._now_s())
        self.charge(context.principal)
        return context


def load_auth(settings: AuthSettings, host: str) -> Auth | None:
    """Reads the keys, if keys are required.

    Args:
        settings: How callers are identified.
        host: The address that the gateway binds.

    Returns:
        `None` when everyone may call.

    Raises:
        SettingsError: Everyone could call from elsewhere, and nobody said that they may; or the keys can't be read.
    """
    if settings.mode == "keys":
        if not settings.keys_file:
            raise SettingsError("QINFER_AUTH__KEYS_FILE is not set; name the file that `qinfer keys new` writes")
        return Auth(read_keys(Path(settings.keys_file)))
    check_exposure(settings, host)
    return None


def presented_key(authorization: str | None, api_key: str | None) -> str:
    """Returns the key that a request's `Authorization: Bearer` or else `X-API-Key` presents; empty without one."""
    scheme, _, token = (authorization or "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return (api_key or "").strip()


def caller_of(header: Callable[[str], str | None], every: Callable[[str], Sequence[str]]) -> Context:
    """Returns the caller, as the headers name it; `Auth.authorize` checks it.

    Args:
        header: Returns a header's value by its name in lower case; `None` = it was not sent.
        every: Returns the values of a header that may be sent several times, which make one list.
    """
    parent = header("traceparent")
    trace = context_text(parent, ",".join(every("tracestate"))) if parent else ""
    return Context(trace=trace, key=presented_key(header("authorization"), header("x-api-key")))


GROUPS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
"""The groups, as Triton names them."""

GRPC_PREFIX = "triton-grpc-protocol-"
"""The prefix of the metadata keys of gRPC."""


class Restrictions:
    """The groups of calls that need a header; `for_http` and `for_grpc` make them.

    Args:
        entries: `group,group:name=value`, as the setting has them.
        variable: The setting's variable, for errors.
        what: What the protocol calls a group, in refusals.
        prefix: What the header's name begins with, before the name in the entry.

    Raises:
        SettingsError: An entry is malformed, a group is unknown, or restricted twice.
    """

    def __init__(self, entries: Iterable[str], variable: str, what: str, prefix: str = "") -> None:
        self._what = what
        self._needed: dict[str, tuple[str, bytes]] = {}
        for position, entry in enumerate(entries, 1):
            names, colon, header = entry.partition(":")
            name, equals, value = header.partition("=")
            if not (names and colon and name.strip() and equals and value):
                raise SettingsError(f"{variable}: entry {position} must be written as group,group:name=value")
            for group in names.split(","):
                self._restrict(group.strip(), prefix + name.strip().lower(), value, variable)

    @classmethod
    def for_http(cls, entries: Iterable[str]) -> "Restrictions":
        """Makes those of HTTP; the header has the name that the entry gives it.

        Raises:
            SettingsError: As the class.
        """
        return cls(entries, "QINFER_HTTP__RESTRICTED", "API")

    @classmethod
    def for_grpc(cls, entries: Iterable[str]) -> "Restrictions":
        """Makes those of gRPC; the metadata key is `triton-grpc-protocol-<name>`.

        Raises:
            SettingsError: As the class.
        """
        return cls(entries, "QINFER_GRPC__RESTRICTED", "protocol", GRPC_PREFIX)

    def covers(self, group: str) -> bool:
        """Tells whether a group is restricted."""
        return group in self._needed

    def check(self, group: str, header: Callable[[str], str | None]) -> None:
        """Checks that a caller may use a group.

        Args:
            group: One of `GROUPS`.
            header: Returns a header's value by its name in lower case; `None` = it was not sent.

        Raises:
            Restricted: The group is restricted, and the header is not there or has another value.
        """
        needed = self._needed.get(group)
        if needed is None:
            return
        name, value = needed
        if not hmac.compare_digest((header(name) or "").encode("latin-1", "replace"), value):
            raise Restricted(f"This {self._what} is restricted, expecting header '{name}'")

    def _restrict(self, group: str, name: str, value: str, variable: str) -> None:
        if group not in GROUPS:
            raise SettingsError(f"{variable}: unknown group '{group}'; groups are {', '.join(GROUPS)}")
        if group in self._needed:
            raise SettingsError(f"{variable}: group '{group}' is restricted twice; name it in one entry only")
        self._needed[group] = name, value.encode()
