"""Code blocks of README, tutorials and guides are executed by tests/e2e/product/test_docs_run.py, or say why not."""

import ast
import subprocess
from pathlib import Path

import pytest

from tests.support.docs import doc_scenes
from tests.support.docs.doc_blocks import ROOT, Block, blocks, guides

BLOCKS = [block for page in guides() for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.is_shell]


def test_there_is_code_that_runs() -> None:
    """The blocks are found at all."""
    assert sum(block.is_executed for block in BLOCKS) >= 30


def test_each_block_runs_or_says_why_not() -> None:
    """A reason is more than a word; and what is executed or saved has none."""
    assert [block.name for block in BLOCKS if block.not_run and len(block.not_run.split()) < 2] == []
    assert [block.name for block in BLOCKS if block.not_run and (block.first or block.prints or block.saved_as)] == []


def test_tests_that_reasons_name_exist() -> None:
    """A block that is not executed because another test does what it says names one that is there."""
    words = {(block.name, word.strip(",;")) for block in BLOCKS for word in block.not_run.split() if "/" in word}

    assert [(name, word) for name, word in sorted(words) if not (ROOT / word).exists()] == []


def test_code_of_other_languages_is_that_of_the_examples() -> None:
    """Which tests/e2e/product/test_foreign_examples.py compiles and runs."""
    suffixes = {"go": ".go", "java": ".java", "javascript": ".mjs"}
    files = [path for path in (ROOT / "examples" / "clients").rglob("*") if path.suffix in suffixes.values()]
    shown = [block for block in BLOCKS if block.language in suffixes]
    lost = [
        block.name
        for block in shown
        if not any(block.code in path.read_text() for path in files if path.suffix == suffixes[block.language])
    ]

    assert {block.language for block in shown} == suffixes.keys()
    assert lost == []


def test_no_mark_is_lost() -> None:
    """Each comment of these forms is right above a block, where it counts."""
    marks = ("<!-- not run", "<!-- saved as", "<!-- first", "<!-- prints", "<!-- may end early")
    for page in guides():
        written = sum(line.startswith(marks) for line in page.read_text().splitlines())
        found = sum(
            bool(given)
            for block in blocks(page)
            for given in (block.not_run, block.saved_as, block.first, block.prints, block.may_end_early)
        )
        assert found == written, page.name


def test_scenes_are_of_pages() -> None:
    """A page that is gone has left no scene behind."""
    assert set(doc_scenes.SCENES) <= {str(page.relative_to(ROOT)) for page in guides()}


def test_shell_can_be_read() -> None:
    """Each shell block is at least a script, also those that are not executed."""
    for block in SHELL:
        checked = subprocess.run(["bash", "-n"], check=False, input=block.code, capture_output=True, text=True)
        assert checked.returncode == 0, f"{block.name}: {checked.stderr}"


def test_python_can_be_read() -> None:
    """Each Python block is at least a module, also those that become files."""
    for block in BLOCKS:
        if block.language == "python":
            ast.parse(block.code, block.name)


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ("", {"is_executed": True}),
        ("<!-- not run: for a reason -->\n", {"is_executed": False, "not_run": "for a reason"}),
        ("<!-- saved as: a/b.py -->\n", {"is_executed": False, "saved_as": "a/b.py"}),
        ("<!-- first: X=1 -->\n<!-- prints: 7 -->\n", {"is_executed": True, "first": "X=1", "prints": "7"}),
        ("<!-- may end early -->\n", {"is_executed": True, "may_end_early": True}),
        ("<!-- not run: far away -->\n\n", {"is_executed": True, "not_run": ""}),
    ],
)
def test_marks_are_understood(mark: str, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a comment right above a fence says."""
    monkeypatch.setattr(Path, "read_text", lambda _: f"Text.\n\n{mark}```sh\nls\n```\n")
    (block,) = blocks(ROOT / "docs" / "how-to" / "page.md")

    assert isinstance(block, Block)
    assert {name: getattr(block, name) for name in expected} == expected
