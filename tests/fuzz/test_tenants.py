"""Two tenants with keys call all routes of jobs, requests and labels at random, each with what it knows of the other.

Each knows the names of all that the other has: ids, keys, files, folders and webhooks, and sends them wherever a name
may be. It knows nothing of the contents: rows, columns, metadata, tensors. No answer shows a name that its tenant has
not sent, or any content; none but 4xx says anything of another's id or file; and what a tenant has is as it left it.
"""

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import SecretStr

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings import (
    AuthSettings,
    LabelingSettings,
    RedisSettings,
    Settings,
    StoreSettings,
    WebhookSettings,
)
from tests.support.fuzzing import FUZZ_S, SEED, within_limits
from tests.support.gateway import running_gateway, settings_of
from tests.support.servers.label_studio_server import CONFIG, PERSONAL, LabelStudioServer, label_studio
from tests.support.servers.servers import RedisServer, redis_6_2

pytestmark = within_limits

SHARE = 0.3
"""The part of the fuzz tests' time that this one has."""
PROJECTS = {"acme": 12, "other": 13}
LABELS = """
name: {0}-{2}
model: {2}
project: {1}
tenant: {0}
mode: {3}
inputs: {{x: {{field: file, kind: file}}}}
results: [{{type: choices, from_name: label, to_name: text, label: y}}]
"""
INSTALLATION = re.compile(
    r"/v1/(endpoints|workers|pauses).*"
    r"|/v1/models/\{model\}(/versions/\{version\})?(/metadata|/pause|/resume|:predict)?"
)
"""The paths of routes that have nothing of tenants."""

FINE = range(200, 300)


class Tenant:
    """One who calls, what is its own, and the files that it has in the lake.

    Attributes:
        names: What it has names for; the other one knows them.
        contents: What nobody else may see.
        ids: The ids of its jobs and requests.
        has: The paths of those that it has not stopped or deleted.
        sent: All that it has sent: what is shown of that later is its own.
    """

    def __init__(self, name: str, key: str, lake: Path, chance: random.Random) -> None:
        self.name, self._chance = name, chance
        self.headers = {"x-api-key": key}
        self.contents: set[str] = set()
        self.ids: set[str] = set()
        self.has: set[str] = set()
        self.sent: list[str] = []
        self.folder = f"file://{lake}/{name}"
        own = lake / name
        (own / "out").mkdir(parents=True)
        self.files = [f"{self.folder}/{self._word('f')}.{kind}" for kind in ("parquet", "csv", "jsonl", "txt")]
        parquet, csv, jsonl, text = (Path(url.removeprefix("file://")) for url in self.files)
        rows = pa.array([[1.0, 2.0, 3.0, 4.0]] * 3, pa.list_(pa.float32(), 4))
        pq.write_table(pa.table({"x": rows, self.content(): [1, 2, 3]}), parquet)
        csv.write_text(f'x,{self.content()}\n1,2\n{self.content()},{self.content()},3\n"{self.content()}')
        jsonl.write_text(f'{{"x": "{self.content()}"}}\n{{"x": {self.content()}\n')
        text.write_text(self.content())
        self.names = {
            *self.files,
            self._word("i"),
            self._word("i"),
            self._word("k"),
            f"{self.folder}/out/{self._word('o')}",
        }

    def content(self) -> str:
        """Returns a new word that only this tenant may see."""
        self.contents.add(word := self._word("c"))
        return word

    def _word(self, kind: str) -> str:
        return f"{kind}{self._chance.getrandbits(48):012x}"


class Call(NamedTuple):
    """A call that is to be made."""

    method: str
    route: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = {}

    @property
    def text(self) -> str:
        """All that is sent, as far as it has names."""
        return f"{self.path} {json.dumps(self.body)} {json.dumps(dict(self.headers))}"


