"""Bulk jobs of several tenants at one gateway: nobody reads, writes, counts or goes on with what is another's."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import SecretStr

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings import AuthSettings, BulkSettings, RedisSettings, StoreSettings, TenantStores
from qinfer.core.store_urls import UrlGrant
from qinfer.jobs.job import JobSpec
from qinfer.jobs.queue.jobs import Jobs
from qinfer.models.spec import ModelSpec
from qinfer.testing import eventually
from tests.support.gateway import Running, running_gateway, settings_of
from tests.support.servers.servers import RedisServer

JOBS = "/v1/jobs"
ROWS = pa.table({"x": pa.array([[1.0, 2.0, 3.0, 4.0]] * 3, pa.list_(pa.float32(), 4)), "id": [1, 2, 3]})


class Lake:
    """A store with a folder for each of two tenants, each with `in.parquet` and a job's output in `scores`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"file://{folder}"
        for tenant in ("acme", "other"):
            (folder / tenant / "scores").mkdir(parents=True)
            pq.write_table(ROWS, folder / tenant / "in.parquet")
            pq.write_table(ROWS, folder / tenant / "scores" / "part-00000.parquet")
        (folder / "common").mkdir()
        pq.write_table(ROWS, folder / "common" / "rows.parquet")

    def job(self, source: str, output: str, **fields: Any) -> dict[str, Any]:
        return {"model": "echo", "inputs": [f"{self.url}/{source}"], "output": {"url": f"{self.url}/{output}"}} | fields


class Tenants:
    """A gateway with keys, and a client that calls as one tenant or another."""

    def __init__(self, running: Running, client: httpx.AsyncClient, keys: dict[str, str]) -> None:
        self.running, self._client, self._keys = running, client, keys

    async def ask(self, who: str, method: str, path: str, body: Any = None) -> httpx.Response:
        return await self._client.request(method, path, json=body, headers={"x-api-key": self._keys[who]})


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


@pytest.fixture
def stores(lake: Lake) -> StoreSettings:
    return StoreSettings(allow=(lake.url,))


@pytest.fixture
async def tenants(redis_server: RedisServer, stores: StoreSettings, tmp_path: Path) -> AsyncIterator[Tenants]:
    file = tmp_path / "keys.json"
    keys = {name: add_key(file, name, (Scope.INFER,), name)[1] for name in ("acme", "other")}
    sections: dict[str, Any] = {
        "redis": RedisSettings(url=SecretStr(f"redis://127.0.0.1:{redis_server.port}/3")),
        "auth": AuthSettings(mode="keys", keys_file=str(file)),
        "stores": stores,
        "bulk": BulkSettings(max_jobs=2),
    }
    settings = settings_of().model_copy(update=sections)
    async with (
        running_gateway(settings) as running,  # the jobs are in a database of its own, Celery's tasks in that Redis
        httpx.AsyncClient(base_url=running.url, timeout=60.0) as client,
    ):
        yield Tenants(running, client, keys)


@pytest.mark.parametrize(
    ("source", "output", "use"),
    [
        ("acme/scores/part-00000.parquet", "other/out", "read"),
        ("acme/scores/*.parquet", "other/out", "read"),
        ("**/*.parquet", "other/out", "read"),
        ("*/in.parquet", "other/out", "read"),
        ("acme-2/in.parquet", "other/out", "read"),
        ("common/rows.parquet", "other/out", "read"),
        ("other/in.parquet", "acme/scores/more", "write"),
        ("other/in.parquet", "acme", "write"),
        ("other/in.parquet", "new", "write"),
    ],
)
async def test_a_job_of_a_tenant_stays_in_its_folder(
    tenants: Tenants, lake: Lake, source: str, output: str, use: str
) -> None:
    """By default: 403 for all else, whether it is there or not."""
    reply = await tenants.ask("other", "POST", JOBS, lake.job(source, output))

    assert reply.status_code == 403, reply.text
    assert f"tenant 'other' may {use}; " in reply.json()["error"]
    assert "QINFER_STORES__TENANTS" in reply.json()["error"]
    assert (await tenants.ask("other", "GET", JOBS)).json()["jobs"] == []


@pytest.mark.parametrize("path", ["other/link/in.parquet", "other/link/*.parquet", "other/file.parquet", "other/*"])
async def test_a_link_leads_to_no_other_tenants_files(tenants: Tenants, lake: Lake, path: str) -> None:
    """Nor does one among the files that a pattern means."""
    (lake.folder / "other" / "link").symlink_to("../acme")
    (lake.folder / "other" / "file.parquet").symlink_to("../acme/in.parquet")

    reply = await tenants.ask("other", "POST", JOBS, lake.job(path, "other/out"))

    assert reply.status_code == 403, reply.text
    assert "id" not in reply.json()


async def test_a_link_leads_no_output_to_another_tenant(tenants: Tenants, lake: Lake) -> None:
    (lake.folder / "other" / "link").symlink_to("../acme")

    reply = await tenants.ask("other", "POST", JOBS, lake.job("other/in.parquet", "other/link/more"))

    assert reply.status_code == 403, reply.text
    assert not (lake.folder / "acme" / "more").exists()


