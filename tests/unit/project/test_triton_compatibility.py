"""The compatibility page answers every row of the feature table, and another page names tests for each answer."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/reference/triton-compatibility.md"
TESTS = ROOT / "docs/builders/triton-tests.md"
SURFACE = ROOT / "docs/builders/triton-protocol.md"

PROVED = {"supported", "partly", "refused"}
STATUSES = PROVED | {"not yet", "not planned"}
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROW = re.compile(r"^\| (\d+) \|(.*)\|$", re.MULTILINE)
QUOTED = re.compile(r'"([^"]+)"')


class Row(NamedTuple):
    number: int
    feature: str
    status: str
    what: str
    tests: str


def rows() -> list[Row]:
    tests = dict(ROW.findall(TESTS.read_text()))
    return [
        Row(int(number), *[*cells_of(cells), cells_of(tests.get(number, "||"))[1]])
        for number, cells in ROW.findall(PAGE.read_text())
    ]


def cells_of(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")]


@cache
def found_in(path: str) -> dict[str, str]:
    """Returns the tests of a file, by name."""
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {one.name: "\n".join(lines[one.lineno - 1 : one.end_lineno]) for one in functions}


def test_every_feature_is_answered_once() -> None:
    """The numbers are those of the feature table, in its order."""
    table = SURFACE.read_text().partition("## 10. Feature table")[2]

    assert [row.number for row in rows()] == [int(number) for number, _ in ROW.findall(table)]
    assert len(rows()) == 69


def test_every_row_of_tests_is_a_feature() -> None:
    features = {(row.number, row.feature) for row in rows()}

    assert {(int(number), cells_of(row)[0]) for number, row in ROW.findall(TESTS.read_text())} <= features


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.feature)
def test_a_row_is_proved(row: Row) -> None:
    """A status is one of the page's; what works or is refused names tests, and what does not names none."""
    named = TEST.findall(row.tests)

    assert row.status in STATUSES
    assert bool(named) == (row.status in PROVED)
    assert row.what or row.status in ("supported", "not yet", "not planned")
    for path, name in named:
        assert name in found_in(path), f"{path} has no {name}"
    assert len(named) == row.tests.count("::")


@pytest.mark.parametrize("row", [row for row in rows() if row.status == "refused"], ids=lambda row: row.feature)
def test_a_refusal_is_quoted_as_a_test_asserts_it(row: Row) -> None:
    """The words of the refusal, but the name of the setting, are in a test that the row names."""
    (message,) = QUOTED.findall(row.what)
    words = re.sub(r"^'[\w.]+' ", "", message)

    assert any(words in found_in(path)[name] for path, name in TEST.findall(row.tests)), message
