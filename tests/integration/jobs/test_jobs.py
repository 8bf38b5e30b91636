"""`/v1/jobs` on a real Redis: what is refused at creation, and what becomes of a job that is not.

Nobody plans or runs the jobs here: Celery's queue is looked at, and jobs are moved on by hand.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from pydantic import SecretStr

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings import AuthSettings, BulkSettings, RedisSettings, Settings, StoreSettings, TenantStores
from qinfer.errors import BrokerUnavailable, Unauthorized
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.tasks import PLAN, QUEUE
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from qinfer_api.jobs import routes
from qinfer_api.jobs import service as use_case
from qinfer_api.jobs.service import JobJanitor
from tests.support.endpoints import canary, declare, split
from tests.support.gateway import Running, running_gateway, settings_of
from tests.support.servers.servers import RedisServer, system_redis

pytestmark = pytest.mark.asyncio(loop_scope="module")

JOBS = "/v1/jobs"


class Place:
    """A folder that jobs may use, with `rows.parquet`: x (4 floats), id, name (text)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"file://{folder}"
        rows = {
            "x": pa.array([[1.0, 2.0, 3.0, 4.0]] * 3, pa.list_(pa.float32(), 4)),
            "id": pa.array([1, 2, 3]),
            "name": pa.array(["a", "b", "c"]),
        }
        (folder / "in").mkdir()
        (folder / "full").mkdir()
        (folder / "full" / "old.txt").write_text("old")
        pq.write_table(pa.table(rows), folder / "in" / "rows.parquet")
        (folder / "in" / "torn.parquet").write_bytes(b"PAR1 torn")

    def job(self, **changes: Any) -> dict[str, Any]:
        """Returns a right job, with changes; `None` removes a field, `output_…` is one of the output."""
        output: dict[str, Any] = {"url": f"{self.url}/out"}
        body: dict[str, Any] = {"model": "echo", "inputs": [f"{self.url}/in/rows.parquet"], "output": output}
        for name, value in changes.items():
            where, field = (output, name.removeprefix("output_")) if name.startswith("output_") else (body, name)
            where[field] = value
            if value is None:
                del where[field]
        return body


