from threading import Thread
from typing import Any

from celery import Celery

class Scheduler:
    def apply_async(self, *args: Any, **kwargs: Any) -> Any: ...

class Service:
    def stop(self, wait: bool = ...) -> None: ...

class _Threaded(Thread):
    service: Service

def EmbeddedService(app: Celery, *, thread: bool, scheduler_cls: str | type[Scheduler] = ...) -> _Threaded: ...
