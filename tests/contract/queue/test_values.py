"""Byte strings beside the streams, small and large, on every kind of server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from qinfer.errors import BrokerUnavailable, PayloadTooLarge
from qinfer.queue import keys
from qinfer.queue.router import BlockingLink, Router
from qinfer.queue.values import LARGE_BYTES, MAX_BYTES, Values
from qinfer.testing import eventually
from tests.contract.conftest import RedisQueue

KEY = keys.result("digits", 0, "r1")
SLOT = keys.slot(KEY)

sizes = pytest.mark.parametrize("size", [1, LARGE_BYTES, LARGE_BYTES + 1, 20 * LARGE_BYTES])


@pytest.fixture
async def values(redis_queue: RedisQueue) -> AsyncIterator[Values]:
    router = await Router.connect(redis_queue.settings)
    yield Values(router, is_cluster=redis_queue.settings.cluster)
    await router.close()


@sizes
async def test_a_value_is_read_as_it_was_stored(values: Values, size: int) -> None:
    """As often as one likes; a later one takes its place."""
    data = b"a\r\n\x00" + b"x" * (size - 1)
    await values.set(SLOT, KEY, b"before", 60.0)

    await values.set(SLOT, KEY, memoryview(bytearray(data)), 60.0)

    assert await values.get(SLOT, KEY) == data
    assert await values.get(SLOT, KEY.encode()) == data


@sizes
async def test_what_is_taken_is_gone(values: Values, size: int) -> None:
    """It is handed over once."""
    await values.set(SLOT, KEY, bytes(size), 60.0)

    assert await values.take(SLOT, KEY) == bytes(size)

    assert await values.take(SLOT, KEY) is None
    assert await values.get(SLOT, KEY) is None


async def test_what_is_cut_off_while_it_is_taken_can_be_taken_again(
    values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is removed only once it has arrived."""
    await values.set(SLOT, KEY, bytes(2 * LARGE_BYTES), 60.0)
    whole = values.call_large

    async def cut(*words: Any, **of: Any) -> Any:
        await whole(*words, **of)
        raise BrokerUnavailable("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(values, "call_large", cut)
        with pytest.raises(BrokerUnavailable):
            await values.take(SLOT, KEY)

    assert await values.take(SLOT, KEY) == bytes(2 * LARGE_BYTES)


async def test_a_large_value_that_is_lost_in_between_is_refused_and_leaves_nothing(
    values: Values, redis_queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that takes over may lack its first pieces."""
    await values.set(SLOT, KEY, b"before", 60.0)
    call, left = BlockingLink.call, []

    async def lossy(link: BlockingLink, *words: Any, **options: Any) -> Any:
        reply = await call(link, *words, **options)
        if words[0] == b"SET":
            left.append(words[1])
            await values.remove(SLOT, words[1])
        return reply

    monkeypatch.setattr(BlockingLink, "call", lossy)
    with pytest.raises(BrokerUnavailable, match="while it was written"):
        await values.set(SLOT, KEY, bytes(3 * LARGE_BYTES), 60.0)

    assert await values.get(SLOT, KEY) == b"before"
    assert await values.get(SLOT, left[0]) is None


async def test_a_value_that_looks_like_a_number_is_one_of_bytes(values: Values) -> None:
    """It is not taken for the size of a large one."""
    await values.set(SLOT, KEY, b"12345", 60.0)

    assert await values.get(SLOT, KEY) == b"12345"


async def test_a_value_expires(values: Values) -> None:
    """None stays for ever."""
    await values.set(SLOT, KEY, b"x", 0.01)

    async def is_gone() -> bool:
        return await values.get(SLOT, KEY) is None

    await eventually(is_gone)


async def test_a_value_that_redis_can_not_store_is_refused(values: Values) -> None:
    """Before it is sent: Redis would drop the connection."""
    with pytest.raises(PayloadTooLarge, match=str(MAX_BYTES)):
        await values.set(SLOT, KEY, bytes(MAX_BYTES + 1), 60.0)
