# What qinfer uses of Celery, which has no types of its own.
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery.worker import WorkController as _WorkController
from kombu import Connection

class _Request:
    id: str
    retries: int

class Task:
    name: str
    request: _Request
    def retry(
        self,
        args: Sequence[object] | None = ...,
        kwargs: Mapping[str, object] | None = ...,
        exc: BaseException | None = ...,
        throw: bool = ...,
        countdown: float | None = ...,
        max_retries: int | None = ...,
    ) -> BaseException: ...

class _Settings:
    def update(self, **settings: object) -> None: ...
    def __getattr__(self, name: str) -> Any: ...

class Celery:
    conf: _Settings
    tasks: Mapping[str, Task]
    WorkController: type[_WorkController]
    def __init__(self, main: str, *, set_as_current: bool = ..., broker: str = ...) -> None: ...
    def send_task(
        self,
        name: str,
        args: Sequence[object] = ...,
        *,
        queue: str = ...,
        ignore_result: bool = ...,
        retry: bool = ...,
        expires: float | None = ...,
    ) -> object: ...
    def task(
        self, *, name: str, bind: bool = ..., max_retries: int | None = ..., shared: bool = ...
    ) -> Callable[[Callable[..., None]], Task]: ...
    def connection_for_read(self) -> Connection: ...
    def finalize(self) -> None: ...
    def set_default(self) -> None: ...
    def close(self) -> None: ...
