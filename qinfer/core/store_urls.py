"""URLs of object stores in requests: those that a tenant may read or write (the settings `stores.*`). Pure.

A URL has one spelling here, `scheme://bucket/key` or `file:///directory/file`. A prefix allows itself and everything in
it: `s3://data/in` allows `s3://data/in/x.parquet`, and neither `s3://data/inside` nor `s3://data-2`. A pattern such as
`*.parquet` matches names in its folder.

Names are literal: `%20`, `#` and `?` stand for themselves. Ambiguous names are refused. Links in a `file://` directory
are followed when an object is opened (`Within` of `qinfer.storage.open`).
"""

import re
from collections.abc import Sequence
from typing import Self
from urllib.parse import unquote

import msgspec

from qinfer.errors import Forbidden, InvalidRequest, QinferError, SettingsError

_ALIASES = {"s3a": "s3", "gcs": "gs", "local": "file", "abfs": "az"}
_WITH_ACCOUNT = {"abfs", "abfss"}  # abfss://container@account.dfs.core.windows.net/key
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_AUTHORITY = re.compile(r"[A-Za-z0-9._-]+(:[0-9]{1,5})?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
_UNSAFE = re.compile(rf"{_CONTROL.pattern}|^ | $")
# The first is for versions of an object; the others are credentials.
_QUERY = re.compile(
    r"\?(?:[^/]*&)?(?:versionid|generation|x-(?:amz|goog)-[a-z-]+|awsaccesskeyid|sig|signature|token)=", re.I
)
# How often percent signs are decoded; a path with more layers is refused.
_DECODINGS = 3
_LONGEST = 2048
_SHOWN = 120


class UrlGrant(msgspec.Struct, frozen=True):
    """The URL prefixes that a tenant may read or write, except those in `deny`, in their one spelling."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    tenant: str = ""
    deny: tuple[str, ...] = ()

    def narrowed(self, other: Self) -> Self:
        """Intersects two grants."""
        read, write = _common(self.read, other.read), _common(self.write, other.write)
        deny = tuple(dict.fromkeys((*self.deny, *other.deny)))
        return msgspec.structs.replace(self, read=read, write=write, deny=deny)

    def check_read(self, url: str) -> str:
        """Checks the URL of an input."""
        return check_url(url, self.read, "read", self.tenant, self.deny)

    def check_write(self, url: str) -> str:
        """Checks the URL of an output."""
        return check_url(url, self.write, "write", self.tenant, self.deny)


def check_url(url: str, allow: Sequence[str], use: str = "use", tenant: str = "", deny: Sequence[str] = ()) -> str:
    """Checks a URL from a request against prefixes; returns its one spelling.

    Raises `InvalidRequest` for an ambiguous one: `..`, schemes chained with `::`, credentials, a query, encoded
    separators.
    """
    place = _parsed(url)
    is_denied = any(_holds(_parsed(prefix), place) for prefix in deny)
    if not is_denied and any(_holds(_parsed(prefix), place) for prefix in allow):
        return _spelled(place)
    raise not_allowed(url, use, tenant)


def not_allowed(url: str, use: str = "use", tenant: str = "") -> Forbidden:
    """Returns the error for a URL that no prefix allows."""
    who, setting = (f"tenant '{tenant}'", "TENANTS") if tenant else ("this server", "ALLOW (qinfer up --allow-store)")
    return Forbidden(
        f"'{_printable(url)}' is in none of the stores that {who} may {use}; "
        f"the operator allows them with QINFER_STORES__{setting}"
    )


def is_below(url: str, prefix: str) -> bool:
    """Tells whether an object is the prefix, or in a folder of that name; not for `file://`.

    A name with a part `.` or `..` is below nothing: drivers may take it for a way up.
    """
    base = prefix.rstrip("/")
    return (url == base or url.startswith(f"{base}/")) and not {".", ".."}.intersection(url.split("/"))


def folders_of(tenant: str, allow: Sequence[str]) -> tuple[str, ...]:
    """Returns a tenant's own folder in each allowed store.

    A tenant has no folder in a store within another store: it would be in the folder of a tenant with the store's name.
    """
    if tenant in ("", ".", ".."):  # no folder has such a name
        return ()
    places = [_parsed(url) for url in allow]
    outermost = [one for one in places if not any(one != other and _holds(other, one) for other in places)]
    return tuple(_spelled((scheme, authority, (*segments, tenant))) for scheme, authority, segments in outermost)


def do_meet(first: str, second: str) -> bool:
    """Tells whether one of two valid URLs equals or contains the other."""
    return contains(first, second) or contains(second, first)


def contains(prefix: str, url: str) -> bool:
    """Tells whether a valid URL is a prefix, or in it."""
    try:
        return _holds(_parsed(prefix), _parsed(url))
    except QinferError:
        return False


def normalised(url: str) -> str:
    """Returns a setting's URL in its one spelling."""
    try:
        return _spelled(_parsed(url))
    except QinferError as error:
        raise SettingsError(error.message) from None


_Place = tuple[str, str, tuple[str, ...]]  # scheme, bucket or host, path


def _parsed(url: str) -> _Place:
    if len(url) > _LONGEST:
        raise InvalidRequest(f"a store's URL of {len(url)} characters is too long; at most {_LONGEST} are possible")
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if "::" in url:
        raise InvalidRequest("a store's URL with '::' chains several stores; name one")
    if not separator or not _SCHEME.fullmatch(scheme):
        raise InvalidRequest(
            f"'{_printable(url)}' is no URL of a store; expected such as s3://bucket/key or file:///data/x"
        )
    authority, _, path = rest.partition("/")
    if "@" in authority and not (scheme in _WITH_ACCOUNT and ":" not in authority):
        raise InvalidRequest("a store's URL may not hold credentials; they come from the store's own variables")
    if _UNSAFE.search(rest) or _QUERY.search(rest) or _hides(path):
        raise InvalidRequest(
            f"'{_printable(url.partition('?')[0])}': a store's URL may hold no control characters, '\\', no space at "
            "an end, no query with a version or credentials, and no '..', '.' or '\\' that is percent-encoded"
        )
    if "@" in authority:
        _check_account(authority)
    else:
        scheme = _ALIASES.get(scheme, scheme)
        _check_authority(scheme, authority, url)
    segments = tuple(path.removesuffix("/").split("/")) if path.removesuffix("/") else ()
    if any(segment in ("", ".", "..") for segment in segments):
        raise InvalidRequest(
            f"'{_printable(url)}': a store's URL may not hold '..', '.' or empty parts; write out where it leads"
        )
    return scheme, authority.removesuffix("localhost") if scheme == "file" else authority, segments


def _hides(path: str) -> bool:
    """Tells whether a percent-decoded path leads elsewhere or has forbidden characters."""
    for _ in range(_DECODINGS):
        decoded = unquote(path)
        if decoded == path:
            return False
        if _CONTROL.search(decoded) or {".", ".."}.intersection(decoded.split("/")):
            return True
        path = decoded
    return unquote(path) != path


def _check_account(authority: str) -> None:
    container, _, host = authority.partition("@")
    if not (_AUTHORITY.fullmatch(container) and _AUTHORITY.fullmatch(host)):
        raise InvalidRequest("a store's URL with an account is abfss://container@account.dfs.core.windows.net/key")


def _check_authority(scheme: str, authority: str, url: str) -> None:
    if scheme == "file":
        if authority not in ("", "localhost"):
            raise InvalidRequest(f"'{_printable(url)}' is not an absolute path; expected file:///directory/file")
    elif not _AUTHORITY.fullmatch(authority):
        raise InvalidRequest(f"'{_printable(url)}' names no bucket; expected such as s3://bucket/key")


def _holds(prefix: _Place, place: _Place) -> bool:
    return prefix[:2] == place[:2] and place[2][: len(prefix[2])] == prefix[2]


def _common(first: Sequence[str], second: Sequence[str]) -> tuple[str, ...]:
    """Intersects prefixes: of two that meet, the longer one remains."""
    pairs = [(_parsed(one), _parsed(other)) for one in first for other in second]
    found = [one if _holds(other, one) else other for one, other in pairs if _holds(one, other) or _holds(other, one)]
    return tuple(dict.fromkeys(map(_spelled, found)))


def _spelled(place: _Place) -> str:
    scheme, authority, segments = place
    return f"{scheme}://{authority}{'/' if segments or scheme == 'file' else ''}{'/'.join(segments)}"


def _printable(url: str) -> str:
    text = "".join(character if character.isprintable() else "?" for character in url)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
