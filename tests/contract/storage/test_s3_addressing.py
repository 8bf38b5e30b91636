"""How requests to S3 name the bucket: in the path, or in the name of the host, as `AWS_S3_ADDRESSING_STYLE` says.

The server is found at `localhost`, for an address has no names below it; `*.localhost` is resolved here.
"""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qinfer.core.settings import RepositorySettings
from qinfer.errors import SettingsError
from qinfer.models.repository.open import open_repositories
from qinfer.storage import open as opening
from qinfer.storage.open import S3_ADDRESSING, store_for
from qinfer.storage.s3_objects import open_native
from tests.support.servers.s3_server import S3Server

BUCKET = "models"
IN_PATH, IN_HOST = "localhost", f"{BUCKET}.localhost"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.fixture
def url(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a folder that nothing is in."""
    resolve = socket.getaddrinfo

    def resolve_here(host: Any, *others: Any, **more: Any) -> Any:
        return resolve("127.0.0.1" if str(host).endswith("localhost") else host, *others, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_here)
    monkeypatch.setattr(opening, "_opened", {})
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value.replace("127.0.0.1", "localhost"))
    monkeypatch.delenv(S3_ADDRESSING, raising=False)
    server.reset()
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.mark.parametrize(("style", "host"), [("", IN_PATH), ("auto", IN_PATH), ("path", IN_PATH), ("virtual", IN_HOST)])
def test_the_bucket_is_where_the_variable_says(
    server: S3Server, url: str, style: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the driver, and for Arrow's own client."""
    monkeypatch.setenv(S3_ADDRESSING, style)
    store = store_for(url)

    store.write(b"content", f"{url}/a.bin")
    assert [entry.url for entry in store.scan(url)] == [f"{url}/a.bin"]
    assert store.read(f"{url}/a.bin", 100) == b"content"
    assert server.hosts == {host}
    assert {path.split("/")[1] == BUCKET for _, path in server.requests} == {host == IN_PATH}

    server.reset()
    native = open_native(store, f"{url}/a.bin")
    assert native is not None
    assert native.read() == b"content"
    assert server.hosts == {host}


def test_without_the_variable_the_configuration_file_of_aws_holds(
    server: S3Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    store = store_for(url)

    store.write(b"content", f"{url}/a.bin")
    native = open_native(store, f"{url}/a.bin")

    assert native is not None
    assert native.read() == b"content"
    assert server.hosts == {IN_HOST}


def test_a_repository_of_another_server(server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's notation, which names the server."""
    monkeypatch.setenv(S3_ADDRESSING, "virtual")
    store_for(url).write(b"", f"{url}/m/config.pbtxt")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    server.reset()
    port = server.endpoint.rpartition(":")[2]

    repositories = open_repositories(RepositorySettings(path=f"s3://localhost:{port}/{url.partition('://')[2]}"))

    assert repositories.names() == ["m"]
    assert server.hosts == {IN_HOST}


def test_another_style_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(S3_ADDRESSING, "host")
    refusal = "AWS_S3_ADDRESSING_STYLE is 'host'; it must be auto, path or virtual"

    with pytest.raises(SettingsError, match=refusal):
        store_for(url)
    with pytest.raises(SettingsError, match=refusal):
        open_repositories(RepositorySettings(path=url))


def test_further_options_of_the_driver_stay(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(S3_ADDRESSING, "virtual")

    options = opening.driver_options("s3")["config_kwargs"]

    assert options["s3"] == {"addressing_style": "virtual"}
    assert "connect_timeout" in options
    monkeypatch.delenv(S3_ADDRESSING)
    assert "s3" not in opening.driver_options("s3")["config_kwargs"]
