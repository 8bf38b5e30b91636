"""`Prefer` (RFC 7240): `respond-async` and `wait`, the two preferences that mean something here.

Either makes a request asynchronous: it is stored, and answered with 202 unless it ends within `wait` seconds.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_ITEM = re.compile(r"""(?:[^,"]|"(?:[^"\\]|\\.)*(?:"|\\?$))+""")  # up to a comma that is in no quoted string
_PREFERENCE = re.compile(r"""\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)\s*(?:=\s*("(?:[^"\\]|\\.)*"|[^\s;,"]*)\s*)?(?:;.*)?""")
_MAX_CHARACTERS = 1000


class Preferences(NamedTuple):
    """What a caller prefers.

    Attributes:
        respond_async: An answer at once, before the result.
        wait_s: The result, if it comes within so many seconds; `None` = nothing was said.
    """

    respond_async: bool = False
    wait_s: int | None = None

    @property
    def is_async(self) -> bool:
        """Whether the request is to be stored."""
        return self.respond_async or self.wait_s is not None

    def applied(self, *, ended: bool) -> str:
        """Returns the `Preference-Applied` of a reply; empty for none."""
        words = ["respond-async"] if self.respond_async and not ended else []
        if self.wait_s is not None:
            words.append(f"wait={self.wait_s}")
        return ", ".join(words)


def read_preferences(headers: Sequence[str]) -> Preferences:
    """Reads the `Prefer` headers of a request; of one preference named twice the first counts (RFC 7240 §2).

    Unknown and malformed preferences are ignored, as the RFC asks.
    """
    found: dict[str, str] = {}
    for item in _ITEM.findall(",".join(headers)[:_MAX_CHARACTERS]):
        preference = _PREFERENCE.fullmatch(item.rstrip())
        if preference is not None:
            found.setdefault(preference[1].lower(), (preference[2] or "").strip('"'))
    wait = found.get("wait", "")
    is_number = wait.isascii() and wait.isdigit() and len(wait) < 10
    return Preferences("respond-async" in found, int(wait) if is_number else None)
