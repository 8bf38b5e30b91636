"""Declarations of endpoints in files."""

from pathlib import Path

import pytest

from qinfer.errors import SettingsError
from qinfer.traffic.endpoints import read_directory, read_file

YAML = """
targets:
  - {model: digits, version: 3, role: stable}
  - model: digits
    version: latest
    weight: 0.1
    when: [{tenant: testers}, {headers: {x-beta: "1"}}]
sticky: header:x-user-id
"""
JSON = '{"name": "other", "targets": [{"model": "digits", "version": 3, "role": "stable"}]}'
TOML = '[[targets]]\nmodel = "digits"\nversion = 3\nrole = "stable"\n'


def test_each_file_is_an_endpoint(tmp_path: Path) -> None:
    """By its own name, or that of the file; other files are left alone."""
    for name, text in {"reader.yaml": YAML, "a.json": JSON, "b.toml": TOML, "README.md": "#"}.items():
        (tmp_path / name).write_text(text)

    endpoints = read_directory(tmp_path)

    assert [endpoint.name for endpoint in endpoints] == ["other", "b", "reader"]
    assert [target.label for target in endpoints[2].targets] == ["digits:3", "digits:latest"]
    assert len({endpoint.file for endpoint in endpoints}) == 3


def test_a_file_that_says_the_same_has_the_same_digest(tmp_path: Path) -> None:
    """Whatever its comments; another weight is another digest."""
    path = tmp_path / "e.yaml"
    path.write_text(YAML)
    first = read_file(path)
    path.write_text(f"# a comment\n{YAML}")
    assert read_file(path) == first
    path.write_text(YAML.replace("0.1", "0.2"))
    assert read_file(path).file != first.file


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("targets: [", "line 1: expected the node content"),
        ("targets: []", "one target must have the role stable, not 0"),
        ("- a", "this is no declaration of an endpoint"),
        ("targets: 1\ntargets: 2", "'targets' appears twice"),
    ],
)
def test_what_is_wrong_names_the_file(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "wrong.yaml").write_text(text)

    with pytest.raises(SettingsError, match=r"wrong\.yaml") as raised:
        read_directory(tmp_path)
    assert reason in raised.value.message


def test_two_files_of_one_endpoint_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(TOML)
    (tmp_path / "a.json").write_text(JSON)

    with pytest.raises(SettingsError, match=r"'a\.json' and 'other\.toml' declare the endpoint 'other'"):
        read_directory(tmp_path)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="none' can't be read: No such file or directory"):
        read_directory(tmp_path / "none")
