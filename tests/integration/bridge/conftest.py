"""The broker of the bridge's tests: a database of Redis of its own."""

from collections.abc import Iterator

import pytest

from tests.support.bridge_scene import Broker
from tests.support.servers.servers import RedisServer


@pytest.fixture
def broker(redis_server: RedisServer) -> Iterator[Broker]:
    one = Broker(f"redis://127.0.0.1:{redis_server.port}/5")
    with redis_server.client() as client:
        client.select(5)
        client.flushdb()
    yield one
    one.close()
