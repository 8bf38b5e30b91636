"""The two threads of a route, with links that are scripted: what they do when a connection breaks."""

import queue
from collections.abc import Callable, Sequence
from typing import Any

from qinfer.bridge.reports import RouteTally
from qinfer.errors import InvalidRequest, ModelNotFound
from qinfer.testing import wait_until
from qinfer_workers.bridge.links import Consumer, LinkPublisher
from qinfer_workers.bridge.messages import (
    Destination,
    MessageRefused,
    Outgoing,
    PublishGroup,
    Receipt,
    Refused,
    SettledMessages,
    SourceMessage,
)
from qinfer_workers.bridge.reading import Work

JOIN_S = 5.0


class FakeSource:
    """A source that gives what is put into it, and breaks when it is told to."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.acknowledged: list[Receipt] = []
        self.is_closed = False
        self._inbox: queue.Queue[list[bytes] | None] = queue.Queue()
        self._tag = 0

    def put(self, *bodies: bytes) -> None:
        self._inbox.put(list(bodies))

    def break_off(self) -> None:
        self._inbox.put(None)

    def receive(self, timeout_s: float) -> list[SourceMessage]:
        try:
            bodies = self._inbox.get(timeout=min(timeout_s, 0.05))
        except queue.Empty:
            return []
        if bodies is None:
            raise ConnectionResetError("broken")
        messages = []
        for body in bodies:
            self._tag += 1
            messages.append(SourceMessage(receipt=Receipt(self.epoch, self._tag), body=body))
        return messages

    def acknowledge(self, receipts: Sequence[Receipt]) -> None:
        self.acknowledged += receipts

    def wake(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class Scene:
    """A consumer between fakes."""

    def __init__(self) -> None:
        self.sources: list[FakeSource] = []
        self.failures = 0
        self.works: list[Any] = []
        self.refused: list[Refused] = []
        self.is_known = True
        self.tally = RouteTally("route")
        self.consumer = Consumer(
            name="route",
            connect=self._connect,
            reader=self,  # type: ignore[arg-type]  # it has what a consumer asks of one
            resolve=self._resolve,
            accept=self.works.extend,
            refuse=self.refused.extend,
            tally=self.tally,
        )

    def set_model(self, _: object) -> None: ...

    def read(self, message: SourceMessage) -> Work:
        if message.body == b"bad":
            raise InvalidRequest("bad")
        if message.body == b"bug":
            raise ZeroDivisionError
        return Work(message, None, message.body != b"anonymous")  # type: ignore[arg-type]  # nobody looks at it

    def _connect(self, epoch: int) -> FakeSource:
        if self.failures:
            self.failures -= 1
            raise OSError("refused")
        self.sources.append(FakeSource(epoch))
        return self.sources[-1]

    def _resolve(self) -> Any:
        if not self.is_known:
            raise ModelNotFound("no such model")

    def __enter__(self) -> "Scene":
        self.consumer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.stop()
        self.consumer.finish()
        assert self.consumer.join(JOIN_S)


def connected(scene: Scene, count: int = 1) -> FakeSource:
    wait_until(lambda: len(scene.sources) == count, 10.0)
    return scene.sources[-1]


def test_what_is_read_is_handed_over_and_what_is_done_is_acknowledged() -> None:
    """What can't be read is told, and in hand until its dead letter is confirmed; a bug costs one message."""
    with Scene() as scene:
        source = connected(scene)
        source.put(b"good", b"bad", b"bug", b"anonymous")
        wait_until(lambda: len(scene.works) + len(scene.refused) == 4, 10.0)
        assert [each.message.body for each in scene.works] == [b"good", b"anonymous"]
        assert [(message.body, error.message) for message, error in scene.refused] == [
            (b"bad", "bad"),
            (b"bug", "internal error; the bridge's log has more"),
        ]
        assert (scene.tally.received, scene.tally.unidentified, scene.tally.unacknowledged) == (4, 1, 4)
        scene.consumer.done([Receipt(1, 1), Receipt(1, 3), Receipt(0, 2)])
        wait_until(lambda: len(source.acknowledged) == 2, 10.0)
        assert scene.tally.unacknowledged == 2

    assert source.acknowledged == [Receipt(1, 1), Receipt(1, 3)]
    assert source.is_closed


