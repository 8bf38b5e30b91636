"""A route of a bridge: its parts and the data that they exchange, its start and its end.

The source's thread receives and reads messages; on the loop, `MessageIntake` accepts batches of them into the lane, and
the thread acknowledges. `Endings` takes ends from the outbox, a thread renders them, and the sink's thread publishes;
the broker's confirms end them. Dead letters on another broker have a thread of their own.

A message is acknowledged only once it is in the model's queue, or its dead letter is confirmed; an end leaves the
outbox only once its reply is confirmed. After a crash, both are delivered again, with the same id.

Stored responses of decoupled models are read when their stream has ended, one stream at a time. An end not confirmed in
its pause is delivered again, to any bridge of the route; in hand here, it is published only once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from qinfer.bridge.reports import RouteTally, count
from qinfer.core.retry import REMIND_S, Backoff, OutageLog
from qinfer.errors import QinferError
from qinfer.queue.deliveries import DeliveryKind, outbox
from qinfer.queue.entries import Ending, EntryAddress, RequestState, reply_address
from qinfer.queue.lanes import Queue
from qinfer.traffic.controller import EndpointFollower
from qinfer_workers.bridge.config import BridgeConfig, RouteOptions
from qinfer_workers.bridge.kombu import open_sink, open_source
from qinfer_workers.bridge.links import Consumer, LinkPublisher
from qinfer_workers.bridge.messages import (
    Destination,
    MessageSink,
    MessageSource,
    Outgoing,
    PublishGroup,
    Receipt,
    Refused,
    RenderedEnd,
    SettledMessages,
    refusal,
    render,
)
from qinfer_workers.bridge.reading import PARTITION, MessageIntake, Reader, RouteVersions

logger = logging.getLogger(__name__)

AGAIN_S = 1.0

NO_STEP_S = 0.1
LAST_STEP_S = 5.0
"""Seconds for each last step; the next bridge gets the messages that are left."""


class BridgeRoute:
    """A route of a bridge."""

    def __init__(
        self,
        *,
        options: RouteOptions,
        config: BridgeConfig,
        delivery: Queue,
        endpoints: EndpointFollower,
        inline_max_bytes: int,
    ) -> None:
        self.options = options
        self.tally = RouteTally(options.name)
        self._observed = endpoints.observed
        self._loop = asyncio.get_running_loop()
        self._states: dict[str, str] = {}  # ends in hand, by id → final state
        self._lost = OutageLog(logger, "published messages reach no queue", remind_s=REMIND_S, route=options.name)
        self._publishers = self._make_publishers()
        self._intake = MessageIntake(
            name=options.name,
            accept=delivery.requests.accept_all,
            done=self._done,
            refuse=self._refuse,
            again=self.wake,
            epoch=lambda: self._consumer.epoch,
            tally=self.tally,
        )
        self.versions = RouteVersions(options, endpoints.view)
        self._endings = Endings(
            delivery=delivery,
            model=self.versions.model,
            kind=outbox(options.outbox, config.retry_s),
            render=partial(render, options),
            post=self._publish_rendered,
            took=self._intake.notify_room,
        )
        reader = Reader(options, config.result_ttl_s, reply_address(endpoints.owner), inline_max_bytes, self.versions)
        connect: Callable[[int], MessageSource] = partial(open_source, options.source, options.body.max_bytes)
        self._consumer = Consumer(
            name=options.name,
            connect=connect,
            reader=reader,
            resolve=self.versions.resolve,
            accept=self._intake.add,
            refuse=self._refuse,
            tally=self.tally,
        )

    def wake(self) -> None:
        """Notes that a request of this process has ended."""
        self._endings.wake()

    async def run(self) -> None:
        """Moves messages until `stop`, and finishes those in hand."""
        publishers = list(dict.fromkeys(self._publishers.values()))
        for publisher in publishers:
            publisher.start()
        self._consumer.start()
        async with asyncio.TaskGroup() as group:
            endings = group.create_task(self._endings.run())
            await group.create_task(self._intake.run())
            _, late = await asyncio.wait([endings], timeout=LAST_STEP_S)
            for task in late:
                task.cancel()
        for publisher in publishers:
            publisher.stop()
        for publisher in publishers:  # first: or messages would be delivered again
            await asyncio.to_thread(publisher.join, NO_STEP_S if late else LAST_STEP_S)
        self._consumer.finish()
        await asyncio.to_thread(self._consumer.join, LAST_STEP_S)
        logger.info("route stopped", extra={"route": self.options.name})

    def stop(self) -> None:
        """Takes no more messages."""
        self._consumer.stop()
        self._intake.stop()
        self._endings.stop()

    def refresh_tally(self) -> None:
        """Updates gauges."""
        self.tally.unconfirmed = self._endings.in_hand

    def _make_publishers(self) -> dict[bool, LinkPublisher]:
        options, source = self.options, self.options.source
        fixed = [options.sink.routing_key] if options.sink.declare and not options.sink.exchange else []
        queues = [queue for queue in fixed if queue]
        dead_letters = [options.dead_letters] if source.declare else []

        def made(
            connection: str, url: str, of: Mapping[str, Any], queues: Sequence[str], exchange: str = ""
        ) -> LinkPublisher:
            connect: Callable[[], MessageSink] = partial(open_sink, url, of, queues, exchange)
            return LinkPublisher(options.name, connection, connect, self._on_settled, self.tally)

        if options.sink_url == options.source_url:
            both = made("sink", options.sink_url, options.sink_options, queues + dead_letters, options.sink.exchange)
            return {False: both, True: both}
        return {
            False: made("sink", options.sink_url, options.sink_options, queues, options.sink.exchange),
            True: made("dead_letters", options.source_url, source.options, dead_letters),
        }

    def _done(self, receipts: Sequence[Receipt]) -> None:
        self._consumer.done(receipts)

    def _refuse(self, refused: Sequence[Refused]) -> None:
        for _, error in refused:
            count(self.tally.refused, error.code.value)
        self._publish([each for message, error in refused for each in refusal(self.options, message, error)])

    def _publish_rendered(self, rendered: Sequence[RenderedEnd]) -> None:
        for each in rendered:
            self._states[each.group.ending_id] = each.state
            self._observe(each)
        self._publish([message for each in rendered for message in each.messages])

    def _observe(self, rendered: RenderedEnd) -> None:
        """Counts a canary's ended request once, without its wait; a route that names a version is no evidence."""
        ending, record = rendered.ending, rendered.ending.record
        if ending.attempts > 1 or record is None or self.options.version or not self._observed.by_target:
            return
        key = self.options.model, f"{record.address.model}:{record.version}"
        if (on_trial := self._observed.by_target.get(key)) is None:
            return
        if record.state is not RequestState.SUCCEEDED:
            on_trial.failed(record.code, record.tenant)
        elif rendered.final is not None:
            on_trial.executed(rendered.final, record.tenant)

    def _publish(self, messages: Sequence[Outgoing]) -> None:
        for is_dead_letter in (False, True):
            some = [message for message in messages if (message.place is Destination.DEAD_LETTER) is is_dead_letter]
            if some:
                self._publishers[is_dead_letter].post(some)

    def _on_settled(self, settled: SettledMessages) -> None:
        self._loop.call_soon_threadsafe(self._settle_messages, settled)

    def _settle_messages(self, settled: SettledMessages) -> None:
        confirmed: list[str] = []
        done: list[Receipt] = []
        for message in settled.taken:
            self._settle_one(message, confirmed, done)
        for message in settled.unroutable:
            count(self.tally.unroutable, message.place.value)
            if message.place is not Destination.REPLY:  # its caller is gone; other queues may yet be made
                message.group.failed = True
                self._lost.failed(f"{message.place.value}: '{(message.exchange or message.routing_key).decode()}'")
            self._settle_one(message, confirmed, done)
        for message in settled.refused:
            message.group.failed = True
            self._lost.failed("the broker refuses messages: is a queue full, or a message too large?")
            self._settle_one(message, confirmed, done)
        if confirmed:
            self._endings.confirm(confirmed)
        if done:
            self._done(done)

    def _settle_one(self, message: Outgoing, confirmed: list[str], done: list[Receipt]) -> None:
        """Adds complete groups to `confirmed` or `done`."""
        group: PublishGroup = message.group
        group.left -= 1
        if group.left:
            return
        if group.receipt is not None:
            if group.failed:
                group.left, group.failed = 1, False
                self._loop.call_later(AGAIN_S, self._publish, [message])
            else:
                done.append(group.receipt)
            return
        if not group.ending_id:
            return
        state = self._states.pop(group.ending_id, "")
        if group.failed:
            self._endings.drop(group.ending_id)
        else:
            count(self.tally.replied, state)
            confirmed.append(group.ending_id)