class Caller:
    """Makes calls of one tenant, with names of both."""

    def __init__(self, chance: random.Random, who: Tenant, other: Tenant, studio: LabelStudioServer) -> None:
        self._chance, self._who, self._other, self._studio = chance, who, other, studio
        self._pages: list[str] = [""]
        self.routes: dict[str, Callable[[str], Call]] = {
            "POST /v1/jobs": self._create,
            "POST /v1/jobs/validate": self._create,
            "GET /v1/jobs": self._list,
            "POST /v1/models/{model}/requests": self._submit,
            "POST /v1/models/{model}/versions/{version}/requests": self._submit,
            "POST /v1/models/{model}/infer_stream": lambda route: self._submit(route, "text"),
            "POST /v1/models/{model}/versions/{version}/infer_stream": lambda route: self._submit(route, "text"),
            "GET /v1/models/{model}/backlog": self._plain,
            "GET /label-studio/{model}/health": self._plain,
            "GET /label-studio/{model}/versions": self._plain,
            "POST /label-studio/{model}/setup": lambda route: self._plain(
                route, {"project": f"{self._project()}.1", "schema": CONFIG}
            ),
            "POST /label-studio/{model}/predict": lambda route: self._plain(
                route, {"project": f"{self._project()}.1", "tasks": self._tasks()}
            ),
            "POST /label-studio/{model}/webhook": lambda route: self._plain(
                route, {"action": "TASKS_CREATED", "project": {"id": self._project()}, "tasks": self._tasks()}
            ),
            "POST /v1/label-studio/{model}/projects/{project}/tasks": lambda route: self._plain(route, {}),
            "GET /v1/label-studio/{model}/projects/{project}/tasks": self._plain,
            "GET /v1/label-studio/{model}/projects/{project}/tasks/{task}": self._plain,
        }
        for end in ("GET", "DELETE", "POST /cancel", "POST /resume", "GET /log", "GET /preview", "GET /events"):
            method, _, rest = end.partition(" ")
            self.routes[f"{method} /v1/jobs/{{job_id}}{rest}"] = self._plain
        for path in ("requests", "dead-letters", "operations"):
            self.routes[f"GET /v1/{path}"] = self._search
        for end in ("GET", "DELETE"):
            self.routes[f"{end} /v1/operations/{{operation_id}}"] = self._plain
        for end in ("", "/inputs"):
            self.routes[f"GET /v1/dead-letters/{{model}}/{{letter_id}}{end}"] = self._plain
        self.routes["POST /v1/operations"] = self._count
        for end in ("GET", "DELETE", "GET /result", "GET /timeline", "GET /events"):
            method, _, rest = end.partition(" ")
            for base in ("/v1/requests", "/v1/models/{model}/requests"):
                self.routes[f"{method} {base}/{{request_id}}{rest}"] = self._plain

    def next(self) -> Call:
        """Returns a call of any route."""
        route = self._chance.choice([*self.routes, *["POST /v1/jobs"] * 5])
        return self.routes[route](route)

    def saw(self, call: Call, status: int, text: str) -> None:
        """Keeps the names of what a call has made, and forgets what it may have ended."""
        answer = json.loads(text) if status in FINE and text.startswith("{") else {}
        if isinstance(after := answer.get("next"), str):
            self._pages.append(after)
        if status in (200, 201, 202) and call.method == "POST" and "links" in answer:
            path = answer["links"]["self"]
            identity = path.rpartition("/")[2]
            if identity not in self._who.ids:  # else it may be one that has ended, told again
                self._who.has.add(path)
            self._who.ids.add(identity)
        if call.method == "DELETE" or call.path.endswith(("/cancel", "/resume")):
            self._who.has -= {path for path in self._who.has if path.rpartition("/")[2] in call.path.split("/")}

    def _one_of(self, *choices: Any) -> Any:
        return self._chance.choice(choices)

    def _whose(self) -> Tenant:
        return self._chance.choice((self._who, self._who, self._who, self._other))

    def _name(self) -> str:
        return self._chance.choice(sorted(self._whose().names))

    def _url(self, *, is_output: bool) -> str:
        who = self._whose()
        new = f"{who.folder}/new-{self._chance.getrandbits(24):x}"
        if is_output:
            return str(
                self._one_of(new, new, f"{who.folder}/out", f"{who.folder}/link/out", who.files[0], self._name())
            )
        folder = self._one_of(who.folder, who.folder, f"{who.folder}/link", who.folder.rpartition("/")[0])
        pattern = self._one_of("*", "*.parquet", "**/*.csv", "*/*", "[a-z]*.jsonl", "../acme/*", "link/*", "out")
        return str(self._one_of(who.files[0], who.files[0], *who.files, f"{folder}/{pattern}", self._name()))

    def _create(self, route: str) -> Call:
        spec: dict[str, Any] = {
            "model": self._one_of("echo", "echo", "echo", "text", "none"),
            "inputs": [self._url(is_output=False) for _ in range(self._one_of(1, 1, 1, 2))],
            "output": {"url": self._url(is_output=True)},
        }
        choices: dict[str, list[Any]] = {
            "id": [self._name(), self._name()],
            "input_format": ["csv", "jsonl", "parquet", "arrow"],
            "columns": [{"x": "x"}, {"x": [self._name()]}, {"y": "x"}],
            "key": ["x", self._name()],
            "passthrough": [["*"], ["x"], [self._name()]],
            "metadata": [{"note": self._who.content()}],
            "webhook": ["http://127.0.0.1:9/hook", f"http://{self._other.name}.example/{self._who.content()}"],
            "error_threshold": [-1, 0.5, 3],
            "deadline_s": [600],
            "priority": ["high", "low"],
            "bad_files": ["skip"],
            "partitioning": ["hive"],
            "limit": [1],
        }
        for field, values in choices.items():
            if self._chance.random() < 0.25:
                spec[field] = self._chance.choice(values)
        headers = {"idempotency-key": self._name()} if self._chance.random() < 0.3 and "id" not in spec else {}
        return Call("POST", route, route.partition(" ")[2], spec, headers)

    def _list(self, route: str) -> Call:
        query = {"limit": self._one_of("1", "100"), "state": self._one_of("", "planning", "cancelled")}
        query["after"] = self._one_of("", self._chance.choice(self._pages), self._name())
        return Call("GET", route, f"/v1/jobs?{urlencode({name: text for name, text in query.items() if text})}")

    def _search(self, route: str) -> Call:
        query = {"model": self._one_of("", "text", "stuck"), "tenant": self._one_of("", "", self._whose().name)}
        query |= {"id_prefix": self._one_of("", self._name()), "error": self._one_of("", self._whose().content())}
        query["after"] = self._one_of("", self._chance.choice(self._pages))
        path = route.partition(" ")[2]
        return Call("GET", route, f"{path}?{urlencode({name: text for name, text in query.items() if text})}")

    def _count(self, route: str) -> Call:
        chosen = {"model": self._one_of("text", "stuck"), "tenant": self._whose().name, "id_prefix": self._name()}
        kept = {name: text for name, text in chosen.items() if name == "model" or self._chance.random() < 0.3}
        action = self._one_of("cancel", "purge", "replay", "discard")
        return self._plain(route, {"action": action, "filter": kept, "dry_run": True})

    def _submit(self, route: str, model: str = "") -> Call:
        model = model or self._one_of("text", "text", "stuck")
        data: list[Any] = [self._who.content()] if model == "text" else [1, 2, 3, 4]
        kind = "BYTES" if model == "text" else "FP32"
        body = {"inputs": [{"name": "x", "shape": [1, len(data)], "datatype": kind, "data": data}]}
        headers: dict[str, str] = {}
        for name in ("request-id", "idempotency-key"):
            if self._chance.random() < 0.3:
                headers[name] = self._name().rpartition("/")[2]
        path = route.partition(" ")[2].replace("{model}", model).replace("{version}", "1")
        return Call("POST", route, path, body, headers)

    def _plain(self, route: str, body: Any = None) -> Call:
        method, _, path = route.partition(" ")
        identity = self._chance.choice([*sorted(self._who.ids | self._other.ids), self._name().rpartition("/")[2]])
        for name, text in {
            "model": self._one_of("text", "one", "stuck", "none"),
            "version": "1",
            "project": str(self._project()),
            "task": str(self._one_of(1, 2, 3)),
            "job_id": identity,
            "request_id": identity,
            "operation_id": identity,
            "letter_id": identity,
        }.items():
            path = path.replace(f"{{{name}}}", text)
        return Call(method, route, path, body)

    def _project(self) -> int:
        return int(self._one_of(*PROJECTS.values()))

    def _tasks(self) -> list[dict[str, Any]]:
        uploads = list(self._studio.files)
        files = [self._url(is_output=False), self._whose().files[3], self._whose().files[3], *uploads]
        return [{"id": number, "data": {"file": self._chance.choice(files)}} for number in (1, 2)]


