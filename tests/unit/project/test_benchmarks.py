"""The benchmark's pure parts: what load generators send and count, the medians, and verdicts that are not kind."""

import json
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import grpc
import hpack
import httpx
import numpy as np
import psutil
import pytest
from rich.console import Console

from benchmarks import (
    bars,
    bodies,
    endurance,
    inprocess,
    load,
    measuring,
    page,
    plan,
    processes,
    proxied,
    readme_table,
    replay,
    servers,
    suite,
)
from benchmarks.measuring import (
    Contestant,
    Step,
    Tally,
    TooNoisy,
    is_too_noisy,
    losses,
    next_step,
    refusals,
    rotated,
    take_turns,
)
from benchmarks.models import MODELS, write_repository
from benchmarks.report import SERVERS, SHORT, markdown, short_table
from benchmarks.results import BATCH, IN_PROCESS, Document, Sample, Setting, interval, summarise
from qinfer.testing import wait_until


def _sample(
    server: str,
    rate: float,
    *,
    connections: int = 64,
    streams: int = 1,
    model: str = "tiny",
    encoding: str = "json",
    number: int = 1,
    p50_us: float = 1000.0,
    p99_us: float = 2000.0,
    errors: dict[str, int] | None = None,
    cpu_us: dict[str, float] | None = None,
    foreign: float = 0.0,
) -> Sample:
    setting = Setting(model=model, encoding=encoding, connections=connections, streams=streams, server=server)
    return Sample(
        setting=setting,
        round=number,
        rate=rate,
        p50_us=p50_us,
        p99_us=p99_us,
        errors=errors or {},
        cpu_us=cpu_us or {},
        foreign=foreign,
    )


NO_LOAD = load.LoadResult(requests=0, duration_s=1.0)
FACTS = {"date": "2026-11-27", "commit": "abc", "processor": "a processor, 2 cores"}


def _document(samples: list[Sample], refusals: list[str] | None = None) -> Document:
    return Document(machine=FACTS, run="turns of 2 s", refusals=refusals or [], samples=samples)


def _complete() -> list[Sample]:
    """Samples of all lines of the short table; qinfer is twice as fast as Triton in each."""
    rates = {"qinfer": 200.0, "triton": 100.0, "mosec_orjson": 300.0, "fastapi_direct": 50.0}
    return [
        replace(_sample(name, rates[name], p50_us=1e6 / rates[name]), setting=replace(setting, server=name))
        for setting in SHORT.values()
        for name in SERVERS
    ]


def _verdict(samples: list[Sample], bar: str) -> bars.Verdict:
    return next(v for v in bars.judge(summarise(samples)) if v.bar.startswith(bar))


def test_wrk_result_is_read_from_our_line() -> None:
    """Counters and errors come from the script's line, whatever wrk prints around it."""
    line = (
        'RESULT {"requests":10,"duration_us":2000000,"p50_us":5,"p99_us":9,"max_us":11,'
        '"errors":{"connect":0,"read":0,"write":0,"timeout":1,"status":3}}'
    )

    result = load.parse(f"Running 1s test\n  Thread Stats\n\n{line}\n", 0.25)

    assert result.rate == 5
    assert result.errors == {"timeout": 1, "status": 3}
    assert result.client_cpu_s == 0.25


def test_wrk_without_result_is_an_error() -> None:
    """A wrk that died is never read as zero requests."""
    with pytest.raises(load.LoadFailed, match="printed no result"):
        load.parse("unable to connect", 0.0)


_H2LOAD = """\
finished in 2.00s, 5.00 req/s, 1.05MB/s
requests: 10 total, 12 started, 10 done, 10 succeeded, 0 failed, 0 errored, 0 timeout
traffic: 3.14KB (3289) total, 101B (101) headers (space savings 96.29%), {data}B ({data}) data
"""


