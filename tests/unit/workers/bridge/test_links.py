"""The publisher of a route, with sinks that are scripted: what it does when a connection breaks."""

import asyncio
import queue
from collections.abc import Callable, Sequence

from qinfer.bridge.reports import RouteTally
from qinfer.testing import eventually
from qinfer_workers.bridge.links import LinkPublisher
from qinfer_workers.bridge.messages import Destination, Outgoing, PublishGroup
from qinfer_workers.bridge.transports.base import MessageRefused, SettledMessages

JOIN_S = 5.0


class FakeSink:
    """A sink that settles nothing until it is told to."""

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []
        self.is_closed = False
        self._news: queue.Queue[SettledMessages | None] = queue.Queue()

    def confirm(self, settled: SettledMessages | None) -> None:
        self._news.put(settled)

    def exchange(self, messages: Sequence[Outgoing], timeout_s: float) -> SettledMessages:
        self.sent += messages
        try:
            settled = self._news.get(timeout=min(timeout_s, 0.05))
        except queue.Empty:
            return SettledMessages()
        if settled is None:
            raise ConnectionResetError("broken")
        return settled

    def wake(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def outgoing(number: int) -> Outgoing:
    return Outgoing(place=Destination.SINK, body=b"%d" % number, group=PublishGroup(left=1))


def publisher(sinks: list[FakeSink], settled: Callable[[SettledMessages], None]) -> LinkPublisher:
    def connect() -> FakeSink:
        sinks.append(FakeSink())
        return sinks[-1]

    return LinkPublisher("route", "sink", connect, settled, RouteTally("route"))


async def test_what_is_not_confirmed_is_published_again_over_the_next_connection() -> None:
    """In order, before what came later; what was confirmed is not."""
    sinks: list[FakeSink] = []
    news: list[SettledMessages] = []
    one, messages = publisher(sinks, news.append), [outgoing(number) for number in range(4)]
    running = asyncio.create_task(one.run())
    one.post(messages[:3])
    await eventually(lambda: bool(sinks) and len(sinks[0].sent) == 3, 10.0)
    sinks[0].confirm(SettledMessages(taken=[messages[1]]))
    await eventually(lambda: bool(news), 10.0)
    sinks[0].confirm(None)
    one.post(messages[3:])
    await eventually(lambda: len(sinks) == 2 and len(sinks[1].sent) == 3, 10.0)
    assert sinks[1].sent == [messages[0], messages[2], messages[3]]
    one.stop()
    sinks[1].confirm(SettledMessages([messages[0]], [messages[2]], [messages[3]]))

    await asyncio.wait_for(running, JOIN_S)
    assert [settled.taken for settled in news] == [[messages[1]], [messages[0]]]
    assert (news[1].refused, news[1].unroutable) == ([messages[2]], [messages[3]])
    assert sinks[1].is_closed


class PickySink(FakeSink):
    """A broker that ends the connection when one message is published, as RabbitMQ does with one that is too large."""

    def __init__(self, bad: Outgoing) -> None:
        super().__init__()
        self._bad = bad

    def exchange(self, messages: Sequence[Outgoing], timeout_s: float) -> SettledMessages:
        self.sent += messages
        if self._bad in self.sent:
            raise MessageRefused("too large")
        taken, self.sent = self.sent, []
        return SettledMessages(taken)


async def test_a_message_that_ends_the_connection_is_found_out() -> None:
    """It is given back as refused, and keeps no other from the queue; what comes after it goes by hundreds again."""
    messages = [outgoing(number) for number in range(5)]
    sinks: list[FakeSink] = []
    taken: list[Outgoing] = []
    refused: list[Outgoing] = []

    def connect() -> FakeSink:
        sinks.append(PickySink(messages[2]))
        return sinks[-1]

    def settled(news: SettledMessages) -> None:
        taken.extend(news.taken)
        refused.extend(news.refused)

    tally = RouteTally("route")
    one = LinkPublisher("route", "sink", connect, settled, tally)
    assert tally.connected == {"sink": False}
    one.post(messages[:4])
    running = asyncio.create_task(one.run())
    await eventually(lambda: len(taken) == 3, 10.0)
    one.post(messages[4:])
    one.stop()

    await asyncio.wait_for(running, JOIN_S)
    assert (taken, refused) == ([messages[0], messages[1], messages[3], messages[4]], [messages[2]])
    assert len(sinks) == 3


async def test_a_publisher_ends_only_when_everything_is_settled() -> None:
    sinks: list[FakeSink] = []
    one, message = publisher(sinks, lambda _: None), outgoing(1)
    running = asyncio.create_task(one.run())
    one.post([message])
    one.stop()
    await eventually(lambda: bool(sinks) and sinks[0].sent == [message], 10.0)
    assert not running.done()
    sinks[0].confirm(SettledMessages([message]))

    await asyncio.wait_for(running, JOIN_S)
