"""The inference worker's composition root: `python -m qinfer_workers.inference`.

SIGTERM and SIGINT drain it, and so does a gateway that is asked to; SIGHUP does nothing.
"""

import asyncio
import atexit
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import uvloop

from qinfer.backends import registry
from qinfer.backends.parameters import (
    use_engine_cache,
    use_environments,
    use_model_variables,
    use_terminal,
    use_triton_files,
)
from qinfer.backends.triton_host.library import TritonFiles
from qinfer.core.processes import SWITCH_INTERVAL_S, model_environment, protect_process
from qinfer.core.settings import Settings, load_settings
from qinfer.errors import BrokerUnavailable, SettingsError
from qinfer.jobs.examiner_pool import READ_SHARES, READERS, ExaminerPool
from qinfer.models.catalog import Catalog
from qinfer.models.control import ModelControl
from qinfer.models.repository.open import open_repositories
from qinfer.models.store import ControlStore, follow_log_settings
from qinfer.observe import logs, tracing
from qinfer.queue.clients import admin_client, wait_for_redis
from qinfer.queue.lanes import Queue
from qinfer_workers.inference.calls.caller import ModelLoads
from qinfer_workers.inference.devices import gpus_here, known_as
from qinfer_workers.inference.executor import are_threads_left
from qinfer_workers.inference.loader import Loader
from qinfer_workers.inference.renewals import ProcessRenewals
from qinfer_workers.inference.tracing import Spans
from qinfer_workers.inference.watchdog import ExecutionWatchdog
from qinfer_workers.inference.worker import Worker
from qinfer_workers.liveness import open_health
from qinfer_workers.renewer import DueTable

logger = logging.getLogger("qinfer_workers.inference")

GC_THRESHOLD = 50_000


async def serve(settings: Settings, ring: logs.LogRing) -> None:
    """Runs a worker until a signal, or until a gateway asks it to drain; `ring` has the end of its log."""
    stop = asyncio.Event()
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    assert starting is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, starting.cancel)
    worker_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    tracer = tracing.open_tracer(os.environ, tracing.WORKER, worker_id)
    health = open_health(settings)
    touching = [loop.create_task(health.run())] if health is not None else []
    queue = await wait_for_redis(partial(Queue.connect, settings.redis, settings.limits))
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    store = ControlStore(admin_client(settings.redis))
    files = open_repositories(settings.repository)
    _set_up_backends(settings)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = known_as(gpus_here(settings.worker.gpus, visible), visible)
    catalog = Catalog(store, settings.limits)
    loads = ModelLoads(ModelControl(files, store, queue, settings.repository, catalog.refresh), catalog)
    factory = partial(registry.factory, models=loads)
    due = DueTable()
    loader = Loader(
        files.version_dir, factory, queue.clock, gpus, registry.completer, with_zeros=settings.worker.warm_up
    )
    loader.watchdog = ExecutionWatchdog(due)
    worker = Worker(settings, queue, store, loader, worker_id, ProcessRenewals(settings, worker_id, os.environ, due))
    worker.readers = ExaminerPool(settings, os.environ, processes=READERS, shares=READ_SHARES)
    if tracer is not None:
        worker.spans = Spans(tracer, queue.clock)
    worker.catalog = catalog
    worker.keep_log(ring)
    if health is not None:
        worker.follow_heartbeats(health.beaten)
    following = loop.create_task(follow_log_settings(store, logs.Switches.from_settings(settings.log)))
    loading = loop.create_task(loads.end_with(stop))
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
    logger.info("worker started", extra={"worker": worker_id, "models": list(settings.worker.models)})
    try:
        await worker.run(stop)
    finally:
        for task in (following, loading, *touching):
            task.cancel()
        await store.close()
        await queue.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
    logger.info("worker stopped", extra={"worker": worker_id})


def _set_up_backends(settings: Settings) -> None:
    worker, cache_dir = settings.worker, settings.repository.cache_dir
    if cache_dir:
        use_engine_cache(Path(cache_dir) / "engines")
    use_environments(cache_dir, worker.max_environment_bytes, worker.max_environment_files)
    use_model_variables(model_environment(os.environ, worker.model_env))
    use_terminal(worker.model_terminal)
    use_triton_files(TritonFiles(worker.triton_directory, worker.triton_backends))


def main() -> int:
    """Runs the program and returns the exit status."""
    protect_process(os.environ)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # SIGHUP is for gateways
    try:
        settings = load_settings()
    except SettingsError as error:
        logs.cannot_start(os.environ, "qinfer_workers.inference", error.message)
        return 2
    logs.configure(settings.log, "worker", unknown=settings.unknown)
    logging.getLogger().addHandler(ring := logs.LogRing())
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, ring))
    except asyncio.CancelledError:
        return 0
    except (SettingsError, BrokerUnavailable) as error:
        logger.error("worker can't run", extra={"reason": error.message})
        return 1
    return 0


def _exit_at_once(status: list[int]) -> None:
    """Exits at once if runtime threads are left: C++ would abort."""
    if are_threads_left():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0])


if __name__ == "__main__":
    ended = [1]
    atexit.register(_exit_at_once, ended)  # registered first, so it runs last
    ended[0] = main()
    sys.exit(ended[0])
