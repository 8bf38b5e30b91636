from threading import Thread

from celery import Celery

class Service:
    def stop(self, wait: bool = ...) -> None: ...

class _Threaded(Thread):
    service: Service

def EmbeddedService(app: Celery, *, thread: bool, scheduler_cls: str = ...) -> _Threaded: ...
