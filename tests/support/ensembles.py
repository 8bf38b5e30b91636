"""Ensembles as callers have them: a gateway that serves both protocols, and workers with real ONNX models.

Models, all FP32[2] with at most 8 rows: `scale` multiplies `x` by a number and gives `y`, `add` gives `y` = `a` + `b`.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
from onnx import helper
from tritonclient.grpc import service_pb2 as pb

from qinfer.backends import registry
from qinfer.backends.base import BackendFactory
from qinfer.core.settings import RepositorySettings, Settings, StoreSettings, WorkerSettings
from qinfer.models.control import ModelControl
from qinfer.models.repository.open import open_repositories
from qinfer.models.state import State
from qinfer.models.store import ControlStore
from qinfer.models.sync import SyncedModel, sync
from qinfer.queue.entries import Lane
from qinfer.testing import eventually
from qinfer_api.app import Gateway, bind
from qinfer_api.rpc.server import open_port
from qinfer_workers.inference.loader import Loader
from qinfer_workers.inference.worker import Worker
from tests.support import models
from tests.support.gateway import lean_gateway, settings_of
from tests.support.inline_workers import InlineRenewals
from tests.support.rpc import stub_of
from tests.support.servers.servers import Database

ROW = [1.0, 2.0]


Width = int | tuple[int, ...]
"""The elements of a row, or their dimensions."""


def scale(repository: Path, name: str, factor: float, version: int = 1, width: Width = 2) -> str:
    """Writes a model that multiplies by a number; returns its name."""
    nodes = [
        helper.make_node("Constant", [], ["factor"], value_float=factor),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    ]
    port = [("x", "FP32", _dims(width))], [("y", "FP32", _dims(width))]
    models.write(repository, name, nodes, *port, version=version)
    return name


def add(repository: Path, name: str = "add") -> str:
    """Writes a model that adds two inputs; returns its name."""
    nodes = [helper.make_node("Add", ["a", "b"], ["y"])]
    models.write(repository, name, nodes, [(one, "FP32", (2,)) for one in "ab"], [("y", "FP32", (2,))])
    return name


Step = tuple[str, Mapping[str, str], Mapping[str, str]]
"""A step: model (`name` or `name:version`), input map, output map."""


def ensemble(
    repository: Path,
    name: str,
    *steps: Step,
    more: str = "",
    max_batch_size: int = 8,
    width: Width = 2,
    reshape: Width = (),
) -> str:
    """Writes an ensemble `x` → `y` of steps, both of one width, and of another one to the steps; returns its name."""
    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    lines = [f'name: "{name}" platform: "ensemble" max_batch_size: {max_batch_size}']
    dims = f"dims: {_listed(width)}" + (f" reshape {{ shape: {_listed(reshape)} }}" if reshape else "")
    lines += [
        f'{kind} {{ name: "{port}" data_type: TYPE_FP32 {dims} }}' for kind, port in (("input", "x"), ("output", "y"))
    ]
    lines += [more, "ensemble_scheduling {"]
    for model, inputs, outputs in steps:
        model_name, _, version = model.partition(":")
        lines.append(f'  step {{ model_name: "{model_name}" model_version: {version or -1}')
        for field, named in (("input_map", inputs), ("output_map", outputs)):
            lines += [f'    {field} {{ key: "{key}" value: "{value}" }}' for key, value in named.items()]
        lines.append("  }")
    (repository / name / "config.pbtxt").write_text("\n".join([*lines, "}"]))
    return name


def _dims(width: Width) -> tuple[int, ...]:
    return (width,) if isinstance(width, int) else width


def _listed(width: Width) -> str:
    return f"[ {', '.join(map(str, _dims(width)))} ]"


def chain(repository: Path, name: str, *scales: str, more: str = "") -> str:
    """Writes an ensemble of models `x` → `y`, one after the other; returns its name."""
    tensors = ["x", *(f"t{number}" for number in range(1, len(scales))), "y"]
    steps = [(model, {"x": tensors[i]}, {"y": tensors[i + 1]}) for i, model in enumerate(scales)]
    return ensemble(repository, name, *steps, more=more)


class EnsemblesServed:
    """See the module docstring.

    Attributes:
        repository: The repository.
        gateway: The gateway.
        control: Loads and unloads.
        store: What workers report, and what they should be.
        client: Calls its HTTP.
        stub: Calls its gRPC.
        factory: Makes the backends of workers that start from now on.
    """

    def __init__(self, repository: Path, database: Database, tasks: asyncio.TaskGroup) -> None:
        self.repository = repository
        self._database = database
        self._tasks = tasks
        self._workers: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = {}
        self._files = open_repositories(RepositorySettings(path=str(repository)))
        self.gateway: Gateway
        self.control: ModelControl
        self.store: ControlStore
        self.client: httpx.AsyncClient
        self.stub: Any
        self.workers: dict[str, Worker] = {}
        self.factory: Callable[[str], BackendFactory] = registry.factory

    async def sync(self) -> list[SyncedModel]:
        """Makes the desired state what the repository holds."""
        return await sync(self._files, self._database.store(), await self._database.delivery())

    async def worker(self, worker_id: str = "w1", **options: Any) -> Worker:
        """Starts a worker."""
        options = {"max_wait_s": 0.05, "lease_s": 1.0, "renew_every_s": 0.3, "drain_s": 2.0, **options}
        stores = StoreSettings(allow=("file:///",))
        settings = Settings(redis=self._database.settings, worker=WorkerSettings(**options), stores=stores)
        queue = await self._database.delivery()
        loader = Loader(self._files.version_dir, self.factory, queue.clock)
        renewals = InlineRenewals(settings, worker_id, os.environ)
        worker = Worker(settings, queue, self._database.store(), loader, worker_id, renewals)
        stop = asyncio.Event()
        self._workers[worker_id] = (stop, self._tasks.create_task(worker.run(stop)))
        self.workers[worker_id] = worker
        return worker

    async def kill(self, worker_id: str) -> None:
        """Ends a worker as a crash would."""
        _, task = self._workers.pop(worker_id)
        task.cancel()
        await asyncio.wait([task])

    async def stop(self, worker_id: str) -> None:
        """Drains a worker."""
        stop, task = self._workers.pop(worker_id)
        stop.set()
        await task

    async def close(self) -> None:
        """Drains all workers."""
        for worker_id in list(self._workers):
            await self.stop(worker_id)

    async def ready(self, *names: str) -> None:
        """Waits until models are ready at their newest generation."""

        async def are_ready() -> bool:
            await self.gateway.catalog.refresh()
            view = self.gateway.catalog._view
            wanted = names or view.statuses
            return bool(wanted) and all(
                name in view.statuses
                and view.statuses[name].is_ready
                and all(s.generation == view.stored[name].generation for s in view.statuses[name].versions.values())
                for name in wanted
            )

        await eventually(are_ready, 30.0, description=f"ready models {names}")

    async def reason(self, name: str) -> str:
        """Waits until a model is not ready for a reason; returns that."""
        found: list[str] = []

        async def is_told() -> bool:
            await self.gateway.catalog.refresh()
            status = self.gateway.catalog._view.statuses[name]
            found[:] = [s.reason for s in status.versions.values() if s.state is State.UNAVAILABLE and s.reason]
            return bool(found) and "no live worker" not in found[0]

        await eventually(is_told, 30.0, description=f"why {name} is not ready")
        return found[0]

    async def post(self, model: str, rows: int = 1, **fields: Any) -> httpx.Response:
        """Sends `ROW`, so many times, over HTTP."""
        tensor = {"name": "x", "shape": [rows, 2], "datatype": "FP32", "data": ROW * rows}
        return await self.client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor], **fields})

    async def infer(self, model: str, rows: int = 1) -> list[float]:
        """Sends `ROW` over HTTP; returns the output."""
        reply = await self.post(model, rows)
        assert reply.status_code == 200, reply.text
        (output,) = reply.json()["outputs"]
        assert output["shape"] == [rows, 2], output
        return list(output["data"])

    async def call(self, model: str) -> list[float]:
        """Sends `ROW` over gRPC; returns the output."""
        message = pb.ModelInferRequest(model_name=model)
        message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
        message.raw_input_contents.append(np.array(ROW, "<f4").tobytes())
        reply = await self.stub.ModelInfer(message)
        return list(map(float, np.frombuffer(reply.raw_output_contents[0], "<f4")))

    async def depth(self, model: str) -> int:
        """Returns how many requests the lane of a model's first version holds."""
        return (await self.gateway._delivery.depth([Lane(model, 1)]))[0]

    async def statistics(self, model: str) -> dict[str, Any]:
        """Returns the statistics of a model's first version."""
        reply = await self.client.get(f"/v2/models/{model}/versions/1/stats")
        return dict(reply.json()["model_stats"][0])


