"""The load generator: its HTTP client fed by hand, and its figures."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter

from qinfer.cli.console import CommandFailed
from qinfer.cli.infer import _check_kinds, _read_gaps
from qinfer.cli.load import (
    Arrivals,
    Load,
    LoadConnection,
    LoadReport,
    LoadTarget,
    OpenConnection,
    SequenceConnection,
    StepRequests,
    StreamConnection,
    batch_counts,
    histogram,
    mean_batch,
    poisson,
    run_load,
)
from qinfer.errors import InvalidRequest


class FakeTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def report() -> LoadReport:
    return LoadReport(concurrency=1)


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport()


@pytest.fixture
def connection(report: LoadReport, transport: FakeTransport) -> LoadConnection:
    connection = LoadConnection(lambda: b"request", report, lambda _connection: None)
    connection.connection_made(transport)
    return connection


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nContent-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_answer_is_read_however_it_is_cut(
    connection: LoadConnection, report: LoadReport, transport: FakeTransport, size: int
) -> None:
    """The next request leaves when the whole answer is there, not before."""
    for begin in range(0, len(ANSWER), size):
        assert transport.written == [b"request"]
        connection.data_received(ANSWER[begin : begin + size])

    assert len(report.latencies_s) == 1
    assert transport.written == [b"request", b"request"]


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
RESPONSE, ERROR = (
    chunk(b'event: response\ndata: {"outputs": []}\n\n'),
    chunk(b'event: error\ndata: {"error": "broken"}\n\n'),
)
END = b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_responses_of_a_stream_are_counted_however_they_are_cut(
    report: LoadReport, transport: FakeTransport, size: int
) -> None:
    """A stream of three responses has a first one, and two times between; the next begins anew."""
    connection = StreamConnection(lambda: b"request", report, lambda _connection: None)
    connection.connection_made(transport)
    text = STREAM_HEAD + 3 * RESPONSE + END

    for begin in [*range(0, len(text), size)] * 2:
        connection.data_received(text[begin : begin + size])

    assert report.first_s is not None
    assert (len(report.first_s), len(report.between_s), len(report.latencies_s), report.errors) == (2, 4, 2, 0)
    assert transport.written == [b"request"] * 3
    assert report.as_json()["responses"] == 6


def test_a_stream_that_breaks_is_an_error(report: LoadReport, transport: FakeTransport) -> None:
    """Its first response had its time."""
    connection = StreamConnection(lambda: b"request", report, lambda _connection: None)
    connection.connection_made(transport)

    connection.data_received(STREAM_HEAD + RESPONSE + ERROR + END)
    connection.data_received(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nfull")

    assert (report.errors, report.latencies_s, report.first_s is not None and len(report.first_s)) == (2, [], 1)
    assert "broken" in report.first_error


def test_error_answer_is_counted_with_its_text(connection: LoadConnection, report: LoadReport) -> None:
    """The first error is shown, the load goes on."""
    connection.data_received(b'HTTP/1.1 503 Service Unavailable\r\ncontent-length: 16\r\n\r\n{"error": "full"')

    assert (report.errors, report.latencies_s) == (1, [])
    assert report.first_error == 'HTTP 503: {"error": "full"'


def test_lost_connection_is_an_error(connection: LoadConnection, report: LoadReport) -> None:
    """A server that closes on us failed the request in flight."""
    connection.connection_lost(None)

    assert report.first_error == "connection lost: closed by the server"


def test_stop_closes_after_the_answer(connection: LoadConnection, report: LoadReport, transport: FakeTransport) -> None:
    """The request in flight still counts; its end is no error."""
    connection.stop()
    connection.data_received(ANSWER)
    connection.connection_lost(None)

    assert (len(report.latencies_s), report.errors, transport.closed) == (1, 0, True)
    assert transport.written == [b"request"]


def test_request_has_the_binary_header_only_with_binary_tensors() -> None:
    """Without it the whole body is JSON (reference §1.7)."""
    plain = LoadTarget.for_url("http://h:1/base/", "/v2/models/a%20b/infer", b"{}", None)
    binary = LoadTarget.for_url("https://h", "/v2/models/m/infer", b"{}x", 2)

    assert plain.request == (b"POST /base/v2/models/a%20b/infer HTTP/1.1\r\nHost: h:1\r\nContent-Length: 2\r\n\r\n{}")
    assert b"Inference-Header-Content-Length: 2\r\n" in binary.request
    assert (binary.host, binary.port, binary.tls) == ("h", 443, True)


def test_run_against_nobody_fails_clearly(unused_tcp_port: int) -> None:
    """No server, no figures."""
    with pytest.raises(CommandFailed, match="0 of 2 connections could be made"):
        run_load(
            LoadTarget.for_url(f"http://127.0.0.1:{unused_tcp_port}", "/", b"{}", None),
            LoadReport(concurrency=2),
            0.1,
            Load(partial(LoadConnection, lambda: b"")),
        )


def test_percentiles_are_by_nearest_rank() -> None:
    """Latencies come in any order."""
    report = LoadReport(concurrency=1, duration_s=2.0, latencies_s=[n / 1000 for n in range(100, 0, -1)])

    figures = report.as_json()

    assert (figures["p50_ms"], figures["p95_ms"], figures["p99_ms"]) == (51.0, 96.0, 100.0)
    assert figures["longest_ms"] == 100.0
    assert figures["requests_per_s"] == 50.0


def test_figures_of_an_empty_run_are_zeros() -> None:
    """Nothing measured is no crash."""
    assert LoadReport(concurrency=1).as_json()["p99_ms"] == 0.0


def test_mean_batch_is_of_the_run_alone() -> None:
    """Counters only grow: the difference is the run's, summed over the model's versions."""
    text = "".join(
        f'qinfer_batch_size_rows_{kind}{{model="{model}",version="{version}"}} {value}\n'
        for model, version, kind, value in [
            ("m", 1, "sum", 90),
            ("m", 1, "count", 10),
            ("m", 2, "sum", 30),
            ("m", 2, "count", 10),
            ("other", 1, "sum", 5),
        ]
    )
    after = batch_counts("# TYPE qinfer_batch_size_rows histogram\n" + text, "m")

    assert after == (120.0, 20.0)
    assert mean_batch((20.0, 10.0), after) == 10.0
    assert mean_batch(after, after) is None


def step_answer(status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: 2\r\n\r\nok" % status


@pytest.fixture
def of_sequences(report: LoadReport, transport: FakeTransport) -> SequenceConnection:
    steps = StepRequests(lambda parameters: json.dumps(dict(parameters)).encode(), 3)
    connection = SequenceConnection(steps, report, lambda _connection: None)
    connection.connection_made(transport)
    return connection


def sent(transport: FakeTransport) -> list[tuple[int, list[str]]]:
    """Returns the sequence of each step, counted from 1, and its flags."""
    steps = [json.loads(text) for text in transport.written]
    ids = list(dict.fromkeys(step["sequence_id"] for step in steps))
    return [(1 + ids.index(step["sequence_id"]), [key for key in step if key != "sequence_id"]) for step in steps]


def test_sequences_are_sent_one_after_the_other(
    of_sequences: SequenceConnection, report: LoadReport, transport: FakeTransport
) -> None:
    for _ in range(4):
        of_sequences.data_received(step_answer())

    start, end = "sequence_start", "sequence_end"
    assert sent(transport) == [(1, [start]), (1, []), (1, [end]), (2, [start]), (2, [])]
    assert (report.sequences_ended, report.sequences_lost, len(report.latencies_s)) == (1, 0, 4)


def test_a_step_that_fails_loses_its_sequence(
    of_sequences: SequenceConnection, report: LoadReport, transport: FakeTransport
) -> None:
    """Another one is begun."""
    of_sequences.data_received(step_answer())
    of_sequences.data_received(step_answer(b"503 Service Unavailable"))

    assert sent(transport) == [(1, ["sequence_start"]), (1, []), (2, ["sequence_start"])]
    assert (report.sequences_ended, report.sequences_lost, report.errors) == (0, 1, 1)


def test_a_stopped_connection_ends_its_sequence(
    of_sequences: SequenceConnection, report: LoadReport, transport: FakeTransport
) -> None:
    """No sequence of a load is left to its idle time."""
    of_sequences.stop()
    of_sequences.data_received(step_answer())
    assert not transport.closed
    of_sequences.data_received(step_answer())

    assert sent(transport) == [(1, ["sequence_start"]), (1, ["sequence_end"])]
    assert transport.closed
    assert report.sequences_ended == 1


def test_figures_of_sequences_are_told_where_there_are_some(report: LoadReport) -> None:
    assert "sequences_ended" not in report.as_json()
    report.sequences_ended = 4

    assert {"sequences_ended": 4, "sequences_lost": 0}.items() <= report.as_json().items()


async def test_requests_arrive_whether_or_not_others_are_answered(report: LoadReport) -> None:
    """With one connection, the second of two arrivals waits; its latency counts from its arrival."""
    transport = FakeTransport()
    arrivals = Arrivals(iter([0.0]))
    connection = OpenConnection(lambda: b"request", arrivals.free, report, lambda _connection: None)
    connection.connection_made(transport)
    assert transport.written == []

    arrivals.begin()
    assert transport.written == [b"request"]
    connection.data_received(ANSWER)
    assert transport.written == [b"request", b"request"]
    connection.data_received(ANSWER)

    assert len(report.latencies_s) == 2
    assert report.latencies_s[1] > report.latencies_s[0]
    arrivals.stop(report)
    assert (transport.closed, report.errors) == (True, 0)


async def test_arrivals_that_found_no_connection_are_errors(report: LoadReport) -> None:
    arrivals = Arrivals(iter([0.0, 0.0]))
    connection = OpenConnection(lambda: b"request", arrivals.free, report, lambda _connection: None)
    connection.connection_made(FakeTransport())

    arrivals.begin()
    arrivals.stop(report)

    assert report.errors == 2
    assert "all 1 connections were busy" in report.first_error


def test_random_arrivals_have_their_rate_and_are_the_same_each_time() -> None:
    gaps, again = poisson(100.0), poisson(100.0)
    first = [next(gaps) for _ in range(10_000)]

    assert sum(first) == pytest.approx(100.0, rel=0.05)
    assert first[:5] == [next(again) for _ in range(5)]


def test_goodput_counts_answers_within_the_deadline() -> None:
    report = LoadReport(1, 0.02, duration_s=2.0, latencies_s=[0.01, 0.02, 0.03, 0.5])

    assert report.as_json()["goodput_per_s"] == 1.0
    assert "goodput_per_s" not in LoadReport(1).as_json()


def test_a_histogram_has_round_bounds() -> None:
    assert histogram([0.0009, 0.001, 0.0011, 0.004, 0.012]) == [
        (0.001, 2),
        (0.002, 1),
        (0.005, 1),
        (0.01, 0),
        (0.02, 1),
    ]
    assert histogram([]) == []


@pytest.mark.parametrize("text", ["", "0", "nan", "inf", "-1 2", "a", "1e-300", "0 0 0 1e-9"])
def test_gaps_are_seconds_of_at_most_a_million_arrivals_each(tmp_path: Path, text: str) -> None:
    """Gaps that never add up would arrive for ever."""
    trace = tmp_path / "gaps.txt"
    trace.write_text(text)
    with pytest.raises(InvalidRequest, match="has"):
        _read_gaps(trace)


def test_gaps_may_be_zero_between_others(tmp_path: Path) -> None:
    trace = tmp_path / "gaps.txt"
    trace.write_text("0\n0\n\n0.5\n")
    assert _read_gaps(trace) == [0.0, 0.0, 0.5]


def test_a_rate_and_a_trace_exclude_one_another() -> None:
    given = dict.fromkeys(("streaming", "sequences", "data", "inputs")) | {"rate": 5.0, "arrivals": Path("gaps.txt")}
    with pytest.raises(BadParameter, match="not both"):
        _check_kinds(given)