def job_settings(server: RedisServer, allow: str, database: int = 0, **bulk: Any) -> Settings:
    more: dict[str, Any] = {
        "redis": RedisSettings(url=SecretStr(f"redis://127.0.0.1:{server.port}/{database}")),
        "stores": StoreSettings(allow=(allow,)),
        "bulk": BulkSettings(**bulk),
    }
    return settings_of().model_copy(update=more)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("data"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(redis_server: RedisServer, place: Place) -> AsyncIterator[Running]:
    settings = job_settings(redis_server, place.url)
    delivery = await Queue.connect(settings.redis)
    async with running_gateway(settings, delivery) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(running: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=running.url) as opened:
        yield opened


async def created(client: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    reply = await client.post(JOBS, json=body, headers=named)
    assert reply.status_code == 201, reply.text
    found: dict[str, Any] = reply.json()
    return found


def job_keys(server: RedisServer) -> set[bytes]:
    """Returns the keys of jobs and of Celery; those that a job's shards move between are one.

    The deliveries about earlier jobs are left out: a gateway may finish one at any moment.
    """
    with server.client() as redis:
        found = {key for key in redis.keys("*") if b"job" in key or b"celery" in key or QUEUE.encode() in key}
    found = {key for key in found if b":deliveries:" not in key}
    return {key.replace(b":job-todo:", b":job-in_lane:") for key in found}


def tasks(server: RedisServer) -> list[tuple[str, str]]:
    """Returns the tasks that wait for a Celery worker, the oldest first: name and job."""
    with server.client() as redis:
        messages = [json.loads(text) for text in reversed(redis.lrange(QUEUE, 0, -1))]
    return [(message["headers"]["task"], message["headers"]["argsrepr"]) for message in messages]


# --- refused ---

BAD: list[tuple[str, Callable[[Place], object], int, list[str]]] = [
    ("no JSON", lambda p: "{", 400, ["JSON"]),
    ("no object", lambda p: "[]", 400, ["JSON"]),
    ("no model", lambda p: p.job(model=None), 400, ["'model' is missing"]),
    ("no inputs", lambda p: p.job(inputs=None), 400, ["'inputs' is missing"]),
    ("empty inputs", lambda p: p.job(inputs=[]), 400, ["'inputs' is empty"]),
    ("no output", lambda p: p.job(output_url=None), 400, ["'output.url' is missing"]),
    ("unknown field", lambda p: p.job(colums={}), 400, ["'colums'", "did you mean 'columns'"]),
    ("wrong type", lambda p: p.job(version="one"), 400, ["'version'"]),
    ("id of another type", lambda p: p.job(id=7), 400, ["'id'"]),
    ("empty id", lambda p: p.job(id=""), 400, ["'id'"]),
    ("id with a slash", lambda p: p.job(id="a/b"), 400, ["'a/b'"]),
    ("id like the server's", lambda p: p.job(id="01JX3M3TC8Z6Q5RYB7WS2K4D9F"), 400, ["01JX3M3TC8Z6Q5RYB7WS2K4D9F"]),
    ("unknown model", lambda p: p.job(model="nope"), 404, ["Request for unknown model: 'nope' is not found"]),
    ("unknown version", lambda p: p.job(version=7), 404, ["unknown model: 'echo' version 7 is not found"]),
    ("missing column", lambda p: p.job(columns={"x": "y1"}), 400, ["'y1'", "'columns.x'"]),
    ("unknown tensor", lambda p: p.job(columns={"z": "id"}), 400, ["'z'", "there are x"]),
    ("dtype", lambda p: p.job(columns={"x": ["id", "id", "id", "name"]}), 400, ["'name' is of type string"]),
    ("shape", lambda p: p.job(columns={"x": {"columns": ["x"], "shape": [5]}}), 400, ["[5]"]),
    ("unknown key", lambda p: p.job(key="idx"), 400, ["'idx'", "did you mean 'id'"]),
    ("unknown passthrough", lambda p: p.job(passthrough=["nome"]), 400, ["'nome'", "did you mean 'name'"]),
    ("no file", lambda p: p.job(inputs=[f"{p.url}/in/none.parquet"]), 400, ["in/none.parquet"]),
    ("no match", lambda p: p.job(inputs=[f"{p.url}/in/2*.parquet"]), 400, ["in/2*.parquet"]),
    ("torn file", lambda p: p.job(inputs=[f"{p.url}/in/torn.parquet"]), 400, ["in/torn.parquet"]),
    ("not empty", lambda p: p.job(output_url=f"{p.url}/full"), 400, ["/full' is not empty", "old.txt"]),
    ("output is a file", lambda p: p.job(output_url=f"{p.url}/in/rows.parquet"), 400, ["is a file"]),
    ("output format", lambda p: p.job(output_format="orc"), 400, ["'output.format'"]),
    ("compression", lambda p: p.job(output_compression="zip"), 400, ["'zip'"]),
    ("input elsewhere", lambda p: p.job(inputs=["file:///etc/passwd"]), 403, ["file:///etc/passwd", "STORES__ALLOW"]),
    ("output elsewhere", lambda p: p.job(output_url="s3://else/x"), 403, ["s3://else/x", "STORES__ALLOW"]),
    ("path above", lambda p: p.job(inputs=[f"{p.url}/in/../../x"]), 400, [".."]),
    ("no scheme", lambda p: p.job(inputs=["in/rows.parquet"]), 400, ["in/rows.parquet"]),
    ("credentials", lambda p: p.job(inputs=["s3://user:secret@bucket/x"]), 400, ["credentials"]),
    ("priority", lambda p: p.job(priority="urgent"), 400, ["'priority'"]),
    ("threshold", lambda p: p.job(error_threshold=1.5), 400, ["'error_threshold' is 1.5"]),
    ("deadline", lambda p: p.job(deadline_s=-1), 400, ["'deadline_s' is -1"]),
    ("webhook", lambda p: p.job(webhook="https://example.org/x"), 400, ["example.org", "QINFER_WEBHOOKS__ALLOW"]),
    ("deep", lambda p: '{"metadata":' + "[" * 500 + "]" * 500 + "}", 400, []),
]


@pytest.mark.parametrize(("make", "status", "said"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
async def test_a_bad_job_is_refused(
    client: httpx.AsyncClient,
    place: Place,
    redis_server: RedisServer,
    make: Callable[[Place], object],
    status: int,
    said: list[str],
) -> None:
    """The text names what is wrong, no credential, and nothing is left in Redis or in the output."""
    before = job_keys(redis_server)
    body = make(place)

    reply = await client.post(JOBS, content=body if isinstance(body, str) else json.dumps(body))

    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert [text for text in said if text not in error] == []
    assert "secret" not in error
    assert job_keys(redis_server) == before
    assert not (place.folder / "out").exists()


async def test_a_body_that_is_too_large(client: httpx.AsyncClient, place: Place) -> None:
    """A record of a job is kept for long."""
    reply = await client.post(JOBS, json=place.job(metadata={"a": "b" * routes.MAX_BODY_BYTES}))

    assert (reply.status_code, "4194304" in reply.json()["error"]) == (400, True)


async def ids_of(client: httpx.AsyncClient) -> list[str]:
    """Returns the ids of the jobs on the first page; what else they say may change meanwhile."""
    return [job["id"] for job in (await client.get(JOBS)).json()["jobs"]]


@pytest.mark.parametrize(
    ("bulk", "status", "said"),
    [
        ({"enabled": False}, 501, "QINFER_BULK__ENABLED"),
        ({"broker_url": "redis+cluster://x"}, 501, "QINFER_BULK__BROKER_URL"),
        ({"broker_url": "redis://127.0.0.1:1/0"}, 503, "can't be reached"),
    ],
    ids=["disabled", "broker unreadable", "broker away"],
)
async def test_a_server_without_bulk(
    redis_server: RedisServer, place: Place, bulk: dict[str, Any], status: int, said: str
) -> None:
    """The remedy is named, no job is left, and everything else works."""
    settings = job_settings(redis_server, place.url, **bulk)
    delivery = await Queue.connect(settings.redis)
    async with running_gateway(settings, delivery) as running, httpx.AsyncClient(base_url=running.url) as client:
        before = await ids_of(client)
        reply = await client.post(JOBS, json=place.job())
        after = await ids_of(client)

    assert (reply.status_code, said in reply.json()["error"]) == (status, True), reply.text
    assert after == before


async def test_too_many_jobs(redis_server: RedisServer, place: Place) -> None:
    """429, and when to come back; those that were created can be created again."""
    settings = job_settings(redis_server, place.url, database=1, max_jobs=1)
    delivery = await Queue.connect(settings.redis)
    async with running_gateway(settings, delivery) as running, httpx.AsyncClient(base_url=running.url) as client:
        await client.post(JOBS, json=place.job(id="only"))
        more = await client.post(JOBS, json=place.job())
        again = await client.post(JOBS, json=place.job(id="only"))
        await client.post(f"{JOBS}/only/cancel")

    assert (more.status_code, more.headers["retry-after"]) == (429, "30")
    assert "QINFER_BULK__MAX_JOBS" in more.json()["error"]
    assert again.status_code == 200


# --- created ---


async def test_a_job_is_validated(client: httpx.AsyncClient, place: Place, redis_server: RedisServer) -> None:
    """Its size is told, and no trace of it remains."""
    before = job_keys(redis_server)

    reply = await client.post(f"{JOBS}/validate", json=place.job(output_rows_per_part=2))
    limited = await client.post(f"{JOBS}/validate", json=place.job(limit=1))

    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert (found["model"], found["files"], found["rows"], found["shards"]) == ("echo", 1, 3, 2)
    assert (found["rows_per_s"], found["estimated_s"]) == (None, None)
    assert (limited.json()["rows"], limited.json()["shards"]) == (1, 1)
    assert job_keys(redis_server) == before


async def test_a_validation_finds_what_planning_would(client: httpx.AsyncClient, place: Place) -> None:
    """Creation looks at the columns of one file only."""
    (place.folder / "two").mkdir()
    for name, columns in (("a", {"x": [[1.0, 2.0, 3.0, 4.0]]}), ("b", {"y": [1.0]})):
        pq.write_table(pa.table(columns), place.folder / "two" / f"{name}.parquet")

    reply = await client.post(f"{JOBS}/validate", json=place.job(inputs=[f"{place.url}/two/*.parquet"]))
    wrong = await client.post(f"{JOBS}/validate", json=place.job(model="nobody"))

    assert (reply.status_code, "b.parquet" in reply.json()["error"]) == (400, True), reply.text
    assert wrong.status_code == 404


async def test_a_job_is_created(client: httpx.AsyncClient, place: Place, redis_server: RedisServer) -> None:
    """Its record, its path, and a task that plans it."""
    reply = await client.post(JOBS, json=place.job(metadata={"who": "me"}, deadline_s=3600, priority="high"))

    job = reply.json()
    assert (reply.status_code, reply.headers["location"]) == (201, f"/v1/jobs/{job['id']}")
    assert {name: job[name] for name in ("model", "version", "state", "priority", "error", "metadata")} == {
        "model": "echo",
        "version": 2,
        "state": "planning",
        "priority": "high",
        "error": None,
        "metadata": {"who": "me"},
    }
    assert job["rows"] == {"total": None, "done": 0, "failed": 0, "scored": 0}
    assert job["shards"] == {"total": None, "done": 0, "failed": 0, "active": 0}
    assert (job["progress"], job["rows_per_s"], job["eta_s"]) == (0.0, None, None)
    assert job["created_at"] < job["deadline_at"]
    assert (job["output_url"], job["manifest_url"]) == (f"{place.url}/out", None)
    assert job["spec"]["inputs"] == [f"{place.url}/in/rows.parquet"]
    assert (PLAN, f"('{job['id']}',)") in tasks(redis_server)
    assert (await client.get(job["links"]["self"])).json() == job


@pytest.mark.parametrize("by", ["id", "Idempotency-Key"])
async def test_the_same_job_twice_is_one(client: httpx.AsyncClient, place: Place, by: str) -> None:
    """Also after its output is no longer empty; with another body the id is taken."""
    target = place.folder / f"twice-{by}"
    body = place.job(output_url=f"{place.url}/{target.name}/")
    headers = {by: "k1"} if by != "id" else {}
    body |= {"id": "twice"} if by == "id" else {}

    first = await client.post(JOBS, json=body, headers=headers)
    target.mkdir()
    (target / "_plan.json").write_text("{}")
    second = await client.post(JOBS, json=body, headers=headers)
    other = await client.post(JOBS, json=body | {"key": "id"}, headers=headers)

    assert (first.status_code, second.status_code, other.status_code) == (201, 200, 409), first.text
    assert second.headers["idempotent-replayed"] == "true"
    assert second.headers["location"] == first.headers["location"]
    assert 'another job, which differs in \'key\': "", now "id"; repeat' in other.json()["error"]


async def test_a_job_on_an_endpoint_keeps_the_version_that_was_stable(
    client: httpx.AsyncClient, running: Running, place: Place
) -> None:
    """It is scored by one version, whatever the weights are; and the same job again is the same one."""
    await declare([running], "scorer", split(canary(0.9)))
    body = place.job(model="scorer", output_url=f"{place.url}/scored")

    estimate = (await client.post(f"{JOBS}/validate", json=body)).json()
    job = await created(client, body | {"id": "of-endpoint"})
    await declare([running], "scorer", split(stable="echo:2"))
    again = await client.post(JOBS, json=body | {"id": "of-endpoint"})
    later = await created(client, body)

    assert (estimate["model"], estimate["version"]) == ("echo", 1)
    assert (job["endpoint"], job["model"], job["version"]) == ("scorer", "echo", 1)
    assert (job["spec"]["model"], job["spec"]["version"]) == ("echo", 1)
    assert (again.status_code, again.json()["version"]) == (200, 1)
    assert (later["endpoint"], later["version"]) == ("scorer", 2)
    log = (await client.get(job["links"]["log"])).json()["log"]
    assert log[0]["text"].startswith("created for endpoint 'scorer', which is echo:1 now; ")


async def test_a_job_may_name_any_version_of_a_hidden_model(
    client: httpx.AsyncClient, running: Running, place: Place
) -> None:
    """Versions are compared before they are targets."""
    await declare([running], "echo", split(stable="echo:1", hides_model=True))

    by_name = await created(client, place.job(output_url=f"{place.url}/hidden"))
    by_version = await created(client, place.job(version=2, output_url=f"{place.url}/hidden-2"))
    await client.delete("/v1/endpoints/echo")

    assert (by_name["endpoint"], by_name["version"]) == ("echo", 1)
    assert (by_version["endpoint"], by_version["version"]) == (None, 2)


async def test_an_id_and_a_key(client: httpx.AsyncClient, place: Place) -> None:
    """One of them names the job."""
    reply = await client.post(JOBS, json=place.job(id="one"), headers={"idempotency-key": "two"})

    assert (reply.status_code, "leave one out" in reply.json()["error"]) == (400, True)


async def test_many_at_once_with_one_id(client: httpx.AsyncClient, place: Place, redis_server: RedisServer) -> None:
    """One is created and planned once; the others find it."""
    replies = await asyncio.gather(*(client.post(JOBS, json=place.job(id="crowd")) for _ in range(6)))

    assert sorted(reply.status_code for reply in replies) == [200] * 5 + [201]
    assert tasks(redis_server).count((PLAN, "('crowd',)")) == 1


async def test_jobs_are_listed(client: httpx.AsyncClient, place: Place) -> None:
    """The newest first, in pages, by state."""
    ids = [(await created(client, place.job()))["id"] for _ in range(3)]
    await client.post(f"{JOBS}/{ids[0]}/cancel")

    first = (await client.get(JOBS, params={"limit": 2})).json()
    second = (await client.get(JOBS, params={"limit": 1, "after": first["next"]})).json()
    planning = (await client.get(JOBS, params={"state": "planning", "limit": 1000})).json()

    assert [job["id"] for job in (*first["jobs"], *second["jobs"])] == ids[::-1]
    assert {job["state"] for job in planning["jobs"]} == {"planning"}
    assert planning["next"] is None


async def test_jobs_are_listed_by_what_they_are(client: httpx.AsyncClient, place: Place) -> None:
    spec = place.job()
    made = await created(client, {**spec, "metadata": {"by": "me", "why": "test"}})
    await created(client, place.job())
    folder = made["output_url"]

    async def listed(**query: Any) -> list[str]:
        return [job["id"] for job in (await client.get(JOBS, params=query)).json()["jobs"]]

    assert await listed(metadata=["by=me", "why=test"]) == [made["id"]]
    assert await listed(metadata=["by=me", "why=not"]) == []
    assert await listed(output=folder, model=made["model"], metadata="by=me") == [made["id"]]
    assert await listed(output=f"{folder}-2") == await listed(model="none") == []


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"metadata": "x"}, "got 'x'"),
        ({"limit": "0"}, "1 to 1000; got '0'"),
        ({"limit": "many"}, "got 'many'"),
        ({"limit": "1001"}, "got '1001'"),
        ({"state": "sleeping"}, "'sleeping'"),
        ({"after": "x"}, "'x'"),
    ],
)
async def test_listings_that_can_not_be(client: httpx.AsyncClient, query: dict[str, str], said: str) -> None:
    """400, with the value."""
    reply = await client.get(JOBS, params=query)

    assert (reply.status_code, said in reply.json()["error"]) == (400, True), reply.text


