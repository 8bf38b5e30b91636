"""`scripts/features.toml` gives each source file to one feature."""

from collections import Counter
from pathlib import Path

from scripts.features import FEATURES, ROOT, files_of, lines_of_code, matches, sources


def test_each_source_file_belongs_to_one_feature() -> None:
    times = Counter(path for feature in FEATURES for path in files_of(feature))
    times.update(dict.fromkeys(sources(), 0))

    assert {str(path.relative_to(ROOT)): count for path, count in times.items() if count != 1} == {}


def test_each_entry_of_the_list_matches_a_file() -> None:
    assert [pattern for patterns in FEATURES.values() for pattern in patterns if not matches(pattern)] == []


def test_docstrings_comments_and_blank_lines_are_not_code(tmp_path: Path) -> None:
    python, lua = tmp_path / "a.py", tmp_path / "a.lua"
    python.write_text('"""Docstring.\n\nMore.\n"""\n\n# comment\nx = """text\n# text\n"""  # comment\n')
    lua.write_text("-- comment\n\nlocal x = 1 -- comment\n")

    assert (lines_of_code(python), lines_of_code(lua)) == (3, 1)
