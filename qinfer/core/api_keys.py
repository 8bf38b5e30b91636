"""The file of API keys: tenants, scopes, quotas, and the keys' SHA-256.

    {"keys": [{"id": "k1", "sha256": "…", "tenant": "acme", "scopes": ["infer"], "rate_per_s": 50, "max_in_flight": 9,
               "created_at": "2026-11-23T10:00:00Z", "expires_at": "2027-11-23T10:00:00Z"}]}

A plain hash suffices, since a key has 256 random bits.
"""

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import re
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from qinfer.core.settings import AuthSettings, Settings
from qinfer.core.settings_sections import ANY
from qinfer.errors import SettingsError

_NAME = r"^[A-Za-z0-9._~-]{1,64}$"
# A longer word may be a key.
_LONG_WORD = re.compile(r"((?:Invalid enum value|unknown field) )([`']).{33,}?\2(?=$| - at `\$)", re.DOTALL)

Name = Annotated[str, msgspec.Meta(pattern=_NAME)]
"""Letters, digits and `._~-`, at most 64."""


class Scope(StrEnum):
    """`viewer` = states and figures, `infer` = also use models, and read the tenant's own contents, `admin` = all."""

    VIEWER = "viewer"
    INFER = "infer"
    ADMIN = "admin"

    @property
    def included(self) -> "frozenset[Scope]":
        """The scopes whose rights this one has, too."""
        order = list(Scope)
        return frozenset(order[: order.index(self) + 1])


Instant = Annotated[datetime, msgspec.Meta(tz=True)]
"""A date and time with its offset from UTC (RFC 3339)."""


MAX_COUNT = 10**9

MAX_WEIGHT = 1000


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file; its quotas are those of the tenant, the same in all keys of the tenant.

    Attributes:
        id: The key's name, for people.
        rate_per_s: The most requests per second; 0 = no limit.
        burst: Requests at once before the rate counts; 0 = a second's worth, at least 1.
        max_in_flight: Unanswered requests; 0 = no limit. An asynchronous request is answered when it is accepted.
        weight: The tenant's share of a contended model, in proportion to the others' weights.
        expires_at: The time from which the key is refused; `None` = never.
    """

    id: Name
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    tenant: Name
    scopes: Annotated[tuple[Scope, ...], msgspec.Meta(min_length=1)] = (Scope.INFER,)
    rate_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    burst: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0
    max_in_flight: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0
    weight: Annotated[int, msgspec.Meta(ge=1, le=MAX_WEIGHT)] = 1
    created_at: Instant | None = None
    expires_at: Instant | None = None

    def is_expired(self, now: datetime) -> bool:
        """Tells whether the key is refused, as of `now`."""
        return self.expires_at is not None and self.expires_at <= now


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[ApiKey, ...] = ()


def hash_key(key: str) -> str:
    """Returns a key's SHA-256, in hexadecimal."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def check_exposure(settings: AuthSettings, host: str, variable: str = "QINFER_HTTP__HOST") -> None:
    """Raises `SettingsError` without `auth.mode` if other machines reach the gateway, or a key file is named."""
    if settings.mode == "" and settings.keys_file:
        raise SettingsError(
            "QINFER_AUTH__KEYS_FILE is set, but keys are not required; set QINFER_AUTH__MODE=keys to require them, or "
            "QINFER_AUTH__MODE=none to let everyone"
        )
    if settings.mode == "" and not is_loopback(host):
        raise SettingsError(
            f"{variable}={host} serves other machines, and authentication is not set; set QINFER_AUTH__MODE=keys "
            "(with QINFER_AUTH__KEYS_FILE), or QINFER_AUTH__MODE=none to let everyone"
        )


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Reads and checks a file of keys."""
    return parse_keys(path, read_key_file(path))


def read_key_file(path: Path) -> bytes:
    """Returns the content of a file of keys."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: the file of API keys can't be read: {error.strerror}") from None


def parse_keys(path: Path, content: bytes) -> tuple[ApiKey, ...]:
    """Checks a file's content; `SettingsError` names no values."""
    keys = _decoded(path, content)
    if not keys:
        raise SettingsError(f"{path} has no keys; `qinfer keys new` adds one")
    return keys


def add_key(
    path: Path,
    tenant: str,
    scopes: tuple[Scope, ...],
    key_id: str = "",
    *,
    expires_at: datetime | None = None,
) -> tuple[ApiKey, str]:
    """Makes a key and appends its entry to the file, if needed a new one of mode 0600.

    A tenant's further keys get its quotas. Returns the entry, and the key, which is stored nowhere.
    """
    key = secrets.token_urlsafe(32)
    with _locked(path):
        keys = _decoded(path, read_key_file(path)) if path.exists() else ()
        same = next((known for known in keys if known.tenant == tenant), None)
        fields = {
            "id": key_id or _new_id(tenant),
            "sha256": hash_key(key),
            "tenant": tenant,
            "scopes": scopes,
            "rate_per_s": same.rate_per_s if same else 0.0,
            "burst": same.burst if same else 0,
            "max_in_flight": same.max_in_flight if same else 0,
            "weight": same.weight if same else 1,
            "created_at": _now(),
            "expires_at": expires_at,
        }
        try:
            entry = msgspec.convert(fields, ApiKey)
        except msgspec.ValidationError as error:
            rule = "1 to 64 letters, digits and ._~-"
            raise SettingsError(f"no key was made: tenant and id are {rule} each, got '{tenant}' ({error})") from None
        _write_keys(path, (*keys, entry))
    return entry, key


