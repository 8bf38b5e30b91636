"""Request headers and metadata that become parameters of the request (reference §1.19, header forwarding)."""

import re
from collections.abc import Iterable

from qinfer.errors import SettingsError

_CASE_SENSITIVE = "(?-i)"  # RE2's, which Triton's documentation tells of; Python has it within groups only


def compile_forward(variable: str, pattern: str) -> re.Pattern[str] | None:
    """Compiles the pattern of the names that are forwarded; `None` for an empty one.

    The case of letters is ignored, as it is in header names, unless the pattern begins with `(?-i)`.

    Args:
        variable: The setting's environment variable, for the error.
        pattern: The pattern.

    Raises:
        SettingsError: It is no regular expression.
    """
    if not pattern:
        return None
    sensitive = pattern.startswith(_CASE_SENSITIVE)
    try:
        return re.compile(pattern.removeprefix(_CASE_SENSITIVE), re.NOFLAG if sensitive else re.IGNORECASE)
    except re.error as error:
        raise SettingsError(
            f"{variable}={pattern}: {error}; it takes a regular expression such as x-tenant-.*"
        ) from None


def forwarded(pattern: re.Pattern[str], headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns the headers whose whole names match, by their names as they were sent; of equal names the last counts."""
    found: dict[str, str] = {}
    for name, value in headers:
        text = name.decode("latin-1")
        if pattern.fullmatch(text):
            found[text] = value.decode("latin-1")
    return found
