"""Replies before they are written: what the fast path and the routes both answer with, so that they answer alike."""

from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from qinfer.errors import Overloaded
from qinfer.messages import Failure
from qinfer_api.http.compression import Encoding, compress
from qinfer_api.status import http_status, retry_after_s

Headers = Sequence[tuple[bytes, bytes]]

_JSON_BEGIN = b"content-type: application/json\r\ncontent-length: "
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


class Reply(msgspec.Struct, frozen=True, gc=False):
    """An answer before it is written.

    Attributes:
        status: The HTTP status.
        body: The body, in its encoding.
        json_length: Set when binary tensors follow the JSON: the JSON's length before compression.
        encoding: The body's content encoding; `None` is identity.
        retry_after_s: Seconds after which to try again; 0 = not told.
    """

    status: int
    body: bytes
    json_length: int | None = None
    encoding: Encoding | None = None
    retry_after_s: int = 0

    def head(self) -> bytes:
        """Returns the reply's own header lines."""
        if self.json_length is None:
            head = b"%b%d\r\n" % (_JSON_BEGIN, len(self.body))
        else:
            head = (
                b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\n"
                b"content-length: %d\r\n" % (self.json_length, len(self.body))
            )
        if self.encoding is not None:
            head += b"content-encoding: %b\r\nvary: accept-encoding\r\n" % self.encoding.encode()
        if self.retry_after_s:
            head += b"retry-after: %d\r\n" % self.retry_after_s
        if self.status == 401:
            head += b"www-authenticate: Bearer\r\n"
        return head

    def compressed(self, encoding: Encoding) -> "Reply":
        """Returns the reply with its body in that encoding."""
        return msgspec.structs.replace(self, body=compress(self.body, encoding), encoding=encoding)


def failure_reply(error: BaseException, *, v1: bool = False) -> Reply:
    """Returns the reply of an error that was raised; `v1` for a route of `/v1`, where some statuses differ."""
    failure = Failure.of(error)
    v1 = v1 and type(error) is not Overloaded  # the server's own trouble, no queue's and no quota
    return error_reply(http_status(failure.code, v1=v1), failure.message, retry_after_s(failure.code, error))


def refusal(failure: Failure) -> Reply:
    """Returns the reply of a failure that a response carries."""
    return error_reply(http_status(failure.code), failure.message, retry_after_s(failure.code))


def error_reply(status: int, message: str, again_s: int = 0) -> Reply:
    """Returns `{"error": message}`; `again_s` is its `Retry-After`, 0 = none."""
    return Reply(status, msgspec.json.encode({"error": message}), retry_after_s=again_s)


class Writer:
    """Renders replies; keeps the block of headers that every reply carries, which uvicorn renews once a second."""

    def __init__(self) -> None:
        self._common: Headers = ()
        self._block = self._json = b""

    def render(self, reply: Reply, common: Headers, *, close: bool) -> bytes:
        """Returns the whole reply: status line, common headers, its own headers, body."""
        if common is not self._common:
            self._common, self._block = common, b"".join([b"%b: %b\r\n" % pair for pair in common])
            self._json = b"".join((_STATUS_LINES[200], self._block, _JSON_BEGIN))
        body = reply.body
        if (
            reply.status == 200
            and reply.json_length is None
            and reply.encoding is None
            and not (close or reply.retry_after_s)
        ):
            return b"%b%d\r\n\r\n%b" % (self._json, len(body), body)
        end = b"connection: close\r\n\r\n" if close else b"\r\n"
        return b"".join((_STATUS_LINES[reply.status], self._block, reply.head(), end, body))
