"""The bridge's configuration file: one YAML or TOML file; every mistake in it is named with its route and field.

Passwords do not belong into the file: `${NAME}` in a URL or a transport option stands for an environment variable.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from qinfer.core.documents import Unreadable, parse, read_limited
from qinfer.errors import SettingsError
from qinfer_workers.bridge.config import BridgeConfig

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_MAX_FILE_BYTES = 2**20
_SHOWN = frozenset({"prefetch", "declare", "reply_to", "version", "priority", "timeout_s", "max_waiting", "max_bytes"})
"""Fields whose texts are shown when they are wrong; others may have a password that was put there by mistake."""


def load_config(path: Path, environment: Mapping[str, str]) -> BridgeConfig:
    """Reads a file.

    Args:
        path: `.yaml`, `.yml` or `.toml`.
        environment: What `${NAME}` stands for.

    Raises:
        SettingsError: It can't be read, or something in it is wrong: all of that is named, passwords are not.
    """
    return parse_config(_read(path), environment, path.name)


def parse_config(document: object, environment: Mapping[str, str], name: str = "configuration") -> BridgeConfig:
    """Checks what a file says; see `load_config`.

    Args:
        document: The file's content, parsed.
        environment: What `${NAME}` stands for.
        name: Of the file, for messages.
    """
    if not isinstance(document, dict):
        raise SettingsError(f"{name}: expected a mapping with 'routes'")
    routes = document.get("routes")
    filled = dict(document)
    if isinstance(routes, list):
        filled["routes"] = [
            _filled(route, environment, f"{name}: {_who(number, route)}") for number, route in enumerate(routes)
        ]
    try:
        return BridgeConfig.model_validate(filled)
    except ValidationError as error:
        found = error.errors(include_url=False)
        if routes:  # pydantic calls them too few when one is wrong
            found = [each for each in found if each["loc"] != ("routes",) or each["type"] != "too_short"]
        problems = [f"{_where(each['loc'], routes)}: {_text(each)}" for each in found]
        raise SettingsError(f"{name}: " + "; ".join(problems)) from None


def _read(path: Path) -> object:
    if path.suffix not in (".yaml", ".yml", ".toml"):
        raise SettingsError(f"{path}: expected a name that ends with .yaml, .yml or .toml")
    try:
        return parse(read_limited(path, _MAX_FILE_BYTES), path.suffix, is_typed=True)
    except OSError as error:
        raise SettingsError(f"{path}: {os.strerror(error.errno or 0)}") from None
    except Unreadable as error:
        raise SettingsError(f"{path}: can't be read: {error}") from None


def _filled(route: Any, environment: Mapping[str, str], who: str) -> Any:
    """Returns a route with the variables of its URLs and transport options filled in."""
    if not isinstance(route, dict):
        return route
    filled = dict(route)
    for end in ("source", "sink"):
        if isinstance(part := route.get(end), dict):
            values = {key: part[key] for key in ("url", "options") if key in part}
            filled[end] = part | {
                key: _substituted(value, environment, f"{who}.{end}.{key}", is_url=key == "url")
                for key, value in values.items()
            }
    return filled


def _substituted(value: Any, environment: Mapping[str, str], where: str, *, is_url: bool) -> Any:
    """Fills variables in; within a URL their values are quoted, a URL that is one variable is taken as it is."""
    if isinstance(value, dict):
        return {key: _substituted(each, environment, f"{where}.{key}", is_url=False) for key, each in value.items()}
    if isinstance(value, list):
        return [_substituted(each, environment, where, is_url=False) for each in value]
    if not isinstance(value, str):
        return value

    def fill(found: re.Match[str]) -> str:
        if found[1] not in environment:
            raise SettingsError(f"{where}: the environment has no {found[1]}; set it")
        given = environment[found[1]]
        return quote(given, safe="") if is_url and found[0] != value else given

    return _VARIABLE.sub(fill, value)


def _who(number: int, route: Any) -> str:
    name = route.get("name") if isinstance(route, dict) else None
    return f"route '{name}'" if isinstance(name, str) else f"route {number + 1}"


def _where(location: tuple[int | str, ...], routes: Any) -> str:
    """Writes where a mistake is: `route 'digits'.source.queue`."""
    if len(location) > 1 and location[0] == "routes" and isinstance(location[1], int) and isinstance(routes, list):
        return ".".join([_who(location[1], routes[location[1]]), *map(str, location[2:])])
    return ".".join(map(str, location)) or "file"


def _text(error: Any) -> str:
    """Writes what is wrong; a value is shown where it can be no secret."""
    if error["type"] == "extra_forbidden":
        return "there is no such field"
    text = str(error["msg"]).removeprefix("Value error, ")
    text = text.replace("valid tuple", "list").replace("Tuple", "the list")
    value, name = error["input"], error["loc"][-1] if error["loc"] else ""
    is_shown = isinstance(value, int | float) or (isinstance(value, str) and name in _SHOWN)
    return f"{text}, got {value!r}" if is_shown or error["type"] == "literal_error" else text
