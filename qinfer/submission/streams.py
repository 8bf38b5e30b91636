"""The reader's side of streams: which responses its caller gets, and how much of them its caller has taken.

A request to a decoupled model has any number of responses. A worker that dies in the middle leaves it to another one,
whose responses begin anew, and while Redis was away the same responses may come twice. `StreamReader` decides for each
of them, without I/O. `Credits` tells the workers what was taken, so that they send more: see `qinfer.batching.streams`
for their side.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto

import msgspec

from qinfer.core.messages import Credit, Response
from qinfer.core.retry import Backoff
from qinfer.errors import DeliveryError, ErrorCode, StreamBroken
from qinfer.queue.lanes import Queue
from qinfer.wire.frame import encode_credits

_LAZY_S = 0.02
_SELDOM_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Verdict(Enum):
    """The fate of a response.

    Attributes:
        DELIVER: It is the next one, or the request's last.
        DROP: Its caller has it, or it is another execution's.
        BREAK: The stream can't go on.
    """

    DELIVER = auto()
    DROP = auto()
    BREAK = auto()


class StreamReader(msgspec.Struct, eq=False):
    """Account of one stream where it is read.

    One execution is followed. Before its caller has had a response, a later execution is followed instead. Afterwards a
    later one breaks the stream, unless the model gives the same responses each time (`resumes`): then those that its
    caller has are dropped, and the rest is delivered. So every response is delivered once, and in order.

    Attributes:
        request_id: The request.
        resumes: `ModelSpec.stream_resume`.
        pause_s: The longest wait for a response.
        ends_s: When the whole stream is over, on the monotonic clock.
        now_s: Returns the monotonic clock's time.
        owes: Called when its worker is to be told what was taken.
        heard_s: When a response came or was taken last; 0 before the first.
        attempt: The execution that is followed; 0 before the first response.
        seen: Responses of that execution that came.
        delivered: Responses that its caller was given, of all executions.
        credit_to: The reply address of the worker that counts the window; empty where nobody counts.
        arrived_bytes: Outputs of the followed execution that came.
        held_bytes: Outputs that were delivered and are not taken yet.
        told_bytes: What the followed execution was told of.
        told_s: When it was told last.
        is_cancelled: Its caller wants no more, and still takes what comes.
        is_urgent: Its worker is to be told of that.
    """

    request_id: str
    resumes: bool
    pause_s: float
    ends_s: float
    now_s: Callable[[], float]
    owes: "Callable[[StreamReader], None]"
    heard_s: float = 0.0
    attempt: int = 0
    seen: int = 0
    delivered: int = 0
    credit_to: str = ""
    arrived_bytes: int = 0
    held_bytes: int = 0
    told_bytes: int = 0
    told_s: float = 0.0
    is_cancelled: bool = False
    is_urgent: bool = False

    def judge(self, response: Response) -> Verdict:
        """Decides what becomes of a response, and takes note of it."""
        self.heard_s = self.now_s()
        if response.attempt < self.attempt:
            return Verdict.DROP
        if response.attempt > self.attempt:
            if self.delivered and not self.resumes:
                return Verdict.BREAK
            self.attempt, self.seen = response.attempt, 0
            self.arrived_bytes = self.told_bytes = 0
        if response.failure is not None and response.final:
            return Verdict.BREAK if response.failure.code == ErrorCode.STREAM_BROKEN else Verdict.DELIVER
        if response.index != self.seen:
            return Verdict.DROP if response.index < self.seen else Verdict.BREAK
        self.seen += 1
        nbytes = response.nbytes
        self.credit_to = response.credit_to
        self.arrived_bytes += nbytes
        if response.index < self.delivered:
            self._owe()
            return Verdict.BREAK if response.final else Verdict.DROP
        self.delivered += 1
        self.held_bytes += nbytes
        return Verdict.DELIVER

    def took(self, nbytes: int) -> None:
        """Takes note of outputs that were delivered and have left: by a socket, or to a model that asked for them."""
        self.heard_s = self.now_s()
        self.held_bytes -= nbytes
        self._owe()

    def cancel(self) -> bool:
        """Has its worker told that its caller wants no more; returns whether a worker is known."""
        if not self.credit_to:
            return False
        self.is_cancelled = self.is_urgent = True
        self.owes(self)
        return True

    @property
    def taken_bytes(self) -> int:
        """Bytes of outputs of the followed execution that its caller has: it has the first ones that came."""
        return max(self.arrived_bytes - self.held_bytes, 0)

    @property
    def until_s(self) -> float:
        """Until when it may go on, on the monotonic clock, if no response comes any more.

        A response that its caller has not taken keeps the model waiting, and not the other way round: its worker ends
        the stream of a caller that takes nothing.
        """
        return min((self.now_s() if self.held_bytes else self.heard_s) + self.pause_s, self.ends_s)

    def broken(self) -> StreamBroken:
        """Returns the error of a stream that can't go on."""
        return StreamBroken(
            f"the worker that executed the request ended after {self.delivered} responses; send the request again"
        )

    def _owe(self) -> None:
        if self.credit_to and self.taken_bytes > self.told_bytes:
            self.owes(self)