class Scene:
    """The gateway's client, the tenants, and the checks of each answer."""

    def __init__(self, client: httpx.AsyncClient, callers: Mapping[Tenant, Caller]) -> None:
        self._client, self._callers = client, callers

    async def call(self, chance: random.Random) -> None:
        """Makes any call of any tenant, and looks at the answer."""
        who = chance.choice(list(self._callers))
        await self.make(who, self._callers[who].next())

    async def make(self, who: Tenant, call: Call) -> None:
        """Makes a call, and looks at the answer."""
        who.sent.append(call.text)
        status, text = await self._ask(who, call)
        try:
            for other in self._callers:
                if other is not who:
                    check(who, other, call, status, text)
        except AssertionError as error:
            error.add_note(f"{who.name}: {call}\n{status} {text[:2000]}")
            raise
        self._callers[who].saw(call, status, text)

    async def check_all(self) -> None:
        """Sees that what each tenant has is as it left it."""
        for who in self._callers:
            for path in who.has:
                status, text = await self._ask(who, Call("GET", "", path))
                assert (status, json.loads(text)["state"] in ("planning", "queued", "succeeded")) == (200, True), text

    async def _ask(self, who: Tenant, call: Call) -> tuple[int, str]:
        """Makes a call; returns status, text and headers: of a stream, the first of its events."""
        headers = {**who.headers, **call.headers}
        async with self._client.stream(call.method, call.path, json=call.body, headers=headers) as reply:
            if reply.headers.get("content-type", "").startswith("text/event-stream"):
                return reply.status_code, await anext(reply.aiter_text(), "")
            text = (await reply.aread()).decode(errors="replace")
            return reply.status_code, text if reply.status_code in FINE else f"{text} {dict(reply.headers)}"


