"""Who sends numbered messages to RabbitMQ, and who takes the predictions: neither gives up while RabbitMQ is killed.

The sender goes on when the broker has confirmed a message; what was not confirmed it sends again, under the same id.
The taker acknowledges a prediction after it is noted. So messages and predictions may come more than once, and none is
lost but by what is between them.
"""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from amqp.exceptions import AMQPError
from kombu import Connection
from kombu.exceptions import OperationalError

from tests.chaos.verdict import Verdict
from tests.support.servers.rabbitmq import RabbitServer

TASKS, PREDICTIONS, DEAD = "tasks", "tasks.done", "tasks.dead"

_BATCH = 50
_CONFIRM_S = 10.0
_PREFETCH = 500
_PAUSE_S = 0.1
_SHOWN = 20
_BROKEN = (AMQPError, OSError, OperationalError)


def body_of(number: int) -> tuple[bytes, str]:
    """Returns a message whose prediction is 2n + 1, and its content type: KServe JSON or a row, in turn."""
    if number % 2:
        return msgspec.json.encode({"a": number, "b": number + 1, "task": number}), "application/x-ndjson"
    inputs = [
        {"name": name, "shape": [1, 1], "datatype": "FP32", "data": [value]}
        for name, value in (("a", number), ("b", number + 1))
    ]
    return msgspec.json.encode({"id": str(number), "inputs": inputs}), "application/json"


def value_of(number: int, body: bytes) -> float:
    """Returns what a prediction says."""
    reply = msgspec.json.decode(body)
    return float(reply["sum"] if number % 2 else reply["outputs"][0]["data"][0])


@dataclass
class Ledger:
    """What was sent, and what came.

    Attributes:
        sent: Messages published, with repetitions.
        taken: Predictions that came, with repetitions.
        predictions: By message id: the distinct ones, as id of the request, state, correlation id and body.
    """

    sent: int = 0
    taken: int = 0
    predictions: dict[str, set[tuple[str, str, str, bytes]]] = field(default_factory=dict)


class Patient(threading.Thread):
    """A thread that begins anew whenever its connection breaks.

    Args:
        ledger: Where it notes what it does.
        broken: The exceptions that show that the connection is broken.
    """

    def __init__(self, ledger: Ledger, broken: tuple[type[Exception], ...]) -> None:
        super().__init__(daemon=True)
        self._ledger = ledger
        self._broken = broken
        self._stopping = threading.Event()
        self.failure: BaseException | None = None

    def stop(self) -> None:
        """Ends it soon."""
        self._stopping.set()
        self.join(30.0)

    def run(self) -> None:
        """Works until it is done, or stopped."""
        while not self._stopping.is_set():
            try:
                self._work()
            except self._broken:
                time.sleep(_PAUSE_S)
            except BaseException as error:
                self.failure = error
                raise

    def _work(self) -> None:
        """Works over one connection."""
        raise NotImplementedError


class _RabbitClient(Patient):
    """A client of RabbitMQ."""

    def __init__(self, rabbit: RabbitServer, ledger: Ledger) -> None:
        super().__init__(ledger, _BROKEN)
        self._rabbit = rabbit

    def _work(self) -> None:
        connection = Connection(self._rabbit.url, connect_timeout=5.0)
        try:
            connection.ensure_connection(max_retries=1, interval_start=0)
            self._use(connection, connection.channel())
        finally:
            connection.collect()

    def _use(self, connection: Connection, channel: Any) -> None:
        raise NotImplementedError


