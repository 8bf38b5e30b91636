"""The object store by itself, on directories and in fsspec's memory: names, reading, deleting, sweeping, the start."""

import asyncio
import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from qinfer.core.settings import LimitSettings, RedisSettings
from qinfer.errors import BrokerUnavailable, CorruptEntry, SettingsError, StoreDenied, StoreUnavailable
from qinfer.queue import object_store
from qinfer.queue.object_store import SWEEP_MARGIN_S, ObjectStore
from qinfer.queue.values import REFERENCE_VERSION, Reference, ValueKind
from qinfer.storage.local import LocalStore
from qinfer.storage.store import mapped
from qinfer.testing import eventually

NOW_S = 1_800_000_000.0
NAME = re.compile(r"[0-9]{12}/[0-9a-f]{16}-[0-9a-f]{32}")

Open = Callable[..., Awaitable[ObjectStore]]


class Clock:
    now_s = NOW_S


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["file", "synced", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{secrets.token_hex(4)}/qinfer" if request.param == "memory" else tmp_path.as_uri()


@pytest.fixture
async def store(request: pytest.FixtureRequest, url: str, clock: Clock) -> AsyncIterator[ObjectStore]:
    durability = "always" if "synced" in request.node.name else "everysec"
    one = await opened(url, clock, durability=durability)
    yield one
    await one.close()


async def opened(url: str, clock: Clock | None = None, *, min_bytes: int = 4, **redis: Any) -> ObjectStore:
    clock = clock or Clock()
    limits = LimitSettings(payload_url=url, payload_url_min_bytes=min_bytes)
    return await ObjectStore.open(limits, RedisSettings(**redis), lambda: clock.now_s)


def names(url: str) -> list[str]:
    """Returns the names of the objects that are there, read past the store."""
    files, folder = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    root = files._strip_protocol(folder)
    return sorted(os.path.relpath(path, root) for path in files.find(folder))


# --- objects ---


async def test_an_object_is_read_as_it_was_written(store: ObjectStore, url: str) -> None:
    """Under a name of our own making, that tells nothing but when it ends and a hash."""
    data = secrets.token_bytes(100_000)

    reference = await store.write("../../etc#0", memoryview(bytearray(data)), 100.0)

    assert NAME.fullmatch(reference.name)
    assert names(url) == [reference.name]
    assert (reference.size, reference.version) == (len(data), REFERENCE_VERSION)
    assert await store.read(reference) == data


async def test_a_name_says_when_it_ends_in_whole_minutes_and_never_too_early(store: ObjectStore) -> None:
    """So that there are few folders to look at."""
    first, second = [await store.write("m", b"x", kept_s) for kept_s in (0.0, 61.0)]

    assert int(first.name[:12]) == NOW_S
    assert int(second.name[:12]) == NOW_S + 120
    assert first.name.partition("-")[0][13:] == second.name.partition("-")[0][13:]


async def test_a_copy_outlives_what_it_was_made_of(store: ObjectStore, url: str) -> None:
    """It is another object, with a later end."""
    reference = await store.write("m", b"tensors", 60.0)

    copy = await store.copy(reference, "m", 6000.0)
    store.delete([reference.name])
    assert copy is not None
    await eventually(lambda: names(url) == [copy.name])

    assert int(copy.name[:12]) == NOW_S + 6000
    assert await store.read(copy) == b"tensors"
    assert await store.copy(reference, "m", 60.0) is None
    assert await store.read(reference) is None


async def test_what_is_deleted_twice_is_no_error(
    store: ObjectStore, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two may finish the same entry; a name that is none of ours is left alone."""
    reference = await store.write("m", b"tensors", 60.0)

    store.delete([reference.name, reference.name, "../other", "etc/passwd"])

    await eventually(lambda: names(url) == [])
    assert not caplog.records


async def test_what_is_being_deleted_is_when_the_store_closes(url: str) -> None:
    """A process that ends leaves little behind."""
    store = await opened(url)
    written = [await store.write("m", b"tensors", 60.0) for _ in range(20)]

    store.delete(reference.name for reference in written)
    await store.close()

    assert names(url) == []


async def test_an_object_that_is_not_what_was_written_is_corrupt(store: ObjectStore, url: str) -> None:
    """Cut off, or written over by someone else."""
    reference = await store.write("m", b"tensors", 60.0)
    files, folder = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{folder}/{reference.name}", b"tens")

    with pytest.raises(CorruptEntry, match="4 of 7 bytes"):
        await store.read(reference)


@pytest.mark.parametrize("name", ["../secret", "", "000000000000/x", f"{'0' * 12}/{'a' * 16}-{'b' * 32}/../../x"])
async def test_a_reference_leads_nowhere_else(store: ObjectStore, name: str) -> None:
    """Whatever Redis holds."""
    for action in (store.read(Reference(name, 1)), store.copy(Reference(name, 1), "m", 60.0)):
        with pytest.raises(CorruptEntry, match="damaged"):
            await action


async def test_a_newer_reference_is_left_to_a_newer_qinfer(store: ObjectStore) -> None:
    """As a newer frame is."""
    reference = await store.write("m", b"tensors", 60.0)
    newer = Reference(reference.name, reference.size, REFERENCE_VERSION + 1)

    with pytest.raises(BrokerUnavailable, match="newer"):
        await store.read(newer)


# --- the sweep ---


async def test_the_sweep_deletes_what_expired_long_ago_and_nothing_else(
    store: ObjectStore, url: str, clock: Clock
) -> None:
    """Not what is younger, nor what others keep in the same place."""
    old = [await store.write("m", b"tensors", 60.0) for _ in range(3)]
    young = await store.write("m", b"tensors", 7200.0)
    files, folder = fsspec.core.url_to_fs(url)
    foreign = [f"{old[0].name[:12]}/readme.txt", "000000000001x/a", "2026/x.parquet"]
    for name in foreign:
        files.makedirs(f"{folder}/{name.rpartition('/')[0]}", exist_ok=True)
        files.pipe_file(f"{folder}/{name}", b"ours")

    clock.now_s = NOW_S + 60 + SWEEP_MARGIN_S
    assert await store.sweep() == 0
    clock.now_s += 1
    assert await store.sweep() == len(old)

    assert names(url) == sorted([young.name, *foreign])
    assert await store.sweep() == 0


async def test_a_round_of_the_sweep_is_bounded(
    store: ObjectStore, url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In objects and in folders; the oldest go first."""
    monkeypatch.setattr(object_store, "_SWEPT_OBJECTS", 3)
    monkeypatch.setattr(object_store, "_SWEPT_FOLDERS", 2)
    written = [await store.write("m", b"tensors", 60.0 * i) for i in (0, 0, 1, 1, 2, 3)]
    clock.now_s += 2 * SWEEP_MARGIN_S

    assert await store.sweep() == 3
    left = [reference.name for reference in written[2:]]
    assert len(set(names(url)) & set(left)) == 3
    assert [await store.sweep() for _ in range(3)] == [2, 1, 0]
    assert names(url) == []


async def test_two_sweeps_do_no_harm_to_one_another(store: ObjectStore, url: str, clock: Clock) -> None:
    """Every gateway is a janitor."""
    for _ in range(30):
        await store.write("m", b"tensors", 60.0)
    other = await opened(url, clock)
    clock.now_s += 2 * SWEEP_MARGIN_S

    await asyncio.gather(store.sweep(), other.sweep(), store.sweep())

    assert names(url) == []
    await other.close()


async def test_emptied_folders_of_a_directory_go_too(tmp_path: Path, clock: Clock) -> None:
    """There is one a minute."""
    store = await opened(tmp_path.as_uri(), clock)
    await store.write("m", b"tensors", 60.0)
    clock.now_s += 2 * SWEEP_MARGIN_S

    await store.sweep()

    assert os.listdir(tmp_path) == []
    await store.close()


# --- trouble ---


async def test_a_store_that_fails_is_unavailable_and_leaks_nothing(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients see no path; what can't be deleted is left to the sweep, and said once."""
    reference = await store.write("m", b"tensors", 60.0)

    def fails(*_: object, **__: object) -> None:
        raise StoreDenied("/srv/secret/path")

    for method in ("write", "read_range", "copy", "delete", "children"):
        monkeypatch.setattr(store._store, method, fails)
    actions = [store.write("m", b"x", 1.0), store.read(reference), store.copy(reference, "m", 1.0), store.sweep()]
    for action in actions:
        with pytest.raises(BrokerUnavailable) as caught:
            await action
        assert caught.value.message == "the payload store can't be reached; try again"
    store.delete([reference.name])
    said = ["the payload store can't be reached", "objects are left to expire"]
    await eventually(lambda: [record.message for record in caplog.records] == said)


async def test_a_store_that_failed_is_left_alone_until_it_works(
    store: ObjectStore, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others fail at once meanwhile; it is tried in the background."""
    monkeypatch.setattr(object_store, "_TRY_AGAIN_S", 0.01)
    caplog.set_level("INFO", "qinfer.queue.object_store")
    reference = await store.write("m", b"tensors", 60.0)
    whole, reads = store._store.read_range, 0

    def read(url: str, begin: int, end: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads <= 3:
            raise StoreUnavailable("it failed")
        return whole(url, begin, end)

    monkeypatch.setattr(store._store, "read_range", read)
    with pytest.raises(BrokerUnavailable):
        await store.read(reference)
    with pytest.raises(BrokerUnavailable, match="can't be reached"):
        await store.write("m", b"more", 60.0)
    assert (reads, names(url)) == (1, [reference.name])
    await eventually(lambda: "the payload store works again" in [record.message for record in caplog.records])

    assert await store.read(reference) == b"tensors"
    assert reads == 5


async def test_a_full_disk_refuses_writes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading and deleting free it; operators are told where it is, clients what to do."""
    caplog.set_level("INFO", "qinfer.queue.object_store")
    store = await opened(tmp_path.as_uri())
    first, second = [await store.write("m", data, 60.0) for data in (b"first", b"second")]

    def full(self: LocalStore, data: object, url: str, *, synced: bool = False) -> None:
        with mapped(url):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "write", full)
        for _ in range(2):
            with pytest.raises(BrokerUnavailable, match="disk is full; try again when results") as caught:
                await store.write("m", b"third", 60.0)
        assert str(tmp_path) not in caught.value.message
        assert caught.value.retryable
        assert await store.read(first) == b"first"
        store.delete([first.name])
        await store.wait_for_deletions()
        assert names(tmp_path.as_uri()) == [second.name]
    assert await store.read(await store.write("m", b"third", 60.0)) == b"third"

    said = [(record.levelname, record.message.partition(":")[0]) for record in caplog.records]
    assert said == [("ERROR", "the payload store's disk is full"), ("INFO", "the payload store's disk has space again")]
    assert f"'{tmp_path.as_uri()}'" in caplog.records[0].message
    await store.close()


async def test_under_everysec_files_are_on_disk_a_second_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Redis' own file is, unless their requests have ended; those that are left when the process ends, too."""
    monkeypatch.setattr(object_store, "_SYNC_S", 0.05)
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    store = await opened(tmp_path.as_uri())

    kept, ended = [await store.write("m", b"tensors", 60.0) for _ in range(2)]
    copy = await store.copy(kept, "m", 600.0)
    await store.write("m", b"outputs", 60.0, ValueKind.ANSWER)
    store.delete([ended.name])
    assert synced == []
    assert copy is not None
    files = [tmp_path / one.name for one in (kept, copy)]
    paths = [tmp_path, *files, *(path.parent for path in files)]
    await eventually(lambda: sorted(synced) == sorted(map(str, paths)))

    synced.clear()
    last = await store.write("m", b"tensors", 60.0)
    await store.close()
    assert str(tmp_path / last.name) in synced


async def test_payloads_leave_space_for_results_and_results_for_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk on which no result can be stored would keep the payloads of its request too."""
    store = await opened(tmp_path.as_uri())
    written = await store.write("m", b"tensors", 60.0)
    about = list(os.statvfs(tmp_path))
    about[0] = about[1] = 4096
    about[2] = 100 * object_store.SPARE_BYTES // 4096
    refused = {}

    for share in (0.4, 0.9, 1.1):
        about[4] = int(share * object_store.SPARE_BYTES) // 4096
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(about))
        refused[share] = [await is_refused(store.write("m", b"x", 1.0, kind)) for kind in ValueKind]
        assert await is_refused(store.copy(written, "m", 1.0)) == (share < 1)

    assert list(ValueKind) == [ValueKind.PAYLOAD, ValueKind.RESULT, ValueKind.ANSWER]
    assert refused == {0.4: [True, True, True], 0.9: [True, False, False], 1.1: [False, False, False]}
    about[2] = 0
    assert await store.write("m", b"x", 1.0)  # a file system that does not say how large it is
    await store.close()


async def test_the_room_for_results_is_what_is_free_beyond_the_reserve(
    store: ObjectStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = object_store.SPARE_BYTES
    found = []

    for blocks, free in ((100 * spare, 0), (100 * spare, spare + 8192), (0, 0)):  # 0 blocks: it does not say how many
        about = os.statvfs_result((1, 1, blocks, free, free, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _, about=about: about)
        found.append(await store.free_bytes())

    assert found == ([None] * 3 if url.startswith("memory") else [0, 8192, sys.maxsize])


async def is_refused(action: Awaitable[object]) -> bool:
    (answer,) = await asyncio.gather(action, return_exceptions=True)
    return isinstance(answer, BrokerUnavailable) and answer.message == object_store.FULL


async def test_nobody_waits_longer_than_the_timeout_for_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of a file server that went away, for one."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    store = await opened(tmp_path.as_uri(), command_timeout_s=0.2)
    monkeypatch.setattr(store._store, "read_range", lambda *_: fifo.read_bytes())
    reference = await store.write("m", b"tensors", 60.0)

    with pytest.raises(BrokerUnavailable):
        await store.read(reference)

    fifo.write_bytes(b"let it end")
    await store.close()


async def test_a_store_that_hangs_keeps_no_process_from_ending(tmp_path: Path) -> None:
    """Nor does the thread that waits in the system call for ever."""
    os.mkfifo(tmp_path / "fifo")

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _HANGING, str(tmp_path))

    assert await asyncio.wait_for(process.wait(), 30.0) == 0


_HANGING = """
import asyncio, sys
from pathlib import Path
from qinfer.queue.object_store import ObjectStore
from qinfer.errors import BrokerUnavailable
from qinfer.core.settings import LimitSettings, RedisSettings

async def main(directory):
    limits = LimitSettings(payload_url=directory.as_uri(), payload_url_min_bytes=1)
    store = await ObjectStore.open(limits, RedisSettings(command_timeout_s=0.2), lambda: 1e9)
    store._store.read_range = lambda *_: (directory / "fifo").read_bytes()
    try:
        await store.read(await store.write("m", b"x", 60.0))
    except BrokerUnavailable:
        await store.close()

asyncio.run(main(Path(sys.argv[1])))
"""


# --- the start ---


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("s3", "is no URL of a store"),
        ("/srv/payloads", "is no URL of a store"),
        ("nostore://x/y", "nostore:// is not known; use s3, gs, az or file"),
        ("s3://key:secret@bucket/x", "may not hold credentials"),
        ("simplecache::s3://bucket", "chains several stores"),
        ("file:///srv/../etc", "'..'"),
        ("file:///no/such/directory", "there is no such directory"),
    ],
)
async def test_a_wrong_url_is_told_at_the_start(wrong: str, text: str) -> None:
    """With the variable's name, and what to do."""
    with pytest.raises(SettingsError, match=r"QINFER_LIMITS__PAYLOAD_URL") as caught:
        await opened(wrong)

    assert text in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gcs"), ("az", "azure")])
async def test_a_missing_driver_is_named_with_its_remedy(
    scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an extra of the package."""
    for module in ("s3fs", "gcsfs", "gcsfs.core", "adlfs"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)

    with pytest.raises(SettingsError, match=re.escape(f"pip install 'qinfer-ml[{extra}]'")):
        await opened(f"{scheme}://bucket/x")


async def test_a_store_that_takes_nothing_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried with an object, which is not left behind."""

    def refused(*_: object, **__: object) -> None:
        with mapped("file:///x"):
            raise PermissionError("Access Denied")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "write", refused)
        with pytest.raises(SettingsError, match=r"does not work: PermissionError: Access Denied"):
            await opened(tmp_path.as_uri())
    store = await opened(tmp_path.as_uri())
    await store.close()

    assert names(tmp_path.as_uri()) == []


async def test_what_is_written_under_always_is_on_the_disk_before_it_is_referred_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file, and the directories that name it; but not an answer, whose caller does not outlive a power loss."""
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        synced.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    monkeypatch.setattr(os, "fsync", fsync)
    store = await opened(tmp_path.as_uri(), durability="always")
    synced.clear()

    reference = await store.write("m", b"tensors", 60.0)
    assert synced == ["file", "directory", "directory"]
    synced.clear()
    await store.copy(reference, "m", 600.0)
    assert synced == ["file", "directory", "directory"]
    synced.clear()
    await store.write("m", b"outputs", 60.0, ValueKind.ANSWER)
    assert synced == []
    await store.close()
