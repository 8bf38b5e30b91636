"""YAML and TOML as people type them: what hides a mistake is refused, and what fills the memory."""

from typing import Any

import pytest

from qinfer.core.documents import Unreadable, parse


@pytest.mark.parametrize(
    ("text", "typed", "plain"),
    [
        ("x: 007", {"x": 7}, {"x": "007"}),
        ("x: 3", {"x": 3}, {"x": "3"}),
        ("x: no", {"x": False}, {"x": "no"}),
        ("x: 1.5", {"x": 1.5}, {"x": "1.5"}),
        ("x: [a, ~]", {"x": ["a", None]}, {"x": ["a", None]}),
        ("a: &a {b: c}\nd: *a", {"a": {"b": "c"}, "d": {"b": "c"}}, {"a": {"b": "c"}, "d": {"b": "c"}}),
        ("\ufeffx: y", {"x": "y"}, {"x": "y"}),
    ],
)
def test_values_are_typed_or_text(text: str, typed: Any, plain: Any) -> None:
    assert parse(text.encode(), ".yaml", is_typed=True) == typed
    assert parse(text.encode(), ".yaml", is_typed=False) == plain


@pytest.mark.parametrize("is_typed", [True, False])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x: 1\ny: 2\nx: 3", "line 3: 'x' appears twice"),
        ("a: &a {b: c}\nd: {<<: *a}", "line 2: merge keys"),
        ("x: !!python/object/apply:os.getcwd []", "the tag"),
        ("x: !!bool x", "'x'|tag"),
        ("x:\n\t- 1", "indent with spaces"),
        ("[" * 5000, "nested too deep"),
        ("x: [", "line 1"),
    ],
)
def test_what_is_refused(text: str, problem: str, *, is_typed: bool) -> None:
    with pytest.raises(Unreadable, match=problem):
        parse(text.encode(), ".yaml", is_typed=is_typed)


def test_toml_and_bytes() -> None:
    assert parse(b"x = 1", ".toml", is_typed=False) == {"x": 1}
    with pytest.raises(Unreadable):
        parse(b"x = ", ".toml", is_typed=False)
    with pytest.raises(Unreadable):
        parse(b"\xff", ".yaml", is_typed=True)
