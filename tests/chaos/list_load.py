"""The sender of numbered plain messages to a Redis list, and the taker of the predictions, through kills of that Redis.

The sender notes in the step that pushes messages how far it has come, so that each is pushed once: a plain message has
no id by which a repetition could be known. The taker reads predictions, notes them, and removes them then.
"""

import base64
import time
from pathlib import Path
from typing import Any

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.chaos.bridge_load import DEAD, PREDICTIONS, TASKS, Ledger, Patient, body_of
from tests.support.servers.servers import RedisServer, redis_6_2

_PUSHED = "pushed"
_BATCH = 50
_PAUSE_S = 0.02
_BROKEN = (redis.RedisError, OSError)


class ListServer(RedisServer):
    """A Redis whose confirmed writes survive a kill."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        super().__init__(redis_6_2(), directory, "--appendonly", "yes", "--appendfsync", "always")

    def end(self) -> None:
        """SIGTERM."""
        self.stop()

    def once(self) -> redis.Redis:
        """Returns a client that sends no command twice."""
        return redis.Redis(port=self.port, protocol=2, socket_timeout=10.0, retry=Retry(NoBackoff(), 0))


class ListSender(Patient):
    """Pushes messages evenly over some seconds.

    Args:
        server: Where to.
        ledger: Where it is noted.
        count: How many.
        seconds: In how many seconds, where it can.
    """

    def __init__(self, server: ListServer, ledger: Ledger, count: int, seconds: float) -> None:
        super().__init__(ledger, _BROKEN)
        self._server = server
        self._count = count
        self._rate = count / seconds
        self.is_done = False

    def _work(self) -> None:
        with self._server.once() as client:
            first = done = int(client.get(_PUSHED) or 0)
            begin_s = time.monotonic()
            while done < self._count and not self._stopping.is_set():
                numbers = range(done, min(done + _BATCH, self._count))
                with client.pipeline() as pipe:
                    pipe.lpush(TASKS, *(body_of(number)[0] for number in numbers))
                    pipe.set(_PUSHED, numbers.stop)
                    pipe.execute()
                done = self._ledger.sent = numbers.stop
                self._stopping.wait(max(begin_s + (done - first) / self._rate - time.monotonic(), 0.0))
        if done >= self._count:
            self.is_done = True
            self._stopping.set()


class ListTaker(Patient):
    """Takes all predictions.

    Args:
        server: Where they are.
        ledger: Where they are noted.
    """

    def __init__(self, server: ListServer, ledger: Ledger) -> None:
        super().__init__(ledger, _BROKEN)
        self._server = server

    def _work(self) -> None:
        with self._server.once() as client:
            while not self._stopping.is_set():
                found: list[Any] = client.lrange(PREDICTIONS, -_BATCH, -1)
                for text in found:
                    self._note(text)
                if found:
                    client.ltrim(PREDICTIONS, 0, -len(found) - 1)
                else:
                    self._stopping.wait(_PAUSE_S)

    def _note(self, text: bytes) -> None:
        envelope = msgspec.json.decode(text)
        headers, body = envelope["headers"], base64.b64decode(envelope["body"])
        seen = (headers["x-qinfer-request-id"], headers["x-qinfer-state"], "", body)
        self._ledger.predictions.setdefault(f"m{_number_of(body)}", set()).add(seen)
        self._ledger.taken += 1


def _number_of(body: bytes) -> int:
    """Returns which message a prediction is of: a KServe reply has its id, and a row only the sum, 2n + 1."""
    reply = msgspec.json.decode(body)
    return int(reply["id"]) if "id" in reply else round((reply["sum"] - 1) / 2)


def left_in_lists(server: ListServer) -> dict[str, int]:
    """Returns how many messages wait in each list, and how many are in hand."""
    with server.client() as client, client.pipeline() as pipe:
        lists = (TASKS, PREDICTIONS, DEAD, f"{TASKS}:arriving")
        for name in lists:
            pipe.llen(name)
        pipe.hlen(f"{TASKS}:taken")
        pipe.zcard(f"{TASKS}:leases")
        pipe.hlen(f"{TASKS}:oversized")
        return dict(zip((*lists, "taken", "leases", "oversized"), pipe.execute(), strict=True))