class Sender(_RabbitClient):
    """Sends messages evenly over some seconds.

    Args:
        rabbit: Where to.
        ledger: Where it is noted.
        count: How many.
        seconds: In how many seconds, where it can.
    """

    def __init__(self, rabbit: RabbitServer, ledger: Ledger, count: int, seconds: float) -> None:
        super().__init__(rabbit, ledger)
        self._count = count
        self._rate = count / seconds
        self._next = 0

    @property
    def is_done(self) -> bool:
        """Whether the broker has confirmed all of them."""
        return self._next >= self._count

    def _use(self, connection: Connection, channel: Any) -> None:
        channel.queue_declare(TASKS, durable=True, auto_delete=False)
        channel.confirm_select()
        tags: set[int] = set()
        channel.events["basic_ack"].add(lambda tag, multiple: _confirm(tags, tag, multiple=multiple))
        last_tag, begin_s, first = 0, time.monotonic(), self._next
        while self._next < self._count and not self._stopping.is_set():
            numbers = range(self._next, min(self._next + _BATCH, self._count))
            for number in numbers:
                last_tag += 1
                tags.add(last_tag)
                self._publish(channel, number)
            give_up_s = time.monotonic() + _CONFIRM_S
            while tags:
                connection.drain_events(timeout=max(give_up_s - time.monotonic(), 0.001))
            self._next = numbers.stop
            self._stopping.wait(max(begin_s + (self._next - first) / self._rate - time.monotonic(), 0.0))
        if self.is_done:
            self._stopping.set()

    def _publish(self, channel: Any, number: int) -> None:
        body, content_type = body_of(number)
        message = channel.prepare_message(
            body,
            content_type=content_type,
            properties={"message_id": f"m{number}", "correlation_id": f"c{number}", "delivery_mode": 2},
        )
        channel.basic_publish(message, exchange="", routing_key=TASKS)
        self._ledger.sent += 1


class Taker(_RabbitClient):
    """Takes all predictions."""

    def _use(self, connection: Connection, channel: Any) -> None:
        channel.queue_declare(PREDICTIONS, durable=True, auto_delete=False)
        channel.basic_qos(0, _PREFETCH, False)
        last: list[int] = []
        channel.basic_consume(PREDICTIONS, callback=lambda message: last.append(self._note(message)))
        while not self._stopping.is_set():
            try:
                connection.drain_events(timeout=0.5)
            except TimeoutError:
                continue
            finally:
                if last:
                    channel.basic_ack(last[-1], multiple=True)
                    last.clear()

    def _note(self, message: Any) -> int:
        about, headers = message.properties, message.headers
        seen = (
            headers["x-qinfer-request-id"],
            headers["x-qinfer-state"],
            about["correlation_id"],
            bytes(message.body),
        )
        self._ledger.predictions.setdefault(about["message_id"], set()).add(seen)
        self._ledger.taken += 1
        return int(message.delivery_info["delivery_tag"])


def _confirm(tags: set[int], tag: int, *, multiple: bool) -> None:
    tags -= {each for each in tags if each <= tag} if multiple else {tag}


def left_in(rabbit: RabbitServer) -> dict[str, int]:
    """Returns how many messages wait in each queue."""
    connection = rabbit.connect()
    try:
        channel = connection.channel()
        found = {queue: channel.queue_declare(queue, passive=True) for queue in (TASKS, PREDICTIONS, DEAD)}
        return {queue: int(declared.message_count) for queue, declared in found.items()}
    finally:
        connection.release()


def judge(ledger: Ledger, count: int, left: dict[str, int], *, is_correlated: bool) -> Verdict:
    """Counts, and says what is wrong.

    Args:
        ledger: What was sent and what came.
        count: How many messages there were.
        left: What is still in the queues.
        is_correlated: Whether messages have a correlation id.
    """
    problems = [f"{number} messages are left in {queue}" for queue, number in left.items() if number]
    counts: Counter[str] = Counter()
    for number in range(count):
        seen = ledger.predictions.pop(f"m{number}", set())
        outcome, problem = _judge_one(number, seen, f"c{number}" if is_correlated else "")
        counts[outcome] += 1
        if problem:
            problems.append(f"m{number}: {problem}")
    problems += [f"{message_id} was never sent" for message_id in ledger.predictions]
    line = " ".join(f"{word}={counts[word]}" for word in ("right", "wrong", "several", "lost"))
    wire = f"repeated on the wire: {ledger.sent - count} messages, {ledger.taken - count} predictions"
    return Verdict(f"messages={count} {line}; {wire}", problems[:_SHOWN])


def _judge_one(number: int, seen: set[tuple[str, str, str, bytes]], expected_id: str) -> tuple[str, str]:
    if not seen:
        return "lost", "has no prediction"
    if len(seen) > 1:
        return "several", f"has {len(seen)} predictions: {sorted(seen)[:3]}"
    _, state, correlation_id, body = next(iter(seen))
    if (state, correlation_id) != ("succeeded", expected_id) or value_of(number, body) != 2.0 * number + 1.0:
        return "wrong", f"has another prediction: {next(iter(seen))}"
    return "right", ""
