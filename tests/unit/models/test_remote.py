"""URLs of repositories, the parts of remote files that are read, and a repository in fsspec's own memory."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from qinfer.core.settings import RepositorySettings
from qinfer.errors import ModelLoadFailed, SettingsError
from qinfer.models.config.file_tensors import read_onnx
from qinfer.models.repository import files as ranges
from qinfer.models.repository.files import Ranges, RemoteFiles, TooFarSpreadError, place_of
from qinfer.models.repository.open import Repositories, open_repositories
from qinfer.storage.store import ANSWER_TIMEOUT_S
from tests.support import models


@pytest.mark.parametrize(
    ("url", "opened", "options", "shown"),
    [
        ("s3://bucket/models", "s3://bucket/models", {}, "s3://bucket/models"),
        ("gs://bucket/models", "gs://bucket/models", {}, "gs://bucket/models"),
        ("az://container/models", "az://container/models", {}, "az://container/models"),
        ("as://account/container/m", "az://container/m", {"account_name": "account"}, "as://account/container/m"),
        ("s3://host:9000/b/m", "s3://b/m", {"endpoint_url": "http://host:9000"}, "s3://host:9000/b/m"),
        ("s3://https://host:9000/b", "s3://b", {"endpoint_url": "https://host:9000"}, "s3://https://host:9000/b"),
        ("s3://http://host/b/m", "s3://b/m", {"endpoint_url": "http://host"}, "s3://http://host/b/m"),
        ("ftp://user:secret@host/m?token=secret", "ftp://user:secret@host/m?token=secret", {}, "ftp://host/m"),
    ],
)
def test_urls(url: str, opened: str, options: dict[str, str], shown: str) -> None:
    """Triton's spellings are understood, and secrets are not shown."""
    place = place_of(url)

    assert (place.url, place.shown) == (opened, shown)
    assert place.options == options


@pytest.mark.parametrize("url", ["as://account", "as:///container/x", "as://account//"])
def test_an_azure_url_needs_its_parts(url: str) -> None:
    """The message shows them."""
    with pytest.raises(SettingsError, match="must be as://<account>/<container>/<path>"):
        RemoteFiles(url)


def test_an_unknown_kind_of_url() -> None:
    """The message names those that are known."""
    with pytest.raises(SettingsError, match="'foo://x' has a URL of an unknown kind; use a directory, s3://, gs://"):
        open_repositories(RepositorySettings(path="foo://x"))


@pytest.mark.parametrize("url", ["s3://me:geheim@host:9000/bucket", "s3://https://me:geheim@host/b"])
def test_a_password_in_the_url_is_refused(url: str) -> None:
    """And not repeated."""
    with pytest.raises(SettingsError, match="no password in its URL") as caught:
        place_of(url)

    assert "geheim" not in caught.value.message


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("s3://bucket/models", r"pip install 'qinfer-ml\[s3\]'"),
        ("gs://bucket/models", r"pip install 'qinfer-ml\[gcs\]'"),
        ("az://container/models", r"pip install 'qinfer-ml\[azure\]'"),
        ("as://account/container/models", r"pip install 'qinfer-ml\[azure\]'"),
    ],
)
def test_a_missing_driver_is_named(url: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    for module in ("s3fs", "gcsfs", "gcsfs.core", "adlfs"):
        monkeypatch.setitem(sys.modules, module, None)
    for protocol in ("s3", "az"):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)

    with pytest.raises(SettingsError, match=f"needs a driver; {remedy}"):
        RemoteFiles(url)


class Driver:
    """A driver that fails."""

    async_impl = True

    def __init__(self, error: Exception) -> None:
        self._error = error

    def invalidate_cache(self) -> None:
        pass

    def _strip_protocol(self, url: str) -> str:
        return url.partition("://")[2]

    def find(self, *_: Any, **options: Any) -> None:
        assert options["timeout"] == ANSWER_TIMEOUT_S
        raise self._error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            PermissionError("Access Denied"),
            "PermissionError: Access Denied; each gateway and each worker needs credentials of its own",
        ),
        (RuntimeError("line\nline"), "RuntimeError: line line"),
        (TimeoutError(), "TimeoutError: no answer within 60 s; are there credentials"),
    ],
)
def test_what_a_driver_raises(
    error: Exception,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """Operators see the reason and the URL; clients see neither."""
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *_, **__: (Driver(error), "bucket/models"))
    repositories = open_repositories(RepositorySettings(path="az://bucket/models", cache_dir=str(tmp_path)))

    with pytest.raises(SettingsError, match=f"^model repository 'az://bucket/models' can't be read: {reason}"):
        repositories.scan()
    with pytest.raises(ModelLoadFailed, match=r"'m' can't be reached now; the server's log says why$"):
        repositories.read("m")
    with pytest.raises(ModelLoadFailed, match=r"^the files of model 'm' can't be reached now"):
        repositories.version_dir("m", 1)
    assert caplog.messages == ["model repository can't be used"] * 2


