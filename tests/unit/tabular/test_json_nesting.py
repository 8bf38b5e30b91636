"""The nesting of JSON lines: found wherever blocks are cut, whatever is in strings."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.tabular.text_rows import NESTING_LIMIT, Nesting

TEXTS = st.text('[]{}"\\a\n', max_size=8)
VALUES = st.recursive(
    st.none() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=9,
)


def is_refused(text: bytes, block_bytes: int) -> bool:
    nesting = Nesting()
    try:
        for start in range(0, len(text), block_bytes):
            nesting.check(text[start : start + block_bytes])
    except ValueError:
        return True
    return False


def deep(value: Any, levels: int) -> bytes:
    """Writes a value within so many arrays and objects."""
    text = json.dumps(value)
    for level in range(levels):
        text = f"[{text}]" if level % 2 else f'{{"}}]": {text}}}'
    return text.encode() + b"\n"


@given(before=st.lists(VALUES, max_size=4), text=TEXTS, block_bytes=st.integers(1, 50))
def test_what_is_too_deep_is_refused_wherever_it_is_cut(before: list[Any], text: str, block_bytes: int) -> None:
    """Lines before it and what strings hold count for nothing."""
    lines = b"".join(json.dumps(value).encode() + b"\n" for value in before)

    assert not is_refused(lines + deep(text, NESTING_LIMIT) + lines, block_bytes)
    assert is_refused(lines + deep(text, 2 * NESTING_LIMIT + 1) + lines, block_bytes)


@pytest.mark.parametrize(
    "text", [b"[" * 200_000, b"[" * 200_000 + b"]" * 200_000, b"[\n" * 200_000, b'{"a":' * 200_000]
)
def test_what_is_never_closed_is_refused(text: bytes) -> None:
    """And what is, at once."""
    assert is_refused(text, 2**20)