@pytest.mark.parametrize("job_id", ["none", "01JX3M3TC8Z6Q5RYB7WS2K4D9F", "a b", "x" * 200, "..x@y"])
async def test_a_job_that_is_not_there(client: httpx.AsyncClient, job_id: str) -> None:
    """404 everywhere, with the id."""
    path = f"{JOBS}/{job_id}"
    replies = [await client.get(path + part) for part in ("", "/log", "/events", "/preview")]
    replies += [await client.post(path + part) for part in ("/cancel", "/resume")]
    replies.append(await client.delete(path))

    assert [reply.status_code for reply in replies] == [404] * 7
    assert all(job_id[:100] in reply.json()["error"] for reply in replies)


async def test_a_job_is_its_tenants(redis_server: RedisServer, place: Place, tmp_path: Path) -> None:
    """For another it does not exist, without a key nothing does, and the same id is another job."""
    file = tmp_path / "keys.json"
    keys = {name: add_key(file, name, (Scope.INFER,), name)[1] for name in ("acme", "other")}
    auth = AuthSettings(mode="keys", keys_file=str(file))
    whole = TenantStores(read=(place.url,), write=(place.url,))
    stores = StoreSettings(allow=(place.url,), tenants=dict.fromkeys(keys, whole))
    settings = job_settings(redis_server, place.url).model_copy(update={"auth": auth, "stores": stores})
    delivery = await Queue.connect(settings.redis)
    async with running_gateway(settings, delivery) as running, httpx.AsyncClient(base_url=running.url) as client:
        acme, other = ({"x-api-key": keys[name]} for name in ("acme", "other"))
        for body, headers in (
            (place.job(id="same"), {}),
            (place.job(), {"idempotency-key": "same"}),
            (place.job(), {}),
        ):
            reply = await client.post(JOBS, json=body, headers=acme | headers)
            links = reply.json()["links"]

            for path in (*links.values(), links["self"] + "/preview?of=input"):
                assert (await client.get(path, headers=other)).status_code == 404
                assert (await client.get(path)).status_code == 401
            assert (await client.post(links["self"] + "/cancel", headers=other)).status_code == 404
            assert (await client.delete(links["self"], headers=other)).status_code == 404
            assert (await client.get(links["self"], headers=acme)).json()["state"] == "planning"
            assert (await client.get(JOBS, headers=other)).json()["jobs"] == []

        mine = (await client.post(JOBS, json=place.job(id="same", key="id"), headers=other)).json()
        assert (mine["id"], mine["links"]["self"]) == ("same", "/v1/jobs/same")
        assert [job["spec"]["key"] for job in (await client.get(JOBS, headers=other)).json()["jobs"]] == ["id"]
        assert len((await client.get(JOBS, headers=acme)).json()["jobs"]) == 3


