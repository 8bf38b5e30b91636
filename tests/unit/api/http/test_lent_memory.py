"""The memory of replies on HTTP that their clients have yet to read."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from qinfer_api.http.connection import HttpConnection


class Lent:
    """Memory, and how much its client is said to have read."""

    read_bytes: Callable[[], int]

    def watch(self, arrived: Callable[[], int], late: Callable[[], None]) -> None:
        del late
        self.read_bytes = arrived


def test_replies_behind_do_not_count_against_the_client() -> None:
    unread = [30]
    transport = SimpleNamespace(get_write_buffer_size=lambda: unread[0], abort=None)
    one: Any = SimpleNamespace(writable=asyncio.Event(), transport=transport, _lent=[], _later_bytes=0)
    first, second = Lent(), Lent()
    HttpConnection._lend(one, first)  # type: ignore[arg-type]

    unread[0] += 20  # another reply is written
    one._later_bytes += 20
    HttpConnection._lend(one, second)  # type: ignore[arg-type]
    unread[0] -= 10  # the client reads

    assert (first.read_bytes(), second.read_bytes()) == (10, 10)
