"""The queue that tests run against, and a garbage collector that keeps off what collection makes.

8,000 tests and their modules are over a million objects that stay until the end. To look through all of them takes a
second, and it was done again and again while they were made, and whenever a test asked for it.
"""

import functools
import gc
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
import redis.utils
from httpx._transports import default
from hypothesis import HealthCheck, settings

from qinfer.models.store import ControlStore
from qinfer.queue.lanes import Queue
from qinfer.testing import EmbeddedServer
from tests.support.servers.servers import Database, embedded_server

_SELDOM = 1000
"""Collections of the middle generation before one of the oldest: with a million objects Python itself waits as long.

Sooner, what one test has left open would fail whichever test runs then."""

PATIENCE_S = 60.0

_HTTPX_CALLS = (httpx.request, httpx.get, httpx.post, httpx.put, httpx.patch, httpx.delete, httpx.head, httpx.options)

# The time that an example takes is the machine's.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Nothing is garbage while tests are collected.

    For each connection redis-py reads its own version from the files of its distribution, which takes 0.7 ms: tests
    open tens of thousands. Each client of httpx reads the certificates of all authorities, which takes 25 ms.

    httpx waits for 5 s unless told otherwise, and a loaded machine stands still for longer; tests that mean a timeout
    name it.
    """
    gc.disable()
    redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)
    httpx.create_ssl_context = default.create_ssl_context = _made_once(httpx.create_ssl_context)  # type: ignore[attr-defined]
    for call in (*_HTTPX_CALLS, httpx.Client.__init__, httpx.AsyncClient.__init__):
        named = call.__kwdefaults__ or {}
        assert named["timeout"] == httpx.Timeout(5.0)
        named["timeout"] = httpx.Timeout(PATIENCE_S)


def _made_once(make: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    made = functools.cache(lambda _, *args, **named: make(*args, **named))
    return lambda *args, **named: made(os.environ.get("SSL_CERT_FILE"), *args, **named)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests begin first, so that no process works at one of them while the others have ended.

    `scripts/test` tells pytest-xdist to keep this order; it would begin with the files of most tests.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """From here on, what was made before is not looked at: not even for garbage, which would take seconds to find."""
    gc.freeze()
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(youngest, middle, _SELDOM)
    gc.enable()


def pytest_unconfigure() -> None:
    """The server that tests shared ends; pytest's last collection looks only at objects that tests made."""
    if embedded_server.cache_info().currsize:
        embedded_server().stop()
    gc.enable()


@pytest.fixture
def collected() -> None:
    """Freezes the objects before the test: its own collections would take seconds to look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def embedded() -> EmbeddedServer:
    """The server that all tests of a process share; nobody moves its time."""
    return embedded_server()


@pytest.fixture(scope="module")
def timed() -> Iterator[EmbeddedServer]:
    """A server of the module's own, whose time its tests move, forward only; each has a database of its own."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
async def database(request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    """An empty database: of the `timed` server if the test has one, of the common one otherwise."""
    server = request.getfixturevalue("timed") if "timed" in request.fixturenames else None
    async with Database(server) as one:
        yield one


@pytest.fixture
async def delivery(database: Database) -> Queue:
    """A queue on the test's database."""
    return await database.delivery()


@pytest.fixture
def store(database: Database) -> ControlStore:
    """A control store on the test's database."""
    return database.store()
