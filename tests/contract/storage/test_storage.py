"""What every `Store` promises (`qinfer/storage/store.py`).

`s3-501` is a store that knows no conditional writes. `gcs` is fake-gcs-server, behind a proxy that adds a condition.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.errors import StoreError, StoreNotFound
from qinfer.storage import fsspec as fsspec_store
from qinfer.storage.fsspec import FsspecStore
from qinfer.storage.open import store_for
from qinfer.storage.store import CommitOutcome, Store
from tests.support.servers import object_stores, s3_server
from tests.support.servers.s3_server import S3Server
from tests.support.servers.servers import matrix

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp, of adlfs

KINDS = ["file", "memory", *matrix("s3", "s3-localstack", "azure", "gcs")]
ALL_KINDS = [*KINDS, *matrix("s3-501")]  # which differs in how objects are made
CHUNK_BYTES = 5 * 2**20  # the least that S3 takes
LARGE_BYTES = 2 * CHUNK_BYTES + 5
RACERS = 8
_numbers = count()


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str, Path], tuple[str, dict[str, str]]]]:
    """Starts what a kind of store needs, once: a bucket's URL, and the variables by which it is found."""
    started: dict[str, tuple[str, dict[str, str]]] = {}
    with ExitStack() as stack:

        def start(kind: str, directory: Path) -> tuple[str, dict[str, str]]:
            if kind not in started:
                started[kind] = _started(kind, directory, stack)
            return started[kind]

        yield start


def _started(kind: str, directory: Path, stack: ExitStack) -> tuple[str, dict[str, str]]:
    if kind in ("s3", "s3-501"):
        server = stack.enter_context(S3Server())
        server.knows_conditions = kind == "s3"
        return server.make_bucket(f"contract-{os.getpid()}-{kind}"), dict(server.environment)
    if kind == "s3-localstack":
        if not s3_server.LOCALSTACK.exists():
            pytest.skip(s3_server.NO_LOCALSTACK)
        endpoint = stack.enter_context(s3_server.localstack(directory))
        s3_server.make_bucket(endpoint, "contract")
        return "s3://contract", dict(s3_server.environment(endpoint))
    if kind == "azure":
        if not object_stores.AZURITE.exists():
            pytest.skip(object_stores.NO_AZURITE)
        found = stack.enter_context(object_stores.azure(directory, "contract"))
        return found.url, dict(found.environment)
    if kind == "gcs":
        google = stack.enter_context(object_stores.gcs("contract"))
        return google.url, dict(google.environment)
    return (f"file://{directory}" if kind == "file" else "memory://contract"), {}