def check(who: Tenant, other: Tenant, call: Call, status: int, text: str) -> None:
    """Sees that an answer shows nothing of another tenant."""
    assert status < 500 or status in (501, 503), status
    for word in other.contents:
        assert word not in text, f"content of {other.name}: {word}"
    for name in {*other.names, *other.ids} - who.names - who.ids:
        assert name not in text or any(name in sent for sent in who.sent), f"a name of {other.name}: {name}"
    asked = call.path.partition("?")[0].split("/")
    if not other.ids.isdisjoint(asked) and who.ids.isdisjoint(asked):
        assert status in (400, 404), f"something of {other.name}"
    if status in FINE and call.route in ("POST /v1/jobs", "POST /v1/jobs/validate"):
        urls = [*call.body["inputs"], call.body["output"]["url"]]
        assert not [url for url in urls if not url.startswith(who.folder)], f"files of {other.name}"


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[RedisServer]:
    """The queue of bulk tasks, which nobody takes."""
    server = RedisServer(redis_6_2(), tmp_path)
    yield server
    server.kill()


@pytest.mark.long
async def test_tenants_see_nothing_of_each_other(tasks: RedisServer, tmp_path: Path) -> None:
    """Whoever calls whatever; `QINFER_TEST_FUZZ_S` says how long."""
    chance, lake = random.Random(SEED), tmp_path / "lake"
    keys = {name: add_key(tmp_path / "keys.json", name, (Scope.INFER,), name)[1] for name in PROJECTS}
    tenants = [Tenant(name, key, lake, chance) for name, key in keys.items()]
    for who, other in zip(tenants, reversed(tenants), strict=True):
        (lake / who.name / "link").symlink_to(f"../{other.name}")
        (lake / who.name / "linked.txt").symlink_to(other.files[-1].removeprefix("file://"))
    async with (
        label_studio() as studio,
        running_gateway(settings(tasks, tmp_path, studio)) as running,
        httpx.AsyncClient(base_url=running.url, timeout=60.0) as client,
    ):
        for who in tenants:
            studio.files[f"/data/upload/{PROJECTS[who.name]}/a.txt"] = who.content().encode()
        pairs = zip(tenants, reversed(tenants), strict=True)
        callers = {who: Caller(chance, who, other, studio) for who, other in pairs}
        scene = Scene(client, callers)
        documented = (await client.get("/openapi.json")).json()["paths"]
        ours = {f"{method.upper()} {path}" for path, found in documented.items() for method in found if is_ours(path)}
        assert set(callers[tenants[0]].routes) == ours
        try:
            for who in tenants:
                body = {"model": "echo", "inputs": who.files[:1], "output": {"url": f"{who.folder}/first"}}
                await scene.make(who, Call("POST", "POST /v1/jobs", "/v1/jobs", body))
                assert who.has
            end_s = time.monotonic() + FUZZ_S * SHARE
            while time.monotonic() < end_s:
                await scene.call(chance)
            await scene.check_all()
        except BaseException as error:
            error.add_note(f"repeat it with QINFER_TEST_SEED={SEED}")
            raise


def is_ours(path: str) -> bool:
    """Tells whether a route has something of tenants; models, endpoints and workers are the installation's."""
    return path.startswith(("/v1/", "/label-studio/")) and not INSTALLATION.fullmatch(path)


def settings(redis: RedisServer, folder: Path, studio: LabelStudioServer) -> Settings:
    """Returns settings with all that tenants share."""
    mappings = folder / "mappings"
    mappings.mkdir()
    for tenant, project in PROJECTS.items():
        for model, mode in (("text", "predict"), ("one", "push")):
            text = LABELS.format(tenant, project, model, mode)
            (mappings / f"{tenant}-{model}.yaml").write_text(text)
    sections: dict[str, Any] = {
        "redis": RedisSettings(url=SecretStr(redis.url)),
        "auth": AuthSettings(mode="keys", keys_file=str(folder / "keys.json")),
        "stores": StoreSettings(allow=(f"file://{folder}/lake",)),
        "webhooks": WebhookSettings(allow=("127.0.0.1:9",), allow_private=True, secret=SecretStr("s")),
        "labeling": LabelingSettings(
            mappings=str(mappings), url=studio.url, token=SecretStr(PERSONAL), predict_timeout_s=0.5
        ),
    }
    return settings_of().model_copy(update=sections)
