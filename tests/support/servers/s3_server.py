"""Servers that speak S3's protocol, for tests of conditional writes.

`S3Server` is moto's, behind what moto lacks: a condition is decided and kept in one step, and holds for completions of
multipart uploads too. It can also be a store that knows no conditions (501), say that others write the same name (409),
fail, refuse, or lose an answer. `localstack()` is another implementation, a program of its own.
"""

import io
import logging
import os
import random
import subprocess
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from tests.support.servers.servers import free_port, wait_until

LOCALSTACK = Path(__file__).resolve().parents[3] / ".venv" / "tools" / "localstack" / "bin" / "python"
NO_LOCALSTACK = "LocalStack is not installed; scripts/tools fetches it where there is a Python of 3.12 or later"

_FOR_PYTHON_3_12 = """
import warnings

if not hasattr(warnings, "deprecated"):  # which LocalStack 2026.3 imports; of Python 3.13
    from typing_extensions import deprecated

    warnings.deprecated = deprecated
"""
_ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message>{}</Error>"


class S3Server:
    """A server on loopback, in this process.

    Attributes:
        knows_conditions: Whether it does what `If-None-Match` says; else it answers 501 to it.
        conflicts: So many conditional writes are answered by 409.
        failures: So many writes are answered by 503.
        lost: So many writes are done, and answered by 500.
        denies: Whether everything is forbidden.
        ignores_match: Whether it answers with another object than that of `If-Match`.
        busy: Decides about each request, if it is there: a share of `busy_share` of them is answered by 503.
        asked: How often each kind of request came, such as `PUT` and `PUT if-none-match`.
        requests: Method and path of each request.
        hosts: The names by which it was asked.
        lists: The prefix of each listing.
    """

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._answer, True, request_handler=MotoRequestHandler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.reset()

    def reset(self) -> None:
        """Behaves again."""
        self.knows_conditions = True
        self.conflicts = self.failures = self.lost = 0
        self.denies = self.ignores_match = False
        self.busy: random.Random | None = None
        self.busy_share = 0.3
        self.requests: list[tuple[str, str]] = []
        self.hosts: set[str] = set()
        self.lists: list[str] = []
        self.asked: Counter[str] = Counter()

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables by which clients find it."""
        return environment(self.endpoint)

    def make_bucket(self, name: str) -> str:
        """Returns the URL of a new bucket."""
        make_bucket(self.endpoint, name)
        return f"s3://{name}"

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        method = environ["REQUEST_METHOD"]
        if self.ignores_match:
            environ.pop("HTTP_IF_MATCH", None)
        self.requests.append((method, environ["PATH_INFO"]))
        self.hosts.add(environ["HTTP_HOST"].partition(":")[0])
        if "list-type" in query:
            self.lists.append(query.get("prefix", [""])[0])
        writes = (method == "PUT" and "partNumber" not in query) or (method == "POST" and "uploadId" in query)
        conditional = writes and environ.get("HTTP_IF_NONE_MATCH") == "*"
        if method == "PUT" and environ["PATH_INFO"].count("/") > 1:
            self.asked["PUT"] += 1
        if conditional:
            self.asked[f"{method} if-none-match"] += 1
        with self._lock:
            refusal = self._refusal(writes=writes, conditional=conditional)
            if refusal is None and conditional and self._exists(environ):
                refusal = 412, "PreconditionFailed", "<Condition>If-None-Match</Condition>"
            if refusal is not None:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))  # or the client's connection breaks
                return _refused(environ, start, *refusal)
            if not (writes and self.lost):
                return list(self._app(environ, start))
            self.lost -= 1
            list(self._app(environ, lambda *_: None))
            return _refused(environ, start, 500, "InternalError")

    def _refusal(self, *, writes: bool, conditional: bool) -> tuple[int, str] | tuple[int, str, str] | None:
        if self.denies:
            return 403, "AccessDenied", "<AWSAccessKeyId>key-id-of-a-test</AWSAccessKeyId>"
        if self.busy is not None and self.busy.random() < self.busy_share:
            return 503, "SlowDown"
        if conditional and not self.knows_conditions:
            return 501, "NotImplemented"
        if conditional and self.conflicts:
            self.conflicts -= 1
            return 409, "ConditionalRequestConflict"
        if writes and self.failures:
            self.failures -= 1
            return 503, "SlowDown"
        return None

    def _exists(self, environ: dict[str, Any]) -> bool:
        statuses: list[str] = []
        ask = {
            **environ,
            "REQUEST_METHOD": "HEAD",
            "QUERY_STRING": "",
            "wsgi.input": io.BytesIO(),
            "CONTENT_LENGTH": "0",
        }
        ask = {name: value for name, value in ask.items() if name not in ("HTTP_IF_NONE_MATCH", "werkzeug.request")}
        list(self._app(ask, lambda status, *_: statuses.append(status)))
        return statuses[0].startswith("200")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def localstack(directory: Path) -> Iterator[str]:
    """Runs LocalStack's S3 alone; returns its endpoint."""
    port = free_port()
    (directory / "sitecustomize.py").write_text(_FOR_PYTHON_3_12)
    settings = {
        "PYTHONPATH": str(directory),
        "GATEWAY_LISTEN": f"127.0.0.1:{port}",
        "SERVICES": "s3",
        "DNS_ADDRESS": "0",
        "DISABLE_EVENTS": "1",
        "SKIP_SSL_CERT_DOWNLOAD": "1",
        "EAGER_SERVICE_LOADING": "1",
        "FILESYSTEM_ROOT": str(directory),
    }
    command = [str(LOCALSTACK), "-m", "localstack.runtime.main"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **settings}, cwd=directory, stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or _has_s3(f"http://127.0.0.1:{port}"), 45.0)
        assert process.poll() is None, (directory / "log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


def environment(endpoint: str) -> Mapping[str, str]:
    """Returns the variables by which clients find a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key-id-of-a-test",
        "AWS_SECRET_ACCESS_KEY": "secret-of-a-test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def make_bucket(endpoint: str, name: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    urllib.request.urlopen(request, timeout=20).close()


def _has_s3(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"{endpoint}/_localstack/health", timeout=2) as reply:
            return b'"s3": "running"' in reply.read()
    except OSError:
        return False


def _refused(environ: dict[str, Any], start: Callable[..., Any], status: int, code: str, more: str = "") -> list[bytes]:
    body = b"" if environ["REQUEST_METHOD"] == "HEAD" else _ERROR.format(code, "no", more).encode()
    start(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]
