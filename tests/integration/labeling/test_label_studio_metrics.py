"""What the metrics of the installation show of predictions that are pushed to Label Studio."""

from contextlib import AsyncExitStack
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from qinfer.testing import eventually
from tests.integration.labeling.test_label_studio_push import event, have_it_again, settings_for
from tests.support.gateway import running_gateway
from tests.support.servers.label_studio_server import label_studio

PREFIX = "qinfer_labeling_"


async def labeling(client: httpx.AsyncClient) -> dict[str, float]:
    """Returns the series of labeling, failures by their reason; all must be of one model, and of the cluster."""
    page = (await client.get("/metrics", params={"scope": "cluster"})).text
    shown = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                labels = dict(sample.labels)
                assert (labels.pop("model"), labels.pop("version", "1")) == ("text", "1")
                shown[labels.get("reason") or sample.name.removeprefix(PREFIX)] = sample.value
    return shown


async def test_pushes_are_counted(tmp_path: Path) -> None:
    """Tasks that were queued, pushed and failed, each with its reason; pushes that are tried again; what waits."""
    async with AsyncExitStack() as opened:
        studio = await opened.enter_async_context(label_studio())
        settings = settings_for(studio, tmp_path / "mappings")
        running = await opened.enter_async_context(running_gateway(settings))
        client = await opened.enter_async_context(httpx.AsyncClient(base_url=running.url))
        tasks = [dict(task) for task in studio.add("pos", "neg", "maybe", "pos")]
        del studio.tasks[2]
        tasks[3]["data"] = {"other": 1}
        studio.failures["/api/projects/12/import"] = [503] * 1000
        assert await labeling(client) == {}
        await client.post("/label-studio/text/webhook", json=event(tasks))

        async def waits() -> bool:
            shown = await labeling(client)
            failed = (shown.get("not_queued"), shown.get("not_predicted"))
            return shown.get("push_retries_total", 0) >= 2 and failed == (1, 1)

        await eventually(waits, 20.0)
        before = await labeling(client)
        studio.failures.clear()
        await have_it_again(running)

        async def are_over() -> bool:
            shown = await labeling(client)
            return (shown.get("pushed_tasks_total"), shown.get("refused")) == (1, 1)

        await eventually(are_over, 20.0)
        after = await labeling(client)

    assert (before["queued_tasks_total"], before["waiting_tasks"], before["pushed_tasks_total"]) == (4, 2, 0)
    del after["push_retries_total"]
    assert after == {
        "queued_tasks_total": 4,
        "pushed_tasks_total": 1,
        "waiting_tasks": 0,
        "not_queued": 1,
        "not_predicted": 1,
        "refused": 1,
        "push_failed": 0,
    }
