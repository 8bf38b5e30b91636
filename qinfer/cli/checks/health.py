"""The checks of `qinfer healthcheck`, with few imports, because they run every few seconds.

Liveness never depends on Redis: restarts do not bring it back.
"""

import asyncio
import http.client
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import urlsplit

from qinfer.cli.local.machine import local_url
from qinfer.core.settings import load_settings
from qinfer.errors import BrokerUnavailable, QinferError
from qinfer.models.state import WorkerRecord

if TYPE_CHECKING:
    from qinfer.models.store import ControlStore

T = TypeVar("T")

WORKER = "worker"

_FORBIDDEN = (401, 403)
_NAMES = {"bulk": "bulk worker"}


class Health(NamedTuple):
    """Healthy or not, and the reason."""

    is_healthy: bool
    text: str


def gateway_health(url: str, *, ready: bool, timeout_s: float) -> Health:
    """Checks a gateway over HTTP; an empty `url` means the gateway of this machine."""
    try:
        settings = load_settings().http
    except QinferError as error:
        return Health(False, error.message)
    parts = urlsplit(url or local_url(settings.host, settings.port, tls=bool(settings.tls_certfile)))
    path = f"{parts.path.rstrip('/')}/v2/health/{'ready' if ready else 'live'}"
    place = f"{parts.hostname}:{parts.port or ''}".rstrip(":")
    try:
        status = _status(parts.scheme, parts.hostname or "", parts.port, path, timeout_s, verify=bool(url))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Health(False, f"no gateway answers at {place}: {_reason(error)}")
    if status in _FORBIDDEN and not ready:
        return Health(True, f"it answers at {place}, and requires authentication for its health ({status})")
    return Health(status == http.client.OK, f"{place}{path} answers {status}")


def program_health(program: str, redis: str, data_dir: Path, *, ready: bool, timeout_s: float) -> Health:
    """Checks that a program on this host sends heartbeats, or reports its liveness.

    `ready` also checks that Redis is reachable, and a worker's models loaded.
    """
    host = socket.gethostname()
    try:
        if program == WORKER:
            strict = load_settings().repository.strict_readiness
            workers = _asked(redis, data_dir, lambda store: store.workers(), timeout_s)
            return judge(workers, host, ready=ready, strict=strict)
        names = _asked(redis, data_dir, lambda store: store.live_processes(program), timeout_s)
    except BrokerUnavailable:
        return Health(not ready, "Redis can't be reached, so the state is unknown")
    except QinferError as error:
        return Health(False, error.message)
    if here := [name for name in names if name.partition("@")[2] == host]:
        return Health(True, f"{', '.join(here)} is alive")
    return Health(
        False, f"no {_NAMES.get(program, program)} on host {host} reports its liveness; {len(names)} on other hosts do"
    )


def judge(workers: Sequence[WorkerRecord], host: str, *, ready: bool, strict: bool) -> Health:
    """Judges a host's worker by heartbeats; pure. `ready` requires loaded models, `strict` also those that failed."""
    here = [worker for worker in workers if worker.host == host]
    if not here:
        return Health(False, f"no worker on host {host} sends heartbeats; {len(workers)} on other hosts do")
    if not ready:
        return Health(True, f"{', '.join(worker.id for worker in here)} is alive")
    lacking = {worker.id: worker.lacks(strict=strict) for worker in here}
    if well := [name for name, problem in lacking.items() if not problem]:
        return Health(True, f"{', '.join(well)} is ready")
    return Health(False, "; ".join(f"{name}: {problem}" for name, problem in lacking.items()))


def _asked(redis: str, data_dir: Path, question: "Callable[[ControlStore], Awaitable[T]]", timeout_s: float) -> T:
    from qinfer.cli.overview import redis_settings
    from qinfer.models.store import ControlStore
    from qinfer.queue.clients import admin_client

    settings = redis_settings(redis, data_dir)

    async def ask() -> T:
        store = ControlStore(admin_client(settings))
        try:
            async with asyncio.timeout(timeout_s):
                return await question(store)
        except TimeoutError:
            raise BrokerUnavailable("Redis does not answer") from None
        finally:
            await store.close()

    return asyncio.run(ask())


def _status(scheme: str, host: str, port: int | None, path: str, timeout_s: float, *, verify: bool) -> int:
    if scheme == "https":
        context = ssl.create_default_context()
        # a local gateway's certificate has its public name
        if not verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, port, timeout=timeout_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