class Prefixes:
    """A driver that lists all names with the prefix that was asked for."""

    async_impl = False

    def invalidate_cache(self) -> None:
        pass

    def _strip_protocol(self, url: str) -> str:
        return url.partition("://")[2]

    def find(self, root: str, **_: Any) -> dict[str, dict[str, Any]]:
        names = (
            "bucket/models/m/1/model.py",
            "bucket/models/m2/1/model.py",
            "bucket/models/m",
            "bucket/models/m/1/../x",
        )
        return {name: {"type": "file", "size": 1, "etag": "a"} for name in names if name.startswith(root)}


def test_a_model_is_not_another_whose_name_begins_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And keys that would lead out of a copy are left out."""
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *_, **__: (Prefixes(), "bucket/models/"))

    listing = RemoteFiles("az://bucket/models").listing("m")

    assert listing is not None
    assert list(listing.files) == ["1/model.py"]


def test_ranges_are_the_bytes() -> None:
    """Whatever part is taken of whatever part."""
    content = os.urandom(3 * ranges.PAGE_BYTES + 17)
    blob = Ranges(lambda begin, end: content[begin:end], len(content))
    view = memoryview(content)
    edge = ranges.PAGE_BYTES

    for begin, end in ((0, 0), (0, 10), (edge - 3, edge + 3), (5, 2 * edge + 5), (len(content) - 4, len(content) + 9)):
        part = blob[begin:end]
        assert part.tobytes() == view[begin:end].tobytes()
        assert part[2:-1].tobytes() == view[begin:end][2:-1].tobytes()
        assert [part[i] for i in range(min(len(part), 4))] == list(view[begin:end][:4])
    with pytest.raises(IndexError):
        blob[10:20][10]


def test_weights_are_not_fetched(tmp_path: Path) -> None:
    """Of a model file of 32 MiB, less than a tenth is read."""
    path = models.weighty(tmp_path, 32 * 2**20)
    content = path.read_bytes()
    fetched = 0

    def fetch(begin: int, end: int) -> bytes:
        nonlocal fetched
        fetched += end - begin
        return content[begin:end]

    found = read_onnx(Ranges(fetch, len(content)), "model.onnx")

    assert found == read_onnx(memoryview(content), "model.onnx")
    assert [t.name for t in found.inputs] == ["x"]
    assert fetched < len(content) // 10


def test_ranges_give_up() -> None:
    """A file that is read nearly whole would better be fetched."""
    blob = Ranges(lambda begin, end: bytes(end - begin), (ranges.MAX_PAGES + 1) * ranges.PAGE_BYTES)

    with pytest.raises(TooFarSpreadError):
        blob.tobytes()


@pytest.fixture
def memory() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def opened(cache: Path) -> Repositories:
    return open_repositories(RepositorySettings(path="memory://models", gpus=0, cache_dir=str(cache)))


def test_what_is_no_model_is_left_out(tmp_path: Path, memory: Any) -> None:
    """Files beside models, hidden directories, and keys that would lead out of a copy."""
    models.add_sub(tmp_path)
    content = (tmp_path / "add_sub" / "1" / "model.onnx").read_bytes()
    for path in ("m/1/model.onnx", "m/1/__pycache__/x.pyc", ".git/1/model.onnx", "README.md", "m2/1/model.onnx"):
        memory.pipe_file(f"/models/{path}", content)
    repositories = opened(tmp_path / "cache")

    assert repositories.names() == ["m", "m2"]
    assert [(m.model, m.error) for m in repositories.scan()] == [("m", ""), ("m2", "")]
    directory = repositories.version_dir("m", 1)
    assert sorted(p.name for p in directory.iterdir()) == ["model.onnx"]


def test_an_unchanged_model_is_read_once(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Polling lists, and reads what is new; a model that is gone is forgotten."""
    reads: list[str] = []
    original = RemoteFiles.read

    def read(self: RemoteFiles, path: str, limit_bytes: int) -> bytes:
        reads.append(path)
        return original(self, path, limit_bytes)

    monkeypatch.setattr(RemoteFiles, "read", read)
    for name in ("a", "b"):
        models.add_sub(tmp_path, name)
        for file in (tmp_path / name).rglob("*.*"):
            memory.pipe_file(f"/models/{file.relative_to(tmp_path)}", file.read_bytes())
    repositories = opened(tmp_path / "cache")

    first = repositories.scan()
    assert len(reads) == 4
    assert repositories.scan() == first
    assert len(reads) == 4

    memory.pipe_file("/models/a/config.pbtxt", b"max_batch_size: 2")
    memory.rm("/models/b", recursive=True)
    (changed,) = repositories.scan()
    assert changed.content_hash != first[0].content_hash
    assert len(reads) == 6


def test_a_chain_of_drivers_is_a_repository(tmp_path: Path) -> None:
    models.add_sub(tmp_path / "models", "m")
    shutil.make_archive(str(tmp_path / "x"), "zip", tmp_path, "models")
    url = f"zip://models::file://{tmp_path}/x.zip"

    repositories = open_repositories(RepositorySettings(path=url, gpus=0, cache_dir=str(tmp_path / "cache")))

    assert [(m.model, m.error) for m in repositories.scan()] == [("m", "")]
    assert sorted(p.name for p in repositories.version_dir("m", 1).iterdir()) == ["model.onnx"]
