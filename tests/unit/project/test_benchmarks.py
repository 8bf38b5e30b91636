"""The benchmark's pure parts: what it reads from wrk, how it takes medians, and that its verdicts are not kind."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks import bars, bodies, endurance, load
from benchmarks.models import MODELS, write_repository
from benchmarks.report import markdown
from benchmarks.results import BATCH, IN_PROCESS, Sample, Setting, summarise
from benchmarks.suite import Plan, rotated


def _sample(
    server: str,
    rate: float,
    *,
    connections: int = 64,
    model: str = "tiny",
    encoding: str = "json",
    number: int = 1,
    p50_us: float = 1000.0,
    p99_us: float = 2000.0,
    errors: dict[str, int] | None = None,
    cpu_us: dict[str, float] | None = None,
) -> Sample:
    setting = Setting(model=model, encoding=encoding, connections=connections, server=server)
    return Sample(
        setting=setting,
        round=number,
        rate=rate,
        p50_us=p50_us,
        p99_us=p99_us,
        errors=errors or {},
        cpu_us=cpu_us or {},
    )


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


def test_row_is_the_median_of_its_rounds() -> None:
    """Rates and latencies are medians; errors of any round stay visible."""
    samples = [_sample("qinfer", rate, number=n) for n, rate in enumerate((10.0, 30.0, 20.0), 1)]
    samples.append(_sample("mosec", 5.0, errors={"status": 1}))

    rows = {row.setting.server: row for row in summarise(samples).values()}

    assert (rows["qinfer"].rate, rows["qinfer"].slowest, rows["qinfer"].fastest) == (20.0, 10.0, 30.0)
    assert not rows["mosec"].valid


@pytest.mark.parametrize(("rate", "outcome"), [(110.0, "PASS"), (109.9, "MISS")])
def test_rate_bar_is_not_rounded(rate: float, outcome: str) -> None:
    """A bar of 1.1 is missed by 1.099."""
    verdict = _verdict([_sample("qinfer", rate), _sample("mosec", 100.0)], "tiny JSON, 64 connections: ≥ 1.1")

    assert verdict.outcome == outcome


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


def test_tail_bar_is_judged_for_every_model() -> None:
    """Each model's p99 at 64 connections has its own verdict."""
    samples = [_sample("qinfer", 1.0, p99_us=4001.0), _sample("qinfer", 1.0, model="mlp", p99_us=4000.0)]

    outcomes = {v.bar[:4].strip(): v.outcome for v in bars.judge(summarise(samples)) if "p99" in v.bar}

    assert outcomes == {"tiny": "MISS", "mlp": "PASS"}


def test_markdown_has_rows_and_ratios() -> None:
    """The table names the server, its ratio to the peer, and the bars."""
    rows = summarise([_sample("qinfer", 300.0, cpu_us={"gateway": 20.0, "wrk": 3.0}), _sample("mosec", 200.0)])

    text = markdown(rows, bars.judge(rows), {"kernel": "Linux"}, "1 round")

    assert "| 64 | qinfer | 300 | 300 … 300 | - | - | 1.50 | - |" in text
    assert "| 20 | gateway 20 | 3 |" in text


def test_order_of_servers_rotates() -> None:
    """Every server comes first in some round."""
    assert [rotated("abc", by)[0] for by in range(4)] == ["a", "b", "c", "a"]


def test_partial_run_is_not_complete() -> None:
    """Only a full run may overwrite the kept results."""
    plan = Plan(
        servers=("qinfer",), models=("tiny",), encodings=("json",), connections=(64,), rounds=3, seconds=5, warm_up_s=2
    )

    assert not plan.is_complete


@pytest.mark.parametrize(("leak_bytes_s", "verdict"), [(0, "flat"), (100_000, "grows")])
def test_growth_is_fitted_after_settling(leak_bytes_s: int, verdict: str) -> None:
    """The first fifth may grow; what grows after it is a leak."""
    samples = [
        (float(t), {"gateway": 50_000_000 + min(t, 100) * 200_000 + leak_bytes_s * t}) for t in range(0, 600, 10)
    ]

    growth = endurance.growths(samples)[0]

    assert growth.is_flat is (verdict == "flat")


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
