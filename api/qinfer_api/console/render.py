"""Fills templates: the environment of Jinja2, and the formats of figures.

Templates escape all values. The pages load scripts, styles and images from the gateway only, and have none inline, so
that a name with markup in it stays text even if a template forgets to escape it.
"""

import hashlib
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

import qinfer

HERE = Path(__file__).parent
STATIC = HERE / "static"

UNKNOWN = "\u2013"
"""A dash, for a figure that is not known."""

MOST_REASON = 300
"""The most characters of a reason in a list."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def depth_root(path: str) -> str:
    """Returns the relative address of the console's first page from a path below it, wherever a proxy has put it."""
    return "../" * (path.count("/") - 1) or "./"


class Templates:
    """The templates; `version` changes with any static file, so that browsers keep them for a year."""

    def __init__(self) -> None:
        names = sorted(path for path in STATIC.iterdir() if path.suffix in (".js", ".css"))
        self.version = hashlib.sha256(b"".join(path.read_bytes() for path in names)).hexdigest()[:12]
        self._environment = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "seconds": seconds,
            "count": count,
            "nbytes": nbytes,
            "percent": percent,
            "ago": ago,
            "instant": instant,
            "stamp": stamp,
            "shortened": shortened,
            "part": lambda text: quote(str(text), safe=""),
        }
        self._environment.globals |= {"version": self.version, "qinfer_version": qinfer.__version__}
        self._environment.globals["ui"] = self._environment.get_template("ui.html").module

    def page(self, request: Request, name: str, values: Mapping[str, Any], status: int = 200) -> HTMLResponse:
        """Renders a page; htmx gets its main part only."""
        is_part = "hx-request" in request.headers
        text = self._environment.get_template(name).render({**values, "is_part": is_part})
        # A reloaded or restored page must not be a part: the two differ by a header.
        return HTMLResponse(text, status, headers={"vary": "hx-request"})


def seconds(value: float | None) -> str:
    """Formats a duration with two or three digits: `1.2 ms`, `340 ms`, `12 s`, `3 min`, `2.5 h`."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        return "∞"
    for limit, factor, unit in (
        (0.001, 1e6, "µs"),
        (1.0, 1e3, "ms"),
        (_MINUTE_S, 1.0, "s"),
        (_HOUR_S, 1 / 60, "min"),
        (2 * _DAY_S, 1 / 3600, "h"),
    ):
        if value < limit:
            return "0 s" if not value else f"{_short(value * factor)} {unit}"
    return f"{_short(value / _DAY_S)} days"


def count(value: float | None) -> str:
    """Formats a number, rounded to three digits below a thousand, with thin spaces above."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return UNKNOWN
    return _short(value) if value < 1000 else f"{value:,.0f}".replace(",", "\u2009")


def nbytes(value: float) -> str:
    """Formats bytes in binary units."""
    size, unit = float(value), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{_short(size)} {_UNITS[unit]}"


def percent(share: float | None) -> str:
    """Formats a share of 0 … 1."""
    return UNKNOWN if share is None or math.isnan(share) else f"{_short(share * 100)} %"


def ago(at_s: float, now_s: float | None = None) -> str:
    """Formats the time since an instant."""
    if not at_s:
        return UNKNOWN
    since_s = (time.time() if now_s is None else now_s) - at_s
    for unit, size in (("days", _DAY_S), ("h", _HOUR_S), ("min", _MINUTE_S), ("s", 1)):
        if since_s >= size * (2 if unit == "days" else 1):
            return f"{since_s // size:.0f} {unit} ago"
    return "now"


def instant(at_s: float) -> str:
    """Formats an instant in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at_s else UNKNOWN


def stamp(text: str | None) -> str:
    """Formats an instant of RFC 3339 in UTC as `instant` does."""
    return f"{text[:10]} {text[11:19]} UTC" if text else UNKNOWN


def shortened(text: str) -> str:
    """Cuts a text to what a row of a list shows; the page of its thing has all of it."""
    return text if len(text) <= MOST_REASON else f"{text[:MOST_REASON]}…"


def _short(value: float) -> str:
    digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:.{digits}f}"
