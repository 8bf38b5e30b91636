"""The bulk worker's composition root: `python -m qinfer_workers.jobs`.

One Celery worker, and a loop that looks for stuck jobs; `QINFER_…` variables configure it. Any number may run.
SIGTERM and SIGINT end it, and its tasks go back to the queue. It also ends when it can't work any more (`Watchdog`), to
be restarted.

Tasks are small and idempotent; their argument is a job's id. A task is acknowledged at its end. If the worker of a task
died, the task is delivered again: by the broker after `visibility_timeout`, and much earlier by `Sweeper`.

Exit codes: 0 after a stop, 2 for a wrong setting, others after a failure.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import uvloop
from celery import Celery, Task
from celery.exceptions import Reject
from celery.worker import state

from qinfer.core.processes import protect_process
from qinfer.core.retry import pause_s
from qinfer.core.settings import Settings, load_settings
from qinfer.errors import QinferError, SettingsError
from qinfer.jobs.examiner_pool import PLAN_SHARES, ExaminerPool
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.tasks import FINALISE, PLAN, QUEUE, BulkTasks, broker_of, celery_app
from qinfer.models.state import BULK
from qinfer.models.store import ControlStore, report_liveness
from qinfer.observe import logs
from qinfer.queue.clients import admin_client, wait_for_redis
from qinfer.queue.lanes import Queue
from qinfer_workers.jobs.services import JobServices
from qinfer_workers.jobs.steps import Finaliser, JobPlanner, Sweeper
from qinfer_workers.liveness import exit_process, open_health

logger = logging.getLogger("qinfer_workers.jobs")

T = TypeVar("T")

CLOSE_S = 2.0
"""`qinfer up` kills the process after 5 seconds."""


TASKS_AT_ONCE = 8
"""Tasks that a process runs at a time; tasks mostly wait."""

LOOK_EVERY_S = 5.0
ANSWER_S = 30.0
"""The time within which the loop has to answer; it never blocks, but may be late on a busy machine."""
HANGING_S = 600.0
"""A time that is longer than drivers of stores wait, including retries."""
STOP_S = 10.0


class WorkStopped(Exception):
    """The process ends; another has to do the work."""


class TimedOut(Exception):
    """The work was cancelled at its time limit."""


class EventLoop:
    """An event loop in its own thread, from creation to `close`."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._beside: list[Future[Any]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="bulk-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Runs a coroutine for another thread.

        At its limit the coroutine is cancelled, but not awaited, since the loop may hang.
        """
        with self._lock:
            if self._stopping:
                work.close()
                raise WorkStopped
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._running.add(future)
        try:
            return self._result(future, limit_s)
        finally:
            with self._lock:
                self._running.discard(future)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs a coroutine until `close`."""
        self._beside.append(asyncio.run_coroutine_threadsafe(work, self._loop))

    def answers(self, within_s: float) -> bool:
        """Returns whether the loop responds, or is closed."""
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:
            return True
        return answered.wait(within_s)

    def stop(self) -> None:
        """Cancels all work; safe in signal handlers."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)

    def close(self, *last: Coroutine[Any, Any, None]) -> None:
        """Runs the last coroutines, then ends the loop."""
        for one in self._beside:
            one.cancel()
        for work in last:
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(work, self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _result(self, future: "Future[T]", limit_s: float) -> T:
        try:
            return future.result(limit_s)
        except (CancelledError, asyncio.CancelledError):
            raise WorkStopped from None
        except TimeoutError:
            if not future.cancel():  # its own `TimeoutError`, or ended just now
                return future.result()
            raise TimedOut(f"it took more than {limit_s:g} s, and was cancelled") from None

    def _cancel(self) -> None:
        with self._lock:
            self._stopping = True
            running = list(self._running)
        for future in running:
            future.cancel()


class Watchdog:
    """Ends the process, to be restarted, if the event loop hangs or threads wait for a dead store."""

    def __init__(self, loop: EventLoop, services: JobServices, stop: Callable[[], None]) -> None:
        self._loop, self._services, self._stop = loop, services, stop
        self._ended = threading.Event()

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._watch_loop, name="bulk-watchdog", daemon=True).start()

    def stop_watching(self) -> None:
        """Ends the watch."""
        self._ended.set()

    def problem(self) -> str:
        """Returns why the process has to end."""
        if not self._loop.answers(ANSWER_S):
            return "the event loop hangs"
        if 2 * (hanging := self._services.hanging(HANGING_S)) >= self._services.settings.plan_threads:
            return f"{hanging} threads wait for stores that never answer"
        return ""

    def _watch_loop(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            if (why := self.problem()) and not self._ended.is_set():
                threading.Thread(target=self._report, args=(why,), daemon=True).start()  # writing to stderr may hang
                self._stop()
                if not self._ended.wait(STOP_S):
                    os._exit(os.EX_SOFTWARE)
                return

    def _report(self, why: str) -> None:
        logger.critical("bulk worker ends", extra={"reason": why})
        faulthandler.dump_traceback()


UseCase = Callable[[str], Coroutine[None, None, None]]
"""Work on a job; a `retryable` error repeats it later."""

_TASK_MARGIN_S = 60.0  # steps end themselves after `plan_timeout_s`; this is for hanging tasks
_VISIBILITY_MARGIN_S = 600.0
_SOCKET_MARGIN_S = 2.0
_FIRST_PAUSE_S = 0.5


def make_app(settings: Settings, loop: EventLoop, use_cases: Mapping[str, UseCase]) -> Celery:
    """Makes the app with a task for each use case."""
    longest_s = settings.bulk.plan_timeout_s + _VISIBILITY_MARGIN_S  # less would deliver running tasks again
    transport = {
        "visibility_timeout": longest_s,
        "socket_timeout": settings.redis.command_timeout_s + _SOCKET_MARGIN_S,
        "retry_on_timeout": True,
        "health_check_interval": 10,
    }
    app = celery_app(settings, settings.redis.connect_timeout_s, transport)
    app.conf.update(
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_send_task_events=True,  # for Flower
        worker_enable_remote_control=False,  # kombu reads a renewed subscription without a limit
        task_send_sent_event=True,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
    )
    for name in (PLAN, FINALISE):
        _register(app, name, loop, use_cases[name], settings)
    app.finalize()
    return app


def longest_pause_s(settings: Settings) -> float:
    """Returns the longest pause before a retry, bounded by the sweep."""
    return 2 * settings.bulk.sweep_every_s


def _register(app: Celery, name: str, loop: EventLoop, use_case: UseCase, settings: Settings) -> None:
    @app.task(name=name, bind=True, max_retries=None, shared=False)
    def run(task: Task, job_id: str) -> None:
        try:
            loop.run(use_case(job_id), settings.bulk.plan_timeout_s + _TASK_MARGIN_S)
        except WorkStopped:
            raise Reject("the worker stops", requeue=True) from None
        except QinferError as error:
            if not error.retryable:
                raise
            later_s = pause_s(task.request.retries + 1, _FIRST_PAUSE_S, longest_pause_s(settings))
            raise task.retry(exc=error, countdown=later_s) from None


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
            settings=settings.bulk,
            stores=settings.stores,
            jobs=Jobs(delivery),
            store=store,
            clock=delivery.clock,
            examiners=ExaminerPool(settings, os.environ, processes=TASKS_AT_ONCE, shares=PLAN_SHARES),
        )
        code = _work(settings, loop, services)
    finally:
        loop.close(store.close(), delivery.close())
    logger.info("bulk worker stopped")
    return code


def _work(settings: Settings, loop: EventLoop, services: JobServices) -> int:
    tasks = BulkTasks(settings)
    use_cases: dict[str, UseCase] = {PLAN: JobPlanner(services, settings.limits).run, FINALISE: Finaliser(services).run}
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