@pytest.mark.parametrize(
    ("data", "errors"), [(630, {}), (650, {}), (567, {"without message": 1}), (0, {"without message": 10})]
)
def test_replies_without_a_message_are_failed_calls(data: int, errors: dict[str, int]) -> None:
    log = "".join(f"1795436949634813\t200\t{us}\n" for us in range(100, 200, 10))

    result = load.parse_h2load(_H2LOAD.format(data=data), log, 63, 0.25)

    assert (result.requests, result.rate, result.p50_us, result.max_us) == (10, 5, 145, 190)
    assert result.errors == errors


def test_h2load_without_result_is_an_error() -> None:
    with pytest.raises(load.LoadFailed, match="printed no result"):
        load.parse_h2load("unable to connect", "", 63, 0.0)


def test_row_is_the_median_of_its_rounds() -> None:
    """Rates and latencies are medians; errors of any round stay visible."""
    samples = [_sample("qinfer", rate, number=n) for n, rate in enumerate((10.0, 30.0, 20.0), 1)]
    samples.append(_sample("mosec", 5.0, errors={"status": 1}))

    rows = {row.setting.server: row for row in summarise(samples).values()}

    assert (rows["qinfer"].rate, *rows["qinfer"].spread) == (20.0, 10.0, 30.0)
    assert not rows["mosec"].valid


@pytest.mark.parametrize(("rate", "outcome"), [(110.0, "PASS"), (109.9, "MISS")])
def test_rate_bar_is_not_rounded(rate: float, outcome: str) -> None:
    """A bar of 1.1 is missed by 1.099."""
    verdict = _verdict([_sample("qinfer", rate), _sample("mosec", 100.0)], "tiny JSON, 64 connections: ≥ 1.1")

    assert verdict.outcome == outcome


@pytest.mark.parametrize("ours", [(115.0, 55.0, 110.0), (115.0, 55.0)])
def test_rates_are_compared_turn_by_turn(ours: tuple[float, ...]) -> None:
    """A round in which the machine was half as fast changes nothing, and a missing turn has no pair."""
    samples = [_sample("qinfer", rate, number=number) for number, rate in enumerate(ours, 1)]
    samples += [_sample("mosec", rate, number=number) for number, rate in enumerate((100.0, 50.0, 100.0), 1)]

    verdict = _verdict(samples, "tiny JSON, 64 connections: ≥ 1.1")

    assert verdict.figures.endswith("= 1.10 (1.10 to 1.15) x" if len(ours) == 3 else "= 1.12 (1.10 to 1.15) x")


def test_bar_on_failed_requests_is_missed() -> None:
    """A rate with failed requests in it clears nothing."""
    samples = [_sample("qinfer", 1e6, errors={"status": 1}), _sample("mosec", 1.0)]

    verdict = _verdict(samples, "tiny JSON, 64 connections: ≥ 1.1")

    assert verdict.outcome == "MISS"
    assert "1 failed" in verdict.figures


def test_bar_without_its_rows_is_not_measured() -> None:
    """What was left out is neither cleared nor missed."""
    assert {verdict.outcome for verdict in bars.judge({})} == {"not measured"}


def test_conv_is_judged_against_the_best_batch_size() -> None:
    """The in-process bound is the fastest of the batch sizes, not the most convenient."""
    bound = [
        _sample(IN_PROCESS, rate, model="conv", encoding=BATCH, connections=batch)
        for batch, rate in ((1, 100.0), (32, 200.0), (64, 90.0))
    ]

    verdict = _verdict([_sample("qinfer", 95.0, model="conv", encoding="binary", connections=32), *bound], "conv")

    assert verdict.outcome == "MISS"


@pytest.mark.parametrize(("gateway_us", "outcome"), [(70.0, "PASS"), (70.1, "MISS")])
def test_ids_may_cost_so_much_of_the_gateways_time(gateway_us: float, outcome: str) -> None:
    plain = _sample("qinfer", 1.0, encoding=bodies.GRPC, cpu_us={"gateway": 50.0, "worker": 9.0})
    with_ids = _sample("qinfer", 1.0, encoding=proxied.GRPC_PROXIED, cpu_us={"gateway": gateway_us, "worker": 900.0})

    assert _verdict([plain, with_ids], "tiny gRPC as behind a proxy: gateway").outcome == outcome


