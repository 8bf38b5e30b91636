"""A measurement: what it asks the server beside the load, and when it ends."""

import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from unittest import mock

import pytest

from qinfer.cli.analyze.figures import Figures, Goal, LoadWindow, MeterRules
from qinfer.cli.analyze.loads import LoadPlan
from qinfer.cli.analyze.measure import Meter, is_enough
from qinfer.cli.analyze.search import Wanted
from qinfer.cli.analyze.space import Candidate, Point
from qinfer.cli.client import GatewayClient
from qinfer.cli.load import LoadConnection, LoadPart, LoadTarget
from qinfer.client import ModelStatistics
from qinfer.observe.host import ProcessUse

POINT = Point(Candidate(1, 8, 0.0, 1, "onnxruntime"), 2)


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def statistics(**executions: tuple[int, int]) -> list[ModelStatistics]:
    """Returns statistics with executions by rows (`of8`), and their milliseconds in all."""
    sizes = [
        {"batch_size": int(rows[2:]), "compute_infer": {"count": count, "ns": ms * 10**6}}
        for rows, (count, ms) in executions.items()
    ]
    return [ModelStatistics(name="m", version="1", fields={"batch_stats": sizes})]


def test_batches_are_those_between_two_readings_of_the_statistics(url: str) -> None:
    """The server answers four readings a second at most, so a measurement makes two, and does not read the metrics."""
    client = mock.Mock(spec=GatewayClient)
    client.statistics.side_effect = [
        statistics(of1=(10, 20), of4=(3, 9)),
        statistics(of1=(12, 30), of4=(3, 9), of8=(4, 32)),
    ]
    target = LoadTarget.for_url(url, "/", b"x", None)
    part = LoadPart(lambda: target.request)
    plan = LoadPlan(target, lambda *ends: LoadConnection(part.following, *ends), [part], "")
    meter = Meter(client, "m", plan, Goal(), MeterRules(0.01, math.inf), lambda: ProcessUse(0.0, 0), lambda: None)

    found = meter.measure(Wanted(POINT))

    assert found.errors == 0
    assert found.batches == ((1, 5.0), (8, 8.0))
    assert found.mean_batch == round((2 * 1 + 4 * 8) / 6, 2)
    assert client.method_calls == [mock.call.statistics("m")] * 2


def windows(*rates: float) -> Figures:
    return Figures(tuple(LoadWindow(rate, 1.0, 2.0, rate) for rate in rates))


@pytest.mark.parametrize(("rates", "to_beat"), [([100.0], 1e9), ([100.0, 101.0], 0.0), ([100.0, 120.0, 110.0], 0.0)])
def test_a_measurement_goes_on_while_it_is_wide(rates: list[float], to_beat: float) -> None:
    assert not is_enough(windows(*rates), Wanted(POINT, 0, to_beat), Goal())


@pytest.mark.parametrize(
    ("rates", "to_beat"), [([100.0, 101.0], 200.0), ([100.0, 100.1, 100.2], 0.0), ([100.0, 120.0] * 4, 0.0)]
)
def test_a_measurement_ends_when_it_is_narrow_or_long_or_can_not_win(rates: list[float], to_beat: float) -> None:
    assert is_enough(windows(*rates), Wanted(POINT, 0, to_beat), Goal())
