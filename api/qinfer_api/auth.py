"""Authentication and authorization: API keys, scopes, tenants' quotas, restricted groups of calls, and the audit log.

The audit log has administrative changes and refused keys. No setting turns it off.
"""

import asyncio
import hmac
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from qinfer.core.api_keys import ApiKey, Scope, check_exposure, hash_key, read_keys
from qinfer.core.clock import Clock, SystemClock
from qinfer.core.settings import AuthSettings
from qinfer.errors import Forbidden, QinferError, Restricted, SettingsError, Unauthorized
from qinfer.observe.logs import AUDIT
from qinfer.observe.tracing import context_text
from qinfer.queue.tenants import Quotas
from qinfer_api.quotas import Quota, QuotaLeases


class Principal(NamedTuple):
    """An authenticated caller, with all its scopes, included ones too; its tenant's keys share `quota`."""

    key_id: str
    tenant: str
    scopes: frozenset[Scope]
    quota: Quota
    sha256: str
    expires_at_s: float

    def allows(self, scope: Scope) -> bool:
        """Returns whether the key allows a scope."""
        return scope in self.scopes


class CallerContext(msgspec.Struct, frozen=True, gc=False):
    """The caller of a request; `trace` is `traceparent`, a blank and `tracestate`."""

    tenant: str = ""
    trace: str = ""
    key: str = ""
    principal: Principal | None = None
    scope: Scope = Scope.INFER

    @property
    def sees_all(self) -> bool:
        """Whether the caller sees stored requests of all tenants, as anyone where no key is needed."""
        return not self.tenant if self.principal is None else self.principal.allows(Scope.ADMIN)

    @property
    def reads(self) -> bool:
        """Whether the caller sees contents: tensors, messages of errors, addresses of webhooks."""
        return self.principal is None or self.principal.allows(Scope.INFER)

    def sees(self, tenant: str) -> bool:
        """Tells whether the caller sees a tenant's stored requests."""
        return tenant == self.tenant or self.sees_all


ANONYMOUS = CallerContext()


