"""Copies of remote files: made once, whole or not at all, shared, and thrown away when they are too many."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qinfer.errors import ModelLoadFailed
from qinfer.models.repository import cache
from qinfer.models.repository.cache import FilesCache
from qinfer.models.repository.files import LocalFiles

URL = "s3://bucket/models"


class Elsewhere(LocalFiles):
    """A directory that plays a remote store, and tells what is fetched from it."""

    is_remote = True

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fetched: list[str] = []
        self.before: Callable[[str], None] = lambda _: None

    def fetch(self, path: str, target: Path) -> None:
        self.before(path)
        self.fetched.append(path)
        super().fetch(path, target)


@pytest.fixture
def store(tmp_path: Path) -> Elsewhere:
    write(tmp_path, "m/config.pbtxt", "config")
    write(tmp_path, "m/warmup/x.bin", "x")
    write(tmp_path, "m/1/model.onnx", "one")
    write(tmp_path, "m/1/sub/weights", "weights")
    write(tmp_path, "m/2/model.onnx", "two")
    return Elsewhere(tmp_path / "store")


def write(tmp_path: Path, path: str, content: str) -> None:
    target = tmp_path / "store" / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(content)


def copies(tmp_path: Path) -> list[Path]:
    return sorted(p for p in (tmp_path / "cache").glob("*/m/*") if p.is_dir() and p.name != "content")


def test_a_copy_has_the_version_and_what_lies_beside_it(tmp_path: Path, store: Elsewhere) -> None:
    """Other versions are not fetched."""
    directory = FilesCache(tmp_path / "cache").version_dir(store, URL, "m", 1)

    assert directory.name == "1"
    assert (directory / "model.onnx").read_text() == "one"
    assert (directory / "sub" / "weights").read_text() == "weights"
    assert (directory.parent / "warmup" / "x.bin").read_text() == "x"
    assert not (directory.parent / "2").exists()


def test_the_same_content_is_fetched_once(tmp_path: Path, store: Elsewhere) -> None:
    """By all processes of a machine; with its hash known, the store is not even asked."""
    first = FilesCache(tmp_path / "cache").version_dir(store, URL, "m", 1, "hash")
    fetched = list(store.fetched)
    unreachable = Elsewhere(tmp_path / "nowhere")

    assert FilesCache(tmp_path / "cache").version_dir(store, URL, "m", 1, "other") == first
    assert FilesCache(tmp_path / "cache").version_dir(unreachable, URL, "m", 1, "hash") == first
    assert store.fetched == fetched


def test_what_did_not_change_is_not_fetched_again(tmp_path: Path, store: Elsewhere) -> None:
    """A new configuration costs no download of the weights; the earlier copy stays as it was."""
    files = FilesCache(tmp_path / "cache")
    before = files.version_dir(store, URL, "m", 1, "a")
    store.fetched.clear()
    write(tmp_path, "m/config.pbtxt", "new config")

    after = files.version_dir(store, URL, "m", 1, "b")

    assert store.fetched == ["m/config.pbtxt"]
    assert (after.parent / "config.pbtxt").read_text() == "new config"
    assert (before.parent / "config.pbtxt").read_text() == "config"
    assert (after / "model.onnx").samefile(before / "model.onnx")


def test_at_once_is_fetched_once(tmp_path: Path, store: Elsewhere) -> None:
    """Whoever comes second waits for the first."""
    together = threading.Barrier(4)

    def load(_: int) -> Path:
        together.wait(10)
        return FilesCache(tmp_path / "cache").version_dir(store, URL, "m", 1)

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(load, range(4)))) == 1
    assert sorted(store.fetched) == ["m/1/model.onnx", "m/1/sub/weights", "m/config.pbtxt", "m/warmup/x.bin"]


def test_a_killed_download_leaves_nothing_that_counts(tmp_path: Path, store: Elsewhere) -> None:
    """The next worker starts anew, at once, and removes what is left."""
    program = r"""
        import os, sys, time
        from pathlib import Path
        from qinfer.models.repository.cache import FilesCache
        from qinfer.models.repository.files import LocalFiles

        class Slow(LocalFiles):
            def fetch(self, path, target):
                target.write_text("half")
                os.write(1, b"fetching\n")
                time.sleep(60)

        root = Path(sys.argv[1])
        FilesCache(root / "cache").version_dir(Slow(root / "store"), sys.argv[2], "m", 1, "hash")
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), URL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
        process.kill()
        process.wait(10)
    assert line == b"fetching\n"
    assert [p.name[:9] for p in copies(tmp_path)] == [".partial-"]

    directory = FilesCache(tmp_path / "cache").version_dir(store, URL, "m", 1, "hash")

    assert (directory / "model.onnx").read_text() == "one"
    assert copies(tmp_path) == [directory.parent]


