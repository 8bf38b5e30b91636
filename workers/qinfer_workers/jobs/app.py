"""The Celery app of the bulk worker: its settings and its tasks, which hand over to the use cases.

Tasks are small and idempotent, their argument is a job's id. A task is acknowledged when it has ended: one whose worker
died comes again, from the broker after `visibility_timeout`, and long before from `qinfer_workers.jobs.sweep`.
"""

from collections.abc import Callable, Coroutine, Mapping
from functools import partial

from celery import Celery, Task
from celery.exceptions import Reject

from qinfer.core.retry import pause_s
from qinfer.core.settings import Settings
from qinfer.errors import QinferError
from qinfer.jobs.tasks import FINALISE, PLAN, QUEUE, SWEEP, celery_app
from qinfer_workers.jobs.event_loop import EventLoop, Stopped

UseCase = Callable[[str], Coroutine[None, None, None]]
"""What a task does for a job; a `retryable` error says: later."""

SWEEP_LIMIT_S = 120.0
"""How long a sweep may take; the next goes on."""

_TASK_MARGIN_S = 60.0  # a step ends itself after `plan_timeout_s`, and tells its job; this is for what hangs
_VISIBILITY_MARGIN_S = 600.0
_SOCKET_MARGIN_S = 2.0
_FIRST_PAUSE_S = 0.5


def make_app(settings: Settings, loop: EventLoop, use_cases: Mapping[str, UseCase]) -> Celery:
    """Makes the app.

    Args:
        settings: Where the broker is, and how long tasks may take.
        loop: Where the use cases run.
        use_cases: Task name → what it does; that of `SWEEP` gets an empty id.

    Raises:
        SettingsError: The broker can't be used.
    """
    app = plain_app(settings)
    for name in (PLAN, FINALISE, SWEEP):
        limit_s = SWEEP_LIMIT_S if name == SWEEP else settings.bulk.plan_timeout_s + _TASK_MARGIN_S
        _register(app, name, partial(_run, loop, use_cases[name], limit_s), longest_pause_s(settings))
    app.finalize()
    return app


def plain_app(settings: Settings) -> Celery:
    """Makes the app without its tasks: all that beat needs, which sends them by name.

    Args:
        settings: Where the broker is, and how often to sweep.

    Raises:
        SettingsError: The broker can't be used.
    """
    longest_s = settings.bulk.plan_timeout_s + _VISIBILITY_MARGIN_S  # else a task that runs would be run again
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
        worker_send_task_events=True,  # Flower shows them
        worker_enable_remote_control=False,  # kombu reads its subscription without a limit where it was made again
        task_send_sent_event=True,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        beat_schedule={
            "sweep": {
                "task": SWEEP,
                "schedule": settings.bulk.sweep_every_s,
                "args": ("",),
                "options": {"queue": QUEUE, "expires": settings.bulk.sweep_every_s},
            }
        },
    )
    return app


def longest_pause_s(settings: Settings) -> float:
    """Returns how long a task waits at most before it is tried again; the sweep must not take it for lost meanwhile."""
    return 2 * settings.bulk.sweep_every_s


def _run(loop: EventLoop, use_case: UseCase, limit_s: float, job_id: str) -> None:
    loop.run(use_case(job_id), limit_s)


def _register(app: Celery, name: str, work: Callable[[str], None], longest_s: float) -> None:
    @app.task(name=name, bind=True, max_retries=None, shared=False)
    def run(task: Task, job_id: str) -> None:
        try:
            work(job_id)
        except Stopped:
            raise Reject("the worker stops", requeue=True) from None
        except QinferError as error:
            if not error.retryable or name == SWEEP:  # which comes again anyway
                raise
            later_s = pause_s(task.request.retries + 1, _FIRST_PAUSE_S, longest_s)
            raise task.retry(exc=error, countdown=later_s) from None
