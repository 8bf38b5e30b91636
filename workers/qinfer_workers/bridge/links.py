"""Connections to other queues, kept open by coroutines: `Link`, and `LinkPublisher` that publishes over one.

kombu's and py-amqp's calls block, so each link makes them in a thread of its own; all else is on the loop. Unconfirmed
messages are published again over the next connection: one may arrive twice, none is lost.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

from qinfer.bridge.reports import RouteTally
from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer_workers.bridge.messages import Outgoing
from qinfer_workers.bridge.transports.base import MessageRefused, MessageSink, MessageSource, SettledMessages

logger = logging.getLogger(__name__)

_MAX_REASON = 500

L = TypeVar("L", MessageSource, MessageSink)
T = TypeVar("T")


class Link(ABC, Generic[L]):
    """Holds one connection, and replaces it when it breaks; `connect` runs in the thread."""

    def __init__(self, route: str, connection: str, outage: str, connect: Callable[[], L], tally: RouteTally) -> None:
        self._route = route
        self._connection = connection
        self._connect: Callable[[], L] = connect
        self._tally = tally
        self._link: L | None = None
        self._stopping = asyncio.Event()
        self._outage = OutageLog(logger, outage, remind_s=REMIND_S, route=route, connection=connection)
        self._backoff = Backoff()
        self._thread = ThreadPoolExecutor(1, f"bridge-{route}-{connection}")
        tally.connected[connection] = False

    async def run(self) -> None:
        """Uses connections until all work is done after `stop`; a cancellation leaves the connection as it is."""
        while not self._is_over:
            try:
                link = self._link = await self._in_thread(self._connect)
                self._connected(is_up=True)
                await self._use_link(link)
            except Exception as error:  # the boundary to kombu, whose transports raise what they like
                self._outage.failed(f"{type(error).__name__}: {error}"[:_MAX_REASON])
                logger.debug("connection lost", exc_info=error, extra={"route": self._route})
            if self._link is not None:
                closed, self._link = self._link, None
                self._connected(is_up=False)
                await self._in_thread(closed.close)
            if not self._is_over:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._backoff.next_s()):
                        await self._stopping.wait()
        self._thread.shutdown(wait=False)

    def stop(self) -> None:
        """Ends `run` when all work is done."""
        self._stopping.set()
        self._wake()

    @abstractmethod
    async def _use_link(self, link: L) -> None:
        """Uses a connection until the end, or an exception."""

    @property
    def _is_over(self) -> bool:
        return self._stopping.is_set()

    async def _in_thread(self, call: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *given)

    def _works(self) -> None:
        self._backoff.reset()
        self._outage.over()

    def _connected(self, *, is_up: bool) -> None:
        self._tally.connected[self._connection] = is_up

    def _wake(self) -> None:
        if (link := self._link) is not None:
            link.wake()


_SETTLE_S = 1.0


class LinkPublisher(Link[MessageSink]):
    """The publisher of a route to one broker; `stop` settles posted messages first."""

    def __init__(
        self,
        name: str,
        connection: str,
        connect: Callable[[], MessageSink],
        settled: Callable[[SettledMessages], None],
        tally: RouteTally,
    ) -> None:
        super().__init__(name, connection, "predictions can't be published", connect, tally)
        self._settled = settled
        self._inbox: list[Outgoing] = []
        self._unsettled: dict[Outgoing, None] = {}  # in posted order
        self._is_careful = False  # an unsettled message has ended a connection

    def post(self, messages: Sequence[Outgoing]) -> None:
        """Publishes messages in order."""
        self._inbox.extend(messages)
        self._wake()

    @property
    def _is_over(self) -> bool:
        return self._stopping.is_set() and not self._inbox and not self._unsettled

    async def _use_link(self, link: MessageSink) -> None:
        try:
            again = list(self._unsettled)
            if self._is_careful:
                for message in again:
                    await self._publish_alone(link, message)
                self._is_careful, again = False, []
            while not self._is_over:
                posted, self._inbox = again + self._inbox, []
                again = []
                self._unsettled.update(dict.fromkeys(posted))
                if self._report_settled(await self._in_thread(link.exchange, posted, _SETTLE_S)):
                    self._works()
        except MessageRefused:
            self._is_careful = True
            raise

    async def _publish_alone(self, sink: MessageSink, message: Outgoing) -> None:
        posted = [message]
        try:
            while message in self._unsettled:
                self._report_settled(await self._in_thread(sink.exchange, posted, _SETTLE_S))
                posted = []
        except MessageRefused:
            self._report_settled(SettledMessages(refused=[message]))
            self._backoff.reset()
            raise

    def _report_settled(self, settled: SettledMessages) -> bool:
        for messages in settled:
            for message in messages:
                self._unsettled.pop(message, None)
        if any(settled):
            self._settled(settled)
        return any(settled)