async def test_the_same_job_in_its_own_folder_is_taken(tenants: Tenants, lake: Lake) -> None:
    """Its record says what it may use."""
    for who in ("acme", "other"):
        reply = await tenants.ask(who, "POST", JOBS, lake.job(f"{who}/*.parquet", f"{who}/out"))

        assert reply.status_code == 201, reply.text
        record = await Jobs(tenants.running.delivery).get(reply.json()["id"])
        assert record is not None
        folder = (f"{lake.url}/{who}",)
        assert msgspec.json.decode(record.grant, type=UrlGrant) == UrlGrant(folder, folder, who)


async def test_unfinished_jobs_are_counted_for_each_tenant(tenants: Tenants, lake: Lake) -> None:
    """One that has as many as it may takes no other one's room."""
    replies = [await tenants.ask("acme", "POST", JOBS, lake.job("acme/in.parquet", f"acme/out-{n}")) for n in range(3)]
    other = await tenants.ask("other", "POST", JOBS, lake.job("other/in.parquet", "other/out"))

    assert [reply.status_code for reply in (*replies, other)] == [201, 201, 429, 201]
    assert "2 jobs are unfinished" in replies[-1].json()["error"]


async def test_files_that_take_long_leave_room_for_other_tenants(tenants: Tenants, lake: Lake) -> None:
    """Of each, one job is checked at a time: a tenant that creates many takes not all processes."""
    use_case, going_on = tenants.running.gateway.jobs, asyncio.Event()
    check, checked = use_case.check, []

    async def slowly(spec: JobSpec, model: ModelSpec, grant: UrlGrant) -> None:
        checked.append(grant.tenant)
        if grant.tenant == "acme":
            await going_on.wait()
        await check(spec, model, grant)

    use_case.check = slowly
    async with asyncio.TaskGroup() as tasks:
        for n in range(2):
            tasks.create_task(tenants.ask("acme", "POST", JOBS, lake.job("acme/in.parquet", f"acme/out-{n}")))
        await eventually(lambda: checked == ["acme"], description="the first is checked")
        other = await tenants.ask("other", "POST", JOBS, lake.job("other/in.parquet", "other/out"))
        assert (other.status_code, checked) == (201, ["acme", "other"])
        going_on.set()

    assert checked == ["acme", "other", "acme"]


class TestEntries:
    """Prefixes by the setting `stores.tenants`."""

    @pytest.fixture
    def stores(self, lake: Lake) -> StoreSettings:
        own = f"{lake.url}/acme"
        entry = TenantStores(read=(own, f"{lake.url}/common"), write=(f"{own}/scores/new",))
        return StoreSettings(allow=(lake.url,), tenants={"acme": entry})

    @pytest.mark.parametrize(
        ("source", "output", "status"),
        [
            ("common/rows.parquet", "acme/scores/new", 201),
            ("acme/in.parquet", "acme/scores/new/deep", 201),
            ("acme/in.parquet", "acme/scores/newer", 403),
            ("acme/in.parquet", "common/out", 403),
            ("other/in.parquet", "acme/scores/new", 403),
        ],
    )
    async def test_read_and_write_differ(
        self, tenants: Tenants, lake: Lake, source: str, output: str, status: int
    ) -> None:
        reply = await tenants.ask("acme", "POST", JOBS, lake.job(source, output))

        assert reply.status_code == status, reply.text

    async def test_a_tenant_without_an_entry_has_its_folder(self, tenants: Tenants, lake: Lake) -> None:
        replies = [
            await tenants.ask("other", "POST", JOBS, lake.job(source, "other/out"))
            for source in ("common/rows.parquet", "other/in.parquet")
        ]

        assert [reply.status_code for reply in replies] == [403, 201]

    async def test_a_job_is_resumed_by_what_is_granted_now(
        self, tenants: Tenants, lake: Lake, stores: StoreSettings
    ) -> None:
        """403 when a prefix was taken away; else the record has the new grant, which its workers go by."""
        created = await tenants.ask("acme", "POST", JOBS, lake.job("acme/in.parquet", "acme/scores/new"))
        job_id, jobs = created.json()["id"], Jobs(tenants.running.delivery)
        await jobs.stop(job_id, "cancelled")
        use_case = tenants.running.gateway.jobs
        settings, own = use_case.settings, f"{lake.url}/acme"

        def granted(**prefixes: tuple[str, ...]) -> None:
            entry = stores.tenants["acme"].model_copy(update=prefixes)
            changed = stores.model_copy(update={"tenants": {"acme": entry}})
            use_case.settings = settings.model_copy(update={"stores": changed})

        granted(read=(f"{lake.url}/common",))
        refused = await tenants.ask("acme", "POST", f"{JOBS}/{job_id}/resume")
        granted(write=(own,))
        resumed = await tenants.ask("acme", "POST", f"{JOBS}/{job_id}/resume")

        assert (refused.status_code, "may read" in refused.json()["error"]) == (403, True)
        assert (resumed.status_code, resumed.json()["state"]) == (200, "planning")
        record = await jobs.get(job_id)
        assert record is not None
        assert msgspec.json.decode(record.grant, type=UrlGrant).write == (own,)