def test_a_connection_that_breaks_is_made_again() -> None:
    """With a new epoch: receipts of the old one are dropped, for what they were of comes again."""
    with Scene() as scene:
        first = connected(scene)
        first.put(b"one")
        wait_until(lambda: len(scene.works) == 1, 10.0)
        scene.failures = 1
        first.break_off()
        second = connected(scene, 2)
        assert first.is_closed
        assert (second.epoch, scene.consumer.epoch, scene.tally.unacknowledged) == (2, 2, 0)
        second.put(b"one")
        wait_until(lambda: len(scene.works) == 2, 10.0)
        scene.consumer.done([Receipt(1, 1), Receipt(2, 1)])
        wait_until(lambda: bool(second.acknowledged), 10.0)

    assert second.acknowledged == [Receipt(2, 1)]


def test_messages_wait_for_their_model() -> None:
    with Scene() as scene:
        scene.is_known = False
        source = connected(scene)
        source.put(b"one")
        wait_until(lambda: scene.tally.received == 1, 10.0)
        assert scene.works == []
        scene.is_known = True
        wait_until(lambda: len(scene.works) == 1, 10.0)


def test_what_is_done_after_the_stop_is_acknowledged() -> None:
    """What was accepted last is not to come again."""
    with Scene() as scene:
        source = connected(scene)
        source.put(b"one")
        wait_until(lambda: len(scene.works) == 1, 10.0)
        scene.consumer.stop()
        scene.consumer.done([Receipt(1, 1)])

    assert source.acknowledged == [Receipt(1, 1)]


class FakeSink:
    """A sink that settles nothing until it is told to."""

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []
        self.is_closed = False
        self._news: queue.Queue[SettledMessages | None] = queue.Queue()

    def confirm(self, settled: SettledMessages | None) -> None:
        self._news.put(settled)

    def send(self, messages: Sequence[Outgoing]) -> None:
        self.sent += messages

    def wait_settled(self, timeout_s: float) -> SettledMessages:
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


def test_what_is_not_confirmed_is_published_again_over_the_next_connection() -> None:
    """In order, before what came later; what was confirmed is not."""
    sinks: list[FakeSink] = []
    news: list[SettledMessages] = []
    one, messages = publisher(sinks, news.append), [outgoing(number) for number in range(4)]
    one.start()
    one.post(messages[:3])
    wait_until(lambda: bool(sinks) and len(sinks[0].sent) == 3, 10.0)
    sinks[0].confirm(SettledMessages(taken=[messages[1]]))
    wait_until(lambda: bool(news), 10.0)
    sinks[0].confirm(None)
    one.post(messages[3:])
    wait_until(lambda: len(sinks) == 2 and len(sinks[1].sent) == 3, 10.0)
    assert sinks[1].sent == [messages[0], messages[2], messages[3]]
    one.stop()
    sinks[1].confirm(SettledMessages([messages[0]], [messages[2]], [messages[3]]))

    assert one.join(JOIN_S)
    assert [settled.taken for settled in news] == [[messages[1]], [messages[0]]]
    assert (news[1].refused, news[1].unroutable) == ([messages[2]], [messages[3]])
    assert sinks[1].is_closed


class PickySink(FakeSink):
    """A broker that ends the connection when one message is published, as RabbitMQ does with one that is too large."""

    def __init__(self, bad: Outgoing) -> None:
        super().__init__()
        self._bad = bad

    def wait_settled(self, timeout_s: float) -> SettledMessages:
        if self._bad in self.sent:
            raise MessageRefused("too large")
        taken, self.sent = self.sent, []
        return SettledMessages(taken)


def test_a_message_that_ends_the_connection_is_found_out() -> None:
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
    one.start()
    wait_until(lambda: len(taken) == 3, 10.0)
    one.post(messages[4:])
    one.stop()

    assert one.join(JOIN_S)
    assert (taken, refused) == ([messages[0], messages[1], messages[3], messages[4]], [messages[2]])
    assert len(sinks) == 3


def test_a_publisher_ends_only_when_everything_is_settled() -> None:
    sinks: list[FakeSink] = []
    one, message = publisher(sinks, lambda _: None), outgoing(1)
    one.start()
    one.post([message])
    one.stop()
    wait_until(lambda: bool(sinks) and sinks[0].sent == [message], 10.0)
    assert not one.join(0.2)
    sinks[0].confirm(SettledMessages([message]))

    assert one.join(JOIN_S)
