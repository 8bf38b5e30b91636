"""The load generator of `qinfer bench`: keep-alive connections that repeat prepared requests.

A minimal HTTP/1.1 client: a general client costs more than the server that it measures.

    LoadConnection       one request after another
    OpenConnection       a request whenever one arrives
    StreamConnection     one request after another, answered by streams
    SequenceConnection   the steps of one sequence after another
    MixConnection        requests of several kinds by their shares
"""

import asyncio
import contextlib
import math
import signal
import ssl
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from secrets import randbelow
from typing import Any, NamedTuple, Self, cast
from urllib.parse import urlsplit

import uvloop
from httptools import HttpResponseParser

from qinfer.cli.console import CommandFailed
from qinfer.client.flows import header_value, sequence_parameters
from qinfer.core.messages import Scalar
from qinfer.observe.catalogue import BATCH_SIZE
from qinfer.wire.kserve_client import JSON_LENGTH_HEADER

CONNECT_TIMEOUT_S = 10.0
TIMER_S, WATCH_S = 0.002, 0.25
MOST_AT_ONCE = 1000
"""Arrivals in one turn of the loop."""
LAST_ANSWERS_S = 10.0
"""Time for requests in flight at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """The gateway's address, and the request as bytes."""

    host: str
    port: int
    tls: bool
    request: bytes

    @classmethod
    def for_url(cls, url: str, path: str, body: bytes, json_length: int | None, api_key: str | None = None) -> Self:
        """Prepares a target; `json_length` is set if tensors are binary."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        path = f"{parts.path.rstrip('/')}{path}"
        lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(body)}"]
        if json_length is not None:
            lines.append(f"{JSON_LENGTH_HEADER}: {json_length}")
        if api_key is not None:
            lines.append(f"Authorization: Bearer {header_value('api_key', api_key)}")
        head = "\r\n".join([*lines, "", ""]).encode()
        return cls(host=parts.hostname or "", port=parts.port or (443 if tls else 80), tls=tls, request=head + body)


@dataclass(slots=True)
class LoadReport:
    """The result of a load test.

    `errors` counts answers other than 200 and lost connections. `first_s` (streams) and `sequences_ended` may be
    `None`;
    `between_s` are times between responses. `interrupted` says that SIGINT ended it. With a
    deadline, `goodput_per_s` counts the answers within it.
    """

    concurrency: int
    deadline_s: float = math.inf
    duration_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    errors: int = 0
    first_error: str = ""
    mean_batch: float | None = None
    first_s: list[float] | None = None
    between_s: list[float] = field(default_factory=list)
    sequences_ended: int | None = None
    sequences_lost: int = 0
    interrupted: bool = False

    @property
    def requests_per_s(self) -> float:
        """Successful answers per second."""
        return len(self.latencies_s) / self.duration_s if self.duration_s else 0.0

    @property
    def goodput_per_s(self) -> float:
        """Successful answers within the deadline per second."""
        good = sum(latency_s <= self.deadline_s for latency_s in self.latencies_s)
        return good / self.duration_s if self.duration_s else 0.0

    def percentile_s(self, percent: float) -> float:
        """Returns a latency percentile, by nearest rank."""
        return percentile(self.latencies_s, percent)

    @property
    def responses_per_s(self) -> float:
        """Responses of streams per second."""
        return (len(self.first_s or ()) + len(self.between_s)) / self.duration_s if self.duration_s else 0.0

    def failed(self, text: str) -> None:
        """Counts an error."""
        self.errors += 1
        self.first_error = self.first_error or text

    def as_json(self) -> dict[str, Any]:
        """Returns the figures, latencies in milliseconds."""
        return {
            "concurrency": self.concurrency,
            "duration_s": round(self.duration_s, 3),
            "requests": len(self.latencies_s),
            "errors": self.errors,
            "first_error": self.first_error,
            "requests_per_s": round(self.requests_per_s, 1),
            **{f"p{p}_ms": round(self.percentile_s(p) * 1000, 3) for p in (50, 95, 99)},
            "longest_ms": round(self.percentile_s(100) * 1000, 3),
            "mean_batch": self.mean_batch,
            **({} if math.isinf(self.deadline_s) else {"goodput_per_s": round(self.goodput_per_s, 1)}),
            **({} if self.first_s is None else self._stream_json(self.first_s)),
            **({} if self.sequences_ended is None else self._sequence_json(self.sequences_ended)),
        }

    def _sequence_json(self, ended: int) -> dict[str, Any]:
        return {"sequences_ended": ended, "sequences_lost": self.sequences_lost}

    def _stream_json(self, first_s: Sequence[float]) -> dict[str, Any]:
        return {
            "responses": len(first_s) + len(self.between_s),
            "responses_per_s": round(self.responses_per_s, 1),
            **{f"first_response_p{p}_ms": round(percentile(first_s, p) * 1000, 3) for p in (50, 99)},
            **{f"between_responses_p{p}_ms": round(percentile(self.between_s, p) * 1000, 3) for p in (50, 99)},
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile by nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def run_load(target: LoadTarget, report: LoadReport, duration_s: float, load: "Load") -> LoadReport:
    """Loads a target by `report.concurrency` connections and fills the report; SIGINT ends it early.

    Raises:
        CommandFailed: The connections could not be made.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_load(target, report, duration_s, load))
    return report


