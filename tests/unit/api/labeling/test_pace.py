"""When tasks may become requests, and when to look again."""

import asyncio

import pytest

from qinfer.core.api_keys import ApiKey, hash_key
from qinfer.errors import QuotaExceeded
from qinfer.labeling.tasks import Board
from qinfer.testing import FakeClock
from qinfer_api.auth import Auth
from qinfer_api.labeling.intake import TaskPace

BOARD = Board("text", "acme", 12)


def auth_with(rate_per_s: float, burst: int) -> Auth:
    key = ApiKey(id="k1", sha256=hash_key("a-key"), tenant="acme", rate_per_s=rate_per_s, burst=burst)
    return Auth([key], FakeClock())


async def test_without_keys_there_is_room_for_all() -> None:
    """And nothing is counted."""
    pace = TaskPace(None, asyncio.Event().set)

    assert pace.task_capacity(BOARD, 16) == 16
    with pace.charged("acme"):
        pass
    assert pace.task_capacity(BOARD, 16) == 16


async def test_there_is_no_room_for_a_tenant_without_a_key() -> None:
    """Its tasks wait on their board: the key may have been removed for good, or be replaced."""
    auth = auth_with(0.0, 0)
    pace = TaskPace(auth, asyncio.Event().set)
    assert pace.task_capacity(BOARD, 16) == 16

    auth.replace_keys([ApiKey(id="k2", sha256=hash_key("b-key"), tenant="other")])

    assert pace.task_capacity(BOARD, 16) == 0


async def test_room_is_what_the_rate_leaves() -> None:
    """At most as many as are asked for; what is not accepted leaves it as it was."""
    pace = TaskPace(auth_with(1.0, 10), asyncio.Event().set)

    assert (pace.task_capacity(BOARD, 3), pace.task_capacity(BOARD, 16)) == (3, 5)
    with pytest.raises(ValueError, match="refused"), pace.charged("acme"):
        raise ValueError("refused")
    assert pace.task_capacity(BOARD, 16) == 5
    for left in (4, 3, 2, 1, 0, 0, 0, 0, 0, 0):
        with pace.charged("acme"):
            pass
        assert pace.task_capacity(BOARD, 16) == left
    with pytest.raises(QuotaExceeded), pace.charged("acme"):
        raise AssertionError("it has nothing left")


async def test_who_waits_for_the_rate_is_looked_at_again() -> None:
    """Soon, once; a board on which nothing is known to wait is not."""
    looked = asyncio.Event()
    pace = TaskPace(auth_with(1.0, 1), looked.set)
    with pace.charged("acme"):
        pass

    assert pace.task_capacity(BOARD, 16) == 0
    assert pace._timer is None
    pace.took(BOARD, 1, 1)
    assert pace.task_capacity(BOARD, 16) == 0
    timer = pace._timer
    assert timer is not None
    assert pace.task_capacity(BOARD, 16) == 0
    assert pace._timer is timer
    await looked.wait()
    assert pace._timer is None
    pace.took(BOARD, 0, 1)
    assert pace.task_capacity(BOARD, 16) == 0
    assert pace._timer is None
