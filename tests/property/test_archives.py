"""Archives of environments, of any members: what is unpacked lies and leads inside."""

import io
import os
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from qinfer.backends.python_host.packed import ArchiveBounds, unpack
from qinfer.errors import ModelLoadFailed
from tests.unit.backends.python_host.test_packed_archives import archive, link, member

PARTS = st.sampled_from(["a", "b", "c", ".", "..", ""])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
MEMBERS = st.one_of(
    st.builds(member, PATHS, st.binary(max_size=600)),
    st.builds(member, PATHS, type=st.sampled_from([tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.XHDTYPE])),
    st.builds(link, PATHS, PATHS, st.sampled_from([tarfile.SYMTYPE, tarfile.LNKTYPE])),
)


@given(st.lists(MEMBERS, min_size=1, max_size=8), st.binary(max_size=4), st.integers(0, 4096))
def test_nothing_leads_out_of_an_archive(
    members: list[tuple[tarfile.TarInfo, io.BytesIO]], noise: bytes, at: int
) -> None:
    """Also of one with a few bytes that are wrong."""
    content = bytearray(archive(*members, mode="w"))
    content[at : at + len(noise)] = noise
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "env"
        root.mkdir()

        with suppress(ModelLoadFailed):
            unpack(io.BytesIO(bytes(content)), root, ArchiveBounds(2**20, 100))

        inside = os.path.realpath(root)
        assert [path.name for path in Path(name).iterdir()] == ["env"]
        assert all(f"{os.path.realpath(path)}/".startswith(f"{inside}/") for path in root.rglob("*"))
