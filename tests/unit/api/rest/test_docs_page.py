"""The files of `/docs` are those of the package that `SOURCE.json` names, with its licence."""

import hashlib
import json
from typing import Any

import pytest

from scripts.swagger_ui import COMPRESSED, LICENCES, SOURCE, TARGET, content_of, integrity_of

NAMED: dict[str, Any] = json.loads(SOURCE.read_text())


@pytest.mark.parametrize("name", [*COMPRESSED, *LICENCES])
def test_a_file_has_its_hash(name: str) -> None:
    assert hashlib.sha256(content_of(name)).hexdigest() == NAMED["files"][name]


def test_every_file_of_others_is_named() -> None:
    """Ours are the page and its start."""
    found = {path.name.removesuffix(".gz") for path in TARGET.iterdir()}

    assert found == {*NAMED["files"], "SOURCE.json", "index.html", "start.js"}


def test_an_archive_is_hashed_as_npm_does() -> None:
    """Of no bytes, as https://www.w3.org/TR/SRI/ does."""
    empty = "sha512-z4PhNX7vuL3xVChQ1m2AB9Yg5AULVxXcg/SpIdNs6c5H0NE8XYXysP+DGNKHfuwvY7kxvUdBeoGlODJ6+SfaPg=="

    assert integrity_of(b"") == empty
