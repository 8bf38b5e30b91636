"""The tests that `scripts/test` leaves out: those of manifests, tools and documents, if nothing of theirs changed."""

import subprocess
from pathlib import Path

import pytest

from scripts import unchanged_tests
from scripts.unchanged_tests import ROOT, SUBJECTS, changed_files, unchanged


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A branch with one commit beside its main branch."""
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path, "first.py")
    git(tmp_path, "switch", "--quiet", "--create", "other")
    commit(tmp_path, "committed.py")
    return tmp_path


def git(directory: Path, *words: str) -> None:
    who = ("-c", "user.name=n", "-c", "user.email=e@localhost")
    subprocess.run(["git", *who, *words], cwd=directory, check=True, capture_output=True)


def commit(directory: Path, name: str) -> None:
    (directory / name).write_text(name)
    git(directory, "add", name)
    git(directory, "commit", "--quiet", "--message", name)


def options(capsys: pytest.CaptureFixture[str]) -> list[str]:
    unchanged_tests.main()
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("changed", "left_out"),
    [
        ("qinfer/queue/lanes.py", ["manifests", "tools", "documents"]),
        ("deploy/prometheus/rules/alerts.yml", ["tools", "documents"]),
        ("tests/unit/deploy/test_chart.py", ["tools", "documents"]),
        ("benchmarks/report.py", ["manifests", "documents"]),
        ("README.md", ["manifests", "tools"]),
        ("pyproject.toml", []),
    ],
)
def test_subjects_without_a_changed_file_are_left_out(changed: str, left_out: list[str]) -> None:
    assert unchanged(["qinfer/batching/policy.py", changed]) == left_out


def test_tests_and_files_of_subjects_exist() -> None:
    paths = [path for subject in SUBJECTS.values() for path in (*subject.tests, *subject.files)]

    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_changes_are_those_of_the_branch_and_of_the_tree(checkout: Path) -> None:
    (checkout / "first.py").write_text("edited")
    (checkout / "untracked.py").touch()

    assert changed_files(checkout) == {"committed.py", "first.py", "untracked.py"}


def test_a_commit_of_the_main_branch_is_no_change_of_another(checkout: Path) -> None:
    git(checkout, "switch", "--quiet", "main")
    commit(checkout, "later.py")
    git(checkout, "switch", "--quiet", "other")

    assert changed_files(checkout) == {"committed.py"}


def test_every_test_runs_if_the_main_branch_is_unknown(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    git(checkout, "branch", "--quiet", "--delete", "--force", "main")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(unchanged_tests, "changed_files", lambda: changed_files(checkout))

    assert options(capsys) == []


def test_every_test_runs_in_continuous_integration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unchanged_tests, "changed_files", lambda: {"qinfer/queue/lanes.py"})
    monkeypatch.delenv("CI", raising=False)
    assert "--ignore=tests/unit/deploy" in options(capsys)

    monkeypatch.setenv("CI", "true")

    assert options(capsys) == []
