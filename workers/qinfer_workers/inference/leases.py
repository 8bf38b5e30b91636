"""The leases in this worker's hands, and the thread that renews them.

A thread with its own connection, because an event loop that is busy for seconds must not lose its leases. What the
two threads share is one set under one lock: the loop adds and removes whole batches, the thread copies it now and then.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from qinfer.batching.execution import Pending
from qinfer.delivery.base import Entry, Lease
from qinfer.errors import BrokerUnavailable

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


class Renewer(Protocol):
    """The part of `Delivery` that the thread uses."""

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Renews leases, and returns those that are lost."""
        ...


class LeaseKeeper:
    """See the module docstring.

    Args:
        delivery: Renews.
        every_s: Seconds between renewals.
        on_lost: Called on the event loop for each held item whose lease is lost.
    """

    def __init__(self, delivery: Renewer, every_s: float, on_lost: Callable[[Pending], None]) -> None:
        self._delivery = delivery
        self._every_s = every_s
        self._on_lost = on_lost
        self._held: set[Pending] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread; call it on the event loop that `on_lost` is to run on."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._serve, args=(loop,), name="renew", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; a renewal under way is not waited for."""
        self._stop.set()

    def hold(self, items: Iterable[Pending]) -> None:
        """Renews these from now on."""
        with self._lock:
            self._held.update(items)

    def drop(self, items: Iterable[Pending]) -> None:
        """Renews these no longer."""
        with self._lock:
            self._held.difference_update(items)

    def holds(self, entry: Entry) -> bool:
        """Tells whether an entry is in this worker's hands already."""
        with self._lock:
            return any(item.lease.entry == entry for item in self._held)

    def renew_once(self) -> list[Pending]:
        """Renews what is held, and returns what is lost; blocking.

        Raises:
            BrokerUnavailable: Nothing is known.
        """
        with self._lock:
            items = list(self._held)
        if not items:
            return []
        lost = {lease.entry for lease in self._delivery.renew([item.lease for item in items])}
        return [item for item in items if item.lease.entry in lost] if lost else []

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        pause_s = self._every_s
        while not self._stop.wait(pause_s):
            try:
                lost = self.renew_once()
                pause_s = self._every_s
            except BrokerUnavailable as error:
                logger.warning("leases not renewed", extra={"reason": error.message})
                pause_s = min(_RETRY_S, self._every_s)
                continue
            except Exception:  # the loop boundary: without this thread every lease would end
                logger.exception("leases not renewed")
                pause_s = min(_RETRY_S, self._every_s)
                continue
            if lost and not self._stop.is_set():
                loop.call_soon_threadsafe(self._report, lost)

    def _report(self, lost: list[Pending]) -> None:
        for item in lost:
            with self._lock:
                held = item in self._held  # else it was finished meanwhile, and its lease ended by that
                self._held.discard(item)
            if held:
                logger.warning("lease lost", extra={"request_id": item.request.id})
                self._on_lost(item)
