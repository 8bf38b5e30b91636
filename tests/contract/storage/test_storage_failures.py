"""Object stores that refuse, conflict, lose answers, or know no conditional writes; and what is said of it."""

import logging
import os
import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.errors import (
    InvalidRequest,
    QinferError,
    StoreChanged,
    StoreDenied,
    StoreError,
    StoreNotFound,
    StoreUnavailable,
    UnsupportedFeature,
)
from qinfer.storage import fsspec as stores
from qinfer.storage.fsspec import FsspecStore
from qinfer.storage.open import store_for
from qinfer.storage.store import CommitOutcome, Store
from tests.support.servers import object_stores
from tests.support.servers.gcs_server import GcsServer
from tests.support.servers.s3_server import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp, of adlfs

CHUNK_BYTES = 5 * 2**20  # the least that S3 takes
LARGE_BYTES = 2 * CHUNK_BYTES + 1
SECRETS = re.compile(r"key-id-of-a-test|secret-of-a-test|127\.0\.0\.1|localhost|http://|AccountKey|devstore|Bearer")
_buckets = count()


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    running.reset()
    clean(monkeypatch)
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(FsspecStore, "chunk_bytes", CHUNK_BYTES)
    monkeypatch.setattr(stores, "_CONFLICT_S", 0.001)
    yield running
    running.reset()


@pytest.fixture
def bucket(server: S3Server) -> str:
    return server.make_bucket(f"trouble-{os.getpid()}-{next(_buckets)}")


def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "STORAGE_")):
            monkeypatch.delenv(name)


def spooled(tmp_path: Path, size_bytes: int = 100) -> Path:
    path = tmp_path / "spool"
    path.write_bytes(os.urandom(size_bytes))
    return path


def content(url: str) -> bytes:
    with store_for(url).open(url) as file:
        return file.read()


def uploads(server: S3Server, bucket: str) -> int:
    """How many multipart uploads are neither completed nor aborted: somebody pays for them."""
    address = f"{server.endpoint}/{bucket.removeprefix('s3://')}?uploads"
    with urllib.request.urlopen(address, timeout=10) as reply:
        return bytes(reply.read()).count(b"<Upload>")


# --- conditional writes ---


@pytest.mark.parametrize(("size_bytes", "asked"), [(100, "PUT"), (LARGE_BYTES, "POST")], ids=["small", "large"])
def test_a_name_that_is_taken_at_the_last_moment(
    server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, asked: str
) -> None:
    """The store decides, not the look before; nothing of the upload stays."""
    url, store = f"{bucket}/part", store_for(bucket)
    store.put_if_absent(b"theirs", url)
    monkeypatch.setattr(store, "stat", lambda _: None)

    assert store.commit_if_absent(spooled(tmp_path, size_bytes), url) is CommitOutcome.EXISTS

    assert server.asked[f"{asked} if-none-match"] >= 1
    assert content(url) == b"theirs"
    assert uploads(server, bucket) == 0


def test_what_is_there_already_is_not_sent(server: S3Server, bucket: str, tmp_path: Path) -> None:
    """A part has a hundred megabytes."""
    url = f"{bucket}/part"
    store_for(bucket).put_if_absent(b"theirs", url)
    before = server.asked.copy()

    assert store_for(bucket).commit_if_absent(spooled(tmp_path, LARGE_BYTES), url) is CommitOutcome.EXISTS

    assert server.asked == before


@pytest.mark.parametrize("size_bytes", [100, LARGE_BYTES], ids=["small", "large"])
def test_a_conflict_is_tried_again(server: S3Server, bucket: str, tmp_path: Path, size_bytes: int) -> None:
    """Somebody else's upload was about to end, and did not."""
    server.conflicts = 2
    spool = spooled(tmp_path, size_bytes)

    assert store_for(bucket).commit_if_absent(spool, f"{bucket}/part") is CommitOutcome.CREATED

    assert content(f"{bucket}/part") == spool.read_bytes()
    assert uploads(server, bucket) == 0


def test_conflicts_without_end_are_an_error(server: S3Server, bucket: str) -> None:
    """That is tried again later."""
    server.conflicts = 1000

    with pytest.raises(StoreUnavailable, match=f"other processes keep writing '{bucket}/x'"):
        store_for(bucket).put_if_absent(b"1", f"{bucket}/x")


@pytest.mark.parametrize("size_bytes", [100, LARGE_BYTES], ids=["small", "large"])
def test_a_lost_answer(server: S3Server, bucket: str, tmp_path: Path, size_bytes: int) -> None:
    """The client asks again, and finds its own: it is there, and whole."""
    server.lost = 1
    spool = spooled(tmp_path, size_bytes)

    outcome = store_for(bucket).commit_if_absent(spool, f"{bucket}/part")

    assert server.lost == 0
    assert outcome is CommitOutcome.EXISTS
    assert content(f"{bucket}/part") == spool.read_bytes()