def test_multiplexed_calls_are_compared_with_those_of_the_same_shape() -> None:
    bar = "tiny gRPC, 4 connections of 16"
    samples = [
        _sample(server, rate, encoding=bodies.GRPC, connections=4, streams=16)
        for server, rate in (("qinfer", 12.0), ("triton", 10.0))
    ]

    assert _verdict(samples, bar).outcome == "PASS"
    assert "| 4 x 16 | qinfer | 12 |" in markdown(_document(samples))
    assert (
        _verdict([samples[0], _sample("triton", 10.0, encoding=bodies.GRPC, connections=4)], bar).outcome
        == "not measured"
    )


def test_tail_bar_is_judged_for_every_model() -> None:
    """Each model's p99 at 64 connections has its own verdict."""
    samples = [_sample("qinfer", 1.0, p99_us=4001.0), _sample("qinfer", 1.0, model="mlp", p99_us=4000.0)]

    outcomes = {v.bar[:4].strip(): v.outcome for v in bars.judge(summarise(samples)) if "p99" in v.bar}

    assert outcomes == {"tiny": "MISS", "mlp": "PASS"}


def test_markdown_has_rows_ratios_bars_and_facts() -> None:
    samples = [_sample("qinfer", 300.0, cpu_us={"gateway": 20.0, "client": 3.0}), _sample("mosec", 200.0)]

    text = markdown(_document(samples))

    assert "| 64 | qinfer | 300 | 300 … 300 |  | 1.00 | 2.00 | 20 | gateway 20 | 3 |" in text
    assert "| 64 | mosec | 200 | 200 … 200 | 1.50 (1.50 to 1.50) |" in text
    assert text.index("### Bars") < text.index("### tiny, json") < text.index("- commit: abc")


def test_order_of_servers_rotates() -> None:
    """Every server comes first in some round."""
    assert [rotated("abc", by)[0] for by in range(4)] == ["a", "b", "c", "a"]


def test_interval_of_a_median_is_that_of_the_sign_test() -> None:
    """Of nine values it leaves out the smallest and the largest, of five none."""
    assert interval([9, 1, 8, 2, 7, 3, 6, 4, 5]) == (2, 8)
    assert interval([5, 1, 2, 3, 4]) == (1, 5)


@pytest.mark.parametrize(
    ("lost", "step"),
    [
        ([0.03], Step.KEEP),
        ([0.031], Step.REPEAT),
        ([0.5, 0.5], Step.REPEAT),
        ([0.5, 0.5, 0.5], Step.DROP),
        ([0.5, 0.5, 0.0], Step.KEEP),
    ],
)
def test_a_disturbed_turn_is_repeated_twice(lost: list[float], step: Step) -> None:
    assert next_step(lost) is step


def test_a_run_is_too_noisy_when_a_quarter_of_its_turns_was_disturbed() -> None:
    assert not is_too_noisy(25, 100)
    assert is_too_noisy(26, 100)


def test_rows_without_enough_clean_turns_are_refused() -> None:
    samples = [_sample("qinfer", 1.0, number=n, foreign=0.5 if n == 1 else 0.0) for n in (1, 2, 3)]
    setting = samples[0].setting

    assert refusals({setting: 2}, samples, planned=100) == []
    assert refusals({setting: 3}, samples, planned=100) == ["tiny json 64, qinfer: 2 clean turns of 3"]
    assert "1 turns lost more than 3%" in refusals({setting: 2}, samples, planned=2)[0]


def test_disturbed_turns_do_not_count() -> None:
    samples = [_sample("qinfer", 1.0, foreign=0.5), _sample("qinfer", 10.0), _sample("qinfer", 30.0, number=2)]

    [row] = summarise(samples).values()

    assert row.rates == {1: 10.0, 2: 30.0}


class _Times(NamedTuple):
    user: float = 0.0
    system: float = 0.0
    softirq: float = 0.0
    steal: float = 0.0
    idle: float = 0.0


