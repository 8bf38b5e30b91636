"""Label Studio's calls while Redis is away."""

import asyncio
from pathlib import Path

import httpx
from pydantic import SecretStr

from qinfer.core.settings import RedisSettings
from qinfer.queue.lanes import Queue
from qinfer.testing import eventually
from tests.integration.labeling.test_label_studio_push import TASKS, event, settings_for
from tests.support.gateway import running_gateway
from tests.support.servers.label_studio_server import label_studio
from tests.support.servers.servers import RedisServer, system_redis


async def test_calls_are_refused_at_once_while_redis_is_away(tmp_path: Path) -> None:
    """Before the time that a command may take: Label Studio waits for a second."""
    directory = tmp_path / "redis"
    directory.mkdir()
    with RedisServer(system_redis(), directory, "--appendonly", "yes") as server:
        queue = await Queue.connect(RedisSettings(url=SecretStr(server.url), command_timeout_s=3600))
        async with label_studio() as studio:
            settings = settings_for(studio, tmp_path / "mappings")
            async with running_gateway(settings, queue) as running, httpx.AsyncClient(base_url=running.url) as client:
                tasks = studio.add("pos")
                await asyncio.to_thread(server.stop)
                await eventually(lambda: not any(link.is_up for link in queue.router.nodes()))
                replies = [
                    await client.post("/label-studio/text/webhook", json=event(tasks)),
                    await client.post("/label-studio/text/predict", json={"tasks": tasks, "project": "12.1"}),
                    await client.post(TASKS),
                    await client.get(TASKS),
                    await client.get(f"{TASKS}/1"),
                ]
                await asyncio.to_thread(server.start)
                await eventually(lambda: any(link.is_up for link in queue.router.nodes()))

    assert [(reply.status_code, "retry-after" in reply.headers) for reply in replies] == [(503, True)] * 5
