"""Rows of jobs on the console's page: texts stay text, a refresh reads none, and a viewer sees none."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings import AuthSettings, StoreSettings, TenantStores
from qinfer.queue.lanes import Queue
from tests.integration.console.test_console_security import HOSTILE, Elements, browser
from tests.integration.jobs.test_jobs import JOBS, job_settings
from tests.support.gateway import running_gateway
from tests.support.servers.servers import RedisServer

JOB = "jobs/nightly"


@pytest.fixture
def lake(tmp_path: Path) -> str:
    rows = [[1.0, 2.0, 3.0, 4.0]] * len(HOSTILE)
    table = {"x": pa.array(rows, pa.list_(pa.float32(), 4)), HOSTILE[0]: list(HOSTILE)}
    (tmp_path / "lake").mkdir()
    pq.write_table(pa.table(table), tmp_path / "lake" / "rows.parquet")
    return f"file://{tmp_path}/lake"


async def test_rows_are_shown_to_those_who_may_read(redis_server: RedisServer, lake: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    keys = {scope: add_key(file, "acme", (scope,), scope.value)[1] for scope in (Scope.INFER, Scope.VIEWER)}
    stores = StoreSettings(allow=(lake,), tenants={"acme": TenantStores(read=(lake,), write=(lake,))})
    more = {"auth": AuthSettings(mode="keys", keys_file=str(file)), "stores": stores}
    settings = job_settings(redis_server, lake).model_copy(update=more)
    body = {"model": "echo", "inputs": [f"{lake}/rows.parquet"], "output": {"url": f"{lake}/out"}, "id": "nightly"}
    async with (
        running_gateway(settings, await Queue.connect(settings.redis)) as running,
        browser(running) as reader,
        browser(running) as viewer,
    ):
        made = await reader.post(f"{running.url}{JOBS}", json=body, headers={"x-api-key": keys[Scope.INFER]})
        assert made.status_code == 201, made.text
        await reader.post("sign-in", data={"key": keys[Scope.INFER]})
        await viewer.post("sign-in", data={"key": keys[Scope.VIEWER]})

        plain = await reader.get(JOB)
        shown = await reader.get(JOB, params={"rows": "input"})
        refreshed = await reader.get(JOB, params={"rows": "input"}, headers={"hx-request": "true", "hx-target": "rows"})
        wrong = await reader.get(JOB, params={"rows": "x"})
        hidden = await viewer.get(JOB, params={"rows": "input"})

    assert [reply.status_code for reply in (plain, shown, refreshed, wrong, hidden)] == [200] * 5
    assert 'hx-get="?rows=input"' in plain.text
    assert "[1,2,3,4]" in shown.text
    assert "[1,2,3,4]" not in plain.text + refreshed.text + hidden.text
    assert "a preview is of one of input" in wrong.text
    assert 'id="preview"' not in hidden.text
    of_rows = {"br", "small", "table", "thead", "tbody", "th", "td", "tr"}
    assert {name for name, _ in Elements(shown.text).found} - {
        name for name, _ in Elements(wrong.text).found
    } <= of_rows
