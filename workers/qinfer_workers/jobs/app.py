"""The Celery app of the bulk worker.

Tasks are small and idempotent; their argument is a job's id. A task is acknowledged at its end. If the worker of a task
died, the task is delivered again: by the broker after `visibility_timeout`, and much earlier by
`qinfer_workers.jobs.sweep`.
"""

from collections.abc import Callable, Coroutine, Mapping
from functools import partial

from celery import Celery, Task
from celery.exceptions import Reject

from qinfer.core.retry import pause_s
from qinfer.core.settings import Settings
from qinfer.errors import QinferError
from qinfer.jobs.tasks import FINALISE, PLAN, celery_app
from qinfer_workers.jobs.event_loop import EventLoop, WorkStopped

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
        work = partial(_run_use_case, loop, use_cases[name], settings.bulk.plan_timeout_s + _TASK_MARGIN_S)
        _register(app, name, work, longest_pause_s(settings))
    app.finalize()
    return app


def longest_pause_s(settings: Settings) -> float:
    """Returns the longest pause before a retry, bounded by the sweep."""
    return 2 * settings.bulk.sweep_every_s


def _run_use_case(loop: EventLoop, use_case: UseCase, limit_s: float, job_id: str) -> None:
    loop.run(use_case(job_id), limit_s)


def _register(app: Celery, name: str, work: Callable[[str], None], longest_s: float) -> None:
    @app.task(name=name, bind=True, max_retries=None, shared=False)
    def run(task: Task, job_id: str) -> None:
        try:
            work(job_id)
        except WorkStopped:
            raise Reject("the worker stops", requeue=True) from None
        except QinferError as error:
            if not error.retryable:
                raise
            later_s = pause_s(task.request.retries + 1, _FIRST_PAUSE_S, longest_s)
            raise task.retry(exc=error, countdown=later_s) from None