class Auth:
    """The known keys; `refused` gets reason, key id and peer of each refusal."""

    def __init__(
        self, keys: Iterable[ApiKey], clock: Clock | None = None, epoch_s: Callable[[], float] = time.time
    ) -> None:
        self._now_s = (clock or SystemClock()).monotonic_s
        self._epoch_s = epoch_s
        self._quotas: dict[str, Quota] = {}
        self._wake: Callable[[Quota], None] = lambda _: None
        self._known: dict[str, Principal] = {}
        self.tenants: frozenset[str] = frozenset()
        """Tenants that have or had a key: their files stay theirs."""
        self.refused: Callable[[str, str, str], None] = lambda _, __, ___: None
        self.replace_keys(keys)

    def replace_keys(self, keys: Iterable[ApiKey]) -> None:
        """Replaces the keys; remaining tenants keep their use of quotas."""
        quotas: dict[str, Quota] = {}
        known: dict[str, Principal] = {}
        for key in keys:
            if key.tenant not in quotas:
                quota = quotas[key.tenant] = self._quotas.get(key.tenant) or Quota(key, self._now_s())
                quota.limit(key)
                quota.wake = self._wake
            expires_at_s = key.expires_at.timestamp() if key.expires_at else math.inf
            scopes = frozenset[Scope]().union(*(scope.included for scope in key.scopes))
            known[key.sha256] = Principal(key.id, key.tenant, scopes, quotas[key.tenant], key.sha256, expires_at_s)
        self._quotas, self._known = quotas, known
        self.tenants |= quotas.keys()

    def lease(self, quotas: Quotas) -> QuotaLeases:
        """Returns leases that share quotas among gateways."""
        leases = QuotaLeases(quotas, self._now_s)
        self._wake = leases.wake
        for quota in self._quotas.values():
            quota.wake = leases.wake
        return leases

    def authorize(self, context: CallerContext, scope: Scope, peer: str = "") -> CallerContext:
        """Authorizes a caller; returns its tenant and principal."""
        if not context.key:
            self.refused("missing", "", peer)
            raise Unauthorized(
                "this server asks for an API key; send it as 'Authorization: Bearer <key>' or 'X-API-Key: <key>'"
            )
        found = self._find(context.key)
        if found is None:
            self.refused("unknown", "", peer)
            raise Unauthorized("the API key is not known; ask for another")
        self._check_scope(found, scope, peer)
        return CallerContext(found.tenant, context.trace, "", found, scope)

    def identify(self, context: CallerContext) -> CallerContext:
        """Finds a known key's owner, regardless of scopes."""
        found = self._find(context.key) if context.key else None
        return context if found is None else CallerContext(found.tenant, context.trace, "", found, context.scope)

    def sign_in(self, key: str, peer: str) -> CallerContext:
        """Returns the caller who presents a valid key, regardless of scopes."""
        found = self._find(key)
        if found is None:
            self.refused("unknown", "", peer)
            raise Unauthorized("the API key is not known; ask for another")
        self._check_expiry(found, peer)
        return CallerContext(found.tenant, "", "", found)

    def holder(self, sha256: str) -> CallerContext | None:
        """Returns the caller to whom a key was given; `None` if it was revoked or has expired."""
        found = self._known.get(sha256)
        if found is None or found.expires_at_s <= self._epoch_s():
            return None
        return CallerContext(found.tenant, "", "", found)

    def holders(self) -> tuple[Principal, ...]:
        """Returns the holders of all keys."""
        return tuple(self._known.values())

    def recheck(self, context: CallerContext) -> None:
        """Checks a caller again, because connections outlast keys."""
        before = context.principal
        if before is None:
            return
        principal = self._known.get(before.sha256)
        if principal is None or principal.tenant != before.tenant:
            self.refused("revoked", before.key_id, "")
            raise Unauthorized(f"key '{before.key_id}' was revoked; use another")
        self._check_scope(principal, context.scope)

    def _find(self, presented: str) -> Principal | None:
        digest = hash_key(presented)
        found: Principal | None = None
        for sha256, principal in self._known.items():  # all, so that timing discloses nothing
            if hmac.compare_digest(sha256, digest):
                found = principal
        return found

    def _check_expiry(self, principal: Principal, peer: str) -> None:
        if principal.expires_at_s <= self._epoch_s():
            self.refused("expired", principal.key_id, peer)
            raise Unauthorized(f"key '{principal.key_id}' has expired; use another")

    def _check_scope(self, principal: Principal, scope: Scope, peer: str = "") -> None:
        self._check_expiry(principal, peer)
        if not principal.allows(scope):
            self.refused("scope", principal.key_id, peer)
            raise Forbidden(f"key '{principal.key_id}' does not have the scope '{scope}'; use one that has")

    def in_flight(self) -> dict[str, int]:
        """Returns the requests in flight of each tenant."""
        return {tenant: quota.in_flight for tenant, quota in self._quotas.items()}

    def weight(self, tenant: str) -> int:
        """Returns a tenant's weight; 0 without a key."""
        return self._quotas[tenant].weight if tenant in self._quotas else 0

    def has_key(self, tenant: str) -> bool:
        """Returns whether a tenant has a valid key."""
        now_s = self._epoch_s()
        return any(known.tenant == tenant and known.expires_at_s > now_s for known in self._known.values())

    def charge(self, principal: Principal) -> None:
        """Charges a request to the rate of the caller's tenant."""
        principal.quota.charge(self._now_s())

    def charge_tenant(self, tenant: str) -> None:
        """Charges a background request to its tenant's rate, if it has a key."""
        if tenant in self._quotas:
            self._quotas[tenant].charge(self._now_s())

    def give_back(self, tenant: str) -> None:
        """Refunds the last charge of a tenant."""
        if tenant in self._quotas:
            self._quotas[tenant].give_back()

    def spare(self, tenant: str) -> float:
        """Returns how many background requests of a tenant have room."""
        return self._quotas[tenant].spare(self._now_s()) if tenant in self._quotas else math.inf

    def authorize_inference(self, context: CallerContext) -> CallerContext:
        """Authorizes an infer request within its tenant's quota, or raises `QuotaExceeded`."""
        if context.principal is None:
            context = self.authorize(context, Scope.INFER)
        else:
            self.recheck(context)
        assert context.principal is not None
        context.principal.quota.check_in_flight(self._now_s())
        self.charge(context.principal)
        return context


