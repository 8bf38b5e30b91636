"""Unpacked environments: made once, shared, held while they are used, and removed afterwards."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import qinfer.backends.python_host.packed as environments
from qinfer.backends.python_host.packed import READY, UNUSED_S, ArchiveBounds, Environments, unpack
from qinfer.errors import ModelLoadFailed
from tests.unit.backends.python_host.test_packed_archives import archive, member

BOUNDS = ArchiveBounds(2**24, 1000)
LONG_AGO = time.time() - 2 * UNUSED_S


def packed(path: Path, text: str = "a") -> Path:
    path.write_bytes(archive(member("lib/a.py", text.encode()), mode="w"))  # gzip notes the time
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


def homes(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir() and path.name not in ("known", "lent")}


def use(root: Path, file: Path, pipe: Connection, bounds: ArchiveBounds) -> None:
    """Uses an environment in a process of its own until it is told to end."""
    pipe.send(str(Environments(root, bounds).unpacked(file, {})))
    pipe.recv()


class User:
    """A process that uses an environment."""

    def __init__(self, root: Path, file: Path, bounds: ArchiveBounds = BOUNDS) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=use, args=(root, file, theirs, bounds), daemon=True)
        self._process.start()

    def place(self) -> Path:
        return Path(self._pipe.recv())

    def end(self) -> None:
        self._pipe.send(None)
        self.join()

    def join(self) -> None:
        self._process.join()


def test_an_archive_is_unpacked_once_and_private(tmp_path: Path) -> None:
    file, root = packed(tmp_path / "env.tar.gz"), tmp_path / "cache" / "environments"
    first = Environments(root, BOUNDS).unpacked(file, {})
    made = (first / "lib" / "a.py").stat()

    again = Environments(root, BOUNDS).unpacked(packed(tmp_path / "copy.tar.gz"), {})

    assert again == first
    assert (again / "lib" / "a.py").stat().st_ino == made.st_ino
    assert {path.stat().st_mode & 0o077 for path in (root, first.parent, first, first / "lib" / "a.py")} == {0}


def test_processes_that_unpack_at_once_share_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, root = packed(tmp_path / "env.tar.gz"), tmp_path / "environments"
    users = [User(root, file) for _ in range(4)]

    places = {user.place() for user in users}

    for user in users:
        user.end()
    assert len(places) == len(homes(root)) == 1
    assert capfd.readouterr().out.count("environment unpacked") == 1


def test_a_changed_archive_is_another_environment(tmp_path: Path) -> None:
    file, root = packed(tmp_path / "env.tar.gz"), tmp_path / "environments"
    before = Environments(root, BOUNDS).unpacked(file, {})

    after = Environments(root, BOUNDS).unpacked(packed(file, "b"), {})

    assert after != before
    assert [(place / "lib" / "a.py").read_text() for place in (before, after)] == ["a", "b"]


def test_what_a_killed_process_has_left_is_not_used(tmp_path: Path) -> None:
    file, root = packed(tmp_path / "env.tar.gz"), tmp_path / "environments"
    place = Environments(root, BOUNDS).unpacked(file, {})
    (place.parent / READY).unlink()
    (place / "lib" / "a.py").write_text("half")
    (root / "other" / "env").mkdir(parents=True)

    assert Environments(root, BOUNDS).unpacked(file, {}) == place

    assert (place / "lib" / "a.py").read_text() == "a"
    assert homes(root) == {place.parent.name}


def test_a_process_that_is_killed_while_it_unpacks_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends its lock, and what it wrote is removed."""
    file, root = packed(tmp_path / "env.tar.gz"), tmp_path / "environments"

    def half(archive: object, target: Path, bounds: object) -> int:
        (target / "half").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with monkeypatch.context() as patched:
        patched.setattr(f"{environments.__name__}.unpack", half)
        User(root, file).join()
    (left,) = homes(root)
    assert (root / left / "env" / "half").exists()

    place = Environments(root, BOUNDS).unpacked(file, {})

    assert [path.name for path in place.iterdir()] == ["lib"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    file, root = tmp_path / "env.tar.gz", tmp_path / "environments"
    file.write_bytes(archive(member("a", b"x"), member("../a", b"x")))

    with pytest.raises(ModelLoadFailed):
        Environments(root, BOUNDS).unpacked(file, {})

    assert homes(root) == set()


def test_what_is_unused_for_a_day_is_removed_and_what_is_used_stays(tmp_path: Path) -> None:
    root = tmp_path / "environments"
    used, unused, recent = (User(root, packed(tmp_path / name, name)) for name in ("used", "unused", "recent"))
    places = {user: user.place() for user in (used, unused, recent)}
    unused.end()
    recent.end()
    for user in (used, unused):
        os.utime(places[user].parent, (LONG_AGO, LONG_AGO))

    new = User(root, packed(tmp_path / "new", "new"))
    place = new.place()

    assert homes(root) == {found.parent.name for found in (places[used], places[recent], place)}
    assert (places[used] / "lib" / "a.py").read_text() == "used"
    for user in (used, new):
        user.end()


def test_what_is_unused_takes_no_more_than_one_may(tmp_path: Path) -> None:
    """The least recently used environments are removed; environments in use do not count."""
    root, bounds, now_s = tmp_path / "environments", ArchiveBounds(20_000, 1000), time.time()
    users = [User(root, packed(tmp_path / name, name * 6000), bounds) for name in "abcde"]
    places = [user.place().parent for user in users]
    for age, place in enumerate(places):
        os.utime(place, (now_s - 100 + age, now_s - 100 + age))
    for user in users[1:]:
        user.end()

    new = User(root, packed(tmp_path / "new", "new"), bounds)
    place = new.place().parent

    assert homes(root) == {found.name for found in (places[0], *places[2:], place)}
    for user in (users[0], new):
        user.end()


def test_a_full_disk_gets_room_from_what_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "environments"
    old = User(root, packed(tmp_path / "old", "old"))
    place = old.place()
    old.end()

    def until_there_is_room(*args: object) -> int:
        if place.exists():
            raise OSError(28, "No space left on device")
        return unpack(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(f"{environments.__name__}.unpack", until_there_is_room)

    new = Environments(root, BOUNDS).unpacked(packed(tmp_path / "new", "new"), {})

    assert homes(root) == {new.parent.name}


def test_a_disk_that_stays_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"{environments.__name__}.unpack", never)

    with pytest.raises(ModelLoadFailed, match="can't be unpacked: No space left on device"):
        Environments(tmp_path / "environments", BOUNDS).unpacked(packed(tmp_path / "new"), {})

    assert homes(tmp_path / "environments") == set()


def test_a_note_that_a_process_writes_is_not_swept(tmp_path: Path) -> None:
    """Another process would fail to rename it, and this one to read it after that."""
    root = tmp_path / "environments"
    (root / "known").mkdir(parents=True)
    partial = root / "known" / ".17"
    partial.write_text("of an archive that will be unpacked")
    os.utime(partial, (LONG_AGO, LONG_AGO))

    Environments(root, BOUNDS).unpacked(packed(tmp_path / "new"), {})

    assert partial.exists()


def test_an_archive_whose_note_can_not_be_written_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note spares a read only; a full disk may get room."""
    monkeypatch.setattr(environments, "_SETTLED_S", -1.0)
    root = tmp_path / "environments"
    (root / "known").mkdir(parents=True)
    (root / "known" / f".{os.getpid()}").mkdir()

    place = Environments(root, BOUNDS).unpacked(packed(tmp_path / "new"), {})

    assert (place / "lib" / "a.py").exists()


def test_an_empty_note_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of the machine may leave one, and the whole directory would be taken for the environment."""
    monkeypatch.setattr(environments, "_SETTLED_S", -1.0)
    file, root = packed(tmp_path / "env.tar.gz"), tmp_path / "environments"
    place = Environments(root, BOUNDS).unpacked(file, {})
    (note,) = (root / "known").iterdir()
    note.write_text("")

    assert Environments(root, BOUNDS).unpacked(file, {}) == place
    assert note.read_text() == place.parent.name


def test_a_known_archive_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_SETTLED_S", -1.0)
    file, root = packed(tmp_path / "env.tar.gz"), tmp_path / "environments"
    place = Environments(root, BOUNDS).unpacked(file, {})
    monkeypatch.setattr("hashlib.file_digest", None)

    assert Environments(root, BOUNDS).unpacked(file, {}) == place


def test_an_archive_that_was_changed_just_now_is_read_again(tmp_path: Path) -> None:
    """A write within a tick of the file system's clock leaves its stamp."""
    file, root = packed(tmp_path / "env.tar.gz"), tmp_path / "environments"

    Environments(root, BOUNDS).unpacked(file, {})

    assert not list((root / "known").glob("*"))


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "environments"
    root.mkdir(mode=0o700)
    root.chmod(0o777)

    with pytest.raises(ModelLoadFailed, match="others can write to it"):
        Environments(root, BOUNDS)
