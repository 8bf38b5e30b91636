"""Restricted APIs: groups of calls that only callers with a secret header may use (reference §1.2, §1.20)."""

import hmac
from collections.abc import Callable, Iterable

from qinfer.errors import Restricted, SettingsError

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
"""What the metadata keys of gRPC begin with."""


class Restrictions:
    """Which groups need which header; `for_http` and `for_grpc` make them.

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
            raise SettingsError(f"{variable}: there is no group '{group}'; groups are {', '.join(GROUPS)}")
        if group in self._needed:
            raise SettingsError(f"{variable}: group '{group}' is restricted twice; name it in one entry only")
        self._needed[group] = name, value.encode()
