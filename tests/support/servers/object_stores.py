"""Servers of object stores for tests: moto's for S3, azurite for Azure, fake-gcs-server for Google Cloud Storage."""

import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
from moto.server import ThreadedMotoServer

from qinfer.storage.open import url_to_fs
from qinfer.testing import wait_until
from tests.support.servers.gcs_server import GcsServer

AZURITE = Path(__file__).resolve().parents[3] / ".venv" / "tools" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
NO_AZURITE = "azurite is not installed; scripts/tools fetches it"

# The account that every azurite has; its key is public (learn.microsoft.com, "Use the Azurite emulator").
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """A running server, with one empty bucket.

    Attributes:
        url: The bucket's URL, such as `s3://models`.
        environment: The variables by which clients find the server.
        options: The same for fsspec, in a process that has not got the variables.
    """

    url: str
    environment: Mapping[str, str]
    options: Mapping[str, object] = field(default_factory=dict)

    def upload(self, directory: Path, to: str = "") -> str:
        """Copies a directory into the bucket, and returns its URL there."""
        target = f"{self.url}/{to or directory.name}"
        for path in directory.rglob("*"):
            if path.is_file():
                self.put(f"{to or directory.name}/{path.relative_to(directory)}", path.read_bytes())
        return target

    def put(self, path: str, content: bytes) -> None:
        """Writes one object."""
        files, root = url_to_fs(self.url, self.options)
        files.pipe_file(f"{root}/{path}", content)

    def remove(self, path: str) -> None:
        """Removes one object."""
        files, root = url_to_fs(self.url, self.options)
        files.rm(f"{root}/{path}")


@contextmanager
def s3(bucket: str = "models") -> Iterator[ObjectStore]:
    """Runs a server that speaks S3's protocol."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        options = {"endpoint_url": endpoint, "key": "key", "secret": "secret", "use_listings_cache": False}
        files = fsspec.filesystem("s3", **options)
        if not files.exists(bucket):
            files.mkdir(bucket)
        yield ObjectStore(url=f"s3://{bucket}", environment=environment, options=options)
        files.rm(bucket, recursive=True)
    finally:
        server.stop()


@contextmanager
def azure(directory: Path, container: str = "models") -> Iterator[ObjectStore]:
    """Runs a server that speaks Azure Blob Storage's protocol."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(AZURITE), "--blobPort", str(port), "--location", str(directory), "--silent", "--skipApiVersionCheck"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _accepts(port), timeout_s=30.0)
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_ACCOUNT_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/{_ACCOUNT};"
        )
        options = {"connection_string": connection, "use_listings_cache": False}
        fsspec.filesystem("az", **options).mkdir(container)
        environment = {"AZURE_STORAGE_CONNECTION_STRING": connection}
        yield ObjectStore(url=f"az://{container}", environment=environment, options=options)
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def gcs(bucket: str = "models") -> Iterator[ObjectStore]:
    """Runs a server that speaks the JSON API of Google Cloud Storage."""
    with GcsServer(bucket) as server:
        options = {"endpoint_url": server.endpoint, "token": "anon", "use_listings_cache": False}
        yield ObjectStore(url=f"gs://{bucket}", environment=server.environment, options=options)


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
