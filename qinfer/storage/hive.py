"""Hive partitions: folders such as `country=de/day=2026-11-01` whose names are columns of their files. Pure.

Names and values are percent-decoded, and `__HIVE_DEFAULT_PARTITION__` is null. A column with whole numbers in all files
is numeric, any other is text.
"""

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from qinfer.errors import InvalidRequest

Values = Mapping[str, str | None]
"""Column → its text, in folder order."""

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?[0-9]{1,18}")


def partition_values(url: str) -> Values:
    """Returns a file's partition columns and values; `url` may be its end."""
    found: dict[str, str | None] = {}
    for folder in _folders(url):
        try:
            name, value = (unquote(part, errors="strict") for part in folder.split("=", 1))
        except UnicodeDecodeError:
            raise InvalidRequest(f"a folder of '{url}' is not UTF-8 after percent-decoding; rename it") from None
        if name in found:
            raise InvalidRequest(f"'{url}' is in two folders named '{name}'; rename one")
        found[name] = None if value == _NULL else value
    return found


def partition_folders(url: str) -> Mapping[str, str]:
    """Returns column → folder, as spelled."""
    return {unquote(folder.split("=", 1)[0]): folder for folder in _folders(url)}


def number_columns(files: Iterable[Values]) -> frozenset[str]:
    """Returns the columns with whole numbers in all files."""
    filled, texts = set[str](), set[str]()
    for values in files:
        for name, value in values.items():
            if value is not None:
                filled.add(name)
                if not _INTEGER.fullmatch(value):
                    texts.add(name)
    return frozenset(filled - texts)


def _folders(url: str) -> list[str]:
    return [folder for folder in url.split("/")[:-1] if folder.find("=") > 0]
