"""A thread that publishes to one broker, and tells what became of each message.

It keeps what the broker has not confirmed, and publishes it again over the next connection when one breaks: the broker
may have had it, so that the same message may come twice, and none is lost.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from qinfer.bridge.metrics import RouteTally
from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer_workers.bridge.messages import Outgoing
from qinfer_workers.bridge.transports.base import MessageRefused, Settled, Sink

logger = logging.getLogger(__name__)

_SETTLE_S = 1.0


class Publisher:
    """One per route and broker; `start`, then `stop` when nothing more will be posted.

    Args:
        name: The route's.
        connection: What it is called in metrics and logs: `sink`, `dead_letters`.
        connect: Opens the sink.
        settled: Gets what became of messages, in this thread.
        tally: Counts.
    """

    def __init__(
        self,
        name: str,
        connection: str,
        connect: Callable[[], Sink],
        settled: Callable[[Settled], None],
        tally: RouteTally,
    ) -> None:
        self._connection = connection
        self._connect = connect
        self._settled = settled
        self._tally = tally
        self._inbox: deque[Outgoing] = deque()
        self._unsettled: dict[Outgoing, None] = {}  # in the order in which they were posted
        self._sink: Sink | None = None
        self._is_careful = False  # one of those that are unsettled has ended a connection
        self._stopping = threading.Event()
        tally.connected[connection] = False
        self._away = OutageLog(
            logger, "predictions can't be published", remind_s=REMIND_S, route=name, connection=connection
        )
        self._thread = threading.Thread(target=self._run, name=f"bridge-{name}-{connection}", daemon=True)

    def start(self) -> None:
        """Begins to publish."""
        self._thread.start()

    def post(self, messages: Sequence[Outgoing]) -> None:
        """Has messages published, in order; for any thread."""
        self._inbox.extend(messages)
        self._wake()

    def stop(self) -> None:
        """Ends when everything is settled; for any thread."""
        self._stopping.set()
        self._wake()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end; tells whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        if (sink := self._sink) is not None:
            sink.wake()

    @property
    def _is_over(self) -> bool:
        return self._stopping.is_set() and not self._inbox and not self._unsettled

    def _run(self) -> None:
        backoff = Backoff()
        while not self._is_over:
            try:
                sink = self._connect()
            except Exception as error:  # noqa: BLE001 - the boundary to kombu, whose transports raise what they like
                self._away.failed(_text(error))
                self._stopping.wait(backoff.next_s())
                continue
            self._sink = sink
            self._tally.connected[self._connection] = True
            try:
                self._send_again(sink, backoff)
                self._serve(sink, backoff)
            except Exception as error:  # the same
                self._is_careful |= isinstance(error, MessageRefused)
                self._away.failed(_text(error))
                logger.debug("sink lost", exc_info=True)
            finally:
                self._sink = None
                self._tally.connected[self._connection] = False
                sink.close()
            if not self._is_over:
                self._stopping.wait(backoff.next_s())

    def _serve(self, sink: Sink, backoff: Backoff) -> None:
        while not self._is_over:
            if self._inbox:
                posted = [self._inbox.popleft() for _ in range(len(self._inbox))]
                self._unsettled.update(dict.fromkeys(posted))
                sink.send(posted)
            if self._take(sink.settle(_SETTLE_S)):
                backoff.reset()
                self._away.over()

    def _send_again(self, sink: Sink, backoff: Backoff) -> None:
        """Publishes what was left; where one of it is to blame, one at a time, so that it is found out."""
        left = list(self._unsettled)
        if not self._is_careful:
            sink.send(left)
            return
        for message in left:
            sink.send([message])
            try:
                while message in self._unsettled:
                    self._take(sink.settle(_SETTLE_S))
            except MessageRefused:
                self._take(Settled(refused=[message]))
                backoff.reset()
                raise
        self._is_careful = False

    def _take(self, settled: Settled) -> bool:
        """Passes news on; tells whether there were any."""
        for messages in settled:
            for message in messages:
                self._unsettled.pop(message, None)
        if any(settled):
            self._settled(settled)
        return any(settled)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
