"""A thread that publishes to one broker, and reports the outcome of each message.

What the broker has not confirmed is kept, and published again over the next connection when one breaks: the broker may
have had it, so that the same message may come twice, and none is lost.
"""

from collections import deque
from collections.abc import Callable, Sequence

from qinfer.bridge.reports import RouteTally
from qinfer_workers.bridge.messages import Outgoing
from qinfer_workers.bridge.transports.base import LinkThread, MessageRefused, Settled, Sink

_SETTLE_S = 1.0


class Publisher(LinkThread[Sink]):
    """The publisher of a route to one broker; `start`, then `stop`, which settles all that was posted first.

    Args:
        name: The route's.
        connection: Its name in metrics and logs: `sink`, `dead_letters`.
        connect: Opens the sink.
        settled: Gets the outcomes of messages, in this thread.
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
        super().__init__(name, connection, "predictions can't be published", tally)
        self._connect = connect
        self._settled = settled
        self._inbox: deque[Outgoing] = deque()
        self._unsettled: dict[Outgoing, None] = {}  # in the order in which they were posted
        self._is_careful = False  # one of those that are unsettled has ended a connection

    def post(self, messages: Sequence[Outgoing]) -> None:
        """Publishes messages in the thread, in order; for any thread."""
        self._inbox.extend(messages)
        self._wake()

    @property
    def _is_over(self) -> bool:
        return self._stopping.is_set() and not self._inbox and not self._unsettled

    def _open(self) -> Sink:
        return self._connect()

    def _serve(self, link: Sink) -> None:
        try:
            self._send_again(link)
            while not self._is_over:
                if self._inbox:
                    posted = [self._inbox.popleft() for _ in range(len(self._inbox))]
                    self._unsettled.update(dict.fromkeys(posted))
                    link.send(posted)
                if self._take(link.settle(_SETTLE_S)):
                    self._works()
        except MessageRefused:
            self._is_careful = True
            raise

    def _send_again(self, sink: Sink) -> None:
        """Publishes what was left; one at a time where one of them has ended a connection, to find out which."""
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
                self._backoff.reset()
                raise
        self._is_careful = False

    def _take(self, settled: Settled) -> bool:
        """Passes outcomes on; returns whether there were any."""
        for messages in settled:
            for message in messages:
                self._unsettled.pop(message, None)
        if any(settled):
            self._settled(settled)
        return any(settled)
