"""The reader's side of streams: the responses that a caller gets, and the credit for those it has taken.

If a stream's worker dies, another begins again, and after an outage of Redis responses may come twice.
`qinfer.batching.streams` is the workers' side.
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


class ResponseFate(Enum):
    """Deliver a response, drop it, or break the stream."""

    DELIVER = auto()
    DROP = auto()
    BREAK = auto()


class StreamReader(msgspec.Struct, eq=False):
    """The account of one stream at its reader, without I/O.

    The reader follows one execution. Before the first delivery a later execution replaces it. Afterwards a later
    execution breaks the stream, unless the model repeats its responses exactly (`resumes`): then the reader drops
    responses that it has delivered.

    Attributes:
        owes: Called when its worker is to get credit.
        held_bytes: Delivered and not taken yet.
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

    def judge(self, response: Response) -> ResponseFate:
        """Decides about a response."""
        self.heard_s = self.now_s()
        if response.attempt < self.attempt:
            return ResponseFate.DROP
        if response.attempt > self.attempt:
            if self.delivered and not self.resumes:
                return ResponseFate.BREAK
            self.attempt, self.seen = response.attempt, 0
            self.arrived_bytes = self.told_bytes = 0
        if response.failure is not None and response.final:
            return ResponseFate.BREAK if response.failure.code == ErrorCode.STREAM_BROKEN else ResponseFate.DELIVER
        if response.index != self.seen:
            return ResponseFate.DROP if response.index < self.seen else ResponseFate.BREAK
        self.seen += 1
        nbytes = response.nbytes
        self.credit_to = response.credit_to
        self.arrived_bytes += nbytes
        if response.index < self.delivered:
            self._owe()
            return ResponseFate.BREAK if response.final else ResponseFate.DROP
        self.delivered += 1
        self.held_bytes += nbytes
        return ResponseFate.DELIVER

    def took(self, nbytes: int) -> None:
        """Records outputs that a socket or calling model has taken."""
        self.heard_s = self.now_s()
        self.held_bytes -= nbytes
        self._owe()

    def cancel(self) -> bool:
        """Tells its worker to stop; returns whether one is known."""
        if not self.credit_to:
            return False
        self.is_cancelled = self.is_urgent = True
        self.owes(self)
        return True

    @property
    def taken_bytes(self) -> int:
        """Outputs of the followed execution that are taken."""
        return max(self.arrived_bytes - self.held_bytes, 0)

    @property
    def until_s(self) -> float:
        """The end of the stream without further responses; with untaken responses only the worker ends the stream."""
        return min((self.now_s() if self.held_bytes else self.heard_s) + self.pause_s, self.ends_s)

    def broken(self) -> StreamBroken:
        """Returns the error of a broken stream."""
        return StreamBroken(
            f"the worker that executed the request ended after {self.delivered} responses; send the request again"
        )

    def _owe(self) -> None:
        if self.credit_to and self.taken_bytes > self.told_bytes:
            self.owes(self)


class Credits:
    """Tells workers how much of their streams the readers in this process have taken.

    A quarter of the window is credited at once, less a little later. A slow caller is reported every few seconds, so
    that its worker does not take it for gone.
    """

    def __init__(self, queue: Queue, window_bytes: int, is_open: Callable[[str], bool]) -> None:
        self._queue = queue
        self._urgent_bytes = max(window_bytes // 4, 1)
        self._is_open = is_open
        self._owing: dict[StreamReader, None] = {}
        self._owed = asyncio.Event()
        self._urgent = asyncio.Event()

    def owe(self, reader: StreamReader) -> None:
        """Schedules credit for a stream."""
        if reader.is_urgent or reader.taken_bytes - reader.told_bytes >= self._urgent_bytes:
            self._urgent.set()
        elif reader.held_bytes and reader.heard_s - reader.told_s < _SELDOM_S:
            return
        self._owing[reader] = None
        self._owed.set()

    async def run(self) -> None:
        """Tells until cancelled, retrying while Redis is away."""
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            await self._owed.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAZY_S):
                    await self._urgent.wait()
            try:
                await self.send_credits()
            except DeliveryError:
                await asyncio.sleep(backoff.next_s())
            else:
                backoff.reset()

    async def send_credits(self) -> None:
        """Sends all credit; after a `DeliveryError` the unsent credit is still owed."""
        owing, self._owing = self._owing, {}
        self._owed.clear()
        self._urgent.clear()
        by_worker: dict[str, list[StreamReader]] = {}
        for reader in owing:
            if self._is_open(reader.request_id):
                by_worker.setdefault(reader.credit_to, []).append(reader)
        outcomes = await asyncio.gather(
            *(self._send_to_worker(worker, readers) for worker, readers in by_worker.items()), return_exceptions=True
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _send_to_worker(self, worker: str, readers: list[StreamReader]) -> None:
        told = [
            Credit(reader.request_id, reader.attempt, reader.taken_bytes, reader.is_cancelled) for reader in readers
        ]
        for reader in readers:
            reader.told_bytes, reader.told_s = reader.taken_bytes, reader.heard_s
            reader.is_urgent = False
        try:
            # A worker without a reply stream has ended.
            await self._queue.publish(worker, encode_credits(told))
        except DeliveryError:
            for reader in readers:
                reader.told_bytes, reader.is_urgent = 0, reader.is_cancelled
                self.owe(reader)
            raise
