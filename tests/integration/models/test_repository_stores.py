"""Model repositories on real object stores: moto's server for S3, azurite for Azure, fake-gcs-server for Google."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from qinfer.core.settings import RepositorySettings
from qinfer.errors import ModelLoadFailed, ModelNotFound, SettingsError
from qinfer.models.config.config import from_json
from qinfer.models.repository.open import Repositories, open_repositories
from tests.support import models
from tests.support.servers import object_stores
from tests.support.servers.object_stores import ObjectStore
from tests.support.servers.servers import matrix

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp, of adlfs


@pytest.fixture(scope="module")
def s3() -> Iterator[ObjectStore]:
    with object_stores.s3() as store:
        yield store


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    if not object_stores.AZURITE.exists():
        pytest.skip(object_stores.NO_AZURITE)
    with object_stores.azure(tmp_path_factory.mktemp("azurite")) as store:
        yield store


@pytest.fixture(scope="module")
def gcs() -> Iterator[ObjectStore]:
    with object_stores.gcs() as store:
        yield store


@pytest.fixture(params=["s3", *matrix("azure", "gcs")])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    found: ObjectStore = request.getfixturevalue(request.param)
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "STORAGE_")):
            monkeypatch.delenv(name)
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})  # FSSPEC_GCS_TOKEN, which it reads once
    return found


@pytest.fixture
def repository(store: ObjectStore, tmp_path: Path) -> str:
    """The URL of a repository with two models, of its own for each test."""
    models.add_sub(tmp_path / "models")
    models.greet(tmp_path / "models")
    (tmp_path / "models" / "add_sub" / "warmup").mkdir()
    (tmp_path / "models" / "add_sub" / "warmup" / "x.bin").write_bytes(bytes(16))
    return store.upload(tmp_path / "models", tmp_path.name)


def opened(url: str, tmp_path: Path, **settings: object) -> Repositories:
    fields = {"path": url, "gpus": 0, "cache_dir": str(tmp_path / "cache"), **settings}
    return open_repositories(RepositorySettings.model_validate(fields))


def test_a_repository_is_read_and_copied(repository: str, tmp_path: Path) -> None:
    """Names, models, completion, and the files that a worker loads."""
    repositories = opened(repository, tmp_path)

    assert repositories.names() == ["add_sub", "greet"]
    found = repositories.scan()
    assert [(m.model, m.versions, m.error) for m in found] == [("add_sub", (1,), ""), ("greet", (1,), "")]
    assert repositories.read("add_sub") == found[0]
    directory = repositories.version_dir("add_sub", 1, content_hash=found[0].content_hash)
    original = tmp_path / "models" / "add_sub"
    assert (directory / "model.onnx").read_bytes() == (original / "1" / "model.onnx").read_bytes()
    assert (directory.parent / "warmup" / "x.bin").read_bytes() == bytes(16)


def test_changes_are_noticed(store: ObjectStore, repository: str, tmp_path: Path) -> None:
    """Of a configuration, of a file of the same size, of a version; and what did not change keeps its hash."""
    repositories = opened(repository, tmp_path)
    content = (tmp_path / "models" / "add_sub" / "1" / "model.onnx").read_bytes()
    before: dict[str, str] = {}

    def changed() -> list[str]:
        now = {model.model: model.content_hash for model in repositories.scan()}
        names = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
        before.clear()
        before.update(now)
        return names

    assert changed() == ["add_sub", "greet"]
    assert changed() == []
    store.put(f"{tmp_path.name}/add_sub/config.pbtxt", b"max_batch_size: 2")
    assert changed() == ["add_sub"]
    store.put(f"{tmp_path.name}/add_sub/1/model.onnx", content.replace(b"add_sub", b"sub_add"))
    assert changed() == ["add_sub"]
    store.put(f"{tmp_path.name}/add_sub/2/model.onnx", content)
    assert changed() == ["add_sub"]
    assert repositories.read("add_sub").versions == (2,)
    store.remove(f"{tmp_path.name}/greet/config.pbtxt")
    store.remove(f"{tmp_path.name}/greet/1/model.onnx")
    assert changed() == ["greet"]
    assert repositories.names() == ["add_sub"]


def test_an_overlay(store: ObjectStore, repository: str, tmp_path: Path) -> None:
    """Files of a load request reach every worker."""
    repositories = opened(repository, tmp_path, overlay=f"{store.url}/overlay-{tmp_path.name}")
    content = (tmp_path / "models" / "greet" / "1" / "model.onnx").read_bytes()

    location = repositories.put_files("fresh", {"7/model.onnx": content})
    model = repositories.read("fresh", json.dumps({"max_batch_size": "2"}), location)

    assert (model.versions, model.error, model.location) == ((7,), "", location)
    assert (repositories.version_dir("fresh", 7, location) / "model.onnx").read_bytes() == content
    repositories.drop_files(location)
    with pytest.raises(ModelNotFound):
        repositories.read("fresh", "", location)


def test_large_files_are_looked_at_by_ranges(store: ObjectStore, tmp_path: Path) -> None:
    """A model without configuration is completed, wherever its weights are."""
    path = models.weighty(tmp_path, 12 * 2**20)
    store.put(f"{tmp_path.name}/m/1/model.onnx", path.read_bytes())

    (model,) = opened(f"{store.url}/{tmp_path.name}", tmp_path).scan()

    assert model.error == ""
    assert model.config
    assert [i.name for i in from_json(model.config).input] == ["x"]


def test_what_is_not_there(store: ObjectStore, tmp_path: Path) -> None:
    """An empty or misspelt URL would unload every model, and is refused."""
    scheme = store.url.partition("://")[0]
    for url in (f"{store.url}/nothing", f"{scheme}://no-such-bucket/models"):
        repositories = opened(url, tmp_path)
        for read in (repositories.names, repositories.scan):
            with pytest.raises(SettingsError, match=f"model repository '{url}' can't be read: there is no such bucket"):
                read()
        with pytest.raises(ModelNotFound):
            repositories.read("m")
        with pytest.raises(ModelLoadFailed, match="version 1 of model 'm' is not in the model repository"):
            repositories.version_dir("m", 1)


def test_tritons_url_of_an_s3_server(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`s3://host:port/bucket/path` needs no variable for the endpoint."""
    models.add_sub(tmp_path / "models")
    s3.upload(tmp_path / "models", tmp_path.name)
    for name, value in s3.environment.items():
        if name != "AWS_ENDPOINT_URL":
            monkeypatch.setenv(name, value)
    host = s3.environment["AWS_ENDPOINT_URL"].removeprefix("http://")

    for url in (f"s3://{host}/models/{tmp_path.name}", f"s3://http://{host}/models/{tmp_path.name}"):
        assert opened(url, tmp_path).names() == ["add_sub"]


def test_an_s3_server_that_is_not_there(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error for operators, soon; and one without an address for clients."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    repositories = opened("s3://models/x", tmp_path)

    with pytest.raises(SettingsError, match="model repository 's3://models/x' can't be read: EndpointConnectionError"):
        repositories.scan()
    with pytest.raises(ModelLoadFailed, match=r"^the files of model 'm' can't be reached now; [^/]*$"):
        repositories.version_dir("m", 1)


def test_an_s3_repository_and_a_local_one(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Side by side."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    models.add_sub(tmp_path / "remote")
    models.add_sub(tmp_path / "local", "here")
    url = s3.upload(tmp_path / "remote", tmp_path.name)
    repositories = opened(f"{tmp_path / 'local'},{url}", tmp_path)

    assert [(m.model, m.error) for m in repositories.scan()] == [("add_sub", ""), ("here", "")]
    assert repositories.version_dir("here", 1) == tmp_path / "local" / "here" / "1"
    assert (repositories.version_dir("add_sub", 1) / "model.onnx").is_file()
