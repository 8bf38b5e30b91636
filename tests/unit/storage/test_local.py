"""Directories as object stores: what a killed process, another one, and the disk do to them."""

import errno
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from qinfer.errors import StoreDenied, StoreError, StoreFull, StoreNotFound
from qinfer.storage.local import LEFTOVER_S, LocalStore, local_path
from qinfer.storage.store import CommitOutcome

CONTENT = bytes(range(256)) * 100_000

# Commits, and kills itself at one step: each call of the system that the commit makes is one, and half of a copy.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from qinfer.storage import local

directory, way = Path(sys.argv[1]), sys.argv[2]
left = 0

def step(name, real):
    def call(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            if name == "copyfileobj":
                arguments[1].write(arguments[0].read(1000))
                arguments[1].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "link" and way == "copied" and Path(arguments[0]).parent != Path(arguments[1]).parent:
            raise OSError(18, "another file system")
        return real(*arguments, **options)
    return call

for module, name in [(os, "link"), (os, "fsync"), (os, "unlink"), (os, "open"), (os, "mkdir"), (shutil, "copyfileobj")]:
    setattr(module, name, step(name, getattr(module, name)))

number = 0
while True:
    number += 1
    child = os.fork()
    if child == 0:
        left = number
        local.LocalStore().commit_if_absent(directory / "spool", f"file://{directory}/out-{number}/deep/part")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
print(number)
"""

RACER = """
import sys
from pathlib import Path
from qinfer.storage.local import LocalStore

store, url, number = LocalStore(), sys.argv[1], int(sys.argv[2])
spool = Path(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
print(" ".join(store.commit_if_absent(spool, f"{url}/part-{part}").name for part in range(50)))
"""


@pytest.fixture
def store() -> LocalStore:
    return LocalStore()


def spooled(tmp_path: Path, data: bytes = b"whole", name: str = "spool") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("way", ["linked", "copied"])
def test_a_killed_process_leaves_nothing_in_part(store: LocalStore, tmp_path: Path, way: str) -> None:
    """At no step: the name is free, or has the whole file; and the next one who commits is not in the way of it."""
    spool = spooled(tmp_path, CONTENT)

    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), way], capture_output=True, text=True, check=True, timeout=50
    )

    steps = int(done.stdout)
    assert steps > (10 if way == "copied" else 7)
    created = 0
    for number in range(1, steps + 1):
        final = tmp_path / f"out-{number}" / "deep" / "part"
        url = f"file://{final}"
        is_there = final.exists()
        assert not is_there or final.read_bytes() == CONTENT
        assert [stat.url for stat in store.scan(f"file://{final.parent}")] == [url] * is_there
        outcome = store.commit_if_absent(spool, url)
        assert outcome is (CommitOutcome.EXISTS if is_there else CommitOutcome.CREATED)
        assert final.read_bytes() == CONTENT
        created += is_there
    assert 1 <= created < steps


def test_leftovers_of_killed_processes_go_after_a_day(tmp_path: Path) -> None:
    """Those of the living do not, nor does anything else."""
    old, young, other = (f".qinfer-{'0' * 16}.tmp", f".qinfer-{'1' * 16}.tmp", ".qinfer-mine.tmp")
    for name in (old, young, other):
        (tmp_path / name).write_bytes(b"half")
    long_ago = time.time() - LEFTOVER_S - 60
    for name in (old, other):
        os.utime(tmp_path / name, (long_ago, long_ago))

    store = LocalStore()
    store.put_if_absent(b"1", f"file://{tmp_path}/x")

    assert sorted(path.name for path in tmp_path.iterdir()) == [young, other, "x"]
    assert [stat.url for stat in store.scan(f"file://{tmp_path}")] == [f"file://{tmp_path}/x"]


def test_of_many_processes_one_creates(tmp_path: Path) -> None:
    """Each of fifty parts is one process's."""
    racers = []
    for number in range(4):
        spool = spooled(tmp_path, f"{number}".encode() * 1000, f"spool-{number}")
        command = [sys.executable, "-c", RACER, f"file://{tmp_path}/out", str(number), str(spool)]
        racers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()

    outcomes = [racer.communicate(timeout=30)[0].split() for racer in racers]

    for part in range(50):
        (winner,) = [number for number in range(4) if outcomes[number][part] == "CREATED"]
        assert (tmp_path / "out" / f"part-{part}").read_bytes() == f"{winner}".encode() * 1000


def test_parts_can_be_read_by_whom_the_umask_allows(store: LocalStore, tmp_path: Path) -> None:
    """Spool files are private, as `tempfile` makes them."""
    spool = spooled(tmp_path)
    spool.chmod(0o600)
    plain = tmp_path / "plain"
    plain.write_bytes(b"")

    store.commit_if_absent(spool, f"file://{tmp_path}/linked")
    store.put_if_absent(b"1", f"file://{tmp_path}/put")

    for name in ("linked", "put"):
        assert (tmp_path / name).stat().st_mode == plain.stat().st_mode


def test_a_file_system_without_hard_links_is_named(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than that a part may be half there."""

    def link(*_: object) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(os, "link", link)

    with pytest.raises(StoreError, match=f"file system of '{tmp_path}' makes no hard links"):
        store.commit_if_absent(spooled(tmp_path), f"file://{tmp_path}/x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spool"]


@pytest.mark.parametrize(
    ("number", "raised", "text"),
    [(28, StoreFull, "no space left"), (13, StoreDenied, "not open"), (30, StoreDenied, "not open")],
)
def test_what_the_disk_says(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raised: type[StoreError], text: str
) -> None:
    """Is told with the URL, and nothing is left."""

    def fsync(_: int) -> None:
        raise OSError(number, os.strerror(number), "/a/secret/path")

    monkeypatch.setattr(os, "fsync", fsync)
    url = f"file://{tmp_path}/x"

    with pytest.raises(raised, match=text) as caught:
        store.put_if_absent(b"1", url)

    assert url in caught.value.message
    assert "secret" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["write", "copy"])
def test_a_full_disk_leaves_no_part_of_a_file(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    source, target = f"file://{tmp_path}/x", f"file://{tmp_path}/folder/y"
    store.write(CONTENT, source)
    whole = os.fsync
    failures = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def fsync(descriptor: int) -> None:
        if failures:
            raise failures.pop()
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    put = partial(store.write, CONTENT) if way == "write" else partial(store.copy, source)

    with pytest.raises(StoreFull, match="no space left"):
        put(target, synced=True)
    assert store.stat(target) is None
    put(target, synced=True)
    assert store.read(target, len(CONTENT)) == CONTENT


@pytest.mark.parametrize("url", ["file://relative/x", "s3://bucket/x", "/data/x"])
def test_only_absolute_paths(store: LocalStore, url: str) -> None:
    """Nothing is written where nobody looks."""
    with pytest.raises(StoreError, match="absolute path"):
        store.put_if_absent(b"1", url)


def test_a_file_in_the_way_of_a_folder(store: LocalStore, tmp_path: Path) -> None:
    """Is an error that names the URL."""
    spooled(tmp_path, name="file")

    with pytest.raises(StoreError, match=f"refuses 'file://{tmp_path}/file/x'"):
        store.put_if_absent(b"1", f"file://{tmp_path}/file/x")
    with pytest.raises(StoreError):
        store.read(f"file://{tmp_path}/file/x", 10)


def test_a_missing_spool_file_is_not_a_missing_object(store: LocalStore, tmp_path: Path) -> None:
    """It is the caller's own."""
    with pytest.raises(FileNotFoundError):
        store.commit_if_absent(tmp_path / "nothing", f"file://{tmp_path}/x")


def test_paths_of_urls() -> None:
    """For readers that are faster with a path."""
    assert local_path("file:///data/x y") == Path("/data/x y")
    assert local_path("file://localhost/data") == Path("/data")
    assert local_path("s3://bucket/x") is None


@pytest.mark.parametrize(
    ("number", "said"), [(errno.EROFS, "read-only here"), (errno.EACCES, "permissions or its owner")]
)
def test_a_folder_needs_no_credentials(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("qinfer.storage.local._make", refuse)

    with pytest.raises(StoreDenied, match=said):
        store.put_if_absent(b"x", f"file://{tmp_path}/out/x")


def test_what_is_replaced_while_it_is_set_aside_stays(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the move, another worker made the part anew."""
    final = spooled(tmp_path, b"broken", "part")
    broken = store.stat(f"file://{final}")
    assert broken is not None
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        final.unlink()
        final.write_bytes(b"whole part")
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    store.set_aside(f"file://{final}", broken.etag)

    assert final.read_bytes() == b"whole part"
    assert store.read(f"file://{final}", 100) == b"whole part"
    with pytest.raises(StoreNotFound):
        store.read(f"file://{tmp_path}/_broken/part-1", 100)
