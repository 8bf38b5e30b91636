"""Sends the bulk tasks by name to Celery's queue.

Rows never pass through Celery. It needs a Redis without cluster mode: `redis.url`, or one of its own. Its libraries are
imported at the first task, so that a gateway without jobs does not load them.
"""

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from redis.connection import parse_url

from qinfer.core.settings import Settings
from qinfer.errors import BrokerUnavailable, SettingsError
from qinfer.queue.clients import Sentinels, parse_place

if TYPE_CHECKING:
    from celery import Celery

QUEUE = "qinfer-bulk"
PLAN, FINALISE = "qinfer.bulk.plan", "qinfer.bulk.finalise"

_VARIABLE = "QINFER_BULK__BROKER_URL"
_UNUSED = {"connection_class", "host", "port", "path", "db", "username", "password"}


class Broker(NamedTuple):
    """Celery's broker; `url` contains the password, empty `tls` = no TLS."""

    url: str
    transport: dict[str, Any]
    tls: dict[str, Any]


def broker_of(settings: Settings) -> Broker:
    """Returns the broker from `bulk.broker_url`, else `redis.url`."""
    given = settings.bulk.broker_url.get_secret_value()
    if not given and settings.redis.cluster:
        raise SettingsError(f"{_VARIABLE} is not set: Celery needs a Redis that is no cluster; give its URL there")
    try:
        place = parse_place(given or settings.redis.url.get_secret_value())
    except SettingsError as error:
        raise SettingsError(error.message.replace("QINFER_REDIS__URL", _VARIABLE) if given else error.message) from None
    if isinstance(place, Sentinels):
        return _sentinels(place, settings)
    fields = dict(parse_url(given or settings.redis.url.get_secret_value()))  # type: ignore[no-untyped-call]
    login = _login(fields)
    if path := str(fields.get("path", "")):
        return Broker(f"redis+socket://{login}{quote(path)}?virtual_host={place.db}", {}, {})
    host = f"[{place.host}]" if ":" in place.host else place.host
    return Broker(f"redis://{login}{host}:{place.port}/{place.db}", {}, _tls(fields) if place.tls else {})


class BulkTasks:
    """Sends tasks. It blocks, and is thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._app: Celery | None = None

    def check(self) -> None:
        """Raises `SettingsError` if tasks can't be sent; sends nothing."""
        broker_of(self._settings)
        self._producer()

    def request_plan(self, job_id: str) -> None:
        """Requests planning of a job; repeatable."""
        self._send_task(PLAN, job_id)

    def finalise(self, job_id: str) -> None:
        """Requests the end of a job with all shards settled."""
        self._send_task(FINALISE, job_id)

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            app, self._app = self._app, None
        if app is not None:
            app.close()

    def _send_task(self, name: str, job_id: str) -> None:
        from kombu.exceptions import KombuError
        from redis.exceptions import RedisError

        app = self._producer()
        patience_s = self._settings.redis.connect_timeout_s / 4
        began_s = time.monotonic()
        for is_last in (False, True):
            try:
                app.send_task(name, (job_id,), queue=QUEUE, ignore_result=True, retry=False)
            except (KombuError, RedisError, OSError):  # their texts name hosts
                if is_last or time.monotonic() - began_s > patience_s:
                    raise BrokerUnavailable("the queue of the bulk tasks can't be reached; try again") from None
            else:
                return  # the idle connection had died: retry on a new one

    def _producer(self) -> "Celery":
        with self._lock:
            if self._app is None:
                half_s = self._settings.redis.connect_timeout_s / 2  # to connect, and for the reply
                self._app = celery_app(self._settings, half_s, {"socket_timeout": half_s, "max_retries": 0})
            return self._app


def celery_app(settings: Settings, connect_s: float, transport: Mapping[str, Any]) -> "Celery":
    """Makes an app with the queue, but without tasks."""
    broker = broker_of(settings)
    try:
        from celery import Celery
    except ImportError:
        raise SettingsError("bulk jobs need Celery: pip install 'qinfer-ml[bulk]'") from None
    app = Celery("qinfer", set_as_current=False, broker=broker.url)
    common = {"socket_connect_timeout": connect_s, "socket_keepalive": True}
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_default_queue=QUEUE,
        task_ignore_result=True,
        broker_use_ssl=broker.tls or None,
        broker_connection_timeout=connect_s,
        broker_transport_options=broker.transport | common | dict(transport),
    )
    return app


def _sentinels(place: Sentinels, settings: Settings) -> Broker:
    login = _login(place.options)
    hosts = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in place.places]
    tls = _tls(place.options) if place.node.tls else {}
    encrypted: dict[str, Any] = {"ssl": True, **tls} if tls else {}
    each_s = settings.redis.connect_timeout_s / (2 * len(hosts))
    asking: dict[str, Any] = {"socket_connect_timeout": each_s, "socket_timeout": each_s}
    if password := settings.redis.sentinel_password.get_secret_value():
        asking["password"] = password
    url = ";".join(f"sentinel://{login}{host}/{place.node.db}" for host in hosts)
    return Broker(url, {"master_name": place.service, "sentinel_kwargs": asking | encrypted}, tls)


def _login(fields: dict[str, Any]) -> str:
    username, password = (quote(str(fields.get(name) or ""), safe="") for name in ("username", "password"))
    return f"{username}:{password}@" if password else f"{username}@" if username else ""


def _tls(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of TLS, which kombu uses with any `ssl_…` option."""
    given = {name: value for name, value in fields.items() if name not in _UNUSED and name.startswith("ssl_")}
    return {"ssl_cert_reqs": "required"} | given
