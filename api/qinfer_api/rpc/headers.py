"""Header fields of gRPC (doc/PROTOCOL-HTTP2.md): the heads of calls, and the statuses that end them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from qinfer.tensors import Bytes
from qinfer_api.http.infer import UNQUOTED, Encoding
from qinfer_api.rpc import hpack
from qinfer_api.status import GRPC_CODES

if TYPE_CHECKING:
    from qinfer_api.rpc.protocol import Call

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
"""The header block of a reply, without metadata."""

# A status's text is a header, of which clients take 8 KiB by default; ASCII takes up to 3 bytes there, others 12.
_MAX_ASCII, _MAX_OTHER = 2000, 500

_NOWHERE: Mapping[str, int] = {}

Metadata = Sequence[tuple[str, str]]


class Abort(Exception):
    """Ends a call with a status.

    Attributes:
        code: The status's name.
        text: Its text.
        again_s: Seconds after which to try again; 0 = unknown.
    """

    def __init__(self, code: str, text: str, again_s: int = 0) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.again_s = again_s


class Packing(NamedTuple):
    """How the messages of replies are compressed.

    Attributes:
        encoding: The format.
        level: The level of zlib.
    """

    encoding: Encoding
    level: int


class Method(NamedTuple):
    """A method of a service.

    Attributes:
        admit: Decides by the head, and the address that it came from, whether the call may be made, and raises if not;
            its result is `Call.context`.
        start: Begins the call, with its message; with b"" where the client sends a stream of them.
        takes_stream: The client sends a stream of messages.
        max_message_bytes: The largest message, decompressed.
        is_awaited: A shutdown waits for its calls; `False` where they last as long as their clients like.
        compression: The level of zlib at which its replies are compressed for clients that accept it; 0 = none is.
    """

    admit: Callable[["Head", str], Any]
    start: Callable[["Call", Bytes], None]
    takes_stream: bool
    max_message_bytes: int
    is_awaited: bool = True
    compression: int = 0


class Head:
    """The head of a call; calls with equal headers share one.

    Attributes:
        method: What is called; `None` = nothing that exists, or not properly: `refusal` says so.
        refusal: The header block that ends the call.
        fields: The headers.
        timeout_s: Seconds until the client gives up; infinite = never.
        encoding: How its compressed messages are compressed.
        packing: How those of its reply are; `None` = they are not.
        memo: What methods have worked out from the metadata.
    """

    __slots__ = ("_places", "_values", "encoding", "fields", "memo", "method", "packing", "refusal", "timeout_s")

    def __init__(
        self,
        method: Method | None,
        refusal: bytes = b"",
        places: Mapping[str, int] = _NOWHERE,
        values: Sequence[bytes] = (),
    ) -> None:
        self.method = method
        self.refusal = refusal
        self.fields: Sequence[hpack.Field] = ()
        self._places = places  # of the first header of each name, among the values
        self._values = values
        self.timeout_s = math.inf
        self.encoding: Encoding | None = None
        self.packing: Packing | None = None
        self.memo: Any = None

    @property
    def metadata(self) -> Metadata:
        """The headers that are not the protocol's own, names in lower case; binary ones are left out."""
        return [
            (name.decode(), value.decode("latin-1"))
            for name, value in self.fields
            if name not in _OWN and name[:1] != b":" and not name.endswith(b"-bin")
        ]

    def first(self, name: str) -> str | None:
        """Returns the value of a header; of several the first."""
        place = self._places.get(name)
        return None if place is None else self._values[place].decode("latin-1")

    def every(self, name: str) -> list[str]:
        """Returns the values of a header, in order."""
        return [value for other, value in self.metadata if other == name] if name in self._places else []


def read_timeout(text: bytes) -> float:
    """Reads a `grpc-timeout`, in seconds.

    Raises:
        Abort: It is none.
    """
    digits, unit = text[:-1], _UNITS_S.get(text[-1:])
    if unit is None or not digits.isdigit() or len(digits) > _MAX_TIMEOUT_DIGITS:
        shown = text[:20].decode("latin-1")
        raise Abort("INVALID_ARGUMENT", f"grpc-timeout '{shown}' is not up to 8 digits and one of H, M, S, m, u, n")
    return int(digits) * unit


def read_encoding(text: bytes) -> Encoding | None:
    """Reads a `grpc-encoding`; `None` = messages are not compressed.

    Raises:
        Abort: It is not supported.
    """
    try:
        return _ENCODINGS[text]
    except KeyError:
        shown = text[:40].decode("latin-1")
        raise Abort(
            "UNIMPLEMENTED", f"grpc-encoding '{shown}' is not supported; use one of {_ACCEPTED.decode()}"
        ) from None


def choose_packing(accepted: str, level: int) -> Packing | None:
    """Chooses how replies are compressed, at a level of zlib (0 = not), for a client that accepts these encodings."""
    known = {name.strip() for name in accepted.split(",")}
    encoding: Encoding | None = "gzip" if "gzip" in known else "deflate" if "deflate" in known else None
    return Packing(encoding, level) if level and encoding is not None else None


def trailers_only(abort: Abort, status: int = 200, initial: bytes = b"") -> bytes:
    """Returns the header block of a reply that is a status alone."""
    head = initial or hpack.status(status) + HEAD[1:]
    return head + status_fields(abort)


def status_fields(abort: Abort) -> bytes:
    """Returns the fields that end a call: status, its text percent-encoded, and when to try again (gRFC A6)."""
    text = quote(shortened(abort.text), safe=UNQUOTED)
    again = hpack.field(b"grpc-retry-pushback-ms", b"%d" % (abort.again_s * 1000)) if abort.again_s else b""
    status = hpack.field(b"grpc-status", b"%d" % _NUMBERS[abort.code])
    return status + hpack.field(b"grpc-message", text.encode()) + again


def shortened(text: str) -> str:
    """Returns a text that a status can carry: the middle of a longer one is left out."""
    most = _MAX_ASCII if text.isascii() else _MAX_OTHER
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
