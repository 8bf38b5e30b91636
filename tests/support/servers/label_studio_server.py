"""A stand-in for Label Studio, in this process: the calls of its API that qinfer makes, answered as version 1.23 does.

Tokens: a legacy token is sent as `Token …`; a personal access token is exchanged for an access token, which is sent as
`Bearer …` and is taken until `forget_access`. Predictions that do not fit the label config are left out, and a task
that is not in the project refuses all of a call, as there. `failures` makes the next calls of a path end with a status.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

LEGACY = "0123456789abcdef0123456789abcdef01234567"
CONFIG = """
<View>
  <Text name="text" value="$text"/>
  <Choices name="label" toName="text"><Choice value="neg"/><Choice value="pos"/></Choices>
</View>
"""


def jwt(**about: Any) -> str:
    """Returns a token that looks as JSON web tokens do; nobody checks its signature."""
    parts = ({"alg": "HS256", "typ": "JWT"}, about)
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + ".x"


PERSONAL = jwt(token_type="refresh", exp=9999999999)


class LabelStudioServer:
    """What there is, and what was called."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.configs: dict[int, str] = {12: CONFIG}
        self.tasks: dict[int, dict[str, Any]] = {}
        self.predictions: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.failures: dict[str, list[int]] = {}
        self.refreshes = 0
        self._access = ""

    def add(self, *texts: str, project: int = 12) -> list[dict[str, Any]]:
        """Adds tasks; returns them as webhooks have them."""
        added = []
        for text in texts:
            number = len(self.tasks) + 1
            self.tasks[number] = {"id": number, "project": project, "data": {"text": text}}
            added.append(self.tasks[number])
        return added

    def of(self, task: int) -> list[dict[str, Any]]:
        """Returns the predictions of a task."""
        return [each for each in self.predictions if each["task"] == task]

    def forget_access(self) -> None:
        """Lets the access token be over."""
        self._access = ""

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        """Answers a call."""
        parts = urlsplit(target)
        path, words = parts.path, {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.calls.append(f"{method} {path}")
        for prefix, statuses in self.failures.items():
            if statuses and path.startswith(prefix):
                return statuses.pop(0), b"<html>trouble</html>"
        if path == "/api/token/refresh/":
            return self._refresh(json.loads(body))
        if headers.get("authorization") not in (f"Token {LEGACY}", f"Bearer {self._access or None}"):
            return 401, b'{"detail": "Invalid token."}'
        if path in self.files:
            return 200, self.files[path]
        status, found = self._api(method, path, words, json.loads(body) if body else None)
        return status, json.dumps(found).encode()

    def _refresh(self, body: dict[str, Any]) -> tuple[int, bytes]:
        if body["refresh"] != PERSONAL:
            return 401, b'{"detail": "Token is invalid", "code": "token_not_valid"}'
        self.refreshes += 1
        self._access = jwt(token_type="access", iat=1000, exp=1300, jti=self.refreshes)
        return 200, json.dumps({"access": self._access}).encode()

    def _api(self, method: str, path: str, words: dict[str, str], body: Any) -> tuple[int, Any]:
        words_of_path = path.strip("/").split("/")[1:]
        if method == "GET" and words_of_path == ["tasks"]:
            return self._list(int(words["project"]), int(words["page"]), int(words["page_size"]))
        if method == "GET" and words_of_path[0] == "tasks":
            found = self.tasks.get(int(words_of_path[1]))
            return (200, found) if found else (404, {"detail": "Not found."})
        if method == "GET" and words_of_path == ["predictions"]:
            return 200, self.of(int(words["task"]))
        if method == "GET" and words_of_path[0] == "projects":
            config = self.configs.get(int(words_of_path[1]))
            return (404, {"detail": "Not found."}) if config is None else (200, {"label_config": config})
        if method == "POST" and words_of_path[2:] == ["import", "predictions"]:
            return self._import(int(words_of_path[1]), body)
        return 404, {"detail": "Not found."}

    def _list(self, project: int, page: int, size: int) -> tuple[int, Any]:
        found = [
            {**task, "total_predictions": len(self.of(number))}
            for number, task in sorted(self.tasks.items())
            if task["project"] == project
        ]
        if page > 1 and not found[(page - 1) * size :]:
            return 404, {"detail": "Invalid page."}
        return 200, {"tasks": found[(page - 1) * size : page * size], "total": len(found)}

    def _import(self, project: int, items: list[dict[str, Any]]) -> tuple[int, Any]:
        if any(self.tasks.get(item["task"], {}).get("project") != project for item in items):
            return 400, {"detail": "Validation error", "validation_errors": ["task ID not found in project"]}
        fitting = [item for item in items if all(self._fits(project, region) for region in item["result"])]
        self.predictions += [{"id": len(self.predictions) + place, **item} for place, item in enumerate(fitting)]
        return 201, {"created": len(fitting)}

    def _fits(self, project: int, region: dict[str, Any]) -> bool:
        config = self.configs[project]
        values = [value for values in region["value"].values() if isinstance(values, list) for value in values]
        return f'"{region["from_name"]}"' in config and all(f'"{value}"' in config for value in values)


@contextlib.asynccontextmanager
async def label_studio() -> AsyncIterator[LabelStudioServer]:
    """Runs a stand-in on a free port of the loopback address."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
                headers = {
                    name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                method, target, _ = lines[0].split(" ")
                status, text = studio.answer(method, target, headers, body)
                head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
                writer.write(head.encode() + text)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    studio = LabelStudioServer(server.sockets[0].getsockname()[1])
    try:
        yield studio
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