def test_files_that_change_meanwhile_are_copied_again(tmp_path: Path, store: Elsewhere) -> None:
    """A copy never mixes two states of the repository."""

    def change(_: str) -> None:
        store.before = lambda _: None
        write(tmp_path, "m/warmup/x.bin", "changed")

    store.before = change

    directory = FilesCache(tmp_path / "cache").version_dir(store, URL, "m", 1)

    assert (directory.parent / "warmup" / "x.bin").read_text() == "changed"
    assert len(copies(tmp_path)) == 1


def test_files_that_change_all_the_time_are_refused(tmp_path: Path, store: Elsewhere) -> None:
    """With the remedy."""
    lengths = iter(range(1, 1000))
    store.before = lambda path: write(tmp_path, "m/warmup/x.bin", "x" * next(lengths))

    with pytest.raises(ModelLoadFailed, match="change while they are copied; load it when they are complete"):
        FilesCache(tmp_path / "cache").version_dir(store, URL, "m", 1)
    assert copies(tmp_path) == []


@pytest.mark.parametrize(("directory", "version"), [("m", 3), ("other", 1)])
def test_what_is_not_there_is_an_error(tmp_path: Path, store: Elsewhere, directory: str, version: int) -> None:
    """That names the model, and no path."""
    with pytest.raises(
        ModelLoadFailed, match=f"version {version} of model '{directory}' is not in the model repository"
    ):
        FilesCache(tmp_path / "cache").version_dir(store, URL, directory, version)


def test_a_cache_that_can_not_be_written(tmp_path: Path, store: Elsewhere) -> None:
    """Clients see no path."""
    (tmp_path / "cache").write_text("a file")

    with pytest.raises(ModelLoadFailed, match=r"^the files of model 'm' can't be copied: [^/]*$"):
        FilesCache(tmp_path / "cache").version_dir(store, URL, "m", 1)


def test_copies_that_are_too_many_are_removed(tmp_path: Path, store: Elsewhere) -> None:
    """But not those that another process uses, nor those of another version."""
    user, others = FilesCache(tmp_path / "cache"), FilesCache(tmp_path / "cache")
    used = user.version_dir(store, URL, "m", 1)
    second = user.version_dir(store, URL, "m", 2)
    for number in range(8):
        write(tmp_path, "m/warmup/x.bin", "x" * (number + 2))
        last = others.version_dir(store, URL, "m", 1, f"hash{number}")

    left = copies(tmp_path)
    assert {used.parent, second.parent, last.parent} <= set(left)
    assert len(left) <= 2 + 1 + cache.COPIES + 1
    assert len(list((tmp_path / "cache").glob("*/m/content/*"))) < 8  # links to what was removed are gone too


def test_copies_of_models_that_are_gone_are_removed(tmp_path: Path, store: Elsewhere) -> None:
    """After a week without use, at the next load of any model, by a process that does not use them."""
    write(tmp_path, "old/1/model.onnx", "old")
    program = "import sys; from pathlib import Path; from qinfer.models.repository.cache import FilesCache as C"
    program += "\nfrom qinfer.models.repository.files import LocalFiles as L"
    program += (
        "\nprint(C(Path(sys.argv[1]) / 'cache').version_dir(L(Path(sys.argv[1]) / 'store'), sys.argv[2], 'old', 1))"
    )
    shown = subprocess.run([sys.executable, "-c", program, tmp_path, URL], capture_output=True, check=True, text=True)
    old = Path(shown.stdout.strip()).parent
    long_ago_s = time.time() - cache.UNUSED_S - 60
    assert old.is_dir()
    os.utime(old, (long_ago_s, long_ago_s))

    FilesCache(tmp_path / "cache").version_dir(store, URL, "m", 1)

    assert not old.exists()