def test_losses_are_what_the_host_and_foreign_programs_took() -> None:
    """Of 4 s of two cores 0.4 s were stolen; 2.6 s were busy, of which 1.8 s are known."""
    after = _Times(user=1.5, system=1.0, softirq=0.1, steal=0.4, idle=1.0)

    stolen, foreign = losses(_Times(), after, known_s=1.8, available_s=4.0)

    assert stolen == pytest.approx(0.1)
    assert foreign == pytest.approx(0.2)


def test_less_than_nothing_is_never_lost() -> None:
    assert losses(_Times(), _Times(user=1.0), known_s=1.1, available_s=4.0) == (0.0, 0.0)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The shares of the cores that the next turns lose; when there are no more, none."""
    shares: list[float] = []

    def measure(setting: Setting, number: int, _generate: Any, _server: Any) -> Sample:
        return replace(_sample("", 1.0, number=number, foreign=shares.pop(0) if shares else 0.0), setting=setting)

    monkeypatch.setattr("benchmarks.measuring.measure", measure)
    return shares


def _contestants(*turns: int) -> list[Contestant]:
    names = "abc"[: len(turns)]
    return [
        Contestant(setting=_sample(name, 1.0).setting, turns=count, generate=lambda: NO_LOAD)
        for name, count in zip(names, turns, strict=True)
    ]


def _server(name: str) -> servers.Server:
    here = Path()
    launch = servers.Launch(model="", model_file=here, repository=here, directory=here, port=1, grpc_port=1)
    return servers.Server(kind=servers.KINDS[name], launch=launch, check=lambda _: None)


def _order(tally: Tally) -> list[str]:
    return [f"{sample.setting.server}{sample.round}" for sample in tally.samples]


@pytest.mark.usefixtures("lost")
def test_servers_take_turns() -> None:
    tally = Tally(planned=5)

    take_turns(_contestants(2, 2, 1), tally, lambda _: None)

    assert _order(tally) == ["a1", "b1", "c1", "b2", "a2"]


@pytest.mark.usefixtures("lost")
def test_servers_without_a_turn_are_stopped_meanwhile() -> None:
    """LitServe takes a whole core while nothing asks it."""
    idle = psutil.Popen([sys.executable, "-c", "while True: pass"])
    beside = _server("litserve")
    beside.roots.append(idle)

    def show(_: Sample) -> None:
        wait_until(lambda: idle.status() == psutil.STATUS_STOPPED, 10, "its stop")

    try:
        take_turns(_contestants(1), Tally(planned=1), show, [beside])

        wait_until(lambda: idle.status() != psutil.STATUS_STOPPED, 10, "the end of the pause")
    finally:
        idle.kill()
        idle.wait()


@pytest.mark.parametrize(("name", "restarts"), [("triton", 1), ("qinfer", 0)])
def test_a_server_that_did_not_survive_its_stop_is_started_again(
    name: str, restarts: int, lost: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qinfer is never stopped: that it gives no answer is its own fault, and stays in the figures."""
    answers, started = [0.0, 5.0], list[str]()
    measured = measuring.measure
    monkeypatch.setattr(measuring, "measure", lambda *given: replace(measured(*given), rate=answers.pop(0)))
    monkeypatch.setattr(servers.Server, "start", lambda server: started.append(server.kind.name))
    tally = Tally(planned=1)

    take_turns([replace(_contestants(1)[0], server=_server(name))], tally, lambda _: None)

    assert lost == []
    assert (len(started), tally.restarts.total()) == (restarts, restarts)
    assert [sample.rate for sample in tally.samples] == [5.0 if restarts else 0.0]


def test_a_run_is_resumed_with_the_loads_that_lack_turns() -> None:
    """A turn without an answer is none."""
    whole = plan.Plan()
    unfinished = whole.scenes[0].loads[1].settings("tiny", "json")
    samples = [
        replace(_sample("", 0.0 if number == 0 and setting in unfinished else 1.0, number=number), setting=setting)
        for setting, turns in whole.needed.items()
        for number in range(turns)
    ]

    left = plan.without(whole, plan.finished(whole, samples))

    assert left.needed == unfinished
    assert left.is_complete


