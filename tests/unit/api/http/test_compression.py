"""Content encodings: negotiation by q-value, and decompression that stays within its limit."""

import gzip
import zlib

import pytest

from qinfer.errors import InvalidRequest, PayloadTooLarge, UnsupportedFeature
from qinfer_api.http.infer import compress, decompress, request_encoding, response_encoding


@pytest.mark.parametrize(
    ("header", "chosen"),
    [
        (None, None),
        ("", None),
        ("identity", None),
        ("br", None),
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("GZIP, deflate", "gzip"),
        ("deflate, gzip", "deflate"),
        ("identity, gzip", None),
        ("br, gzip, identity", "gzip"),
        ("gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("gzip;q=0, deflate;q=0", None),
        ("gzip;q=0.5, identity;q=0.9", None),
        ("*", "gzip"),
        ("gzip;q=0, *;q=0.5", "deflate"),
        ("gzip; q=nonsense", None),
    ],
)
def test_response_encoding(header: str | None, chosen: str | None) -> None:
    """The best q-value wins, and of equal ones the first."""
    assert response_encoding(header) == chosen


def test_an_unknown_request_encoding_is_unsupported() -> None:
    """Triton's text (reference §1.11)."""
    with pytest.raises(UnsupportedFeature, match=r"^Unsupported compression type$"):
        request_encoding("br")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_what_is_compressed_decompresses(encoding: str) -> None:
    """Both ways."""
    known = request_encoding(encoding)
    assert known is not None

    assert decompress(compress(b"abc" * 1000, known), known, 3000) == b"abc" * 1000


def test_a_gzip_body_of_several_members_is_read_whole() -> None:
    """RFC 1952 allows it, and tools make it."""
    assert decompress(gzip.compress(b"ab") + gzip.compress(b"cd"), "gzip", 100) == b"abcd"


def test_a_bomb_is_stopped_at_the_limit() -> None:
    """A small body that decompresses to far more than the limit is refused."""
    with pytest.raises(PayloadTooLarge, match="exceeds the maximum allowed value of 1000 bytes"):
        decompress(gzip.compress(bytes(50_000_000)), "gzip", 1000)


@pytest.mark.parametrize("body", [b"", gzip.compress(b"abcdef" * 100, mtime=0)[:-20]])
def test_a_body_that_is_cut_off_is_refused(body: bytes) -> None:
    """Half a body is no body."""
    with pytest.raises(InvalidRequest, match="cut off"):
        decompress(body, "gzip", 10_000)


_ABC = gzip.compress(b"abc", mtime=0)


@pytest.mark.parametrize("body", [b"abc" * 10, _ABC[:-8] + bytes(8), _ABC + b"more"])
def test_a_damaged_body_is_refused(body: bytes) -> None:
    """No compressed data at all, with a wrong checksum, and with something behind it."""
    with pytest.raises(InvalidRequest, match="the body is not gzip"):
        decompress(body, "gzip", 10_000)


def test_either_container_goes_by_either_name() -> None:
    """As with Triton; what has no container, as some call deflate, is refused by both."""
    bare = zlib.compressobj(wbits=-15)
    raw = bare.compress(b"abc") + bare.flush()

    assert decompress(zlib.compress(b"abc"), "gzip", 10) == decompress(gzip.compress(b"abc"), "deflate", 10) == b"abc"
    with pytest.raises(InvalidRequest, match="the body is not deflate"):
        decompress(raw, "deflate", 10)


def test_very_many_members_are_refused() -> None:
    """Empty ones cost time without ever reaching the size limit."""
    with pytest.raises(InvalidRequest, match="more than 1000 members"):
        decompress(gzip.compress(b"") * 800_000, "gzip", 1000)


def test_a_few_members_are_one_body() -> None:
    """As gzip files that were appended to are."""
    assert decompress(gzip.compress(b"a" * 100_000) + gzip.compress(b"b"), "gzip", 200_000) == b"a" * 100_000 + b"b"


@pytest.mark.parametrize("header", ["gzip;q=nan", "gzip;q=inf", "gzip;q=2"])
def test_a_weight_that_is_none_counts_as_zero(header: str) -> None:
    """Weights are numbers from 0 to 1."""
    assert response_encoding(header) is None
