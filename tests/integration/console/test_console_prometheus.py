"""Charts of more than an hour: what a real Prometheus gives, and what becomes of one that is away, slow or hostile."""

import asyncio
import contextlib
import json
import math
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from pydantic import SecretStr

from qinfer.core.settings_sections import ConsoleSettings
from qinfer.errors import InvalidRequest
from qinfer.testing import wait_until
from qinfer_api.console import prometheus
from qinfer_api.console.history import TOTAL
from qinfer_api.console.prometheus import HOUR, RANGES, LongHistory, PrometheusFailed
from tests.support.deploy.deployments import tool
from tests.support.gateway import running_gateway, settings_of
from tests.support.servers.servers import free_port

SIX_HOURS, _, WEEK = RANGES[1:]
END_S = 1_770_001_200
"""A multiple of each range's step."""


class FakePrometheus:
    """A server of one answer, which notes what it was asked."""

    def __init__(self, answer: bytes = b"", status: str = "200 OK", headers: str = "", *, stalls: bool = False) -> None:
        self.answer, self.status, self.headers, self.stalls = answer, status, headers, stalls
        self.asked: list[dict[str, list[str]]] = []
        self.paths: list[str] = []
        self.heads: list[str] = []
        self._answering: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if self._answering:
            await asyncio.wait(self._answering)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        target = urlsplit(head.split()[1])
        self.paths.append(target.path)
        self.asked.append(parse_qs(target.query))
        self.heads.append(head)
        if self.stalls:
            await reader.read()  # until the client gives up
        else:
            length = f"content-length: {len(self.answer)}"
            lines = f"HTTP/1.1 {self.status}\r\n{length}\r\nconnection: close\r\n{self.headers}\r\n"
            writer.write(lines.encode() + self.answer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def matrix(*values: tuple[float, str]) -> bytes:
    result = [{"metric": {}, "values": values}]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()


@contextlib.asynccontextmanager
async def history(url: str, match: str = "", now_s: float = END_S + 10.0) -> AsyncIterator[LongHistory]:
    long = LongHistory(ConsoleSettings(prometheus_url=SecretStr(url), prometheus_match=match), lambda: now_s)
    try:
        yield long
    finally:
        await long.close()


async def test_points_are_put_on_the_grid_of_a_range() -> None:
    """Gaps, NaN and what lies outside of it are unknown."""
    start_s = END_S - SIX_HOURS.span_s
    values = [(start_s, "1.5"), (start_s + 120, "NaN"), (start_s + 130, "5"), (END_S, "3"), (END_S + 600, "7")]
    async with FakePrometheus(matrix(*values)).serving() as url, history(url) as long:
        columns = await long.columns(TOTAL, SIX_HOURS)

    assert set(columns) == {"at_s", "rate", "errors", "p50_s", "p99_s", "work_s"}
    assert {len(column) for column in columns.values()} == {361}
    assert (columns["at_s"][0], columns["at_s"][-1]) == (start_s, END_S)
    assert (columns["rate"][0], columns["rate"][-1]) == (1.5, 3.0)
    assert all(math.isnan(value) for value in columns["rate"][1:-1])


async def test_only_the_api_of_its_url_is_asked_with_the_labels_of_the_model() -> None:
    """A model's name is no part of the query's language, and user and password go along."""
    server = FakePrometheus(matrix())
    async with server.serving() as url:
        named = f"{url.replace('://', '://me:secret@')}/prometheus/"
        async with history(named, 'namespace="ml"') as long:
            await long.columns('a"} or vector(1):2', WEEK)

    assert set(server.paths) == {"/prometheus/api/v1/query_range"}
    assert {(one["start"][0], one["end"][0], one["step"][0]) for one in server.asked} == {
        (str(END_S - WEEK.span_s), str(END_S), "1800")
    }
    labels = r'{namespace="ml",model="a\"} or vector(1)",version="2"}'
    assert all(labels in one["query"][0] for one in server.asked)
    assert all("authorization: basic" in head.lower() for head in server.heads)


@pytest.mark.parametrize("series", ["digits", "digits:", ":1", "digits:one", "x" * 2000 + ":1"])
async def test_another_series_is_refused(series: str) -> None:
    server = FakePrometheus(matrix())
    async with server.serving() as url, history(url) as long:
        with pytest.raises(InvalidRequest, match="is no model with its version"):
            await long.columns(series, WEEK)

    assert server.paths == []


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (FakePrometheus(b"", "302 Found", "location: http://127.0.0.1:1/\r\n"), "a redirect, which is not followed"),
        (FakePrometheus(b'{"status":"error","error":"too many"}', "422 X"), "answered with status 422: too many"),
        (FakePrometheus(b'{"status":"error","error":"odd"}'), "answered with status 200: odd"),
        (FakePrometheus(b"<html>", "401 X"), "status 401, and not as Prometheus"),
        (FakePrometheus(b"[]"), "not as Prometheus"),
        (FakePrometheus(b"\xff"), "not as Prometheus"),
        (FakePrometheus(matrix((END_S, "many"))), "not as Prometheus"),
        (FakePrometheus(b" " * (prometheus.MOST_BYTES + 1)), "sent more than 1048576 bytes"),
        (FakePrometheus(b"", "nonsense"), "can't be reached"),
    ],
)
async def test_an_answer_that_is_none_has_a_reason(server: FakePrometheus, said: str) -> None:
    async with server.serving() as url, history(url) as long:
        with pytest.raises(PrometheusFailed, match=said) as failed:
            await long.columns(TOTAL, WEEK)

    assert "127.0.0.1" not in str(failed.value)


