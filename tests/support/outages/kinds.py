"""The outages that are recorded: what brings each about, and what runs beside the callers meanwhile."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import httpx
import pyarrow as pa
import yaml

from qinfer.client import Client, Job
from qinfer.testing import wait_until
from tests.support import faulty_backend
from tests.support.bridge_scene import PREDICTIONS, TASKS, Broker, routes
from tests.support.hanging import HANG, write_hanging
from tests.support.jobs.job_proof import parquet
from tests.support.outages import redis
from tests.support.outages.scene import MODELS, Scene, answers

JOB_MODEL = "faulty"
JOB_ROWS = 200
HANGING = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [HANG]}]}
MESSAGE_EVERY_S = 0.5
MESSAGE = json.dumps(
    {"inputs": [{"name": name, "shape": [1, 1], "datatype": "FP32", "data": [1.0]} for name in ("a", "b")]}
).encode()


async def kill_workers(scene: Scene) -> None:
    """All workers are killed, and none starts again."""
    for worker in scene.workers:
        worker.kill()


async def break_model(scene: Scene) -> None:
    """A model whose file no runtime can read comes into the repository; callers ask for it."""
    (scene.models / "broken" / "1").mkdir(parents=True)
    (scene.models / "broken" / "1" / "model.onnx").write_bytes(b"this is no model")


async def fail_rollout(scene: Scene) -> None:
    """A new version cannot be loaded; the old one serves on."""
    _rewrite(scene.models / "digits" / "config.pbtxt", '"add"', '"no-such-mode"')


async def slow_down(scene: Scene) -> None:
    """A new version takes two seconds."""
    _rewrite(scene.models / "digits" / "config.pbtxt", '"0.01"', '"2.0"')


async def fill_redis(scene: Scene) -> None:
    """Redis has no memory left."""
    with scene.redis.client() as client:
        client.config_set("maxmemory", "1mb")


async def kill_redis(scene: Scene) -> None:
    """Redis is gone, and does not come back."""
    scene.redis.process.kill()


async def hang_job(scene: Scene) -> None:
    """A job comes to a row at which its model hangs."""
    with Client(scene.gateways[0].url) as client:
        await asyncio.to_thread(_submit, scene, client, "hangs", [*range(JOB_ROWS), faulty_backend.SLOW])


async def hang(scene: Scene, times: int = 1) -> None:
    """A request hangs in a model with a limit; others follow it, one a minute."""
    async with httpx.AsyncClient(base_url=scene.gateways[0].url, timeout=None) as client, asyncio.TaskGroup() as tasks:
        for number in range(times):
            if number:
                await asyncio.sleep(60)
            tasks.create_task(client.post("/v2/models/hang/infer", json=HANGING))


async def kill_bridge(scene: Scene) -> None:
    """The only bridge is killed, and none starts again; messages keep coming."""
    scene.bridges[0].kill()


async def roll(scene: Scene) -> None:
    """No outage: every ten minutes a job, all workers and gateways are replaced, one worker more comes and goes."""
    for turn in range(6):
        more = scene.worker()
        await asyncio.to_thread(_complete, scene, f"turn{turn}")
        for number, worker in enumerate(scene.workers):
            await asyncio.sleep(90)
            new = scene.worker()
            await asyncio.sleep(15)
            worker.send_signal(signal.SIGTERM)
            await asyncio.to_thread(worker.wait)
            scene.workers[number] = new
        for number in range(len(scene.gateways)):
            await asyncio.sleep(120)
            await _replace(scene, number)
        more.send_signal(signal.SIGTERM)


async def _replace(scene: Scene, number: int) -> None:
    """Replaces a gateway as behind a load balancer: callers go to the others first."""
    gateway = scene.gateways.pop(number)
    gateway.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(gateway.process.wait)
    port = int(gateway.url.rpartition(":")[2])
    scene.gateways.insert(number, await asyncio.to_thread(scene.gateway, port, gateway.metrics_port))


def _rewrite(file: Path, old: str, new: str) -> None:
    """Replaces a part of a model's configuration, at once."""
    after = file.with_suffix(".new")
    after.write_text(file.read_text().replace(old, new))
    after.rename(file)


@asynccontextmanager
async def hanging(scene: Scene, limit_s: float) -> AsyncIterator[None]:
    """Has a python model with a limit, which hangs at one value."""
    write_hanging(scene.models, limit_s)
    await asyncio.to_thread(
        wait_until, lambda: answers(f"{scene.gateways[0].url}/v2/models/hang/ready"), 60, "a model that may hang"
    )
    yield