# --- on its way ---


async def test_progress_is_told(client: httpx.AsyncClient, running: Running, place: Place) -> None:
    """What the workers did, how fast, and the log."""
    jobs = Jobs(running.delivery)
    job = await created(client, place.job())
    await jobs.add_shards(job["id"], [(0, b"frame"), (1, b"frame")], rows=30, complete=True)
    await jobs.note(job["id"], "hello")

    shown = (await client.get(job["links"]["self"])).json()
    log = (await client.get(job["links"]["log"])).json()["log"]

    assert (shown["state"], shown["rows"]["total"], shown["shards"]["total"]) == ("running", 30, 2)
    assert shown["started_at"] >= shown["created_at"]
    assert log[-1]["text"] == "hello"
    assert log[-1]["at"].endswith("Z")


async def test_rows_of_a_job_are_looked_at(client: httpx.AsyncClient, place: Place) -> None:
    """The gateway's examiner reads them; of a job without a finished shard, only the inputs."""
    job = await created(client, place.job())
    path = job["links"]["self"] + "/preview"

    inputs = await client.get(path, params={"of": "input", "rows": 2})
    others = [(await client.get(path, params=query)).json() for query in ({}, {"of": "failed"})]
    refused = [await client.get(path, params=query) for query in ({"of": "x"}, {"rows": "0"}, {"rows": "101"})]

    assert inputs.json() == {
        "of": "input",
        "file": f"{place.url}/in/rows.parquet",
        "columns": [
            {"name": "x", "type": "fixed_size_list<element: float>[4]"},
            {"name": "id", "type": "int64"},
            {"name": "name", "type": "string"},
        ],
        "columns_left_out": 0,
        "rows": [["[1,2,3,4]", "1", "a"], ["[1,2,3,4]", "2", "b"]],
    }
    assert [(one["of"], one["file"], one["rows"]) for one in others] == [("output", "", []), ("failed", "", [])]
    assert {reply.status_code for reply in refused} == {400}
    assert "a preview is of one of input, output, failed; got 'x'" in refused[0].text


