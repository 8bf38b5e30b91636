"""Content encodings, pure: which one to answer with, and bounded decompression (reference §1.11)."""

import zlib
from typing import Literal

from qinfer.errors import InvalidRequest, PayloadTooLarge, UnsupportedFeature
from qinfer.tensors import Bytes

Encoding = Literal["gzip", "deflate"]

_WINDOW_BITS: dict[Encoding, int] = {"gzip": 31, "deflate": 15}  # `deflate` in HTTP is the zlib container
_STEP_BYTES = 256 * 1024
_PIECE_BYTES = 64 * 1024  # what zlib returns unused is a copy: of a piece, not of all the rest
_MAX_MEMBERS = 1000  # of a gzip file that was appended to; each costs as much as a small file


def request_encoding(header: str | None) -> Encoding | None:
    """Reads `Content-Encoding`; `None` for identity.

    Raises:
        UnsupportedFeature: It is neither gzip, deflate nor identity.
    """
    encoding = (header or "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding == "gzip":
        return "gzip"
    if encoding == "deflate":
        return "deflate"
    raise UnsupportedFeature("Unsupported compression type")


def response_encoding(header: str | None) -> Encoding | None:
    """Chooses from `Accept-Encoding` by its q-values; gzip wins a tie, `None` is identity (RFC 9110 §12.5.3)."""
    weights: dict[str, float] = {}
    for item in (header or "").lower().split(","):
        name, _, parameters = item.partition(";")
        weights[name.strip()] = _weight(parameters)
    anything = weights.get("*", 0.0)
    gzip, deflate = weights.get("gzip", anything), weights.get("deflate", anything)
    if max(gzip, deflate) <= 0 or weights.get("identity", 0.0) > max(gzip, deflate):
        return None
    return "gzip" if gzip >= deflate else "deflate"


def compress(body: bytes, encoding: Encoding) -> bytes:
    """Compresses a reply at the fastest level: floats shrink little, and latency counts."""
    compressor = zlib.compressobj(level=1, wbits=_WINDOW_BITS[encoding])
    return compressor.compress(body) + compressor.flush()


def decompress(body: Bytes, encoding: Encoding, max_bytes: int) -> bytes:
    """Decompresses a request body; never holds more than `max_bytes` plus one step of the output.

    Raises:
        InvalidRequest: It is damaged or cut off.
        PayloadTooLarge: It decompresses to more than `max_bytes` bytes.
    """
    out = bytearray()
    view, position = memoryview(body), 0
    try:
        for _ in range(_MAX_MEMBERS):
            decompressor = zlib.decompressobj(wbits=_WINDOW_BITS[encoding])
            while position < len(view) and not decompressor.eof:
                piece = view[position : position + _PIECE_BYTES]
                out += decompressor.decompress(piece, min(_STEP_BYTES, max_bytes - len(out) + 1))
                if len(out) > max_bytes:
                    raise too_large(None, max_bytes)
                position += len(piece) - len(decompressor.unconsumed_tail) - len(decompressor.unused_data)
            if not decompressor.eof:
                raise InvalidRequest(f"the {encoding} body is cut off; send all of it")
            if position == len(view):
                return bytes(out)
        raise InvalidRequest(f"the {encoding} body has more than {_MAX_MEMBERS} members; compress it as one")
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding}: {error}") from None


def too_large(size: int | None, max_bytes: int) -> PayloadTooLarge:
    """Returns the error for a body of `size` bytes (`None`: more than the limit, how many is not known)."""
    many = "more than the limit" if size is None else f"{size} bytes"
    return PayloadTooLarge(
        f"request body of {many} exceeds the maximum allowed input size of {max_bytes} bytes; "
        "raise QINFER_HTTP__MAX_INPUT_BYTES to accept it"
    )


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                weight = float(value)
            except ValueError:
                return 0.0
            return weight if 0.0 <= weight <= 1.0 else 0.0
    return 1.0
