"""Archives of environments: what is unpacked, and what is refused before it could lie or lead outside."""

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from qinfer.backends.python_host.packed import ArchiveBounds, leads_out, unpack
from qinfer.errors import ModelLoadFailed

PLENTY = ArchiveBounds(2**24, 1000)

Fill = Callable[[tarfile.TarFile], object]


def member(name: str, content: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, io.BytesIO]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, io.BytesIO(content)


def link(name: str, goal: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, io.BytesIO]:
    return member(name, type=kind, linkname=goal)


def archive(*members: tuple[tarfile.TarInfo, io.BytesIO], mode: str = "w:gz") -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=mode) as tar:  # type: ignore[call-overload]
        for info, content in members:
            tar.addfile(info, content)
    return made.getvalue()


def unpacked(target: Path, content: bytes, bounds: ArchiveBounds = PLENTY) -> Path:
    target.mkdir()
    unpack(io.BytesIO(content), target, bounds)
    return target


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_files_directories_and_links_are_unpacked(tmp_path: Path, mode: str) -> None:
    content = archive(
        member("./", type=tarfile.DIRTYPE),
        member("./lib/empty", type=tarfile.DIRTYPE),
        member("./lib/a.py", b"a", mtime=1_000_000_000),
        member("./bin/python3", b"#!", mode=0o6777),
        link("./bin/python", "python3"),
        link("./lib64", "lib"),
        link("./lib/also.py", "lib/a.py", tarfile.LNKTYPE),
        mode=mode,
    )

    root = unpacked(tmp_path / "env", content)

    assert (root / "lib64" / "a.py").read_text() == (root / "lib" / "also.py").read_text() == "a"
    assert (root / "lib" / "a.py").stat().st_mtime == 1_000_000_000
    assert [(root / name).stat().st_mode & 0o7777 for name in ("lib/a.py", "bin/python")] == [0o600, 0o700]
    assert (root / "lib" / "empty").is_dir()


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([member("/etc/evil", b"x")], "'/etc/evil', which leads out of it"),
        ([member("../evil", b"x")], "'../evil', which leads out of it"),
        ([member("lib/../../evil", b"x")], "which leads out of it"),
        ([link("a", "/etc")], "'a', which is a link that leads out of it"),
        ([link("a", "..")], "'a', which is a link that leads out of it"),
        ([link("d/x", ".."), link("y", "d/x/..")], "'y', which is a link that leads out of it"),
        ([link("y", "d/x/.."), link("d/x", "..")], "'y', which is a link that leads out of it"),
        ([link("a", "b"), link("b", "a")], "which is a link that leads out of it"),
        ([link("a", "b"), member("b/c", b""), link("a/d", "c")], "'a/d', which lies behind a link"),
        ([link("a", "b"), member("b/c", b""), member("a/d", b"")], "members in the way of one another"),
        ([link("a", "../evil", tarfile.LNKTYPE)], "'a', which leads out of it"),
        ([link("a", "/etc/passwd", tarfile.LNKTYPE)], "'a', which leads out of it"),
        ([link("a", "later", tarfile.LNKTYPE), member("later", b"")], "a link to a file that is not before it"),
        ([member("a", type=tarfile.CHRTYPE, devmajor=1, devminor=3)], "neither file, directory nor link"),
        ([member("a", type=tarfile.BLKTYPE)], "neither file, directory nor link"),
        ([member("a", type=tarfile.FIFOTYPE)], "neither file, directory nor link"),
        ([member("a", b"x"), member("a/b", b"x")], "members in the way of one another"),
        ([member(".", b"x")], "'.', which is no directory"),
        ([link("a", "x" * 5000)], "a link with an invalid target"),
        ([link("a", "")], "a link with an invalid target"),
    ],
)
def test_what_does_not_stay_inside_is_refused(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, io.BytesIO]], text: str
) -> None:
    with pytest.raises(ModelLoadFailed) as refused:
        unpacked(tmp_path / "env", archive(*members))

    assert text in refused.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["env"]
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_a_link_to_python_outside_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="conda-pack, or make the environment by python -m venv --copies"):
        unpacked(tmp_path / "env", archive(link("bin/python3", "/usr/bin/python3")))


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (ArchiveBounds(20_000, 1000), r"more than 20000 bytes when unpacked \(QINFER_WORKER__MAX_ENVIRONMENT_BYTES\)"),
        (ArchiveBounds(2**24, 3), r"more than 3 members \(QINFER_WORKER__MAX_ENVIRONMENT_FILES\)"),
    ],
)
def test_what_is_too_much_is_refused(tmp_path: Path, bounds: ArchiveBounds, text: str) -> None:
    content = archive(*(member(str(n), bytes(10_000)) for n in range(4)))

    with pytest.raises(ModelLoadFailed, match=text):
        unpacked(tmp_path / "env", content, bounds)


def test_what_unpacks_to_very_much_is_refused_early(tmp_path: Path) -> None:
    """A file that says that it is large, and has holes, writes nothing."""
    sparse = member("a", b"", type=tarfile.GNUTYPE_SPARSE)
    with pytest.raises(ModelLoadFailed):
        unpacked(tmp_path / "sparse", archive(sparse))

    bomb = gzip.compress(archive(member("a", bytes(2**26)), mode="w"))
    with pytest.raises(ModelLoadFailed, match="more than 16777216 bytes"):
        unpacked(tmp_path / "bomb", bomb)
    assert sum(path.stat().st_size for path in tmp_path.rglob("a")) <= 2**24


WHOLE = archive(*(member(f"lib/{n}.py", os.urandom(3000)) for n in range(20)), mode="w")


@pytest.mark.parametrize("kept", [0, 1, 700, 512 * 14, len(WHOLE) // 2, -10240, -1])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_what_was_cut_off_is_refused(tmp_path: Path, kept: int, pack: Callable[[bytes], bytes]) -> None:
    """Also where a member ends, which is no error to `tarfile`."""
    content = pack(WHOLE)
    cut = (
        content[:kept]
        if kept >= 0 or pack is gzip.compress
        else content[: max(kept - 512, -len(content))].rstrip(b"\0")
    )

    with pytest.raises(ModelLoadFailed, match=r"is damaged, or no \.tar\.gz"):
        unpacked(tmp_path / "env", cut)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(100), b"BZh9" + bytes(100), b"\x1f\x8b" + bytes(600)])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ModelLoadFailed, match=r"is damaged, or no \.tar\.gz"):
        unpacked(tmp_path / "env", content)


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    """By the checksum at the end of gzip."""
    content = bytearray(gzip.compress(WHOLE, 0))
    content[len(content) // 2] ^= 1

    with pytest.raises(ModelLoadFailed, match="is damaged"):
        unpacked(tmp_path / "env", bytes(content))


@pytest.mark.parametrize(
    ("path", "links", "out"),
    [
        ("a/b", {}, False),
        ("a", {"a": "b/c"}, False),
        ("a", {"a": "b/../c"}, False),
        ("a/b", {"a/b": "../c"}, False),
        ("a/b", {"a/b": "../../c"}, True),
        ("a", {"a": "b/c", "b": "d/e"}, False),
        ("a", {"a": "b/../..", "b": "d/e"}, False),
        ("a", {"a": "b/../../..", "b": "d/e"}, True),
        ("a", {"a": "b/..", "b": "."}, True),
    ],
)
def test_where_links_lead(path: str, links: dict[str, str], out: bool) -> None:  # noqa: FBT001
    assert leads_out(tuple(path.split("/")), {tuple(name.split("/")): goal for name, goal in links.items()}) == out
