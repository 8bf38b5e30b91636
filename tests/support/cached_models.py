"""A gateway in this process whose response cache is on, with models that use it; see `tests.support.gateway`.

Models, all `x` → `y` of FP32[4], at most 8 rows: `echo_cached` (answered as `echo`), `shared` (as well, and cached for
all tenants), `late` (answered once a test has it `work`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from qinfer.core.settings import LimitSettings, Settings
from qinfer.core.settings_sections import CacheSettings
from qinfer.models.config.config import normalise, parse, to_json, to_spec
from qinfer.models.spec import lanes_of
from qinfer.models.state import DesiredState, State, StoredModel, VersionState, WorkerRecord
from tests.support.gateway import Running, running_gateway, settings_of, work

LOCAL, REDIS = "local,size=1000000", "redis,ttl=60"
CACHED = 'input { name: "x" data_type: TYPE_FP32 dims: [4] } output { name: "y" data_type: TYPE_FP32 dims: [4] } '
CACHED += "response_cache { enable: true }"
FOR_ALL = ' parameters { key: "qinfer.cache_scope" value { string_value: "all" } }'
MODELS = {"echo_cached": CACHED, "shared": CACHED + FOR_ALL, "late": CACHED}


def cached(config: str = LOCAL, settings: Settings | None = None) -> Settings:
    """Returns settings with a response cache."""
    return (settings or settings_of()).model_copy(update={"cache": CacheSettings(config=config)})


@contextlib.asynccontextmanager
async def caching_gateway(settings: Settings) -> AsyncIterator[Running]:
    """Runs a gateway, and a worker of the first two models."""
    async with running_gateway(settings) as running, asyncio.TaskGroup() as group:
        await declare(running)
        workers = [group.create_task(work(running, name)) for name in ("echo_cached", "shared")]
        yield running
        for worker in workers:
            worker.cancel()


async def declare(running: Running, generation: int = 1) -> None:
    """Writes the models under a generation, and has the gateway see them."""
    for name, text in MODELS.items():
        config = normalise(parse(f'name: "{name}" backend: "stub" max_batch_size: 8 {text}'), name)
        await running.delivery.ensure(list(lanes_of(to_spec(config, LimitSettings()), 1)))
        await running.store.put_model(StoredModel(name, generation, to_json(config), (1,)))
        await running.store.set_desired(DesiredState(name, generation))
    ready = {name: {1: VersionState(State.READY, generation)} for name in MODELS}
    await running.store.heartbeat(WorkerRecord(id="w2", started_at=0.0, models=ready), ttl_s=3600)
    await running.refresh()
