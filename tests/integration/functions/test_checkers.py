"""Type checkers accept the apps of the documents, of `qinfer new` and of these tests."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qinfer.cli.apps import new
from tests.support.docs.doc_blocks import ROOT, blocks

APPS = ("functions_app.py", "typed_app.py")


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for page in ("functions.md", "develop-models.md"):
        for block in blocks(ROOT / "docs" / "how-to" / page):
            if block.saved_as.endswith(".py"):
                (tmp_path / block.saved_as).write_text(block.code)
    for name in APPS:
        shutil.copy(ROOT / "tests" / "support" / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    new("greet")
    return tmp_path


def check(command: list[str], examples: Path) -> str:
    found = ""
    for folder in (examples, examples / "greet"):  # both have an app.py
        files = sorted(path.name for path in folder.glob("*.py"))
        done = subprocess.run([*command, *files], cwd=folder, capture_output=True, text=True, check=False)
        found += done.stdout + done.stderr if done.returncode else ""
    return found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_mypy_accepts_the_examples(examples: Path) -> None:
    options = ["--cache-dir", str(ROOT / ".mypy_cache" / "examples")]
    options += ["--disallow-any-generics", "--disable-error-code", "import-untyped"]  # scikit-learn has no types

    assert check([sys.executable, "-m", "mypy", *options], examples) == ""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_pyright_accepts_the_examples(examples: Path) -> None:
    pyright = shutil.which("pyright") or pytest.skip(
        "pyright is not installed: pip install pyright, which needs Node.js"
    )

    assert check([pyright, "--pythonpath", sys.executable], examples) == ""
