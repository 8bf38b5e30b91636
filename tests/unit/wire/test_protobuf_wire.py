"""Messages that can't be read, or not at a reasonable cost, are refused before anything of them is looked at."""

import pytest

from qinfer.errors import InvalidRequest
from qinfer.wire.kserve_grpc import parse_infer


@pytest.mark.parametrize("blob", [b"\xff", b"\x0a\x05m", b"\x3b", bytes(20_000), b"\x3a\xff\xff\xff\xff\x7f" * 4000])
def test_what_is_no_message_is_an_invalid_request(blob: bytes) -> None:
    """Neither small nor large garbage is an internal error."""
    with pytest.raises(InvalidRequest, match="is not a message"):
        parse_infer(blob)


def test_a_message_of_very_many_fields_is_refused() -> None:
    """Looking at each takes long: ten megabytes of empty inputs took fifteen seconds."""
    with pytest.raises(InvalidRequest, match="has more than 65536 inputs"):
        parse_infer(b"\x3a\x00" * 65_537)

    assert len(parse_infer(b"\x3a\x00" * 65_536).raw) == 65_536