def revoke_key(path: Path, key_id: str) -> ApiKey:
    """Removes a key and returns its entry; the last key stays."""
    with _locked(path):
        keys = read_keys(path)
        entry = _entry(path, keys, key_id)
        left = tuple(key for key in keys if key.id != key_id)
        if not left:
            raise SettingsError(
                f"{path}: '{key_id}' is the only key, and gateways accept no file without keys; make another first"
            )
        _write_keys(path, left)
    return entry


def rotate_key(path: Path, key_id: str, overlap: timedelta, lifetime: timedelta | None = None) -> tuple[ApiKey, str]:
    """Makes a key with the rights of another, which expires after `overlap`.

    Without a `lifetime`, the new key gets the lifetime of the old one. Returns the entry, and the key, which is stored
    nowhere.
    """
    key = secrets.token_urlsafe(32)
    with _locked(path):
        keys = read_keys(path)
        old = _entry(path, keys, key_id)
        now = _now()
        lifetime = lifetime or _lifetime(old)
        ending = msgspec.structs.replace(old, expires_at=min(now + overlap, old.expires_at or now + overlap))
        entry = msgspec.structs.replace(
            old,
            id=_new_id(old.tenant),
            sha256=hash_key(key),
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
        )
        _write_keys(path, (*(ending if known is old else known for known in keys), entry))
    return entry, key


def _lifetime(key: ApiKey) -> timedelta | None:
    if key.expires_at is None:
        return None
    if key.created_at is None or key.created_at >= key.expires_at:
        raise SettingsError(f"key '{key.id}' expires, and its entry does not tell its lifetime; give one")
    return key.expires_at - key.created_at


def _decoded(path: Path, content: bytes) -> tuple[ApiKey, ...]:
    if not content.strip():
        raise SettingsError(f"{path} is empty; `qinfer keys new` writes one with a key")
    try:
        keys = msgspec.json.decode(content, type=_KeyFile).keys
    except ValueError as error:  # a string that is no UTF-8
        problem = _LONG_WORD.sub(r"\1…", str(error))
        raise SettingsError(f"{path}: {problem}; `qinfer keys new` writes entries as they should be") from None
    _check_keys(path, keys)
    return keys


def _entry(path: Path, keys: tuple[ApiKey, ...], key_id: str) -> ApiKey:
    found = next((key for key in keys if key.id == key_id), None)
    if found is None:
        raise SettingsError(f"{path} has no key '{key_id}'; `qinfer keys list` shows those that it has")
    return found


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _new_id(tenant: str) -> str:
    return f"{tenant[:48]}-{secrets.token_hex(4)}"


def _write_keys(path: Path, keys: tuple[ApiKey, ...]) -> None:
    _check_keys(path, keys)
    _replace(path, msgspec.json.format(msgspec.json.encode(_KeyFile(keys)), indent=2) + b"\n")


def _check_keys(path: Path, keys: tuple[ApiKey, ...]) -> None:
    quotas: dict[str, tuple[float, int, int, int]] = {}
    for number, key in enumerate(keys):
        where = f"{path}: keys[{number}]"
        if any(other.id == key.id for other in keys[:number]):
            raise SettingsError(f"{where}.id '{key.id}' is taken; give each key its own")
        if any(other.sha256 == key.sha256 for other in keys[:number]):
            raise SettingsError(f"{where}.sha256 is the same as in another entry; give each entry its own key")
        quota = key.rate_per_s, key.burst, key.max_in_flight, key.weight
        if quotas.setdefault(key.tenant, quota) != quota:
            raise SettingsError(
                f"{where} has other quotas than tenant '{key.tenant}' has before; quotas belong to the tenant: "
                "give all of its keys the same rate_per_s, burst, max_in_flight and weight"
            )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        directory = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise SettingsError(f"{path}: its directory can't be opened: {error.strerror}") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _replace(path: Path, data: bytes) -> None:
    """Keeps the mode, for its readers; a link to the file stays."""
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(descriptor, path.stat().st_mode & 0o777)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise SettingsError(f"{path}: the file of API keys can't be written: {error.strerror}") from None


def is_loopback(host: str) -> bool:
    """Tells whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local(settings: Settings) -> bool:
    """Returns whether all ports are on loopback addresses."""
    http, grpc, metrics = settings.http, settings.grpc, settings.metrics
    hosts = [http.host]
    if grpc.enabled:
        hosts.append(grpc.host or http.host)
    if metrics.enabled:
        hosts.append(metrics.host or http.host)
    return all(map(is_loopback, hosts))


def own_console_host(settings: Settings) -> str:
    """Returns the address of the console's own port; empty where it shares the port of HTTP."""
    return "" if settings.console.port is None else settings.console.host or settings.http.host


def why_no_console(settings: Settings) -> str:
    """Returns why the console is not served, or empty."""
    if not settings.console.enabled:
        return "the console is off: QINFER_CONSOLE__ENABLED"
    host = own_console_host(settings)
    is_near = is_loopback(host) if host else is_local(settings)
    if settings.auth.mode == "keys" or (is_near and ANY not in settings.http.allow_hosts):
        return ""
    where = "its own port" if host else "all ports, or by QINFER_CONSOLE__PORT and QINFER_CONSOLE__HOST its own port,"
    return (
        "the console is off: other machines reach it, and it asks for no API keys; set QINFER_AUTH__MODE=keys, or bind "
        f"{where} to loopback addresses without QINFER_HTTP__ALLOW_HOSTS=*"
    )