def test_a_busy_store_is_waited_for(server: S3Server, bucket: str) -> None:
    """`SlowDown` is no error yet."""
    server.failures = 1

    assert store_for(bucket).put_if_absent(b"1", f"{bucket}/x") is CommitOutcome.CREATED


# --- a store without them ---


@pytest.mark.parametrize("size_bytes", [100, LARGE_BYTES], ids=["small", "large"])
def test_without_conditional_writes(
    server: S3Server, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, size_bytes: int
) -> None:
    """It works, and the log says why it is done otherwise: once for a bucket, which is not asked again."""
    server.knows_conditions = False
    store = store_for(bucket)
    spool = spooled(tmp_path, size_bytes)

    with caplog.at_level(logging.INFO, "qinfer"):
        assert store.commit_if_absent(spool, f"{bucket}/a") is CommitOutcome.CREATED
        asked = {name: number for name, number in server.asked.items() if "if-none-match" in name}
        assert store.commit_if_absent(spool, f"{bucket}/b") is CommitOutcome.CREATED
        assert store.put_if_absent(b"1", f"{bucket}/b") is CommitOutcome.EXISTS

    assert content(f"{bucket}/a") == content(f"{bucket}/b") == spool.read_bytes()
    assert {name: number for name, number in server.asked.items() if "if-none-match" in name} == asked
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "501" in record.getMessage()
    assert record.__dict__["bucket"] == bucket.removeprefix("s3://")
    assert uploads(server, bucket) == 0


