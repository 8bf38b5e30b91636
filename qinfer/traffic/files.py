"""Declarations of endpoints in files: one file, YAML, TOML or JSON, is one endpoint."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from qinfer.core.documents import Unreadable, parse, read_limited
from qinfer.errors import InvalidRequest, SettingsError
from qinfer.traffic.endpoints import Endpoint, read_endpoint

SUFFIXES = (".yaml", ".yml", ".json", ".toml")
_MAX_BYTES = 2**20
_DIGITS = 16


def read_directory(directory: str | Path) -> list[Endpoint]:
    """Reads a directory's declarations by name, or raises `SettingsError`."""
    try:
        paths = sorted(path for path in Path(directory).iterdir() if path.suffix in SUFFIXES)
    except OSError as error:
        raise SettingsError(f"the directory of endpoints '{directory}' can't be read: {error.strerror}") from None
    found: dict[str, Path] = {}
    endpoints = []
    for path in paths:
        endpoint = read_file(path)
        if endpoint.name in found:
            both = f"'{found[endpoint.name].name}' and '{path.name}'"
            raise SettingsError(f"{both} declare the endpoint '{endpoint.name}'; keep one of them")
        found[endpoint.name] = path
        endpoints.append(endpoint)
    return endpoints


def read_file(path: Path) -> Endpoint:
    """Reads a file, and adds the digest of its content."""
    try:
        document: Any = parse(read_limited(path, _MAX_BYTES), path.suffix, is_typed=True)
        named = {"name": path.stem, **document} if isinstance(document, dict) else document
        endpoint = read_endpoint(named)
    except OSError as error:
        raise SettingsError(f"the file '{path}' can't be read: {error.strerror}") from None
    except Unreadable as error:
        raise SettingsError(f"the file '{path}': {error}") from None
    except InvalidRequest as error:
        raise SettingsError(f"the file '{path}': {error.message}") from None
    digest = hashlib.sha256(msgspec.json.encode(endpoint)).hexdigest()
    return msgspec.structs.replace(endpoint, file=digest[:_DIGITS])
