"""A real browser: pages of other origins, and `/docs`, which loads nothing from elsewhere."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings_sections import CorsSettings
from tests.support.foreign import output, program, tool
from tests.support.gateway import running_gateway, settings_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]

MODULE = Path(__file__).parents[3] / "examples" / "clients" / "javascript" / "gateway.mjs"
SCRIPTS = Path(__file__).parent / "browser"
BODY = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


async def visit(address: str, script: str, value: object = None) -> dict[str, Any]:
    """Opens a page and runs a script in it; returns `found`, what the page `loaded`, and its `errors`."""
    directory = tool("chromium", "usr/bin/chromium")
    words = [program("node"), str(SCRIPTS / "page.js"), str(directory / "usr/bin/chromium"), address]
    words += [str(SCRIPTS / script), json.dumps(value)]
    found: dict[str, Any] = json.loads(await output(*words, NODE_PATH=str(directory / "node_modules")))
    return found


@contextlib.contextmanager
def page_of_another_origin() -> Iterator[str]:
    """Serves an empty page, and the module of the examples that calls gateways; yields its origin."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_module = self.path == "/gateway.mjs"
            self.send_response(200)
            self.send_header("content-type", "text/javascript" if is_module else "text/html")
            self.end_headers()
            self.wfile.write(MODULE.read_bytes() if is_module else b"<!doctype html><title>page</title>")

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("fast_path", [True, False])
async def test_a_page_of_another_origin_calls(tmp_path: Path, *, fast_path: bool) -> None:
    """With a key, as far as its origin and its headers are allowed; what is refused it can read."""
    file = tmp_path / "keys.json"
    key = add_key(file, "acme", (Scope.INFER,), "acme")[1]
    settings = settings_of({"fast_path": fast_path}, auth={"mode": "keys", "keys_file": str(file)})
    with page_of_another_origin() as origin, page_of_another_origin() as stranger:
        settings = settings.model_copy(update={"cors": CorsSettings(allow_origins=(origin,))})
        async with running_gateway(settings) as running:
            value = {"url": running.url, "key": key, "body": BODY}
            allowed = await visit(origin, "calls.js", value)
            blocked = await visit(stranger, "calls.js", value)

    assert allowed["found"] == {
        "plain": [1, 2, 3, 4],
        "binary": [1, 2, 3, 4],
        "module": [1, 2, 3, 4],
        "refused": "the API key is not known; ask for another",
        "busy": [503, True],
        "result": [1, 2, 3, 4],
        "cancelled": 404,
        "other": "blocked",
    }
    assert blocked["found"] == {"plain": "blocked", "health": "blocked"}


async def test_the_docs_load_nothing_from_elsewhere() -> None:
    """They show all operations and the ways to present a key, and call the gateway; no rule of theirs is broken."""
    async with running_gateway() as running:
        seen = await visit(f"{running.url}/docs", "docs.js")

    assert [address for address in seen["loaded"] if not address.startswith((running.url, "data:"))] == []
    assert seen["errors"] == []
    assert seen["found"]["tags"] >= 6
    assert seen["found"]["schemes"] == 3
    assert seen["found"]["status"] == "200"
