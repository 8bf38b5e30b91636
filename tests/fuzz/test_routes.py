"""All HTTP routes of the OpenAPI document, asked by two tenants and an administrator with bodies that are nearly right.

Each answer comes in time, fails only as is prescribed, and says nothing of another tenant. A new route is asked as soon
as it is documented.
"""

import http.client
import itertools
import json
import random
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote_to_bytes, urlsplit

import httpx
import pytest

from tests.fuzz.gateway import NAMES, UNLOADED, FuzzedGateway, Tenant
from tests.support.fuzzing import NASTY, damaged, fuzz, within_limits
from tests.support.threaded_gateway import is_prescribed

pytestmark = within_limits

ANSWER_S = 15.0
"""Seconds within which each answer is whole: the longest timeout and wait of this gateway are 2 s."""
MOST_BYTES = 4 * 2**20
"""The size of the largest answer: no tensor here is large."""
ASKED = ("echo", "text", "stateful") * 7
"""Models that are asked most: what they answer is known."""
KEPT_IDS = 50

Operation = tuple[str, str, dict[str, Any]]
"""Method, path and the document's entry."""


class Grammar:
    """Makes values of the document's schemas, mostly right ones.

    Args:
        schemas: The named ones.
        chance: The random numbers.
        who: Who asks: his mark is in his text.
        folder: Where the files of jobs are.
    """

    def __init__(self, schemas: Mapping[str, Any], chance: random.Random, who: Tenant, folder: str) -> None:
        self._schemas, self._chance = schemas, chance
        row = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
        text = {"name": "x", "shape": [1, 1], "datatype": "BYTES", "data": [who.mark]}
        job = {"model": "echo", "inputs": [f"file://{folder}/rows.parquet"], "metadata": {"who": who.mark}}
        self._right: dict[str, list[Any]] = {
            "InferCall": [
                {"inputs": [row]},
                {"inputs": [text], "id": who.mark, "parameters": {"told_who": who.mark, "timeout": 10**5}},
                {"inputs": [row], "outputs": [{"name": "y", "parameters": {"classification": 2}}]},
                {"inputs": [row], "parameters": self._flags()},
            ],
            "NewJob": [{**job, "output": {"url": f"file://{folder}/{who.mark}-{chance.randint(0, 10**6)}"}}],
            "Changes": [{"priority": "low"}, {}],
        }
        self._hints: dict[str, list[Any]] = {
            "model": list(NAMES),
            "name": ["x", "x", "y", "a", "b", who.mark],
            "datatype": ["FP32", "BYTES", "INT32", "FP16"],
            "shape": [[1, 4], [1], [1, 1], [2, 2], []],
            "data": [[1, 2, 3, 4], [who.mark], [[1.5, 2, 3, 4]], [1]],
            "url": [
                f"file://{folder}/{who.mark}-{chance.randint(0, 99)}",
                f"file://{folder}",
                "file:///etc",
                "s3://b/k",
            ],
            "inputs.url": [f"file://{folder}/rows.parquet", f"file://{folder}/*.parquet"],
            "id": [who.mark, "1"],
            "copy": [["n"], ["name"], []],
            "log_file": ["/tmp/x"],
            "key": ["/r"],
        }

    def _flags(self) -> dict[str, Any]:
        """Returns the parameters of a step of a sequence."""
        of, is_start = self._chance.choice((1, 7, "7", 0, "", 2**64 - 1)), self._chance.random() < 0.5
        flags = {"sequence_id": of, "sequence_start": is_start, "sequence_end": self._chance.random() < 0.3}
        return {**flags, "qinfer_step": self._chance.choice((1, 2, 0, "1"))} if self._chance.random() < 0.5 else flags

    def value(self, schema: Mapping[str, Any], name: str = "", depth: int = 0) -> Any:
        """Returns a value; `name` is that of the member that it is for."""
        chance = self._chance
        if "$ref" in schema:
            named = schema["$ref"].rpartition("/")[2]
            if named in self._right and chance.random() < 0.6:
                return chance.choice(self._right[named])
            return self.value(self._schemas[named], name, depth)
        if name in self._hints and chance.random() < 0.8:
            return chance.choice(self._hints[name])
        if choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
            return self.value(chance.choice(choices), name, depth)
        if "enum" in schema or "const" in schema:
            return chance.choice(schema.get("enum") or [schema["const"]])
        return self._typed(schema, name, depth)

    def _typed(self, schema: Mapping[str, Any], name: str, depth: int) -> Any:
        kind = schema.get("type", self._chance.choice(("string", "integer", "null", "array")))
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            count = 0 if depth > 5 else self._chance.randint(0, 3)
            inner = schema.get("items") or self._chance.choice(schema.get("prefixItems") or [{}])
            return [self.value(inner, f"{name}.url" if name == "inputs" else "", depth + 1) for _ in range(count)]
        return self._scalar(str(kind))

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, needed = schema.get("properties", {}), schema.get("required", ())
        found = {
            name: self.value(inner, name, depth + 1)
            for name, inner in properties.items()
            if name in needed or (depth < 5 and self._chance.random() < 0.4)
        }
        more = schema.get("additionalProperties")
        if more and self._chance.random() < 0.3:
            found[self._chance.choice(("told_a", "priority", "x", "config"))] = self.value(
                more if isinstance(more, dict) else {}, "", depth + 1
            )
        return found

    def _scalar(self, kind: str) -> Any:
        chance = self._chance
        match kind:
            case "integer":
                return chance.choice((0, 1, 2, 7, -1, 2**31, 2**63, 2**64, chance.randint(0, 10**6)))
            case "number":
                return chance.choice((0, 0.5, -1.5, 1e308, float("nan"), float("inf"), chance.random()))
            case "boolean":
                return chance.random() < 0.5
            case "null":
                return None
        return chance.choice(("", "a", "/", "..", "\ud800", "é", "\0", "x" * 3000, str(chance.random())))


