"""gRPC's header fields (doc/PROTOCOL-HTTP2.md)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from qinfer.submission.memory import Landing
from qinfer.tensors import Bytes
from qinfer_api.http.infer import UNQUOTED, Encoding
from qinfer_api.rpc import hpack
from qinfer_api.status import GRPC_CODES

if TYPE_CHECKING:
    from qinfer_api.rpc.protocol import GrpcCall

_NUMBERS = {name: number for number, name in enumerate(GRPC_CODES)}
_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MAX_TIMEOUT_DIGITS = 8
_ENCODINGS: dict[bytes, Encoding | None] = {b"identity": None, b"gzip": "gzip", b"deflate": "deflate"}
_ACCEPTED = b"identity, deflate, gzip"
_OWN = frozenset((b"content-type", b"te", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding", b"host"))

HEAD = b"".join(
    (
        hpack.status(200),
        hpack.field(b"content-type", b"application/grpc"),
        hpack.field(b"grpc-accept-encoding", _ACCEPTED),
    )
)

# Clients accept 8 KiB of a header; an ASCII character takes up to 3 bytes, others 12.
_MAX_ASCII, _MAX_OTHER = 2000, 500

_NOWHERE: Mapping[str, int] = {}

Metadata = Sequence[tuple[str, str]]


class Abort(Exception):
    """Ends a call; `again_s` 0 = unknown."""

    def __init__(self, code: str, text: str, again_s: int = 0) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.again_s = again_s


class ReplyCompression(NamedTuple):
    """Compression of the reply's messages; `level` is a compression level of zlib."""

    encoding: Encoding
    level: int


class Method(NamedTuple):
    """A method of a service.

    `admit` decides by the head and the peer's address. `start` gets the message, or b"" for a stream. A shutdown waits
    for calls that are `is_awaited`. `compression` is the zlib level of replies, 0 = uncompressed.
    `land` may return memory for a message of so many bytes.
    """

    admit: Callable[["CallHead", str], Any]
    start: Callable[["GrpcCall", Bytes], None]
    takes_stream: bool
    max_message_bytes: int
    is_awaited: bool = True
    compression: int = 0
    land: Callable[["GrpcCall", int], Landing | None] | None = None


class CallHead:
    """The head of calls with equal headers; without a method, `refusal` ends the call."""

    __slots__ = (
        "_places", "_values", "encoding", "fields", "is_awaited", "memo", "method", "packing", "refusal", "timeout_s"
    )  # fmt: skip

    def __init__(
        self,
        method: Method | None,
        refusal: bytes = b"",
        places: Mapping[str, int] = _NOWHERE,
        values: Sequence[bytes] = (),
    ) -> None:
        self.method = method
        self.is_awaited = method is None or method.is_awaited
        self.refusal = refusal
        self.fields: Sequence[hpack.Field] = ()
        self._places = places
        self._values = values
        self.timeout_s = math.inf
        self.encoding: Encoding | None = None
        self.packing: ReplyCompression | None = None
        self.memo: Any = None

    @property
    def metadata(self) -> Metadata:
        """Custom text headers, by lower-case name."""
        return [
            (name.decode(), value.decode("latin-1"))
            for name, value in self.fields
            if name not in _OWN and name[:1] != b":" and not name.endswith(b"-bin")
        ]

    def first(self, name: str) -> str | None:
        """Returns the first value of a header."""
        place = self._places.get(name)
        return None if place is None else self._values[place].decode("latin-1")

    def every(self, name: str) -> list[str]:
        """Returns all values of a header."""
        return [value for other, value in self.metadata if other == name] if name in self._places else []


def read_timeout(text: bytes) -> float:
    """Parses `grpc-timeout` to seconds."""
    digits, unit = text[:-1], _UNITS_S.get(text[-1:])
    if unit is None or not digits.isdigit() or len(digits) > _MAX_TIMEOUT_DIGITS:
        shown = text[:20].decode("latin-1")
        raise Abort("INVALID_ARGUMENT", f"grpc-timeout '{shown}' is not up to 8 digits and one of H, M, S, m, u, n")
    return int(digits) * unit


def read_encoding(text: bytes) -> Encoding | None:
    """Parses `grpc-encoding`; `None` = no compression."""
    try:
        return _ENCODINGS[text]
    except KeyError:
        shown = text[:40].decode("latin-1")
        raise Abort(
            "UNIMPLEMENTED", f"grpc-encoding '{shown}' is not supported; use one of {_ACCEPTED.decode()}"
        ) from None


def choose_packing(accepted: str, level: int) -> ReplyCompression | None:
    """Chooses the compression of replies."""
    known = {name.strip() for name in accepted.split(",")}
    encoding: Encoding | None = "gzip" if "gzip" in known else "deflate" if "deflate" in known else None
    return ReplyCompression(encoding, level) if level and encoding is not None else None


def trailers_only(abort: Abort, status: int = 200, initial: bytes = b"") -> bytes:
    """Returns the header block of a mere status."""
    head = initial or hpack.status(status) + HEAD[1:]
    return head + status_fields(abort)


def status_fields(abort: Abort) -> bytes:
    """Returns a status with its time of retry (gRFC A6)."""
    text = quote(shortened(abort.text), safe=UNQUOTED)
    again = hpack.field(b"grpc-retry-pushback-ms", b"%d" % (abort.again_s * 1000)) if abort.again_s else b""
    status = hpack.field(b"grpc-status", b"%d" % _NUMBERS[abort.code])
    return status + hpack.field(b"grpc-message", text.encode()) + again


def shortened(text: str) -> str:
    """Shortens a text for a status."""
    most = _MAX_ASCII if text.isascii() else _MAX_OTHER
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
