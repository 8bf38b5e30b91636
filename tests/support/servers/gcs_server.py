"""A stand-in for Google Cloud Storage: what its JSON API's documentation says of the calls that bulk jobs make.

There is no emulator of it that is installed as a package. Conditions (`ifGenerationMatch=0`) are decided when an object
is made; a resumable upload makes it with its last chunk.
"""

import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")
_SESSION = re.compile(r"/upload/session/([0-9]+)")
_OBJECTS = re.compile(r"/storage/v1/b/([^/]+)/o")
_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)")
_REWRITE = re.compile(r"/storage/v1/b/[^/]+/o/([^/]+)/rewriteTo/b/[^/]+/o/([^/]+)")
_BUCKET = re.compile(r"/storage/v1/b/([^/]+)")
_RANGE = re.compile(r"bytes[= ]([0-9]+)-([0-9]+)(?:/([0-9]+))?")


class GcsServer:
    """A server on loopback, in this process, with one bucket.

    Attributes:
        asked: How often uploads of a kind came: `multipart` (small files) and `resumable`.
        denies: Whether everything is forbidden.
    """

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.sessions: dict[str, tuple[str, bool, bytearray]] = {}
        self.asked: Counter[str] = Counter()
        self.denies = False
        self.lock = threading.Lock()
        self.numbers = count(1)
        handler = type("Handler", (_Handler,), {"of": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables by which clients find it."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint}

    def create(self, name: str, data: bytes, *, if_absent: bool) -> dict[str, Any] | None:
        """Makes an object; `None` where there is one, and there should be none."""
        with self.lock:
            if if_absent and name in self.objects:
                return None
            self.objects[name] = data, next(self.numbers)
            return self.resource(name)

    def resource(self, name: str) -> dict[str, Any]:
        data, generation = self.objects[name]
        return {"kind": "storage#object", "name": name, "size": str(len(data)), "generation": str(generation)}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients drop what they no longer want to know."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    of: GcsServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, query, _ = self._asked()
        if (found := _OBJECT.fullmatch(path)) and (name := unquote(found[2])) in self.of.objects:
            if query.get("alt") != ["media"]:
                return self._say(200, self.of.resource(name))
            data = self.of.objects[name][0]
            limits = _RANGE.match(self.headers.get("Range", ""))
            part = data[int(limits[1]) : int(limits[2]) + 1] if limits else data
            return self._send(206 if limits else 200, part)
        if (found := _OBJECTS.fullmatch(path)) and found[1] == self.of.bucket:
            return self._say(200, self._listing(query))
        if (found := _BUCKET.fullmatch(path)) and found[1] == self.of.bucket:
            return self._say(200, {"kind": "storage#bucket", "name": found[1]})
        return self._refuse(404)

    def do_POST(self) -> None:
        path, query, body = self._asked()
        if_absent = query.get("ifGenerationMatch") == ["0"]
        if found := _SESSION.fullmatch(path):
            return self._chunk(found[1], body)
        if found := _REWRITE.fullmatch(path):
            source = unquote(found[1])
            if source not in self.of.objects:
                return self._refuse(404)
            made = self.of.create(unquote(found[2]), self.of.objects[source][0], if_absent=False)
            return self._say(200, {"done": True, "resource": made})
        found = _UPLOAD.fullmatch(path)
        if not found or found[1] != self.of.bucket:
            return self._refuse(404)
        kind = query["uploadType"][0]
        self.of.asked[kind] += 1
        if kind == "resumable":
            session = str(next(self.of.numbers))
            self.of.sessions[session] = json.loads(body)["name"], if_absent, bytearray()
            return self._send(200, b"", {"Location": f"{self.of.endpoint}/upload/session/{session}"})
        _, metadata, media, _ = body.split(b"--==0==", 3)
        name = json.loads(metadata.split(b"\n\n", 1)[1])["name"]
        return self._made(self.of.create(name, media.split(b"\n\n", 1)[1][:-1], if_absent=if_absent))

    def do_DELETE(self) -> None:
        path, _, _ = self._asked()
        if _SESSION.fullmatch(path):
            return self._refuse(499)
        found = _OBJECT.fullmatch(path)
        with self.of.lock:
            gone = found is None or self.of.objects.pop(unquote(found[2]), None) is None
        return self._refuse(404) if gone else self._send(204, b"")

    def _chunk(self, session: str, body: bytes) -> None:
        name, if_absent, data = self.of.sessions[session]
        limits = _RANGE.match(self.headers["Content-Range"])
        assert limits is not None
        assert int(limits[1]) == len(data), "chunks come in their order"
        data += body
        if len(data) < int(limits[3]):
            return self._send(308, b"", {"Range": f"bytes=0-{len(data) - 1}"})
        return self._made(self.of.create(name, bytes(data), if_absent=if_absent))

    def _listing(self, query: Mapping[str, list[str]]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        items, prefixes = [], set()
        for name in sorted(self.of.objects):
            if name.startswith(prefix):
                inner, separator, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
                if separator:
                    prefixes.add(f"{prefix}{inner}{separator}")
                else:
                    items.append(self.of.resource(name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}

    def _asked(self) -> tuple[str, dict[str, list[str]], bytes]:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        if self.of.denies:
            return "/denied", {}, body
        return parts.path, parse_qs(parts.query), body

    def _made(self, resource: dict[str, Any] | None) -> None:
        if resource is None:
            self._refuse(412)
        else:
            self._say(200, resource)

    def _refuse(self, status: int) -> None:
        status = 403 if self.of.denies else status
        self._say(status, {"error": {"code": status, "message": "no"}})

    def _say(self, status: int, message: Mapping[str, Any]) -> None:
        self._send(status, json.dumps(message).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A line for each request is too much."""
