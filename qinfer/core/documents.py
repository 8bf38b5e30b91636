"""Documents that people write, YAML or TOML, read strictly.

Duplicate keys, tags and merge keys in YAML are refused: they hide mistakes, make objects, or fill the memory.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from qinfer.core.wrong_values import explain

_TAG = "tag:yaml.org,2002:"
_SHOWN = 60


class Unreadable(ValueError):
    """The text says where and why."""


class _Strict(yaml.BaseLoader):
    tags = frozenset(_TAG + kind for kind in ("str", "seq", "map"))

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002  (PyYAML's)
        if node.tag not in self.tags:
            raise yaml.constructor.ConstructorError(None, None, f"the tag '{node.tag}' is not read", node.start_mark)
        if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in {"", "~", "null"}:
            return None
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value == "<<" and key.style is None:
                raise yaml.constructor.ConstructorError(None, None, "merge keys (<<) are not read", key.start_mark)
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                what = f"'{key.value[:_SHOWN]}' appears twice"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _StrictTyped(_Strict, yaml.SafeLoader):
    tags = _Strict.tags | {_TAG + kind for kind in ("null", "bool", "int", "float")}


def read_limited(path: Path, most_bytes: int) -> bytes:
    """Returns a file's content, or raises `Unreadable` above `most_bytes`."""
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise Unreadable(f"it is larger than {most_bytes} bytes")
    return data


def parse(data: bytes, suffix: str, *, is_typed: bool) -> Any:
    """Parses UTF-8 as `.toml`, or else YAML, or raises `Unreadable`.

    Without `is_typed` labels of YAML such as `no`, `007` and `2026-01-31` stay texts.
    """
    try:
        text = data.decode("utf-8-sig")
        if suffix == ".toml":
            return tomllib.loads(text)
        return yaml.load(text, _StrictTyped if is_typed else _Strict)  # noqa: S506  (they make no objects)
    except yaml.MarkedYAMLError as error:
        raise Unreadable(_marked(error)) from None
    except (ValueError, KeyError, yaml.YAMLError) as error:
        raise Unreadable(str(error)) from None
    except RecursionError:
        raise Unreadable("its lists and mappings are nested too deep") from None


def problems_of(error: ValidationError) -> Iterator[tuple[str, ErrorDetails]]:
    """Yields each problem's text without its place, and pydantic's details."""
    found = error.errors(include_url=False)
    inner = {item["loc"][0] for item in found if len(item["loc"]) > 1}
    for item in found:
        # pydantic also calls a list with a wrong element too short
        if item["type"] == "too_short" and item["loc"][0] in inner:
            continue
        yield explain(item), item


def _marked(error: yaml.MarkedYAMLError) -> str:
    place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
    remedy = "; indent with spaces" if "'\\t'" in str(error.problem) else ""
    return f"{place}{error.problem}{remedy}"