def mutated(chance: random.Random, value: Any) -> Any:
    """Returns a JSON value with one place of it replaced, dropped or repeated."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        if chance.random() < 0.2:
            return {other: inner for other, inner in value.items() if other != name}
        return {**value, name: mutated(chance, value[name])}
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        return [*value[:at], mutated(chance, value[at]), *value[at + chance.randint(0, 1) :]]
    deep: Any = 1
    for _ in range(chance.choice((1, 1, 5, 300))):
        deep = [deep]
    return chance.choice((None, True, -1, 1e999, 2**70, "", "\ud800", [], {}, deep, {"": {}}, [None] * 100))


class Callers:
    """The tenants, what the document says, and the ids that each was given."""

    def __init__(self, gateway: FuzzedGateway, document: dict[str, Any]) -> None:
        self.gateway = gateway
        self._schemas = document["components"]["schemas"]
        self._operations: list[Operation] = [
            (method, path, entry) for path, methods in document["paths"].items() for method, entry in methods.items()
        ]
        self._ids: dict[str, list[str]] = {tenant.name: [] for tenant in gateway.tenants}
        place = urlsplit(gateway.http)
        self._place = str(place.hostname), int(place.port or 0)
        self._open()

    def _open(self) -> None:
        self._socket = socket.create_connection(self._place, timeout=ANSWER_S)

    def close(self) -> None:
        self._socket.close()

    def call(self, chance: random.Random) -> None:
        """Makes a call, and looks at its answer."""
        who = chance.choice(self.gateway.tenants)
        method, path, entry = chance.choice(self._operations)
        target = self._target(chance, who, path, entry)
        headers = self._headers(chance, who, entry)
        body = self._body(chance, who, entry)
        if chance.random() < 0.05:
            method = chance.choice(("PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "get", "CONNECT", "X"))
        sent = f"{method.upper() if method.islower() else method} {target} HTTP/1.1\r\nhost: localhost\r\n".encode()
        sent += b"".join(b"%s: %s\r\n" % pair for pair in headers) + b"content-length: %d\r\n\r\n" % len(body) + body
        try:
            status, text = self._answer(method.upper(), sent)
            self._check(who, status, text, sent)
        except (AssertionError, OSError, http.client.HTTPException) as error:
            error.add_note(f"{who.name} sent {sent[:3000]!r}")
            raise
        if status in (201, 202):
            self._remember(who, text)

    def _target(self, chance: random.Random, who: Tenant, path: str, entry: dict[str, Any]) -> str:
        admin = any(word in path for word in ("/load", "/unload", "trace", "/pause", "/resume"))
        ids = [chance.choice(known) for known in self._ids.values() if known]
        values = {
            "model": chance.choice(UNLOADED if admin else [*ASKED, *ASKED, *NAMES, "nobody"]),
            "version": chance.choice(("1", "2", "0", "-1", "x", "9" * 30)),
        }
        for parameter in entry.get("parameters", ()):
            if parameter["in"] == "path":
                name = parameter["name"]
                text = values.get(name) or chance.choice([*ids, *ids, who.mark, "1"])
                if chance.random() < 0.05:
                    text = damaged(chance, text.encode()).decode("latin-1")
                path = path.replace(f"{{{name}}}", quote(text, safe="") or "x")
        asked = [parameter["name"] for parameter in entry.get("parameters", ()) if parameter["in"] == "query"]
        words = ("1", "0", "-1", "0.1", "nan", "completed", "9" * 30, "true", "%00", "%ff", *map(quote, ids))
        query = "&".join(f"{name}={chance.choice(words)}" for name in asked if chance.random() < 0.5)
        return path + (f"?{query}" if query else "")

    def _headers(self, chance: random.Random, who: Tenant, entry: dict[str, Any]) -> list[tuple[bytes, bytes]]:
        headers = [(b"authorization", b"Bearer " + who.key.encode())] if chance.random() < 0.97 else []
        for parameter in entry.get("parameters", ()):
            if parameter["in"] == "header" and chance.random() < 0.3:
                ids = [identity for known in self._ids.values() for identity in known[-3:]]
                words = [
                    who.mark,
                    who.mark,
                    "1",
                    "0.2",
                    "respond-async",
                    "wait=1",
                    "http://localhost/x",
                    "9" * 400,
                    *ids,
                ]
                text = chance.choice(words).encode()
                text = damaged(chance, text) if chance.random() < 0.2 else text
                headers.append((parameter["name"].encode(), text.translate(None, b"\r\n\0").strip()))
        if chance.random() < 0.05:
            headers.append((b"content-encoding", chance.choice((b"gzip", b"deflate", b"br", b"x"))))
        return headers

    def _body(self, chance: random.Random, who: Tenant, entry: dict[str, Any]) -> bytes:
        content = entry.get("requestBody", {}).get("content", {})
        if "application/json" not in content:
            return b"" if chance.random() < 0.9 else chance.choice(NASTY)
        grammar = Grammar(self._schemas, chance, who, str(self.gateway.folder))
        value = grammar.value(content["application/json"]["schema"])
        while chance.random() < 0.4:
            value = mutated(chance, value)
        data = json.dumps(value).encode()
        return damaged(chance, data) if chance.random() < 0.15 else data

    def _answer(self, method: str, sent: bytes) -> tuple[int, bytes]:
        for is_last in (False, True):
            try:
                self._socket.sendall(sent)
                answer = http.client.HTTPResponse(self._socket, method=method)
                answer.begin()
                break
            except (ConnectionError, http.client.BadStatusLine):
                self._open()  # the one before was closed with its answer
                if is_last:
                    raise
        goes_on = str(answer.getheader("content-type")).startswith("text/event-stream")
        text = self._first_event(answer) if goes_on else answer.read(MOST_BYTES)
        if answer.will_close or not answer.isclosed():
            self._socket.close()
            self._open()
        return answer.status, text

    def _first_event(self, answer: http.client.HTTPResponse) -> bytes:
        """Reads what a stream of events begins with: nothing, for who says that he has read it."""
        self._socket.settimeout(0.2)
        try:
            return answer.read1(MOST_BYTES)
        except TimeoutError:
            return b""

    def _check(self, who: Tenant, status: int, text: bytes, sent: bytes) -> None:
        shown = text.decode(errors="replace")
        told = sent + unquote_to_bytes(sent)
        assert len(text) < MOST_BYTES
        assert status != 500 or is_prescribed(status, shown), f"{status} {shown}"
        assert "Traceback" not in shown
        if who.name == "root":
            return
        for other in self.gateway.tenants:
            if other != who:
                assert other.mark.encode() not in text or other.mark.encode() in told, shown[:2000]
                for identity in self._ids[other.name]:
                    assert identity.encode() not in text or identity.encode() in told, shown[:2000]

    def _remember(self, who: Tenant, text: bytes) -> None:
        try:
            identity = json.loads(text).get("id")
        except (ValueError, AttributeError, RecursionError):
            return
        known = identity in itertools.chain(*self._ids.values())  # a request may be named like another tenant's job
        if isinstance(identity, str) and len(identity) > 20 and not known:
            self._ids[who.name] = [*self._ids[who.name], identity][-KEPT_IDS:]


@pytest.fixture
def callers(fuzzed: FuzzedGateway) -> Iterator[Callers]:
    callers = Callers(fuzzed, httpx.get(f"{fuzzed.http}/openapi.json", timeout=ANSWER_S).json())
    yield callers
    callers.close()


@pytest.mark.slow
def test_all_routes(callers: Callers) -> None:
    """Whoever asks for whatever."""

    def one(chance: random.Random) -> None:
        for _ in range(50):
            callers.call(chance)
        callers.gateway.check()

    fuzz(0.2, one)
