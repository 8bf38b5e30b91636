from collections.abc import Mapping, Sequence
from datetime import timedelta
from logging import Logger
from typing import Any, NoReturn

from airflow.triggers.base import BaseTrigger

class Connection:
    conn_id: str
    host: str | None
    schema: str | None
    port: int | None
    password: str | None

class BaseHook:
    log: Logger
    def __init__(self, logger_name: str | None = None) -> None: ...
    @classmethod
    def get_connection(cls, conn_id: str) -> Connection: ...
    @classmethod
    async def aget_connection(cls, conn_id: str) -> Connection: ...

class BaseOperator:
    template_fields: Sequence[str]
    template_fields_renderers: dict[str, str]
    ui_color: str
    execution_timeout: timedelta | None
    log: Logger
    def __init__(self, **arguments: Any) -> None: ...
    def execute(self, context: Mapping[str, Any]) -> Any: ...
    def on_kill(self) -> None: ...
    def defer(
        self,
        *,
        trigger: BaseTrigger,
        method_name: str,
        kwargs: dict[str, Any] | None = None,
        timeout: timedelta | float | None = None,
    ) -> NoReturn: ...
