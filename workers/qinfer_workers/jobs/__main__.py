"""The bulk worker's composition root: `python -m qinfer_workers.jobs`.

One Celery worker, and a loop that looks for stuck jobs; `QINFER_…` variables configure it. Any number may run.
SIGTERM and SIGINT end it, and its tasks go back to the queue. It also ends when it can't work any more (`Watchdog`), to
be restarted.

Exit codes: 0 after a stop, 2 for a wrong setting, others after a failure.
"""

import logging
import os
import signal
import socket
import threading
from functools import partial
from types import FrameType

from celery.worker import state

from qinfer.core.processes import protect_process
from qinfer.core.settings import Settings, load_settings
from qinfer.errors import SettingsError
from qinfer.jobs.examiner_pool import PLAN_SHARES, ExaminerPool
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.tasks import FINALISE, PLAN, QUEUE, BulkTasks, broker_of
from qinfer.models.state import BULK
from qinfer.models.store import ControlStore, report_liveness
from qinfer.observe import logs
from qinfer.queue.clients import admin_client, wait_for_redis
from qinfer.queue.lanes import Queue
from qinfer.storage.open import store_for
from qinfer_workers.jobs.app import TASKS_AT_ONCE, EventLoop, UseCase, Watchdog, WorkStopped, make_app
from qinfer_workers.jobs.services import JobServices
from qinfer_workers.jobs.steps import Finaliser, JobPlanner
from qinfer_workers.jobs.sweep import Sweeper
from qinfer_workers.liveness import exit_process, open_health

logger = logging.getLogger("qinfer_workers.jobs")

_LEVELS = {
    "celery.worker.strategy": logging.WARNING,  # several lines for each task
    "celery.app.trace": logging.WARNING,
    "celery.worker.request": logging.WARNING,
    "kombu.transport.virtual.base": logging.ERROR,  # warns of tasks handed back at the end, which is intended
}


async def _connect(settings: Settings) -> tuple[Queue, ControlStore]:
    delivery = await wait_for_redis(partial(Queue.connect, settings.redis, settings.limits))
    return delivery, ControlStore(admin_client(settings.redis))


def serve(settings: Settings) -> int:
    """Runs a worker until a signal; returns the exit code."""
    broker_of(settings)
    loop = EventLoop()
    _stop_on_signals(loop)
    if (health := open_health(settings)) is not None:
        loop.start(health.run())
    try:
        delivery, store = loop.run(_connect(settings), threading.TIMEOUT_MAX)
    except WorkStopped:  # by a signal, while waiting for Redis
        return os.EX_OK
    try:
        services = JobServices(
            settings=settings,
            jobs=Jobs(delivery),
            store=store,
            clock=delivery.clock,
            store_for=store_for,
            examiners=ExaminerPool(settings, os.environ, processes=TASKS_AT_ONCE, shares=PLAN_SHARES),
        )
        code = _work(settings, loop, services)
    finally:
        loop.close(store.close(), delivery.close())
    logger.info("bulk worker stopped")
    return code


def _work(settings: Settings, loop: EventLoop, services: JobServices) -> int:
    tasks = BulkTasks(settings)
    use_cases: dict[str, UseCase] = {
        PLAN: JobPlanner(services, settings.limits).run,
        FINALISE: Finaliser(services).run,
    }
    app = make_app(settings, loop, use_cases)
    app.set_default()  # the pool's threads find tasks there
    name = f"qinfer-bulk-{os.getpid()}@{socket.gethostname()}"
    worker = app.WorkController(
        hostname=name,
        pool_cls="threads",  # threads of stores' drivers do not survive a fork
        concurrency=TASKS_AT_ONCE,
        queues=QUEUE,
        without_mingle=True,
        without_gossip=True,
    )
    watchdog = Watchdog(loop, services, partial(_stop, loop, os.EX_SOFTWARE))
    loop.start(services.examiners.run())
    loop.start(report_liveness(services.store, name, BULK))
    loop.start(Sweeper(services, tasks).run_rounds())
    watchdog.start()
    logger.info("bulk worker started")
    worker.start()
    watchdog.stop_watching()
    tasks.close()
    return worker.exitcode or os.EX_OK


def main() -> int:
    """Reads the settings, serves, and returns the exit status."""
    protect_process(os.environ)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # only gateways use it; child processes ignore it, too
    try:
        settings = load_settings()
        logs.configure(settings.log, "bulk", unknown=settings.unknown)
        if settings.log.level != "DEBUG":
            for name, level in _LEVELS.items():
                logging.getLogger(name).setLevel(level)
        return serve(settings)
    except SettingsError as error:
        logs.cannot_start(os.environ, "qinfer_workers.jobs", error.message)
        return 2
    except Exception:  # threads that wait for a store would keep the process alive
        logger.exception("bulk worker failed")
        return os.EX_SOFTWARE


def _stop(loop: EventLoop, code: int) -> None:
    state.should_stop = code
    loop.stop()


def _stop_on_signals(loop: EventLoop) -> None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        _stop(loop, os.EX_OK)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


if __name__ == "__main__":
    exit_process(main())