def test_a_disturbed_turn_is_repeated_at_once(lost: list[float]) -> None:
    lost += [0.0, 0.5]
    tally = Tally(planned=100)

    take_turns(_contestants(1, 1), tally, lambda _: None)

    assert _order(tally) == ["a1", "b1", "b1"]


def test_a_server_that_lacks_clean_turns_has_another_round_with_its_equals(lost: list[float]) -> None:
    lost += [0.5, 0.5, 0.5]
    tally = Tally(planned=100)

    take_turns(_contestants(2, 2, 1), tally, lambda _: None)

    assert _order(tally) == ["a1", "a1", "a1", "b1", "c1", "b2", "a2", "a3", "b3"]


def test_a_noisy_run_is_given_up(lost: list[float]) -> None:
    lost += [0.5] * 100

    with pytest.raises(TooNoisy, match="3 turns lost more than 3% of the cores"):
        take_turns(_contestants(4, 4), Tally(planned=8), lambda _: None)


def test_a_run_that_only_shows_repeats_nothing(lost: list[float]) -> None:
    lost += [0.5] * 100
    tally = Tally(planned=4, strict=False)

    take_turns(_contestants(2, 2), tally, lambda _: None)

    assert len(tally.samples) == 4


def test_partial_run_is_not_complete() -> None:
    """Only a full run may overwrite the kept results."""
    whole = plan.Plan()

    assert plan.restricted(whole, lambda _: True, 99).is_complete
    assert not plan.restricted(whole, lambda setting: setting.server != "celery", 99).is_complete
    assert not plan.restricted(whole, lambda _: True, 8).is_complete


def test_the_plan_has_all_that_is_published_at_least_nine_times() -> None:
    needed = plan.Plan().needed

    for setting in SHORT.values():
        assert needed[setting] >= needed[replace(setting, server="triton")] >= 9


def test_a_complete_run_takes_at_most_an_hour() -> None:
    assert plan.Plan().estimate_s < 60 * 60


def test_large_tensors_are_measured_beside_triton_and_the_ceiling() -> None:
    needed = plan.Plan().needed

    for model in ("embedding", "patch", "image", "frames", "mask", "photo"):
        for many in (1, 16, 64):
            asked = {(one.encoding, one.server) for one in needed if (one.model, one.connections) == (model, many)}
            both = {(encoding, name) for encoding in ("binary", "grpc", "shm") for name in ("qinfer", "triton")}
            assert asked == {*both, ("binary", "ceiling")}


def test_the_ceiling_answers_as_the_network_does(tmp_path: Path) -> None:
    """Several at once, whose heads come alone; and one that leaves."""
    model = MODELS["mask"]
    file = write_repository(model, tmp_path)
    expected = inprocess.expected_answer(model, file)
    body = bodies.write_body(model, bodies.BINARY, expected, tmp_path)
    launch = servers.Launch(
        model=model.name,
        model_file=file,
        repository=tmp_path,
        directory=tmp_path / "ceiling",
        port=processes.free_port(),
        grpc_port=0,
    )
    with servers.running(servers.KINDS["ceiling"], launch, body) as server, ThreadPoolExecutor(8) as threads:
        with socket.create_connection(("127.0.0.1", launch.port)) as leaving:
            leaving.sendall(b"POST / HTTP/1.1\r\ninference-header-content-length: 10\r\n\r\n{")
        for done in [threads.submit(bodies.check_answer, server.url, body) for _ in range(32)]:
            done.result()