@asynccontextmanager
async def ensembles_served(repository: Path, **sections: Any) -> AsyncIterator[EnsemblesServed]:
    """Runs the gateway, and the workers that are started, until the block ends; takes sections of its settings."""
    settings = settings_of(limits={"wait_for_workers_s": 10}, grpc={}, **sections)
    repository_settings = RepositorySettings(path=str(repository), control_mode="explicit", load_timeout_s=20.0)
    settings = settings.model_copy(update={"repository": repository_settings})
    async with Database() as database, asyncio.TaskGroup() as tasks:
        scene = EnsemblesServed(repository, database, tasks)
        rpc = open_port(settings)
        assert rpc is not None
        delivery, store = await database.delivery(), database.store()
        gateway = lean_gateway(settings, delivery, store, bind(settings.http), rpc=rpc)
        files = open_repositories(repository_settings)
        scene.gateway, scene.store = gateway, store
        scene.control = ModelControl(files, store, delivery, repository_settings, gateway.catalog.refresh)
        serving = asyncio.create_task(gateway.serve())
        await gateway.started.wait()
        async with (
            httpx.AsyncClient(base_url=gateway.url, timeout=30) as client,
            grpc.aio.insecure_channel(rpc.url.partition("://")[2]) as channel,
        ):
            scene.client, scene.stub = client, stub_of(channel)
            try:
                yield scene
            finally:
                await scene.close()
        gateway.stop()
        await asyncio.wait([serving])
        serving.result()