def batch_counts(metrics_text: str, model: str) -> tuple[float, float]:
    """Reads (rows, executions) of a model from `/metrics`."""
    from prometheus_client.parser import text_string_to_metric_families

    rows = executions = 0.0
    for family in text_string_to_metric_families(metrics_text):
        for sample in family.samples:
            if sample.labels.get("model") != model:
                continue
            rows += sample.value if sample.name == f"{BATCH_SIZE.name}_sum" else 0.0
            executions += sample.value if sample.name == f"{BATCH_SIZE.name}_count" else 0.0
    return rows, executions


def mean_batch(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    """Returns the mean batch size between two `batch_counts`."""
    executions = after[1] - before[1]
    return round((after[0] - before[0]) / executions, 2) if executions > 0 else None


NextRequest = Callable[[], bytes]


class LoadConnection(asyncio.Protocol):
    """Sends a request, waits for its answer, repeats; until `stopping` or an error."""

    def __init__(self, request: NextRequest, report: LoadReport, ended: Callable[["LoadConnection"], None]) -> None:
        self._request = request
        self._report = report
        self._ended = ended
        self._parser = HttpResponseParser(self)
        self._buffer = b""
        self.stopping = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the first request."""
        # uvloop's transports do not inherit from asyncio.Transport
        self._transport = cast("asyncio.Transport", transport)
        self._send_request()

    def data_received(self, data: bytes) -> None:
        """Reads a piece of an answer."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Keeps the body of an error, for the parser."""
        if self._parser.get_status_code() != 200:
            self._buffer += body

    def on_message_complete(self) -> None:
        """Counts an answer, and goes on, for the parser."""
        status = self._parser.get_status_code()
        self._on_response("" if status == 200 else f"HTTP {status}: {self._buffer[:300].decode(errors='replace')}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Reports the end, an error unless stopped."""
        if not self.stopping:
            self._report.failed(f"connection lost: {exc or 'closed by the server'}")
        self._ended(self)

    def stop(self) -> None:
        """Ends the connection after the next answer."""
        self.stopping = True

    def abort(self) -> None:
        """Ends now; a missing answer is an error."""
        self._report.failed("no answer at the end of the test")
        self.stopping = True
        self._transport.abort()

    def _send_request(self) -> None:
        self._buffer = b""
        self._sent_s = time.perf_counter()
        self._transport.write(self._request())

    def _on_response(self, error: str) -> None:
        if error:
            self._report.failed(error)
        else:
            self._report.latencies_s.append(time.perf_counter() - self._sent_s)
        self._go_on()

    def _go_on(self) -> None:
        if self.stopping:
            self._transport.close()
        else:
            self._send_request()


class OpenConnection(LoadConnection):
    """Sends a request when one arrives. Latencies count from the arrival, so that waiting for a connection counts."""

    def __init__(
        self,
        request: NextRequest,
        free: Callable[["OpenConnection"], None],
        report: LoadReport,
        ended: Callable[[LoadConnection], None],
    ) -> None:
        super().__init__(request, report, ended)
        self._free = free

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for a request."""
        self._transport = cast("asyncio.Transport", transport)
        self._free(self)

    def send(self, arrived_s: float) -> None:
        """Sends a request that arrived at an instant of `perf_counter`."""
        self._send_request()
        self._sent_s = arrived_s

    def close(self) -> None:
        """Closes an idle connection."""
        self.stopping = True
        self._transport.close()

    def _go_on(self) -> None:
        if self.stopping:
            self._transport.close()
        else:
            self._free(self)


class Arrivals:
    """Gives requests that arrive at given gaps to idle connections; the others wait for one."""

    def __init__(self, gaps_s: Iterator[float]) -> None:
        self._gaps_s = gaps_s
        self._idle: list[OpenConnection] = []
        self._waiting: deque[float] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def begin(self) -> None:
        """Starts the arrivals."""
        self._loop = asyncio.get_running_loop()
        self._due_s = time.perf_counter()
        self._arrive()

    def free(self, connection: OpenConnection) -> None:
        """Takes a connection that has no request."""
        if self._waiting:
            connection.send(self._waiting.popleft())
        else:
            self._idle.append(connection)

    def stop(self, report: LoadReport) -> None:
        """Ends the arrivals; requests that wait for a connection are errors."""
        if self._timer is not None:
            self._timer.cancel()
        for _ in self._waiting:
            report.failed(f"not sent: all {report.concurrency} connections were busy; give a larger --concurrency")
        self._waiting.clear()
        for connection in self._idle:
            connection.close()

    def _arrive(self) -> None:
        now_s = time.perf_counter()
        for _ in range(MOST_AT_ONCE):
            if self._due_s > now_s:
                break
            # timers are a millisecond late, which is not the server's fault
            arrived_s = now_s if now_s - self._due_s < TIMER_S else self._due_s
            if self._idle:
                self._idle.pop().send(arrived_s)
            else:
                self._waiting.append(arrived_s)
            gap_s = next(self._gaps_s, None)
            if gap_s is None:
                return
            self._due_s += gap_s
        self._timer = self._loop.call_later(max(self._due_s - now_s, 0.0), self._arrive)


class StreamConnection(LoadConnection):
    """Measures streamed responses (`/v1/…/infer_stream`)."""

    def __init__(self, request: NextRequest, report: LoadReport, ended: Callable[[LoadConnection], None]) -> None:
        super().__init__(request, report, ended)
        if report.first_s is None:
            report.first_s = []
        self._first_s = report.first_s
        self._last_s = 0.0
        self._error = b""

    def _send_request(self) -> None:
        self._last_s, self._error = 0.0, b""
        super()._send_request()

    def on_body(self, body: bytes) -> None:
        """Measures the events of a stream."""
        if self._parser.get_status_code() != 200:
            super().on_body(body)
            return
        now_s = time.perf_counter()
        *events, self._buffer = (self._buffer + body).split(b"\n\n")
        for event in events:
            if b"event: error" in event:
                self._error = event
            elif not self._last_s:
                self._first_s.append(now_s - self._sent_s)
            else:
                self._report.between_s.append(now_s - self._last_s)
            self._last_s = now_s

    def _on_response(self, error: str) -> None:
        super()._on_response(error or self._error.decode(errors="replace")[:300])


class StepRequests:
    """The requests of sequences; the first id is random, because loads may be concurrent."""

    def __init__(self, encode: Callable[[Mapping[str, Scalar]], bytes], per_sequence: int) -> None:
        self.encode = encode
        self.per_sequence = per_sequence
        # a model may take the id as INT32
        self._ids = count(1 + randbelow(2**30))

    def next_id(self) -> int:
        """Returns the id of another sequence."""
        return next(self._ids)


class SequenceConnection(LoadConnection):
    """Sends sequences from START to END; `stop` ends the current one first."""

    def __init__(self, steps: StepRequests, report: LoadReport, ended: Callable[[LoadConnection], None]) -> None:
        super().__init__(lambda: self._step, report, ended)
        self._step = b""
        report.sequences_ended = report.sequences_ended or 0
        self._steps = steps
        self._id = 0
        # 0 = no sequence is open
        self._number = 0
        self._is_last = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Reports the end of connection and sequence."""
        self._report.sequences_lost += self._number > 0
        super().connection_lost(exc)

    def _send_request(self) -> None:
        if not self._number:
            self._id = self._steps.next_id()
        self._number += 1
        self._is_last = self.stopping or self._number == self._steps.per_sequence
        if self._number <= 2 or self._is_last:
            self._step = self._steps.encode(sequence_parameters(self._id, start=self._number == 1, end=self._is_last))
        super()._send_request()

    def _on_response(self, error: str) -> None:
        if error:
            self._report.sequences_lost += 1
            self._number = 0
        elif self._is_last:
            self._report.sequences_ended = (self._report.sequences_ended or 0) + 1
            self._number = 0
        super()._on_response(error)

    def _go_on(self) -> None:
        if self._number:
            self._send_request()
        else:
            super()._go_on()


class LoadPart:
    """One kind of requests in a mixed load.

    Attributes:
        following: Returns the next request.
        share: Its share of the requests, in any unit.
        streams: Whether its answers are streams.
        latencies_s: The latencies of its answers.
    """

    def __init__(self, following: NextRequest, share: float = 1.0, *, streams: bool = False) -> None:
        self.following, self.share, self.streams = following, share, streams
        self.latencies_s: list[float] = []


def by_share(parts: Sequence[LoadPart]) -> Iterator[LoadPart]:
    """Yields parts evenly interleaved, each as often as its share says (smooth weighted round robin)."""
    credit, total = [0.0] * len(parts), sum(part.share for part in parts)
    while True:
        credit = [one + part.share for one, part in zip(credit, parts, strict=True)]
        chosen = max(range(len(parts)), key=credit.__getitem__)
        credit[chosen] -= total
        yield parts[chosen]


class MixConnection(StreamConnection):
    """Sends the requests of a mixed load; each kind has latencies of its own, too."""

    def __init__(self, parts: Iterator[LoadPart], report: LoadReport, ended: Callable[[LoadConnection], None]) -> None:
        super().__init__(lambda: self._part.following(), report, ended)
        self._parts = parts

    def _send_request(self) -> None:
        self._part = next(self._parts)
        super()._send_request()

    def on_body(self, body: bytes) -> None:
        """Measures the events of a stream, or keeps the body of an error."""
        if self._part.streams:
            super().on_body(body)
        else:
            LoadConnection.on_body(self, body)

    def _on_response(self, error: str) -> None:
        if not error and not self._error:
            self._part.latencies_s.append(time.perf_counter() - self._sent_s)
        super()._on_response(error)


MakeConnection = Callable[[LoadReport, Callable[[LoadConnection], None]], LoadConnection]
"""Gets the report, and the function to call at the end."""


class Load(NamedTuple):
    """How connections are made, and when requests arrive; `None`: as soon as the one before is answered."""

    make: MakeConnection
    arrivals: Arrivals | None = None
    watch: Callable[[LoadReport], None] | None = None
    """Called each `WATCH_S` while the load runs."""


def poisson(rate: float, seed: int = 0) -> Iterator[float]:
    """Yields the gaps of random arrivals, `rate` a second on average (exponential distribution)."""
    expovariate = Random(seed).expovariate  # noqa: S311  not for security
    while True:
        yield expovariate(rate)


def histogram(latencies_s: Sequence[float], most: int = 12) -> list[tuple[float, int]]:
    """Returns upper bounds (1, 2, 5, 10, … of a unit) and counts of at most `most` ranges that have latencies."""
    bounds = [10.0**power * times for power in range(-5, 4) for times in (1, 2, 5)]
    counts = [0] * (len(bounds) + 1)
    for latency_s in latencies_s:
        counts[bisect_left(bounds, latency_s)] += 1
    used = [place for place, count in enumerate(counts) if count]
    if not used:
        return []
    return [
        ((*bounds, math.inf)[place], counts[place]) for place in range(max(used[0], used[-1] - most + 1), used[-1] + 1)
    ]


async def _load(target: LoadTarget, report: LoadReport, duration_s: float, load: Load) -> None:
    open_connections: set[LoadConnection] = set()
    over, all_closed = asyncio.Event(), asyncio.Event()

    def ended(connection: LoadConnection) -> None:
        open_connections.discard(connection)
        if not open_connections:
            all_closed.set()
            over.set()

    def interrupt() -> None:
        report.interrupted = True
        over.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
    started_s = time.perf_counter()
    await _connect(target, open_connections, lambda: load.make(report, ended), report.concurrency)
    if load.arrivals is not None:
        started_s = time.perf_counter()
        load.arrivals.begin()
    await _run_until(over, started_s, duration_s, report, load)
    if load.arrivals is not None:
        load.arrivals.stop(report)
    for connection in open_connections:
        connection.stop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_ANSWERS_S):
            await all_closed.wait()
    report.duration_s = time.perf_counter() - started_s
    for connection in tuple(open_connections):
        connection.abort()


async def _connect(
    target: LoadTarget, connections: set[LoadConnection], make: Callable[[], LoadConnection], count: int
) -> None:
    loop = asyncio.get_running_loop()
    tls = ssl.create_default_context() if target.tls else None
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            for _ in range(count):
                connection = make()
                connections.add(connection)
                await loop.create_connection(lambda c=connection: c, target.host, target.port, ssl=tls)
    except (OSError, TimeoutError) as error:
        made = len(connections) - 1
        raise CommandFailed(f"{made} of {count} connections could be made, then: {error}") from None


async def _run_until(over: asyncio.Event, started_s: float, duration_s: float, report: LoadReport, load: Load) -> None:
    until_s = started_s + duration_s
    while not over.is_set() and (left_s := until_s - time.perf_counter()) > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), left_s if load.watch is None else min(left_s, WATCH_S))
        if load.watch is not None:
            report.duration_s = time.perf_counter() - started_s
            load.watch(report)