@pytest.mark.parametrize("problems", [["no"], []])
def test_only_a_run_without_refusals_is_published(
    problems: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, partial, results_page, readme = (
        tmp_path / name for name in ("results.json", "partial.json", "RESULTS.md", "README.md")
    )
    for name, path in {"RESULTS": results, "PARTIAL": partial}.items():
        monkeypatch.setattr(suite, name, path)
    monkeypatch.setattr(page, "PAGE", results_page)
    monkeypatch.setattr(readme_table, "README", readme)
    monkeypatch.setattr(readme_table, "PICTURE", tmp_path / "speed.svg")
    readme.write_text("no place\n")
    chosen = plan.Plan(scenes=(), groups=())

    document = suite.publish(chosen, Tally(samples=_complete(), planned=1), problems, Console())

    assert document.refusals == problems
    written = [path.exists() for path in (partial, results, results_page)]
    assert written == ([True, False, False] if problems else [False, True, True])


def test_a_section_is_written_in_its_place_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    page.write("soak", "old", FACTS, path)
    page.write("bulk", "rows", FACTS, path)
    bulk = page.read(path)["bulk"]

    page.write("soak", "new", FACTS, path)

    text = path.read_text()
    assert "old" not in text
    assert page.read(path)["bulk"] == bulk
    assert text.index("## Bulk jobs") < text.index("## Memory under steady load")
    assert "new\n\nMeasured on 2026-11-27 at commit abc: a processor, 2 cores.\n<!-- /section -->" in text


def test_short_table_has_rates_latencies_and_ratios() -> None:
    lines = short_table(summarise(_complete()))

    assert (
        lines[0]
        == "| requests per second, or p50 | qinfer | Triton | mosec + orjson | FastAPI | qinfer / Triton (95 %) |"
    )
    assert "| `tiny`, HTTP JSON, 1,000 connections | 200 | 100 | **300** | 50 | 2.00 (2.00 to 2.00) |" in lines
    assert "| `tiny`, gRPC, 1 connection: p50 | 5.00 ms | 10.00 ms | **3.33 ms** | 20.00 ms |  |" in lines


def test_readme_gets_table_and_picture(tmp_path: Path) -> None:
    readme, picture = tmp_path / "README.md", tmp_path / "images" / "speed.svg"
    readme.write_text(f"before\n{readme_table.BEGIN}\nold figures\n{readme_table.END}\nafter\n")

    readme_table.write(_document(_complete()), readme, picture)

    text = readme.read_text()
    assert text.startswith(f"before\n{readme_table.BEGIN}\n| requests per second, or p50 |")
    assert text.endswith(f"{readme_table.END}\nafter\n")
    assert "old figures" not in text
    assert "Measured on 2026-11-27 at commit abc: a processor, 2 cores." in text
    bars_drawn = ElementTree.fromstring(picture.read_text()).findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(bars_drawn) == 4 * 4
    assert max(int(bar.attrib["width"]) for bar in bars_drawn) < readme_table.WIDTH
    assert [bar.attrib["class"] for bar in bars_drawn].count("qinfer") == 4


@pytest.mark.parametrize("document", [_document(_complete(), ["too noisy"]), _document(_complete()[4:])])
def test_readme_is_never_written_from_a_run_that_may_not_be_published(document: Document, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"{readme_table.BEGIN}\n{readme_table.END}\n")

    with pytest.raises(readme_table.NotPublishable):
        readme_table.write(document, readme, tmp_path / "speed.svg")

    assert readme.read_text() == f"{readme_table.BEGIN}\n{readme_table.END}\n"


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    document = _document(_complete(), ["why not"])

    document.write(tmp_path / "results.json")

    assert Document.read(tmp_path / "results.json") == document


@pytest.mark.parametrize(("leak_bytes_s", "verdict"), [(0, "flat"), (100_000, "grows")])
def test_growth_is_fitted_after_settling(leak_bytes_s: int, verdict: str) -> None:
    """The first fifth may grow; what grows after it is a leak."""
    samples = [
        (float(t), {"gateway": 50_000_000 + min(t, 100) * 200_000 + leak_bytes_s * t}) for t in range(0, 600, 10)
    ]

    growth = endurance.growths(samples)[0]

    assert growth.is_flat is (verdict == "flat")


@pytest.fixture
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxied, "CONNECTIONS", 2)
    monkeypatch.setattr(proxied, "REQUESTS_EACH", 40)
    monkeypatch.setattr(replay, "REQUESTS_EACH", 40)
    monkeypatch.setattr(proxied, "BODIES", 30)
    monkeypatch.setattr(proxied, "CHECKED", 3)


def _record(encoding: str, directory: Path) -> tuple[bodies.Body, list[bytes]]:
    model = MODELS["tiny"]
    session = inprocess.session(write_repository(model, directory))
    body = proxied.write_recording(model, encoding, session, directory)
    return body, proxied.read_recording(body.path)


