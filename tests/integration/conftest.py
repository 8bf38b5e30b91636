"""Which event loop the tests run on, gateways that several modules ask, and the workers in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import nullcontext

import pytest
import pytest_asyncio
import uvloop

from qinfer.models.store import ControlStore
from qinfer.queue.lanes import Queue
from tests.support.inline_workers import InlineWorkers, inline_workers
from tests.support.programs import forked_children
from tests.support.rpc import Rpc, rpc
from tests.support.servers.servers import RedisServer, system_redis


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Puts the gateway's tests on the loop that it runs on: its transports buffer and pause in their own way."""
    if item.path.name.startswith(("test_http_", "test_grpc_")):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True, scope="module")
def _forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forks the processes of models and the examiners of the gateways and workers in this process."""
    looks_for_children = request.path.name in {"test_jobs_examined.py", "test_faults.py"}
    with nullcontext() if looks_for_children else forked_children():
        yield


@pytest.fixture
def old_node_id(request: pytest.FixtureRequest) -> None:
    """Gives an item the attribute of pytest before 9.2 that schemathesis 4.32 reads."""
    request.node._nodeid = request.node.nodeid


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(system_redis(), tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
async def scene(delivery: Queue, store: ControlStore) -> AsyncIterator[InlineWorkers]:
    async with inline_workers(delivery, store) as one:
        yield one


@pytest.fixture
async def server() -> AsyncIterator[Rpc]:
    """A gateway that serves both protocols."""
    async with rpc() as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def common_server() -> AsyncIterator[Rpc]:
    """One for all tests of a module: they run on its event loop, `@pytest.mark.asyncio(loop_scope="module")`."""
    async with rpc() as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def common_server_with_memory() -> AsyncIterator[Rpc]:
    """The same, where clients may share memory."""
    async with rpc(allow_client_shm=True) as one:
        yield one