async def test_a_job_is_cancelled_resumed_and_deleted(
    client: httpx.AsyncClient,
    running: Running,
    place: Place,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each can be asked for again; what does not fit the state is refused with what to do."""

    async def rests(_: JobJanitor) -> None:
        """Leaves it to the test to end what is cancelling."""

    monkeypatch.setattr(JobJanitor, "attend", rests)
    monkeypatch.setattr(JobJanitor, "fill_lanes", rests)
    job = await created(client, place.job(deadline_s=600))
    path = job["links"]["self"]
    early = await client.delete(path)
    stopped = [(await client.post(path + "/cancel")).json()["state"] for _ in range(2)]
    waits = await client.post(path + "/resume")
    await Jobs(running.delivery).move(job["id"], {"cancelling"}, "cancelled")
    again = await client.post(path + "/cancel")
    planned = tasks(redis_server).count((PLAN, f"('{job['id']}',)"))
    resumed = [await client.post(path + "/resume") for _ in range(2)]

    assert (early.status_code, f"POST {path}/cancel" in early.json()["error"]) == (409, True)
    assert stopped == ["cancelling", "cancelling"]
    assert (waits.status_code, "once it is cancelled" in waits.json()["error"]) == (409, True)
    assert (again.status_code, again.json()["state"]) == (200, "cancelled")
    assert again.json()["ended_at"] is not None
    assert [reply.json()["state"] for reply in resumed] == ["planning", "planning"]
    assert resumed[0].json()["ended_at"] is None
    assert resumed[0].json()["deadline_at"] >= job["deadline_at"]
    assert tasks(redis_server).count((PLAN, f"('{job['id']}',)")) == planned + 1

    await Jobs(running.delivery).stop(job["id"], "expired")
    gone = await client.delete(path)
    assert (gone.status_code, gone.content) == (204, b"")
    assert (await client.get(path)).status_code == 404


async def test_a_job_is_resumed_with_changes(client: httpx.AsyncClient, running: Running, place: Place) -> None:
    """One that failed by its threshold would fail again; what can't be changes nothing."""
    job = await created(client, place.job(max_parallel=1))
    await Jobs(running.delivery).stop(job["id"], "failed", error="1 rows failed")
    path = job["links"]["self"]
    bad = [{"error_threshold": 1.5}, {"priority": "high"}, {"max_parallel": "2"}, []]

    refused = [await client.post(path + "/resume", json=body) for body in bad]
    unchanged = (await client.get(path)).json()
    resumed = (await client.post(path + "/resume", json={"error_threshold": -1, "deadline_s": 60})).json()
    record = await Jobs(running.delivery).get(job["id"])

    assert [reply.status_code for reply in refused] == [400] * 4
    assert ["'error_threshold' is 1.5" in refused[0].text, "priority" in refused[1].text] == [True, True]
    assert (unchanged["state"], unchanged["error"]) == ("failed", "1 rows failed")
    assert (resumed["state"], resumed["error"]) == ("planning", None)
    assert (resumed["spec"]["error_threshold"], resumed["spec"]["max_parallel"]) == (-1, 1)
    assert resumed["deadline_at"] is not None
    assert record is not None
    assert record.max_parallel == 1
    assert record.resumed_at >= record.ended_at  # its speed counts from there
    log = (await client.get(path + "/log")).json()["log"]
    waits = "waits for a bulk worker, which plans it"
    assert [line["text"] for line in log] == [f"created; {waits}", "failed: 1 rows failed", f"resumed; {waits}"]


async def test_a_job_that_was_resumed_with_changes_is_found_again(
    client: httpx.AsyncClient, running: Running, place: Place
) -> None:
    """By the body that it was created with, as what repeats it does not know of the changes; not by another."""
    body = place.job(id="nightly", error_threshold=0.5)
    job = await created(client, body)
    await Jobs(running.delivery).stop(job["id"], "failed", error="1 rows failed")
    await client.post(job["links"]["self"] + "/resume", json={"error_threshold": -1})

    again = await client.post("/v1/jobs", json=body)
    other = await client.post("/v1/jobs", json=body | {"priority": "high"})

    assert (again.status_code, again.json()["id"]) == (200, job["id"])
    assert other.status_code == 409


async def test_the_same_body_resumes_a_job(client: httpx.AsyncClient, running: Running, place: Place) -> None:
    """With the limits that it has now; whoever asks without `resume` changes nothing."""
    body, resume = place.job(id="weekly"), {"resume": "true"}
    first = await client.post(JOBS, json=body, params=resume)
    await Jobs(running.delivery).stop("weekly", "failed", error="1 rows failed")

    plain = await client.post(JOBS, json=body)
    refused = await client.post(JOBS, json=body | {"key": "id"}, params=resume)
    resumed = await client.post(JOBS, json=body | {"error_threshold": -1}, params=resume)
    again = await client.post(JOBS, json=body | {"error_threshold": -1}, params=resume)
    await Jobs(running.delivery).stop("weekly", "cancelling")
    early = await client.post(JOBS, json=body, params=resume)

    assert [first.status_code, plain.status_code, refused.status_code] == [201, 200, 409]
    assert plain.json()["state"] == "failed"
    assert (resumed.status_code, resumed.json()["state"]) == (200, "planning")
    assert resumed.json()["spec"]["error_threshold"] == -1
    assert again.json()["state"] == "planning"
    assert (early.status_code, early.json()["state"] in ("cancelling", "cancelled")) == (200, True)


@pytest.mark.parametrize(("query", "said"), [("resume=true", "by its id"), ("resume=yes", "'yes'")])
async def test_a_resumption_that_can_not_be(client: httpx.AsyncClient, place: Place, query: str, said: str) -> None:
    reply = await client.post(f"{JOBS}?{query}", json=place.job())

    assert (reply.status_code, said in reply.json()["error"]) == (400, True)


async def test_a_completed_job_is_not_resumed(client: httpx.AsyncClient, running: Running, place: Place) -> None:
    """Its manifest is where it says; there is nothing left to do."""
    job = await created(client, place.job())
    await Jobs(running.delivery).move(job["id"], {"planning"}, "completed")

    shown = (await client.get(job["links"]["self"])).json()
    reply = await client.post(job["links"]["self"] + "/resume")

    assert shown["manifest_url"] == f"{place.url}/out/_manifest.json"
    assert (reply.status_code, "nothing to resume" in reply.json()["error"]) == (409, True)
    assert (await client.post(job["links"]["self"] + "/cancel")).json()["state"] == "completed"


# --- overwriting ---


def with_plan(place: Place, name: str) -> dict[str, Any]:
    """Returns a job whose output folder has the plan of an earlier one."""
    (place.folder / name).mkdir(exist_ok=True)
    (place.folder / name / "_plan.json").write_text('{"job_id": "earlier", "shards": []}')
    return place.job(output_url=f"{place.url}/{name}", overwrite=True)


async def test_an_earlier_jobs_output_may_be_overwritten(client: httpx.AsyncClient, place: Place) -> None:
    """Where no job has written, nothing is; nothing is removed before the new job is planned."""
    body = with_plan(place, "earlier")

    plain = await client.post(JOBS, json=body | {"overwrite": False})
    foreign = await client.post(JOBS, json=place.job(output_url=f"{place.url}/full", overwrite=True))
    job = await created(client, body)

    assert (plain.status_code, "--overwrite" in plain.json()["error"]) == (400, True)
    assert (foreign.status_code, "no _plan.json" in foreign.json()["error"]) == (400, True)
    assert job["spec"]["overwrite"] is True
    assert [path.name for path in (place.folder / "earlier").iterdir()] == ["_plan.json"]


@pytest.mark.parametrize("first", [False, True])
async def test_a_job_that_overwrites_is_alone_in_its_folder(
    client: httpx.AsyncClient, running: Running, place: Place, *, first: bool
) -> None:
    """Whichever of the two came first; and a job that ended early may not be resumed beside it."""
    body = place.job(output_url=f"{place.url}/alone-{first}")
    one = await created(client, body | {"overwrite": first})

    refused = await client.post(JOBS, json=body | {"overwrite": not first})
    await Jobs(running.delivery).stop(one["id"], "cancelled")
    other = await created(client, body | {"overwrite": not first})
    resumed = await client.post(one["links"]["self"] + "/resume")

    for reply, holder in ((refused, one), (resumed, other)):
        assert (reply.status_code, holder["id"] in reply.json()["error"]) == (409, True)


async def test_the_same_body_runs_a_completed_job_anew(
    client: httpx.AsyncClient, running: Running, place: Place
) -> None:
    """A scheduler's "clear and run again"; a job that ended early goes on, and without `resume` nothing happens."""
    body, resume = with_plan(place, "anew") | {"id": "anew"}, {"resume": "true"}
    first = (await client.post(JOBS, json=body, params=resume)).json()
    await Jobs(running.delivery).stop("anew", "failed", error="1 rows failed")
    went_on = await client.post(JOBS, json=body, params=resume)
    await Jobs(running.delivery).move("anew", {"planning"}, "completed")

    plain = await client.post(JOBS, json=body)
    kept = await client.post(JOBS, json=body | {"overwrite": False}, params=resume)
    anew = await client.post(JOBS, json=body | {"key": "id"}, params=resume)

    assert (went_on.status_code, went_on.json()["created_at"]) == (200, first["created_at"])
    assert [(reply.status_code, reply.json()["state"]) for reply in (plain, kept)] == [(200, "completed")] * 2
    assert (anew.status_code, anew.json()["state"], anew.json()["spec"]["key"]) == (201, "planning", "id")


async def test_a_repeated_id_says_which_fields_are_new(client: httpx.AsyncClient, place: Place) -> None:
    """Those that the known job has not are null."""
    body = place.job(id="forms")
    await created(client, body)

    reply = await client.post(JOBS, json=body | {"csv": {"delimiter": ";"}})

    assert (reply.status_code, "'csv': null, now" in reply.json()["error"]) == (409, True)


# --- events ---


async def test_events_follow_a_job_to_its_end(client: httpx.AsyncClient, running: Running, place: Place) -> None:
    """The job now, each change, and then the stream ends; who saw the end is told not to come back."""
    job = await created(client, place.job())
    seen: list[str] = []

    async with client.stream("GET", job["links"]["events"]) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        async for line in reply.aiter_lines():
            if line.startswith("id: "):
                last = line[4:]
            if line.startswith("data: "):
                seen.append(json.loads(line[6:])["state"])
                if seen == ["planning"]:
                    await Jobs(running.delivery).add_shards(job["id"], [(0, b"frame")], rows=3, complete=True)
                elif seen == ["planning", "running"]:
                    await Jobs(running.delivery).stop(job["id"], "failed", error="it broke")
    again = await client.get(job["links"]["events"], headers={"last-event-id": last})

    assert seen == ["planning", "running", "failed"]
    assert (again.status_code, again.content) == (204, b"")
    assert running.gateway.jobs.watchers.taken == 0
    assert (await client.get(job["links"]["self"])).json()["error"] == "it broke"


async def test_a_stream_ends_when_the_queue_is_away(
    client: httpx.AsyncClient, running: Running, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Properly, so that whoever listens comes again; before it would begin, the refusal says when."""
    job = await created(client, place.job())

    async def away(*_: object) -> None:
        raise BrokerUnavailable("the queue can't be reached")

    async with client.stream("GET", job["links"]["events"]) as reply:
        lines = reply.aiter_lines()
        first = await anext(lines)
        monkeypatch.setattr(running.gateway.jobs.jobs, "wait_for_change", away)
        await Jobs(running.delivery).note(job["id"], "something else")
        await Jobs(running.delivery).add_shards(job["id"], [(0, b"frame")], rows=3, complete=True)
        rest = [line async for line in lines]

    assert (first, reply.status_code) == ("event: progress", 200)
    assert rest[-1] == ""


async def test_a_stream_ends_with_its_callers_key(
    client: httpx.AsyncClient, running: Running, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens later is not told."""
    job = await created(client, place.job())

    def revoked(_: object) -> None:
        raise Unauthorized("key 'k1' was revoked; use another")

    async with client.stream("GET", job["links"]["events"]) as reply:
        lines = reply.aiter_lines()
        first = await anext(lines)
        monkeypatch.setattr(running.gateway.dispatcher, "recheck", revoked)
        await Jobs(running.delivery).add_shards(job["id"], [(0, b"frame")], rows=3, complete=True)
        rest = [line async for line in lines]

    assert first == "event: progress"
    assert not any(line.startswith("event:") for line in rest)
    await eventually(lambda: running.gateway.jobs.watchers.taken == 0, description="the end of the stream")


async def test_a_quiet_stream_is_kept_alive(
    client: httpx.AsyncClient, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By comments; what was seen is not told again."""
    monkeypatch.setattr(routes, "HEARTBEAT_S", 0.01)
    job = await created(client, place.job())
    async with client.stream("GET", job["links"]["events"]) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("id: "):
                last = line[4:]
                break

    async with client.stream("GET", job["links"]["events"], headers={"last-event-id": last}) as reply:
        assert [line async for line in _first(reply.aiter_lines())] == [": still here"]


async def test_too_many_watchers(client: httpx.AsyncClient, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """503, and when to come back."""
    monkeypatch.setattr(use_case, "MAX_WATCHERS", 0)
    job = await created(client, place.job())

    reply = await client.get(job["links"]["events"])

    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


async def test_a_shutdown_ends_streams(redis_server: RedisServer, place: Place) -> None:
    """And the job stays."""
    settings = job_settings(redis_server, place.url)
    delivery = await Queue.connect(settings.redis)
    async with running_gateway(settings, delivery) as running, httpx.AsyncClient(base_url=running.url) as client:
        job = await created(client, place.job())
        async with client.stream("GET", job["links"]["events"]) as reply:
            lines = reply.aiter_lines()
            assert await anext(lines) == "event: progress"
            await eventually(lambda: running.gateway.jobs.watchers.taken == 1)
            running.gateway.stop()
            assert [line async for line in lines][-1] == ""
            assert running.gateway.jobs.watchers.taken == 0


async def _first(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    async for line in lines:
        yield line
        return


async def test_jobs_are_refused_at_once_while_redis_is_away(place: Place, tmp_path: Path) -> None:
    """As requests are: with when to try again, and before the time that a command may take."""
    with RedisServer(system_redis(), tmp_path, "--appendonly", "yes") as server:
        settings = job_settings(server, place.url)
        queue = await Queue.connect(settings.redis.model_copy(update={"command_timeout_s": 3600.0}))
        async with running_gateway(settings, queue) as running, httpx.AsyncClient(base_url=running.url) as client:
            await asyncio.to_thread(server.stop)
            await eventually(lambda: not any(link.is_up for link in queue.router.nodes()))
            replies = [
                await client.post(JOBS, json=place.job()),
                await client.post(f"{JOBS}/validate", json=place.job()),
                await client.get(JOBS),
                *[await client.get(f"{JOBS}/one{path}") for path in ("", "/log", "/events", "/preview")],
                *[await client.post(f"{JOBS}/one/{path}") for path in ("cancel", "resume")],
                await client.delete(f"{JOBS}/one"),
            ]
            await asyncio.to_thread(server.start)
            await eventually(lambda: any(link.is_up for link in queue.router.nodes()))

    assert [(reply.status_code, "retry-after" in reply.headers) for reply in replies] == [(503, True)] * 10