@pytest.fixture(params=KINDS)
def folder(
    request: pytest.FixtureRequest,
    servers: Callable[[str, Path], tuple[str, dict[str, str]]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """The URL of a folder that nothing is in."""
    url, environment = servers(request.param, tmp_path_factory.mktemp("store"))
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "STORAGE_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})  # FSSPEC_GCS_TOKEN, which it reads once
    monkeypatch.setattr(FsspecStore, "chunk_bytes", CHUNK_BYTES)
    if request.param == "azure":  # its driver sends less than 64 MiB at once
        store_for(url)._files.service_client._config.max_single_put_size = CHUNK_BYTES  # type: ignore[attr-defined]
    return f"{url}/out-{next(_numbers)}"


@pytest.fixture
def store(folder: str) -> Store:
    return store_for(folder)


def spooled(tmp_path: Path, data: bytes, name: str = "spool") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def content(store: Store, url: str) -> bytes:
    with store.open(url) as file:
        return file.read()


# --- creating ---


@pytest.mark.parametrize("folder", ALL_KINDS, indirect=True)
@pytest.mark.parametrize("size_bytes", [1, 1000, LARGE_BYTES], ids=["byte", "small", "large"])
def test_a_file_is_committed_once(store: Store, folder: str, tmp_path: Path, size_bytes: int) -> None:
    """The second is told that there is one, and changes nothing; the spool files stay."""
    data = os.urandom(size_bytes)
    url = f"{folder}/deep/part-00000.parquet"

    assert store.commit_if_absent(first := spooled(tmp_path, data), url) is CommitOutcome.CREATED
    assert store.commit_if_absent(second := spooled(tmp_path, b"another", "b"), url) is CommitOutcome.EXISTS

    assert content(store, url) == data
    assert (first.read_bytes(), second.read_bytes()) == (data, b"another")
    found = store.stat(url)
    assert found is not None
    assert (found.url, found.size_bytes) == (url, size_bytes)
    shutil.rmtree(tmp_path)
    assert content(store, url) == data  # nothing of the spool is needed


@pytest.mark.parametrize("folder", ALL_KINDS, indirect=True)
def test_bytes_are_put_once(store: Store, folder: str) -> None:
    """The same for small files."""
    url = f"{folder}/_SUCCESS"

    assert store.put_if_absent(b"first", url) is CommitOutcome.CREATED
    assert store.put_if_absent(b"second", url) is CommitOutcome.EXISTS

    assert store.read(url, 100) == b"first"


def test_nothing_is_not_committed(store: Store, folder: str, tmp_path: Path) -> None:
    """Empty objects mark folders in some stores, and drivers write them without a condition."""
    with pytest.raises(ValueError, match="empty"):
        store.put_if_absent(b"", f"{folder}/x")
    with pytest.raises(ValueError, match="empty"):
        store.commit_if_absent(spooled(tmp_path, b""), f"{folder}/x")

    assert store.stat(f"{folder}/x") is None


@pytest.mark.parametrize("folder", ALL_KINDS, indirect=True)
@pytest.mark.parametrize("size_bytes", [100, LARGE_BYTES], ids=["small", "large"])
def test_of_many_at_once_one_creates(
    store: Store, folder: str, tmp_path: Path, request: pytest.FixtureRequest, size_bytes: int
) -> None:
    """And what is there is that one's; without conditions, it is whole and one of theirs."""
    kind = request.node.callspec.params["folder"]
    if (kind, size_bytes) == ("s3-localstack", LARGE_BYTES):
        pytest.skip("LocalStack decides about the completion of an upload, and then completes it, without a lock")
    url = f"{folder}/part-00000.parquet"
    racers = RACERS if size_bytes < LARGE_BYTES else 3
    contents = [bytes([number]) * size_bytes for number in range(racers)]
    files = [spooled(tmp_path, data, str(number)) for number, data in enumerate(contents)]
    barrier = threading.Barrier(racers)

    def commit(number: int) -> CommitOutcome:
        barrier.wait()
        return store.commit_if_absent(files[number], url)

    with ThreadPoolExecutor(racers) as threads:
        outcomes = list(threads.map(commit, range(racers)))

    if kind == "s3-501":
        assert content(store, url) in contents
    else:
        assert outcomes.count(CommitOutcome.CREATED) == 1
        assert content(store, url) == contents[outcomes.index(CommitOutcome.CREATED)]


# --- writing ---


def test_writing_replaces_what_is_there(store: Store, folder: str) -> None:
    url = f"{folder}/deep/x"

    store.write(b"first", url)
    store.write(b"second", url, synced=True)

    assert store.read(url, 100) == b"second"


def test_a_copy_is_an_object_of_its_own(store: Store, folder: str) -> None:
    store.write(b"tensors", f"{folder}/x")

    store.copy(f"{folder}/x", f"{folder}/later/y")
    store.delete(f"{folder}/x")

    assert store.read(f"{folder}/later/y", 100) == b"tensors"
    with pytest.raises(StoreNotFound):
        store.copy(f"{folder}/x", f"{folder}/later/z")
    assert store.stat(f"{folder}/later/z") is None


# --- looking ---


@pytest.mark.parametrize("size_bytes", [0, 10, 1000])
def test_a_range_ends_where_the_object_does(store: Store, folder: str, size_bytes: int) -> None:
    data, url = os.urandom(size_bytes), f"{folder}/x"
    store.write(data, url)

    for begin, end in ((0, 5), (3, 9), (0, 2000), (5, 2000)):
        assert store.read_range(url, begin, end) == data[begin:end]
    assert store.read(url, size_bytes) == data
    with pytest.raises(StoreNotFound):
        store.read_range(f"{folder}/y", 0, 5)


def test_an_object_is_fetched_into_a_file(store: Store, folder: str, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    store.write(data, f"{folder}/x")

    store.fetch(f"{folder}/x", tmp_path / "copy")

    assert (tmp_path / "copy").read_bytes() == data
    with pytest.raises(StoreNotFound):
        store.fetch(f"{folder}/y", tmp_path / "nothing")


def test_children_are_what_is_directly_in_a_folder(store: Store, folder: str) -> None:
    for name in ("a/b/c", "a/d", "e", ".f"):
        store.write(b"x", f"{folder}/{name}")

    assert sorted(store.children(folder)) == [(".f", False), ("a", True), ("e", False)]
    assert sorted(store.children(f"{folder}/a")) == [("b", True), ("d", False)]
    assert store.children(f"{folder}/nothing") == []


def test_a_large_object_is_read_whole(store: Store, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers fetch parts of it at once; the limit counts all the same."""
    monkeypatch.setattr(fsspec_store, "_AT_ONCE_BYTES", 100)
    data = os.urandom(1000)
    store.write(data, f"{folder}/x")

    assert store.read(f"{folder}/x", 1000) == data
    with pytest.raises(StoreError, match="at most 999"):
        store.read(f"{folder}/x", 999)
    with pytest.raises(StoreNotFound):
        store.read(f"{folder}/y", 1000)


def test_reading_is_limited(store: Store, folder: str) -> None:
    """Someone else may have put something huge there."""
    store.put_if_absent(b"12345", f"{folder}/x")

    assert store.read(f"{folder}/x", 5) == b"12345"
    with pytest.raises(StoreError, match="at most 4"):
        store.read(f"{folder}/x", 4)


def test_what_is_not_there(store: Store, folder: str) -> None:
    """Is an error to read, and none to look at or delete; a folder is no object."""
    store.put_if_absent(b"1", f"{folder}/folder/x")

    for url in (f"{folder}/nothing", f"{folder}/folder", f"{folder}/folder/x/y"):
        assert store.stat(url) is None
        with pytest.raises(StoreError):
            store.read(url, 10)
        with pytest.raises(StoreError):
            store.open(url).read()
    with pytest.raises(StoreNotFound, match=f"'{folder}/nothing' does not exist"):
        store.read(f"{folder}/nothing", 10)
    store.delete(f"{folder}/nothing")
    store.set_aside(f"{folder}/nothing")
    assert sorted(store.scan(f"{folder}/nothing")) == []


def test_a_listing_has_everything_below_a_folder(store: Store, folder: str) -> None:
    """With the tags that `stat` has; and nothing of a folder whose name begins the same."""
    names = ["_plan.json", "a/b/c", "a=1,b=ü/x", "part-00000.parquet", "part-00001.parquet"]
    for number, name in enumerate(names):
        store.put_if_absent(b"x" * (number + 1), f"{folder}/{name}")
    store.put_if_absent(b"x", f"{folder}-2/x")

    for prefix in (folder, f"{folder}/"):
        found = sorted(store.scan(prefix))
        assert [stat.url for stat in found] == [f"{folder}/{name}" for name in names]
        assert [stat.size_bytes for stat in found] == [1, 2, 3, 4, 5]
        assert found == [store.stat(stat.url) for stat in found]


def test_a_tag_is_of_the_content(store: Store, folder: str) -> None:
    """The same when nothing happens, another one when the object was made anew."""
    url = f"{folder}/x"
    store.put_if_absent(b"123", url)
    before = store.stat(url)
    assert before is not None
    assert before.etag.strip('"') == before.etag != ""
    assert store.stat(url) == before

    store.delete(url)
    store.put_if_absent(b"124", url)

    after = store.stat(url)
    assert after is not None
    assert after.etag != before.etag


@pytest.mark.parametrize("sequential", [True, False])
def test_a_reader_seeks(store: Store, folder: str, tmp_path: Path, *, sequential: bool) -> None:
    """As pyarrow does."""
    data = os.urandom(300_000)
    store.commit_if_absent(spooled(tmp_path, data), f"{folder}/x")

    with store.open(f"{folder}/x", sequential=sequential) as file:
        assert file.seek(-8, os.SEEK_END) == len(data) - 8
        assert file.read() == data[-8:]
        assert file.seek(100) == file.tell() == 100
        assert file.read(50) == data[100:150]
        buffer = bytearray(20)
        assert file.readinto(buffer) == 20  # type: ignore[attr-defined]  # of every file that is read
        assert bytes(buffer) == data[150:170]
        assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
    assert file.closed


def test_pyarrow_reads_it(store: Store, folder: str, tmp_path: Path) -> None:
    """With its own fetching ahead, from several threads."""
    table = pa.table({"x": range(100_000), "y": [f"row {number}" for number in range(100_000)]})
    pq.write_table(table, tmp_path / "x", row_group_size=10_000)
    store.commit_if_absent(tmp_path / "x", f"{folder}/x.parquet")

    with store.open(f"{folder}/x.parquet") as file:
        assert pq.ParquetFile(file, pre_buffer=True).read() == table


# --- removing ---


def test_what_is_broken_is_set_aside(store: Store, folder: str) -> None:
    """Its name is free, it is kept, and so is the next one."""
    url = f"{folder}/part-00000.parquet"
    for data in (b"broken", b"broken too"):
        assert store.put_if_absent(data, url) is CommitOutcome.CREATED
        store.set_aside(url)
        assert store.stat(url) is None
    assert store.put_if_absent(b"whole", url) is CommitOutcome.CREATED

    assert store.read(f"{folder}/_broken/part-00000.parquet-1", 100) == b"broken"
    assert store.read(f"{folder}/_broken/part-00000.parquet-2", 100) == b"broken too"
    assert store.read(url, 100) == b"whole"


def test_only_what_was_found_broken_is_set_aside(store: Store, folder: str) -> None:
    """Not what another worker has made of it meanwhile."""
    url = f"{folder}/part-00000.parquet"
    store.put_if_absent(b"broken", url)
    broken = store.stat(url)
    assert broken is not None
    store.delete(url)
    store.put_if_absent(b"whole", url)

    store.set_aside(url, broken.etag)
    assert store.read(url, 100) == b"whole"
    whole = store.stat(url)
    assert whole is not None
    store.set_aside(url, whole.etag)
    assert store.stat(url) is None


def test_deleting(store: Store, folder: str) -> None:
    """Twice is once."""
    store.put_if_absent(b"1", f"{folder}/x")

    store.delete(f"{folder}/x")
    store.delete(f"{folder}/x")

    assert sorted(store.scan(folder)) == []


def test_a_folder_is_deleted_with_all_that_it_holds(store: Store, folder: str) -> None:
    for name in ("a/b/c", "a/d", "ab"):
        store.write(b"x", f"{folder}/{name}")

    store.delete_folder(f"{folder}/a")
    store.delete_folder(f"{folder}/a")

    assert [stat.url for stat in store.scan(folder)] == [f"{folder}/ab"]


def test_one_store_for_all_urls(folder: str) -> None:
    """Connections are kept."""
    assert store_for(folder) is store_for(f"{folder}/another/file")
