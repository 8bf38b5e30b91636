"""What `qinfer healthcheck` finds out. Light on purpose: it runs every few seconds in each container.

Liveness never depends on Redis: a restart does not bring it back, and workers outlive its absence.
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
from qinfer.models.state import State, WorkerRecord

if TYPE_CHECKING:
    from qinfer.models.store import ControlStore

T = TypeVar("T")

_FORBIDDEN = (401, 403)
_CALLED = {"bulk": "bulk worker"}


class Health(NamedTuple):
    """Whether a program is well, and what was seen."""

    is_well: bool
    text: str


class RedisPlace(NamedTuple):
    """Where Redis is, as the options say it: a URL, or the data directory of a running `up`."""

    url: str
    data_dir: Path


def gateway_health(url: str, *, ready: bool, timeout_s: float) -> Health:
    """Asks a gateway over HTTP.

    Args:
        url: The gateway; empty = that of this machine, at the port of the settings.
        ready: Whether it should get requests, or only whether it lives.
        timeout_s: How long it has to answer.
    """
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
        return Health(True, f"it answers at {place}, and tells its health only to who may ask ({status})")
    return Health(status == http.client.OK, f"{place}{path} answers {status}")


def worker_health(place: RedisPlace, *, ready: bool, timeout_s: float) -> Health:
    """Looks for the heartbeat of a worker of this host.

    Args:
        place: Where Redis is.
        ready: Whether it has its models as well.
        timeout_s: How long Redis has to answer.
    """
    try:
        strict = load_settings().repository.strict_readiness
        workers = _asked(place, lambda store: store.workers(), timeout_s)
    except QinferError as error:
        return _unasked(error, ready=ready)
    return judge(workers, socket.gethostname(), ready=ready, strict=strict)


def process_health(program: str, place: RedisPlace, *, ready: bool, timeout_s: float) -> Health:
    """Looks for a live process of this host.

    Args:
        program: What it is: `BULK`, `BEAT` or `BRIDGE`.
        place: Where Redis is.
        ready: Whether Redis is there as well.
        timeout_s: How long Redis has to answer.
    """
    try:
        names = _asked(place, lambda store: store.live_processes(program), timeout_s)
    except QinferError as error:
        return _unasked(error, ready=ready)
    host = socket.gethostname()
    if here := [name for name in names if name.partition("@")[2] == host]:
        return Health(True, f"{', '.join(here)} lives")
    called = _CALLED.get(program, program)
    return Health(False, f"no {called} of host {host} gives a sign of life; {len(names)} of other hosts do")


def judge(workers: Sequence[WorkerRecord], host: str, *, ready: bool, strict: bool) -> Health:
    """Tells from the heartbeats whether a worker of a host is well; pure.

    Args:
        workers: All live workers.
        host: Whose are meant.
        ready: Whether it has its models as well.
        strict: A model that it could not load makes it not ready, as it does the server.
    """
    here = [worker for worker in workers if worker.host == host]
    if not here:
        return Health(False, f"no worker of host {host} has a heartbeat; {len(workers)} of other hosts have")
    if not ready:
        return Health(True, f"{', '.join(worker.id for worker in here)} lives")
    lacking = {worker.id: _lacks(worker, strict=strict) for worker in here}
    if well := [name for name, problem in lacking.items() if not problem]:
        return Health(True, f"{', '.join(well)} is ready")
    return Health(False, "; ".join(f"{name}: {problem}" for name, problem in lacking.items()))


def _lacks(worker: WorkerRecord, *, strict: bool) -> str:
    """Says why a worker is not ready; empty = it is."""
    if worker.draining:
        return "it drains"
    unready = {State.LOADING, State.UNAVAILABLE} if strict else {State.LOADING}
    waiting = [
        f"{model}:{version} is {state.state}"
        for model, versions in sorted(worker.models.items())
        for version, state in sorted(versions.items())
        if state.state in unready
    ]
    return ", ".join(waiting)


def _unasked(error: QinferError, *, ready: bool) -> Health:
    if isinstance(error, BrokerUnavailable):
        return Health(not ready, "Redis can't be reached, so that nothing is known")
    return Health(False, error.message)


def _asked(place: RedisPlace, question: "Callable[[ControlStore], Awaitable[T]]", timeout_s: float) -> T:
    from qinfer.cli.overview import redis_settings
    from qinfer.models.store import ControlStore
    from qinfer.queue.clients import admin_client

    settings = redis_settings(place.url, place.data_dir)

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
        if not verify:  # it is on this machine, and its certificate is for the name that others call it by
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