def test_without_conditional_writes_what_another_wrote_is_not_ours(
    server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same moment: the reader of it decides, as of any that was there before."""
    server.knows_conditions = False
    url, store = f"{bucket}/x", store_for(bucket)
    store.put_if_absent(b"1", f"{bucket}/another")
    compare = store.open

    def late(url: str, *, sequential: bool = False) -> object:
        fsspec.filesystem("s3", skip_instance_cache=True).pipe_file(url, b"theirs")
        return compare(url, sequential=sequential)

    monkeypatch.setattr(store, "open", late)

    assert store.put_if_absent(b"mine", url) is CommitOutcome.EXISTS
    assert content(url) == b"theirs"


# --- errors ---


OPERATIONS: dict[str, Callable[[Store, str, Path], object]] = {
    "commit": lambda store, url, path: store.commit_if_absent(path, url),
    "put": lambda store, url, _: store.put_if_absent(b"1", url),
    "write": lambda store, url, _: store.write(b"1", url),
    "copy": lambda store, url, _: store.copy(url, f"{url}-2"),
    "read": lambda store, url, _: store.read(url, 10),
    "fetch": lambda store, url, path: store.fetch(url, path.with_name("fetched")),
    "children": lambda store, url, _: store.children(url),
    "stat": lambda store, url, _: store.stat(url),
    "list": lambda store, url, _: sorted(store.scan(url)),
    "set_aside": lambda store, url, _: store.set_aside(url),
    "open": lambda store, url, _: store.open(url).read(),
    "delete": lambda store, url, _: store.delete(url),
    "delete_folder": lambda store, url, _: store.delete_folder(url),
}


IN_A_BUCKET = ["commit", "put", "write", "copy", "read", "fetch", "list", "open"]
"""Operations that fail where there is no bucket; to the others, nothing is there."""


def fails(url: str, tmp_path: Path, names: list[str], raised: type[StoreError]) -> None:
    """Every operation raises an error that names the URL, and nothing that is secret."""
    spool = spooled(tmp_path)
    for name in names:
        with pytest.raises(raised) as caught:
            OPERATIONS[name](store_for(url), url, spool)
        assert f"'{url}'" in caught.value.message, name
        assert not SECRETS.search(caught.value.message), name
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__  # it would be shown with the traceback


def test_what_s3_denies(server: S3Server, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The store's answer has the id of the key in it."""
    server.denies = True

    with caplog.at_level(logging.DEBUG, "qinfer"):
        fails(f"{bucket}/x", tmp_path, list(OPERATIONS), StoreDenied)

    assert not [record for record in caplog.records if record.name.startswith("qinfer")]


def test_a_bucket_of_s3_that_is_not_there(server: S3Server, tmp_path: Path) -> None:
    """To look is no error, to list it is."""
    url = "s3://no-such-bucket/folder"

    fails(url, tmp_path, IN_A_BUCKET, StoreNotFound)
    assert store_for(url).stat(url) is None


def test_an_s3_server_that_is_not_there(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is the operator's."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")

    fails("s3://bucket/x", tmp_path, ["put"], StoreUnavailable)


def test_s3_without_credentials(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy is said."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))

    with pytest.raises(StoreDenied, match="needs credentials in the store's own variables"):
        store_for("s3://bucket/x").read("s3://bucket/x", 10)


def test_an_impossible_name_of_a_bucket(server: S3Server) -> None:
    """Is nothing to try again."""
    with pytest.raises(StoreError, match="refuses 's3://in!valid/x'") as caught:
        store_for("s3://in!valid/x").put_if_absent(b"1", "s3://in!valid/x")
    assert not caught.value.retryable


def test_an_object_that_is_replaced_while_it_is_read(server: S3Server, bucket: str) -> None:
    """Never half of one and half of another."""
    url, store = f"{bucket}/x", store_for(bucket)
    store.put_if_absent(b"1" * 100, url)
    with store.open(url) as file:
        assert file.read(10) == b"1" * 10
        store.delete(url)
        store.put_if_absent(b"2" * 100, url)

        with pytest.raises(StoreChanged, match=f"'{url}' was replaced"):
            file.read(10)


def test_errors_come_through_pyarrow(server: S3Server, bucket: str, tmp_path: Path) -> None:
    """It calls the file, and raises what the file raised."""
    url, store = f"{bucket}/x.parquet", store_for(bucket)
    pq.write_table(pa.table({"x": range(100_000)}), tmp_path / "x", row_group_size=10_000)
    store.commit_if_absent(tmp_path / "x", url)
    with store.open(url) as file:
        reader = pq.ParquetFile(file)
        store.delete(url)
        store.put_if_absent(b"another", url)

        with pytest.raises(StoreChanged):
            reader.read()


def test_what_google_denies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a bucket that is not there; uploads of both kinds were conditional, or the contract's tests would fail."""
    clean(monkeypatch)
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})
    monkeypatch.setattr(logging.getLogger("gcsfs"), "disabled", True)  # it logs what it raises
    with GcsServer("bucket") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        fails(
            "gs://no-such-bucket/x",
            tmp_path,
            IN_A_BUCKET,
            StoreNotFound,
        )
        server.denies = True
        fails("gs://bucket/x", tmp_path, list(OPERATIONS), StoreDenied)


def test_what_azure_denies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong key, and a container that is not there."""
    if not object_stores.AZURITE.exists():
        pytest.skip(object_stores.NO_AZURITE)
    clean(monkeypatch)
    with object_stores.azure(tmp_path / "azurite", "bucket") as server:
        right = server.environment["AZURE_STORAGE_CONNECTION_STRING"]
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", right)
        fails(
            "az://no-such-container/x",
            tmp_path,
            IN_A_BUCKET,
            StoreNotFound,
        )
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", right.replace("AccountKey=Eby8", "AccountKey=AAAA"))
        fails("az://bucket/x", tmp_path, ["commit", "put", "read", "stat", "delete"], StoreDenied)


# --- URLs ---


@pytest.mark.parametrize("url", ["hdfs://x/y", "http://host/x", "bucket/x", "", "ftp://x"])
def test_stores_that_jobs_do_not_use(url: str) -> None:
    """The remedy is said."""
    with pytest.raises(InvalidRequest, match="use s3, gs, az, abfss or file"):
        store_for(url)


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "s3://me@bucket/x", "abfss://c:secret@account/x"])
def test_credentials_in_a_url_are_refused(url: str) -> None:
    """Without saying them again."""
    with pytest.raises(InvalidRequest, match="may not hold credentials") as caught:
        store_for(url)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("s3://b", "s3fs", "s3"), ("gs://b", "gcsfs.core", "gcs"), ("az://b", "adlfs", "azure")],
)
def test_a_driver_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, url: str, module: str, extra: str) -> None:
    """How to install it."""
    monkeypatch.setenv("FSSPEC_TEST", module)  # another environment, another store
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, url.partition(":")[0], raising=False)
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(UnsupportedFeature, match=re.escape(f"pip install 'qinfer-ml[{extra}]'")):
        store_for(url)


def test_a_store_for_each_environment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads that ask at the same moment, all get one."""
    found: list[Store] = []
    threads = [threading.Thread(target=lambda: found.append(store_for("s3://bucket"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(store) for store in found}) == 1
    assert len(found) == 8

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")

    assert store_for("s3://bucket") is not found[0]


def test_errors_are_of_one_family() -> None:
    """So that one clause catches them all."""
    assert issubclass(StoreError, QinferError)
    assert [error.retryable for error in (StoreUnavailable, StoreDenied, StoreNotFound)] == [True, False, False]
