"""Wire versions of records: what is newer is refused clearly, what was appended is skipped."""

import msgspec
import pytest

from qinfer.errors import CorruptEntry
from qinfer.wire.versions import NewerVersion, Record


class Old(msgspec.Struct, array_like=True):
    name: str


class New(msgspec.Struct, array_like=True):
    name: str
    size: int = 7


OLD = Record(Old, "the record of a test")


def test_a_newer_record_is_refused_with_both_versions_and_a_remedy() -> None:
    """Whoever upgrades processes in the wrong order learns which one to upgrade."""
    newer = Record(New, "the record of a test", version=2).encode(New("a"))

    with pytest.raises(NewerVersion) as caught:
        OLD.decode(newer)

    assert caught.value.message == (
        "the record of a test of wire version 2 was written by a newer qinfer; this program reads version 1: "
        "upgrade this program first"
    )


def test_fields_may_be_appended_within_a_version() -> None:
    """An older reader skips them, and a newer one gives them their defaults."""
    new = Record(New, "the record of a test")

    assert OLD.decode(new.encode(New("a", 1))) == Old("a")
    assert new.decode(OLD.encode(Old("a"))) == New("a", 7)


@pytest.mark.parametrize("raw", [b"", b"\x01", b"\x01\x80", b"\x01\x91\xc1", b"\x01\x91\xa1\xff"])
def test_a_damaged_record_is_corrupt(raw: bytes) -> None:
    """Not an error of msgspec's, which nobody expects."""
    with pytest.raises(CorruptEntry):
        OLD.decode(raw)