@pytest.mark.usefixtures("_few_requests")
def test_recorded_http_requests_differ_in_ids_and_bodies(tmp_path: Path) -> None:
    body, requests = _record(proxied.JSON_PROXIED, tmp_path)

    heads = [
        dict(line.split(": ", 1) for line in r.decode().partition("\r\n\r\n")[0].splitlines()[1:]) for r in requests
    ]
    contents = [r.partition(b"\r\n\r\n")[2] for r in requests]
    assert len(requests) == 80
    assert [int(head["Content-Length"]) for head in heads] == [len(content) for content in contents]
    assert len({head["x-request-id"] for head in heads}) == len({head["traceparent"] for head in heads}) == 80
    assert len(set(contents)) == 30
    assert [sample.path.read_bytes() for sample in body.samples] == contents[:3]


@pytest.mark.usefixtures("_few_requests")
def test_recorded_grpc_calls_put_their_ids_into_the_dynamic_table(tmp_path: Path) -> None:
    _, requests = _record(proxied.GRPC_PROXIED, tmp_path)

    found: list[dict[str, str]] = []
    decoder = hpack.Decoder()
    for number, request in enumerate(requests[:40]):
        end = 9 + int.from_bytes(request[:3], "big")
        found.append({str(name): str(value) for name, value in decoder.decode(request[9:end])})
        newest = tuple(map(bytes, decoder.header_table.dynamic_entries[0]))
        assert newest == (b"traceparent", found[-1]["traceparent"].encode())
        assert int.from_bytes(request[5:9], "big") == 2 * number + 1
    assert len({headers["x-request-id"] for headers in found}) == 40
    assert len({headers["grpc-timeout"] for headers in found}) > 30


