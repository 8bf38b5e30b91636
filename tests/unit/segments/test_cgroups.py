"""Memory cgroups, from the files that the kernel shows."""

from pathlib import Path

import pytest

from qinfer.segments import memory as segments
from qinfer.segments.memory import OwnMemory, has_spare

MIB = 2**20


def group(directory: Path, limit: int | str, used: int, *, files: int = 0, is_first: bool = False) -> None:
    """Writes what the kernel shows of a group, in bytes; `is_first` = of version 1."""
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_first else ("memory.max", "memory.current")
    for name, value in zip(names, (limit, used), strict=True):
        (directory / name).write_text(f"{value}\n")
    before = "inactive_file 0\nactive_file 0\ntotal_" if is_first else ""
    total = "total_" if is_first else ""
    (directory / "memory.stat").write_text(f"anon 4096\n{before}inactive_file {files - 1}\n{total}active_file 1\n")


def of_process(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_a_group_keeps_an_eighth_of_its_limit(tmp_path: Path) -> None:
    of_process(tmp_path, "0::/\n")
    group(tmp_path / "sys/fs/cgroup", 80 * MIB, 60 * MIB)

    assert has_spare(10 * MIB, tmp_path)
    assert not has_spare(10 * MIB + 1, tmp_path)


@pytest.mark.parametrize("is_first", [False, True])
def test_pages_of_files_count_as_left(tmp_path: Path, *, is_first: bool) -> None:
    of_process(tmp_path, "3:cpu,memory:/a\n" if is_first else "0::/a\n")
    base = tmp_path / ("sys/fs/cgroup/memory" if is_first else "sys/fs/cgroup")
    group(base / "a", 80 * MIB, 75 * MIB, files=30 * MIB, is_first=is_first)

    assert has_spare(25 * MIB, tmp_path)
    assert not has_spare(25 * MIB + 1, tmp_path)


def test_each_group_around_the_process_counts(tmp_path: Path) -> None:
    of_process(tmp_path, "1:name=systemd:/other\n0::/a/b\n")
    base = tmp_path / "sys/fs/cgroup"
    group(base / "a/b", "max", 60 * MIB)
    group(base / "a", 80 * MIB, 65 * MIB)

    assert has_spare(5 * MIB, tmp_path)
    assert not has_spare(6 * MIB, tmp_path)


def test_without_a_limit_there_is_memory(tmp_path: Path) -> None:
    """In a container the path may be one of the machine, which is not there."""
    assert has_spare(2**40, tmp_path)
    of_process(tmp_path / "v1", "4:memory:/docker/abc\n")
    group(tmp_path / "v1/sys/fs/cgroup/memory", 9223372036854771712, 0, is_first=True)
    assert has_spare(2**40, tmp_path / "v1")


def test_no_page_is_taken_that_a_group_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs that have pages are used further."""
    memory = OwnMemory("gateway-a", 8 * MIB)
    held = memory.write([bytes(MIB)], MIB, "")
    assert held is not None
    monkeypatch.setattr(segments, "has_spare", lambda _: False)

    assert memory.write([bytes(MIB)], MIB, "") is None
    held.release()
    again = memory.write([bytes(MIB)], MIB, "")

    assert again is not None
    assert memory.held_bytes == again.place.size
    memory.close()