class Credits:
    """Tells workers how much of their streams was taken; one for each process that reads streams.

    What makes up a quarter of the window is told at once. Less is told when nothing else is to be taken, a little later
    and with others of the same worker: its stream may be one of many small responses, which wait for no credit. A
    caller that takes slowly is told of every few seconds, so that its worker does not think that it takes nothing.

    Args:
        queue: The queue.
        window_bytes: Outputs of one stream that may be on their way.
        is_open: Tells whether a request of an id still waits for responses.
    """

    def __init__(self, queue: Queue, window_bytes: int, is_open: Callable[[str], bool]) -> None:
        self._queue = queue
        self._urgent_bytes = max(window_bytes // 4, 1)
        self._is_open = is_open
        self._owing: dict[StreamReader, None] = {}
        self._owed = asyncio.Event()
        self._urgent = asyncio.Event()

    def owe(self, reader: StreamReader) -> None:
        """Takes note of a stream of which more was taken than its worker knows."""
        if reader.is_urgent or reader.taken_bytes - reader.told_bytes >= self._urgent_bytes:
            self._urgent.set()
        elif reader.held_bytes and reader.heard_s - reader.told_s < _SELDOM_S:
            return
        self._owing[reader] = None
        self._owed.set()

    async def run(self) -> None:
        """Tells until cancelled; what can't be told while Redis is away is told afterwards."""
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            await self._owed.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAZY_S):
                    await self._urgent.wait()
            try:
                await self.tell()
            except DeliveryError:
                await asyncio.sleep(backoff.next_s())
            else:
                backoff.reset()

    async def tell(self) -> None:
        """Tells what is owed now.

        Raises:
            DeliveryError: Some was not told, and is still owed.
        """
        owing, self._owing = self._owing, {}
        self._owed.clear()
        self._urgent.clear()
        by_worker: dict[str, list[StreamReader]] = {}
        for reader in owing:
            if self._is_open(reader.request_id):
                by_worker.setdefault(reader.credit_to, []).append(reader)
        outcomes = await asyncio.gather(
            *(self._tell(worker, readers) for worker, readers in by_worker.items()), return_exceptions=True
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _tell(self, worker: str, readers: list[StreamReader]) -> None:
        told = [
            Credit(reader.request_id, reader.attempt, reader.taken_bytes, reader.is_cancelled) for reader in readers
        ]
        for reader in readers:
            reader.told_bytes, reader.told_s = reader.taken_bytes, reader.heard_s
            reader.is_urgent = False
        try:
            # A worker whose reply stream is gone has ended: another one executes the request.
            await self._queue.publish(worker, encode_credits(told))
        except DeliveryError:
            for reader in readers:
                reader.told_bytes, reader.is_urgent = 0, reader.is_cancelled
                self.owe(reader)
            raise
