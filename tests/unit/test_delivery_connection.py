"""What goes over a connection to Redis."""

import pytest

from qinfer.delivery.connection import Template, pack


@pytest.mark.parametrize("last", [b"", b"frame", bytearray(b"\r\n"), memoryview(b"x" * 1000)])
def test_a_template_packs_what_pack_packs(last: bytes | bytearray | memoryview) -> None:
    """Only the way is shorter: the bytes are those of the whole command."""
    template = Template(b"XADD", "lane", b"*", 1, b"f")

    packed = template.pack(last)

    assert packed == pack((b"XADD", "lane", b"*", 1, b"f", bytes(last)))