async def test_a_prometheus_that_is_away_or_stalls_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with history(f"http://127.0.0.1:{free_port()}") as long:
        with pytest.raises(PrometheusFailed, match="can't be reached"):
            await long.columns(TOTAL, WEEK)
    monkeypatch.setattr(prometheus, "WITHIN_S", 0.2)
    async with FakePrometheus(stalls=True).serving() as url, history(url) as long:
        with pytest.raises(PrometheusFailed, match="has not answered within"):
            await long.columns(TOTAL, WEEK)


async def test_an_answer_is_kept_for_a_while_and_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure too, so that an overloaded Prometheus is left alone."""
    monkeypatch.setattr(prometheus, "MOST_KEPT", 2)
    server = FakePrometheus(matrix())
    async with server.serving() as url, history(url) as long:
        await asyncio.gather(*(long.columns(TOTAL, WEEK) for _ in range(5)))
        once = len(server.paths)
        for number in range(3):
            await long.columns(f"m:{number}", WEEK)
        kept = len(long._kept)
        server.status = "503 X"
        for _ in range(2):
            with pytest.raises(PrometheusFailed):
                await long.columns("other:1", WEEK)

    assert (once, kept) == (5, 2)
    assert len(server.paths) == 21


@pytest.mark.parametrize("url", ["prometheus:9090", "ftp://prometheus", "http://", "http://prometheus?x=1"])
def test_another_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ValueError, match="QINFER_CONSOLE__PROMETHEUS_URL must be"):
        ConsoleSettings(prometheus_url=SecretStr(url))


async def page_and_history(url: str, name: str) -> tuple[str, Any]:
    """Returns the overview with the charts of a range, and what its charts fetch."""
    settings = settings_of().model_copy(update={"console": ConsoleSettings(prometheus_url=SecretStr(url))})
    async with running_gateway(settings) as running:
        await running.refresh()
        async with httpx.AsyncClient(base_url=f"{running.url}/console/", follow_redirects=True) as client:
            page = await client.get("", params={"range": name})
            return page.text, (await client.get("history", params={"of": "", "range": name})).json()


async def test_pages_offer_ranges_where_prometheus_is_named() -> None:
    async with FakePrometheus(matrix()).serving() as url:
        page, columns = await page_and_history(url, "7d")
    without, hour = await page_and_history("", "7d")

    assert '<a href="?range=7d" aria-current="true">7d</a>' in page
    assert 'data-range="7d"' in page
    assert len(columns["at_s"]) == 337
    assert columns["rate"][0] is None
    assert "?range=" not in without
    assert 'data-range="1h"' in without
    assert len(hour["at_s"]) == HOUR.span_s / HOUR.step_s


async def test_a_note_says_why_there_are_no_charts() -> None:
    page, answer = await page_and_history(f"http://127.0.0.1:{free_port()}", "24h")

    assert "data-chart-note" in page
    assert answer == {"note": "Prometheus can't be reached (ConnectError)"}


SAMPLES_EVERY_S = 120
BUCKETS = (0.1, 0.2, math.inf)


def exposition(end_s: int) -> str:
    """Returns eight days of samples: two gateways with a request a second each, of which the first fails a tenth.

    Half of all requests take less than a tenth of a second, the others less than a fifth.
    """
    lines = []
    for name, kind in (
        ("qinfer_requests", "counter"), ("qinfer_request_failures", "counter"),
        ("qinfer_request_duration_seconds", "histogram"), ("qinfer_backlog_work_seconds", "gauge"),
    ):  # fmt: skip
        lines.append(f"# TYPE {name} {kind}")
        for gateway in ("one", "two"):
            of = f'model="digits",version="1",process="{gateway}",instance="{gateway}"'
            for at_s in range(end_s - 8 * 86_400, end_s + 1, SAMPLES_EVERY_S):
                count = at_s - end_s + 8 * 86_400
                if name == "qinfer_requests":
                    lines.append(f"{name}_total{{{of}}} {count} {at_s}")
                elif name == "qinfer_request_failures" and gateway == "one":
                    lines.append(f"{name}_total{{{of}}} {count / 10} {at_s}")
                elif kind == "histogram":
                    for bound, share in zip(BUCKETS, (0.5, 1.0, 1.0), strict=True):
                        le = "+Inf" if bound == math.inf else bound
                        lines.append(f'{name}_bucket{{{of},le="{le}"}} {count * share} {at_s}')
                elif kind == "gauge":
                    lines.append(f'{name}{{model="digits",version="1",instance="{gateway}"}} 12.5 {at_s}')
    return "\n".join([*lines, "# EOF", ""])


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """A Prometheus with eight days of samples, and their end."""
    folder = tmp_path_factory.mktemp("prometheus")
    program, promtool = tool("promtool", "prometheus"), tool("promtool", "promtool")
    end_s = int(time.time()) // 1800 * 1800
    (folder / "samples").write_text(exposition(end_s))
    data, url = folder / "data", f"http://127.0.0.1:{(port := free_port())}"
    make = [str(promtool), "tsdb", "create-blocks-from", "--max-block-duration=240h"]  # it reads all for each block
    subprocess.run([*make, "openmetrics", str(folder / "samples"), str(data)], check=True, capture_output=True)
    (folder / "prometheus.yml").write_text("")
    with (folder / "log").open("wb") as log:
        command = [str(program), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={data}"]
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        wait_until(lambda: is_ready(url), 60, "Prometheus")
        yield url, end_s
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/-/ready").status_code == 200
    return False


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_real_prometheus_gives_the_figures_of_each_range(real: tuple[str, int]) -> None:
    """A real Prometheus takes any model's name, of which it knows nothing; wrong labels are told in its words."""
    url, end_s = real
    async with history(url, now_s=end_s) as long, history(url, "no matcher") as wrong:
        asked = [(series, chosen) for series in (TOTAL, "digits:1") for chosen in RANGES[1:]]
        found = [(chosen, await long.columns(series, chosen)) for series, chosen in asked]
        other = await long.columns('späte "modelle"\\ {}\n\u2028😀:1', WEEK)
        with pytest.raises(PrometheusFailed, match=r"status 400: .*parse error"):
            await wrong.columns(TOTAL, WEEK)

    assert all(math.isnan(value) for value in other["rate"])
    for chosen, columns in found:
        figures = {name: (column[0], column[-1]) for name, column in columns.items()}
        assert figures.pop("at_s") == (end_s - chosen.span_s, end_s)
        wanted = {"rate": 2.0, "errors": 0.1, "p50_s": 0.1, "p99_s": 0.198, "work_s": 12.5}
        for name, value in wanted.items():
            assert figures.pop(name) == pytest.approx((value, value)), name
        assert not figures
        assert not any(math.isnan(value) for column in columns.values() for value in column)
