"""A gateway that loads models on request, with workers and Triton's own clients: a repository as its users have it."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt
import tritonclient.grpc.aio as over_grpc
import tritonclient.http.aio as over_http

from qinfer.backends import registry
from qinfer.core.settings import RepositorySettings, Settings, WorkerSettings
from qinfer.jobs.examiner_pool import READ_SHARES, READERS, ExaminerPool
from qinfer.models.repository.open import Repositories, open_repositories
from qinfer.models.store import ControlStore
from qinfer.queue.entries import Lane
from qinfer_api.app import Gateway, bind
from qinfer_api.rpc.server import open_port
from qinfer_workers.inference.loader import Loader
from qinfer_workers.inference.worker import Worker
from tests.support.gateway import lean_gateway, settings_of
from tests.support.inline_workers import InlineRenewals
from tests.support.servers.servers import Database

Array = npt.NDArray[Any]


class ServedModels:
    """See the module docstring.

    Attributes:
        repository: The repository.
        gateway: The gateway.
        store: What workers report, and what they should be.
        http: Triton's client over HTTP.
        grpc: Triton's client over gRPC.
        grpc_target: The address of the gateway's gRPC port.
    """

    def __init__(
        self,
        repository: Path,
        database: Database,
        tasks: asyncio.TaskGroup,
        files: Repositories,
        sections: Mapping[str, Any],
    ) -> None:
        self.repository = repository
        self._sections = sections
        self._database = database
        self._tasks = tasks
        self._files = files
        self._workers: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = {}
        self.workers: dict[str, Worker] = {}
        self.gateway: Gateway
        self.store: ControlStore
        self.http: Any
        self.grpc: Any
        self.grpc_target = ""

    async def worker(self, worker_id: str = "w1", **options: Any) -> None:
        """Starts a worker."""
        options = {"max_wait_s": 0.05, **options}
        settings = Settings(redis=self._database.settings, worker=WorkerSettings(**options), **self._sections)
        queue = await self._database.delivery()
        loader = Loader(
            self._files.version_dir,
            registry.factory,
            queue.clock,
            completers=registry.completer,
            with_zeros=settings.worker.warm_up,
        )
        renewals = InlineRenewals(settings, worker_id, os.environ)
        worker = Worker(settings, queue, self._database.store(), loader, worker_id, renewals)
        worker.readers = ExaminerPool(settings, os.environ, processes=READERS, shares=READ_SHARES)
        stop = asyncio.Event()
        self._workers[worker_id] = (stop, self._tasks.create_task(worker.run(stop)))
        self.workers[worker_id] = worker

    async def kill(self, worker_id: str) -> None:
        """Ends a worker as a crash would."""
        _, task = self._workers.pop(worker_id)
        task.cancel()
        await asyncio.wait([task])

    async def close(self) -> None:
        """Drains all workers."""
        for stop, task in self._workers.values():
            stop.set()
            await task

    async def waits(self, model: str, count: int) -> bool:
        """Tells whether the queue of a model's first version holds so many requests, waiting and in flight."""
        return await self.gateway._delivery.depth([Lane(model, 1)]) == [count]

    async def infer(self, model: str, **arrays: Array) -> Any:
        """Asks a model over gRPC; returns the client's result."""
        return await self.grpc.infer(model, [tensor(name, array) for name, array in arrays.items()])


def tensor(name: str, array: Array, module: Any = over_grpc) -> Any:
    """Makes an input of one of Triton's clients."""
    datatype = {"f": "FP", "i": "INT", "u": "UINT"}[array.dtype.kind] + str(8 * array.dtype.itemsize)
    given = module.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


@asynccontextmanager
async def models_served(
    repository: Path, sections: Mapping[str, Any] | None = None, *, first_worker: bool = True, **options: Any
) -> AsyncIterator[ServedModels]:
    """Runs the gateway and a worker until the block ends.

    Args:
        repository: The repository.
        sections: Further sections of the settings, of gateway and worker.
        first_worker: Whether there is one from the beginning.
        **options: Settings of the repository.
    """
    sections = sections or {}
    options = {"path": str(repository), "control_mode": "explicit", "load_timeout_s": 30.0, **options}
    settings = settings_of(limits={"wait_for_workers_s": 10}, grpc={})
    settings = settings.model_copy(update={"repository": RepositorySettings(**options), **sections})
    files = open_repositories(settings.repository)
    async with Database() as database, asyncio.TaskGroup() as tasks:
        scene = ServedModels(repository, database, tasks, files, sections)
        rpc = open_port(settings)
        assert rpc is not None
        delivery, scene.store = await database.delivery(), database.store()
        scene.gateway = gateway = lean_gateway(settings, delivery, scene.store, bind(settings.http), files, rpc)
        serving = asyncio.create_task(gateway.serve())
        await gateway.started.wait()
        scene.grpc_target = rpc.url.partition("://")[2]
        if first_worker:
            await scene.worker()
        async with (
            over_http.InferenceServerClient(gateway.url.partition("://")[2]) as scene.http,
            over_grpc.InferenceServerClient(scene.grpc_target) as scene.grpc,
        ):
            try:
                yield scene
            finally:
                await scene.close()
                gateway.stop()
                await serving