MOST_AT_ONCE = 500
MOST_IN_HAND = 4 * MOST_AT_ONCE
MOST_BYTES_IN_HAND = 64 * 2**20
"""This bounds memory while a sink is unreachable."""

REREAD_S = 1.0

PACE_S = 0.01
"""The pause between partial reads, so that each read finds many endings."""

_LONGEST_PAUSE_S = 1.0
_MESSAGE_BYTES = 1000


class Endings:
    """The ends of a route's requests.

    `render` makes an end's messages in a thread (`None` = no recipient); `took` is called when requests have left the
    queue.
    """

    def __init__(
        self,
        *,
        delivery: Queue,
        model: str,
        kind: DeliveryKind,
        render: Callable[[Ending, Sequence[bytes]], RenderedEnd | None],
        post: Callable[[Sequence[RenderedEnd]], None],
        took: Callable[[], None],
    ) -> None:
        self._delivery = delivery
        self._place = (model, PARTITION, kind)
        self._render_one = render
        self._post = post
        self._took = took
        self._in_hand: dict[str, int] = {}  # ends → bytes of their results
        self._in_hand_bytes = 0
        self._confirmed: deque[str] = deque()
        self._news = asyncio.Event()
        self._to_confirm = asyncio.Event()
        self._room = asyncio.Event()
        self._stopping = False
        self._is_taking = True
        self._away = OutageLog(
            logger, "ended requests can't be read", remind_s=REMIND_S, outbox=kind.name.removeprefix("outbox:")
        )

    @property
    def in_hand(self) -> int:
        """Ends that are not confirmed."""
        return len(self._in_hand)

    def wake(self) -> None:
        """Notes that the outbox may have ends."""
        self._news.set()

    def confirm(self, ending_ids: Sequence[str]) -> None:
        """Takes ends with confirmed messages off the outbox."""
        self._confirmed.extend(ending_ids)
        self._to_confirm.set()

    def drop(self, ending_id: str) -> None:
        """Drops an end, which is delivered again."""
        self._remove_ending(ending_id)
        self._to_confirm.set()

    def stop(self) -> None:
        """Stops reading; ends `run` once replies in hand are confirmed."""
        self._stopping = True
        self._news.set()
        self._room.set()
        self._to_confirm.set()

    async def run(self) -> None:
        """Takes and confirms until `stop`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take_all())
            group.create_task(self._confirm_all())

    async def _take_all(self) -> None:
        backoff = Backoff(PACE_S * 10, _LONGEST_PAUSE_S)
        while not self._stopping:
            self._news.clear()
            count = min(MOST_AT_ONCE, MOST_IN_HAND - len(self._in_hand))
            if self._in_hand_bytes >= MOST_BYTES_IN_HAND:
                count = 0
            taken: list[Ending] = []
            if count > 0:
                try:
                    taken = await self._delivery.requests.endings(*self._place, count)
                    backoff.reset()
                    self._away.over()
                except QinferError as error:
                    self._away.failed(error.message)
                    await asyncio.sleep(backoff.next_s())
                    continue
            fresh = [ending for ending in taken if ending.id not in self._in_hand]
            if fresh:
                self._took()
                await self._render([ending for ending in fresh if not _is_stream(ending)])
                for stream in filter(_is_stream, fresh):
                    await self._render_stream(stream)
            if count <= 0 or not taken:
                with suppress(TimeoutError):
                    async with asyncio.timeout(REREAD_S):
                        await self._news.wait()
            if len(taken) < MOST_AT_ONCE:
                await asyncio.sleep(PACE_S)
        self._is_taking = False
        self._to_confirm.set()

    async def _render_stream(self, ending: Ending) -> None:
        """Publishes a stream's end once there is room, or leaves it to a later delivery."""
        while self._in_hand_bytes >= MOST_BYTES_IN_HAND and not self._stopping:
            self._room.clear()
            await self._room.wait()
        if self._stopping:
            return
        place, stored = EntryAddress(*self._place[:2], ending.request_id), list[bytes]()
        try:
            while page := await self._delivery.requests.responses.read(place, len(stored)):
                stored += page
        except QinferError as error:
            self._away.failed(error.message)
            return
        await self._render([ending], stored)

    async def _render(self, endings: Sequence[Ending], stored: Sequence[bytes] = ()) -> None:
        for ending in endings:
            size = len(ending.blob or b"") + sum(len(blob) + _MESSAGE_BYTES for blob in stored)
            self._in_hand[ending.id] = size
            self._in_hand_bytes += size
        rendered = await asyncio.to_thread(lambda: [self._render_one(ending, stored) for ending in endings])
        if silent := [ending.id for ending, each in zip(endings, rendered, strict=True) if each is None]:
            self.confirm(silent)
        self._post([each for each in rendered if each is not None])

    def _remove_ending(self, ending_id: str) -> None:
        self._in_hand_bytes -= self._in_hand.pop(ending_id, 0)
        self._room.set()

    async def _confirm_all(self) -> None:
        backoff = Backoff(PACE_S * 10, _LONGEST_PAUSE_S)
        while self._is_taking or self._in_hand:
            if not self._confirmed:
                self._to_confirm.clear()
                if not self._confirmed:
                    await self._to_confirm.wait()
                continue
            ids = list(self._confirmed)
            try:
                await self._delivery.deliveries.done(*self._place, ids)
            except QinferError as error:
                self._away.failed(error.message)
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            for _ in ids:
                self._remove_ending(self._confirmed.popleft())
            if len(self._in_hand) < MOST_AT_ONCE:
                self._news.set()


def _is_stream(ending: Ending) -> bool:
    record = ending.record
    return record is not None and record.decoupled and record.state is RequestState.SUCCEEDED