@contextmanager
def _grpc_server(answer: Callable[[bytes, grpc.ServicerContext], bytes]) -> Iterator[tuple[str, int]]:
    """Serves one call as another implementation of gRPC does."""
    service, _, method = bodies.GRPC_PATH[1:].partition("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield "127.0.0.1", port
    finally:
        server.stop(None).wait()


@pytest.mark.usefixtures("_few_requests")
def test_recorded_calls_are_answered_also_by_connections_that_are_opened_anew(tmp_path: Path) -> None:
    _, requests = _record(proxied.GRPC_PROXIED, tmp_path)
    seen: list[Any] = []

    def answer(_message: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append(dict(context.invocation_metadata())["x-request-id"])
        return b"answer"

    with _grpc_server(answer) as address:
        result = replay.replay(address, requests, 1.0, 5 + len(b"answer"))

    assert result["errors"] == {}
    assert result["requests"] > 80
    assert len(set(seen)) == 80


@pytest.mark.usefixtures("_few_requests")
def test_failed_calls_of_a_recording_are_errors(tmp_path: Path) -> None:
    _, requests = _record(proxied.GRPC_PROXIED, tmp_path)

    def answer(_message: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        raise AssertionError

    with _grpc_server(answer) as address:
        result = replay.replay(address, requests, 0.2, 5 + len(b"answer"))

    assert result["errors"]["length"] > 0
    assert result["errors"]["status"] > 0


@pytest.mark.parametrize("encoding", [bodies.JSON, bodies.BINARY])
def test_body_describes_the_example(tmp_path: Path, encoding: str) -> None:
    """Both encodings carry the model's example row."""
    model = MODELS["tiny"]

    body = bodies.write_body(model, encoding, np.zeros((1, 8), np.float32), tmp_path)

    content, length = body.path.read_bytes(), body.headers.get(bodies.LENGTH_HEADER)
    tensor = json.loads(content[: int(length)] if length else content)["inputs"][0]
    data = np.frombuffer(content[int(length) :], np.float32) if length else np.array(tensor["data"], np.float32)
    assert tensor["shape"] == [1, 16]
    np.testing.assert_array_equal(data, model.example().ravel())


def test_an_input_in_shared_memory_is_named_by_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server gets the object as its region, again after it was started again."""
    model, asked = MODELS["tiny"], []
    body = bodies.write_body(model, bodies.SHM, np.zeros((1, 8), np.float32), tmp_path)
    content, key = model.example().tobytes(), f"qinfer-test-{tmp_path.name}"

    def post(url: httpx.URL, *, json: object, **_: object) -> httpx.Response:
        asked.append((str(url), json))
        return httpx.Response(200 if len(asked) < 3 else 400)

    monkeypatch.setattr(httpx, "post", post)
    with bodies.shared_object(key, content):
        bodies.register("http://127.0.0.1:1/v2/models/tiny/infer", key, len(content))
        assert Path("/dev/shm", key).read_bytes() == content
        with pytest.raises(bodies.WrongAnswer):
            bodies.register("http://127.0.0.1:1/", key, len(content))

    assert not Path("/dev/shm", key).exists()
    where = json.loads(body.path.read_bytes())["inputs"][0]["parameters"]
    assert where == {"shared_memory_region": bodies.REGION, "shared_memory_byte_size": len(content)}
    region = f"http://127.0.0.1:1/v2/systemsharedmemory/region/{bodies.REGION}"
    assert asked[:2] == [
        (f"{region}/unregister", {}),
        (f"{region}/register", {"key": f"/{key}", "byte_size": len(content)}),
    ]


def test_only_a_server_with_a_region_allows_them() -> None:
    launch = _server("qinfer").launch

    for region in ("", "key"):
        [command] = servers.KINDS["qinfer"].commands(replace(launch, region=region))
        assert ("--allow-client-shm" in command.argv) == bool(region)


def test_wrong_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose numbers differ from ONNX Runtime's is not measured."""
    body = bodies.write_body(MODELS["tiny"], bodies.JSON, np.zeros((1, 8), np.float32), tmp_path)
    output = {"name": "y", "datatype": "FP32", "shape": [1, 8], "data": [1.0] * 8}
    monkeypatch.setattr(httpx, "post", lambda *_, **__: httpx.Response(200, json={"outputs": [output]}))

    with pytest.raises(bodies.WrongAnswer):
        bodies.check_answer("http://127.0.0.1/", body)


def test_conv_costs_about_100_mflop() -> None:
    """The models are what the README says they are."""
    properties = {p.key: p.value for p in MODELS["conv"].build().metadata_props}

    assert 0.9e8 < 2 * int(properties["multiply_adds"]) < 1.1e8


def test_repository_is_in_tritons_layout(tmp_path: Path) -> None:
    """The file that every server loads is where Triton would look for it."""
    path = write_repository(MODELS["tiny"], tmp_path)

    assert path == tmp_path / "tiny" / "1" / "model.onnx"
    assert "max_batch_size: 64" in (tmp_path / "tiny" / "config.pbtxt").read_text()


def test_the_script_model_brings_its_file(tmp_path: Path) -> None:
    """The same `model.py` is served by qinfer and by Triton."""
    path = write_repository(MODELS["script"], tmp_path)

    assert "TritonPythonModel" in path.with_name("model.py").read_text()
    assert 'backend: "python"' in (tmp_path / "script" / "config.pbtxt").read_text()


def test_a_new_connection_is_asked_for_in_each_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts: list[str] = []
    body = bodies.write_body(MODELS["tiny"], bodies.JSON, np.zeros((1, 8), np.float32), tmp_path)
    line = 'RESULT {"requests":1,"duration_us":1,"p50_us":1,"p99_us":1,"max_us":1,"errors":{}}'

    def generate(_command: Any, _seconds: float) -> tuple[str, float]:
        scripts.append(body.path.with_suffix(".json.lua").read_text())
        return line, 0.0

    monkeypatch.setattr(load, "_run", generate)
    monkeypatch.setattr(load, "require_wrk", lambda: "wrk")

    load.run("http://127.0.0.1/", body, 1, 1, fresh=True)
    load.run("http://127.0.0.1/", body, 1, 1)

    assert ['wrk.headers["Connection"] = "close"' in script for script in scripts] == [True, False]