@asynccontextmanager
async def jobs(scene: Scene) -> AsyncIterator[None]:
    """Runs a bulk worker, and a first job to its end."""

    def first_job() -> None:
        faulty_backend.write_model(scene.models, JOB_MODEL, hold_s=24 * 3600)
        wait_until(lambda: answers(f"{scene.gateways[0].url}/v2/models/{JOB_MODEL}/ready"), 60, JOB_MODEL)
        _complete(scene, "first")

    scene.start("qinfer_workers.jobs")
    await asyncio.to_thread(first_job)
    yield


@asynccontextmanager
async def jobs_and_messages(scene: Scene) -> AsyncIterator[None]:
    """Runs a bulk worker and a bridge."""
    async with jobs(scene), messages(scene):
        yield


def _complete(scene: Scene, name: str) -> None:
    """Runs a job to its end."""
    with Client(scene.gateways[0].url) as client:
        ended = _submit(scene, client, name, range(JOB_ROWS)).wait(timeout_s=60)
    if ended.state != "completed":
        raise RuntimeError(f"the job {name!r} is {ended.state}: {ended.error}")


def _submit(scene: Scene, client: Client, name: str, values: Iterable[float]) -> Job:
    """Submits a job over a file of these values."""
    file = scene.directory / f"{name}.parquet"
    file.write_bytes(parquet(pa.table({"x": pa.array([[float(value)] for value in values], pa.list_(pa.float32()))})))
    return client.submit_job(JOB_MODEL, file, scene.directory / f"{name}-scored")


@asynccontextmanager
async def messages(scene: Scene) -> AsyncIterator[None]:
    """Runs a bridge, and sends messages into its queue until the block ends."""
    file = scene.directory / "routes.yaml"
    file.write_text(yaml.safe_dump(routes(scene.redis.url, name="scores", model=MODELS[0])))
    scene.bridges.append(scene.start("qinfer_workers.bridge", str(file)))
    broker = Broker(scene.redis.url)
    broker.declare(TASKS, PREDICTIONS)

    async def send() -> None:
        for number in count():
            await asyncio.to_thread(broker.put, MESSAGE, message_id=f"m{number}")
            await asyncio.sleep(MESSAGE_EVERY_S)

    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(send())
        await broker.take()
        yield
        sending.cancel()


class Outage(NamedTuple):
    """An outage.

    Attributes:
        begin: Brings it about.
        lasts_s: How long it is watched.
        models: What callers ask for meanwhile.
        beside: What runs beside the callers, from before the health to the end.
        is_cluster: Redis is a cluster.
    """

    begin: Callable[[Scene], Awaitable[None]]
    lasts_s: float = 240.0
    models: tuple[str, ...] = MODELS
    beside: Callable[[Scene], AbstractAsyncContextManager[None]] = nullcontext  # type: ignore[assignment]
    is_cluster: bool = False


OUTAGES = {
    "workers_killed": Outage(kill_workers),
    "load_failure": Outage(break_model, models=(*MODELS, "broken")),
    "failed_rollout": Outage(fail_rollout),
    "slow_model": Outage(slow_down, 480.0),
    "hang_10": Outage(hang, 120.0, beside=partial(hanging, limit_s=10)),
    "hang_60": Outage(hang, 180.0, beside=partial(hanging, limit_s=60)),
    "hang_300": Outage(hang, 420.0, beside=partial(hanging, limit_s=300)),
    "hangs_again": Outage(partial(hang, times=6), 420.0, beside=partial(hanging, limit_s=10)),
    "redis_full": Outage(fill_redis),
    "redis_gone": Outage(kill_redis),
    "redis_disk_full": Outage(redis.fill_disk, beside=redis.append_only),
    "redis_rewrite_fails": Outage(redis.lose_folder, 480.0, beside=redis.append_only),
    "redis_save_fails": Outage(redis.lose_folder_of_snapshots, 480.0, beside=redis.saves),
    "redis_evicts": Outage(redis.evict),
    "redis_memory_high": Outage(redis.share_memory, 420.0),
    "redis_replica_lost": Outage(redis.kill_replica, 420.0, beside=redis.replicated),
    "redis_replica_hangs": Outage(redis.hang_replica, 480.0, beside=redis.replicated),
    "redis_connections": Outage(redis.leak_connections),
    "redis_node_down": Outage(redis.kill_node, is_cluster=True),
    "stuck_job": Outage(hang_job, 1140.0, beside=jobs),
    "dead_bridge": Outage(kill_bridge, beside=messages),
    "healthy": Outage(roll, 3600.0, beside=jobs_and_messages),
}
