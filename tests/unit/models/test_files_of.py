"""Models with a configuration of their own for the files of another model (`qinfer.files_of`)."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from onnx import helper

from qinfer.core.settings import RepositorySettings
from qinfer.errors import ModelNotFound
from qinfer.models.config.config import from_json
from qinfer.models.repository.open import Repositories, open_repositories
from qinfer.models.state import StoredModel
from tests.support import models


def opened(path: Path | str, **settings: object) -> Repositories:
    return open_repositories(RepositorySettings.model_validate({"path": str(path), "gpus": 0, **settings}))


def of(model: str, more: str = "") -> str:
    """Returns a configuration for the files of a model."""
    return f'parameters {{ key: "qinfer.files_of" value {{ string_value: "{model}" }} }} {more}'


def other(repository: Path, config: str, name: str = "quick") -> Path:
    """Writes a model that has nothing but a configuration; returns its directory."""
    directory = repository / name
    directory.mkdir(parents=True)
    (directory / "config.pbtxt").write_text(config)
    return directory


def scanned(repositories: Repositories, name: str = "quick") -> StoredModel:
    return next(model for model in repositories.scan() if model.model == name)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a model of two versions, and labels."""
    root = tmp_path / "models"
    for version in (1, 2):
        nodes = [helper.make_node("Neg", ["x"], ["y"])]
        models.write(root, "digits", nodes, [("x", "FP32", (2,))], [("y", "FP32", (2,))], version=version)
    (root / "digits" / "labels.txt").write_text("cat\ndog\n")
    return root


def test_one_has_versions_and_files_of_the_other_and_its_own_configuration(repository: Path) -> None:
    output = 'output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }'
    other(repository, of("digits", f"max_batch_size: 32 version_policy {{ all {{ }} }} {output}"))
    repositories = opened(repository)

    model = scanned(repositories)

    assert (model.error, model.versions, model.files) == ("", (1, 2), "digits")
    assert model == repositories.read("quick")
    config = from_json(model.config)
    assert (config.name, config.backend, config.max_batch_size) == ("quick", "onnxruntime", 32)
    assert model.labels == {"y": ("cat", "dog")}
    directory = repositories.version_dir(model.files, 2, model.location, model.content_hash)
    assert directory == repository / "digits" / "2"


def test_the_model_itself_is_as_it_was(repository: Path) -> None:
    before = opened(repository).scan()
    other(repository, of("digits"))

    assert [model for model in opened(repository).scan() if model.model == "digits"] == before


def test_new_files_are_seen(repository: Path) -> None:
    """Also where what was read before is known, as it is when the repository is polled."""
    directory = other(repository, of("digits", "version_policy { all { } }"))
    for path in (*directory.rglob("*"), *(repository / "digits").rglob("*.*")):
        os.utime(path, (1, 1))
    repositories = opened(repository)
    before = scanned(repositories)

    (repository / "digits" / "2").rename(repository / "digits" / "3")

    after = scanned(repositories)
    assert (before.versions, after.versions) == ((1, 2), (1, 3))
    assert before.content_hash != after.content_hash


def test_a_model_that_comes_later_is_found(repository: Path) -> None:
    directory = other(repository, of("later"))
    os.utime(directory / "config.pbtxt", (1, 1))
    repositories = opened(repository)
    assert "later" in scanned(repositories).error

    (repository / "digits").rename(repository / "later")
    (repository / "later" / "config.pbtxt").unlink()

    assert scanned(repositories).error == ""


def test_a_configuration_of_the_other_changes_nothing(repository: Path) -> None:
    other(repository, of("digits"))
    before = opened(repository).read("quick")

    with (repository / "digits" / "config.pbtxt").open("a") as file:
        file.write("version_policy { all { } }")

    assert opened(repository).read("quick") == before


def test_they_may_be_in_two_repositories(repository: Path, tmp_path: Path) -> None:
    other(tmp_path / "more", of("digits"))
    repositories = opened(f"{tmp_path / 'more'},{repository}")

    model = scanned(repositories)

    assert (model.error, model.versions) == ("", (2,))
    assert repositories.version_dir(model.files, 2) == repository / "digits" / "2"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nobody", "qinfer.files_of names 'nobody': no model repository has a model of that name"),
        ("../digits", "qinfer.files_of names '../digits': no model repository has a model of that name"),
        ("quick", "qinfer.files_of of model 'quick' names 'quick', which has no versions of its own"),
        ("chain", "qinfer.files_of of model 'quick' names 'chain', which has no versions of its own"),
        ("", "qinfer.files_of names '': no model repository has a model of that name"),
    ],
)
def test_whose_files_can_not_be_used(repository: Path, name: str, why: str) -> None:
    other(repository, of(name))
    other(repository, of("digits"), "chain")

    assert why in scanned(opened(repository)).error


def test_a_model_that_several_repositories_have(repository: Path, tmp_path: Path) -> None:
    models.add_sub(tmp_path / "more", "digits")
    other(repository, of("digits"))

    error = scanned(opened(f"{repository},{tmp_path / 'more'}")).error
    assert "names 'digits': model appears in two or more repositories" in error


def test_versions_are_either_its_own_or_the_others(repository: Path) -> None:
    models.add_sub(repository, "quick")
    (repository / "quick" / "config.pbtxt").write_text(of("digits"))

    error = scanned(opened(repository)).error

    assert error == "model 'quick' has a version 1 of its own, and qinfer.files_of 'digits'; remove one of both"


def override(**fields: Any) -> str:
    return json.dumps({"parameters": {"qinfer.files_of": {"string_value": "digits"}}, **fields})


def test_a_configuration_of_a_load_request_needs_no_directory(repository: Path) -> None:
    repositories = opened(repository)

    model = repositories.read("quick", override(max_batch_size=32))

    assert (model.error, model.versions, model.files) == ("", (2,), "digits")
    assert from_json(model.config).max_batch_size == 32


@pytest.mark.parametrize("config", ["", "{", '{"backend": "onnxruntime"}'])
def test_without_such_a_configuration_an_unknown_name_stays_one(repository: Path, config: str) -> None:
    with pytest.raises(ModelNotFound, match="no model repository has a model 'quick'"):
        opened(repository).read("quick", config)


def test_files_of_a_load_request_are_its_own(repository: Path, tmp_path: Path) -> None:
    repositories = opened(repository, overlay=str(tmp_path / "overlay"))
    location = repositories.put_files("quick", {"7/model.onnx": b"x"})

    assert "has a version 7 of its own" in repositories.read("quick", override(), location).error


@pytest.fixture
def memory() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def test_remote_files_are_copied_once(repository: Path, tmp_path: Path, memory: Any) -> None:
    other(repository, of("digits", "max_batch_size: 32"))
    for path in repository.rglob("*.*"):
        memory.pipe_file(f"/models/{path.relative_to(repository)}", path.read_bytes())
    repositories = opened("memory://models", cache_dir=str(tmp_path / "cache"))
    quick, digits = scanned(repositories), scanned(repositories, "digits")

    ours = repositories.version_dir(quick.files, 2, quick.location, quick.content_hash)
    theirs = repositories.version_dir(digits.files, 2, digits.location, digits.content_hash)

    assert quick.content_hash != digits.content_hash
    assert ours.resolve() == theirs.resolve()
    assert (ours / "model.onnx").is_file()
