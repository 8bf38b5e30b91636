"""Names the tests of manifests, tools and documents whose files have not changed; `scripts/test` leaves them out.

Tests of code always run, as cheap tests do. Every test runs where `CI` is set, and where git can't tell the changes.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MAIN = ("origin/main", "main")


class Subject(NamedTuple):
    """Tests, and what the paths of the files begin with that they check; they check themselves, too."""

    tests: tuple[str, ...]
    files: tuple[str, ...]


_PACKAGING = ("pyproject.toml", "requirements/", "scripts/", "deploy/docker/", "Makefile")
SUBJECTS = {
    "manifests": Subject(
        ("tests/unit/deploy/", "tests/integration/deploy/"),
        (
            *_PACKAGING,
            *("deploy/", "docker-compose.yml", ".dockerignore", ".github/", "docs/", "tests/data/", "tests/support/"),
            *("qinfer/cli/", "qinfer/core/", "qinfer/observe/", "qinfer/errors.py", "qinfer/jobs/job.py"),
            *("qinfer/queue/keys.py", "api/qinfer_api/scaling.py", "workers/qinfer_workers/bridge/config.py"),
        ),
    ),
    "tools": Subject(
        (
            "tests/e2e/product/test_benchmark_visits.py",
            "tests/e2e/product/test_demo.py",
            "tests/unit/project/test_benchmark_callers.py",
            "tests/unit/project/test_benchmarks.py",
            "tests/unit/project/test_clean_room.py",
            "tests/unit/project/test_containers.py",
            "tests/unit/project/test_pins.py",
        ),
        (*_PACKAGING, "benchmarks/", "examples/", "docs/how-to/install.md", ".github/"),
    ),
    "documents": Subject(
        (
            "tests/e2e/product/test_first_answer.py",
            "tests/unit/project/test_docs_blocks.py",
            "tests/unit/project/test_docs_site.py",
        ),
        (*_PACKAGING, "README.md", "docs/", "mkdocs.yml", "examples/", "qinfer/cli/", "tests/support/docs/"),
    ),
}


def unchanged(changed: Iterable[str]) -> list[str]:
    """Returns the subjects that none of the changed files belongs to."""
    paths = list(changed)
    return [
        name
        for name, subject in SUBJECTS.items()
        if not any(path.startswith(subject.files + subject.tests) for path in paths)
    ]


def changed_files(root: Path = ROOT) -> set[str]:
    """Returns the files that differ from the main branch, where this one left it; none if git can't tell."""
    bases = (_git(root, "merge-base", "HEAD", main) for main in MAIN)
    base = next((found[0] for found in bases if found), "")
    if not base:
        return set()
    tracked = _git(root, "diff", "--name-only", "--no-renames", base)
    return {*tracked, *_git(root, "ls-files", "--others", "--exclude-standard")}


def _git(root: Path, *words: str) -> list[str]:
    found = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return found.stdout.splitlines() if found.returncode == 0 else []


def main() -> None:
    """Prints pytest's options, and on the error output which tests are left out."""
    changed = set() if os.environ.get("CI") else changed_files()
    names = unchanged(changed) if changed else []
    sys.stderr.write(f"tests left out, because their files have not changed: {', '.join(names) or 'none'}\n")
    for path in (path for name in names for path in SUBJECTS[name].tests):
        sys.stdout.write(f"--ignore={path.rstrip('/')}\n")


if __name__ == "__main__":
    main()
