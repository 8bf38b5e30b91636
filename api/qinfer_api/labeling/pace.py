"""How fast the tasks of a tenant become requests: no faster than its rate, and calls that somebody waits for go first.

A webhook brings a thousand tasks at once, so they are taken whatever the rate is, and counted one by one when they
become requests: in the gateway that makes them, where the tenant's other requests are counted too. Until then they
wait on their board; none is refused for the rate, and none fails for it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from qinfer.labeling.tasks import Board
from qinfer_api.auth import Auth

LOOK_AGAIN_S = 0.25
"""So soon is looked whether a rate has room again, where tasks are known to wait for it."""


class Pace:
    """One per gateway.

    Args:
        auth: Which rates tenants have; `None` = none.
        look_again: Called some time after tasks had to wait for a rate.
    """

    def __init__(self, auth: Auth | None, look_again: Callable[[], object]) -> None:
        self._auth = auth
        self._look_again = look_again
        self._behind: set[Board] = set()
        self._timer: asyncio.TimerHandle | None = None

    def room(self, board: Board, most: int) -> int:
        """Returns how many tasks of a board may become requests now, at most `most`."""
        if self._auth is None:
            return most
        room = int(min(self._auth.spare(board.tenant), most))
        if not room and board in self._behind and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look)
        return room

    def took(self, board: Board, count: int, room: int) -> None:
        """Notes how many tasks were found where there was room for `room`: as many, and more may wait."""
        if count < room:
            self._behind.discard(board)
        else:
            self._behind.add(board)

    @contextlib.contextmanager
    def charged(self, tenant: str) -> Iterator[None]:
        """Counts a request against the rate of its tenant; one that is not accepted within does not count.

        Raises:
            QuotaExceeded: The rate is used up: others were quicker.
        """
        if self._auth is None:
            yield
            return
        self._auth.charge_tenant(tenant)
        try:
            yield
        except BaseException:
            self._auth.give_back(tenant)
            raise

    def _look(self) -> None:
        self._timer = None
        self._look_again()