def load_auth(settings: AuthSettings, host: str) -> Auth | None:
    """Loads the keys; `None` if none are required."""
    if settings.mode == "keys":
        if not settings.keys_file:
            raise SettingsError("QINFER_AUTH__KEYS_FILE is not set; name the file that `qinfer keys new` writes")
        return Auth(read_keys(Path(settings.keys_file)))
    check_exposure(settings, host)
    return None


def presented_key(authorization: str | None, api_key: str | None) -> str:
    """Returns the key of `Authorization: Bearer`, else of `X-API-Key`."""
    scheme, _, token = (authorization or "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return (api_key or "").strip()


def caller_of(header: Callable[[str], str | None], every: Callable[[str], Sequence[str]]) -> CallerContext:
    """Returns the unchecked caller; `every` joins repeated headers."""
    parent = header("traceparent")
    trace = context_text(parent, ",".join(every("tracestate"))) if parent else ""
    return CallerContext(trace=trace, key=presented_key(header("authorization"), header("x-api-key")))


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

GRPC_PREFIX = "triton-grpc-protocol-"


class Restrictions:
    """Groups of calls that need a header, from entries `group,group:name=value`."""

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
        """Creates HTTP's restrictions."""
        return cls(entries, "QINFER_HTTP__RESTRICTED", "API")

    @classmethod
    def for_grpc(cls, entries: Iterable[str]) -> "Restrictions":
        """Creates gRPC's restrictions; the metadata key is `triton-grpc-protocol-<name>`."""
        return cls(entries, "QINFER_GRPC__RESTRICTED", "protocol", GRPC_PREFIX)

    def covers(self, group: str) -> bool:
        """Returns whether a group is restricted."""
        return group in self._needed

    def check(self, group: str, header: Callable[[str], str | None]) -> None:
        """Raises `Restricted` if a group's header is missing or wrong."""
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


logger = logging.getLogger(AUDIT)

MOST_A_SECOND = 10
"""Lines a second per reason; further lines are only counted."""


@contextmanager
def administrative(context: CallerContext, act: str, where: str, peer: str) -> Iterator[None]:
    """Logs an administrative act at its end; `act` is the HTTP method or `gRPC`, `where` the path or method."""
    outcome = "done"
    try:
        yield
    except QinferError as error:
        outcome = error.code
        raise
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        key = "" if context.principal is None else context.principal.key_id
        about = {"tenant": context.tenant, "key": key, "act": act, "path": where, "peer": peer, "outcome": outcome}
        logger.info("administrative act", extra=about)


class RefusedKeys:
    """Logs up to `MOST_A_SECOND` refused keys per reason; for one event loop."""

    def __init__(self, second_s: float = 1.0) -> None:
        self._second_s = second_s
        self._seen: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, reason: str, key: str, peer: str) -> None:
        """Logs a refusal, of reason `missing`, `unknown`, `expired`, `revoked` or `scope`."""
        self._seen[reason] += 1
        if self._seen[reason] <= MOST_A_SECOND:
            logger.warning("key refused", extra={"reason": reason, "key": key, "peer": peer})
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._second_s, self._log_refused)

    def _log_refused(self) -> None:
        self._timer = None
        for reason, count in self._seen.items():
            if count > MOST_A_SECOND:
                logger.warning("keys refused", extra={"reason": reason, "without_a_line": count - MOST_A_SECOND})
        self._seen.clear()
