"""Triton's summaries and its histogram: how exact the quantiles are, of which time, and the lines."""

import math
import random

import pytest
from pydantic import ValidationError

from qinfer.core.settings_sections import MetricsSettings
from qinfer.observe import latencies
from qinfer.observe.exposition import render
from qinfer.observe.latencies import SlidingWindow, quantiles
from qinfer.observe.stats import GatewayTally, StatsTally, add
from qinfer.observe.triton_metrics import MetricsChoice
from qinfer_api.observe.metrics import MetricsSnapshot, shown_metrics

SUMMARY = """\
# HELP nv_inference_queue_summary_us Summary of inference queuing duration in microseconds (includes cached requests)
# TYPE nv_inference_queue_summary_us summary
nv_inference_queue_summary_us_count{model="m",version="1"} 4
nv_inference_queue_summary_us_sum{model="m",version="1"} 31000
nv_inference_queue_summary_us{model="m",version="1",quantile="0.5"} 1001.09829
nv_inference_queue_summary_us{model="m",version="1",quantile="0.9"} 28133.3013
"""
HISTOGRAM = """\
# HELP nv_inference_first_response_histogram_ms Duration from request to first response in milliseconds
# TYPE nv_inference_first_response_histogram_ms histogram
nv_inference_first_response_histogram_ms_count{model="m",version="1"} 3
nv_inference_first_response_histogram_ms_sum{model="m",version="1"} 6611
nv_inference_first_response_histogram_ms_bucket{model="m",version="1",le="100"} 1
nv_inference_first_response_histogram_ms_bucket{model="m",version="1",le="500"} 1
nv_inference_first_response_histogram_ms_bucket{model="m",version="1",le="2000"} 2
nv_inference_first_response_histogram_ms_bucket{model="m",version="1",le="5000"} 2
nv_inference_first_response_histogram_ms_bucket{model="m",version="1",le="+Inf"} 3
"""


def counting(*, summaries: bool = False, histogram: bool = False) -> StatsTally:
    """Returns what counts latencies too."""
    tally = StatsTally()
    tally.with_summaries, tally.with_histogram = summaries, histogram
    return tally


def page(fields: dict[str, int], wanted: MetricsChoice) -> str:
    return render(shown_metrics(GatewayTally(), MetricsSnapshot(stats={("m", 1): fields}), wanted=wanted)).decode()


def test_quantiles_are_exact_within_what_is_promised() -> None:
    """Of latencies from microseconds to minutes, counted by several workers and added up."""
    rng = random.Random(7)
    waits = [int(1000 * math.exp(rng.uniform(0, 18))) for _ in range(3000)]
    fields: dict[str, int] = {}
    for start in range(0, len(waits), 1000):
        worker = counting(summaries=True)
        worker.executed(1, waits[start : start + 1000], 0, 0, 0)
        add(fields, worker.drain())
    ordered = sorted(waits)

    found = quantiles(fields, latencies.QUEUE, (0.001, 0.5, 0.9, 0.999, 1.0))

    for quantile, value in found.items():
        true_us = ordered[math.ceil(quantile * len(ordered)) - 1] / 1000
        assert abs(value - true_us) <= latencies.ERROR * true_us * 1.000001


def test_each_part_of_a_latency_has_its_summary() -> None:
    """A batch's parts count for each of its requests; the whole is wait and parts together."""
    worker = counting(summaries=True)
    worker.executed(2, [5_000_000, 5_000_000], 10_000, 2_000_000, 300_000)
    fields = worker.drain()

    told = {which: quantiles(fields, which, (0.5,))[0.5] for which in ("request", "queue", "input", "infer", "output")}

    for which, true_us in (("request", 7310), ("queue", 5000), ("input", 10), ("infer", 2000), ("output", 300)):
        assert told[which] == pytest.approx(true_us, rel=latencies.ERROR)
    assert sum(count for name, count in fields.items() if name.startswith("summary:infer:")) == 2


def test_a_latency_of_nothing_is_a_microsecond() -> None:
    """And nothing counted is no number."""
    worker = counting(summaries=True)
    worker.executed(1, [0], 0, 1000, 0)

    assert quantiles(worker.drain(), latencies.INPUT, (0.5,)) == {0.5: 1.0}
    assert math.isnan(quantiles({}, latencies.INPUT, (0.5,))[0.5])


def test_the_lines_of_a_summary() -> None:
    """As Triton prints them: count and sum agree with the counters."""
    worker = counting(summaries=True)
    worker.executed(4, [1_000_000, 1_000_000, 1_000_000, 28_000_000], 0, 0, 0)
    fields = worker.drain()

    shown = page(fields, MetricsChoice(quantiles=(0.5, 0.9), recent={("m", 1): fields}))

    assert SUMMARY in shown
    assert 'nv_inference_queue_duration_us{model="m",version="1"} 31000' in shown
    for part in ("request", "compute_input", "compute_infer", "compute_output"):
        assert f"# TYPE nv_inference_{part}_summary_us summary" in shown


def test_the_lines_of_the_histogram() -> None:
    """In milliseconds, with Triton's buckets; to the first response, without what comes after it."""
    worker = counting(histogram=True)
    worker.executed(3, [9_500_000, 599_000_000, 6_000_000_000], 500_000, 500_000, 10**12)

    assert HISTOGRAM in page(worker.drain(), MetricsChoice(histogram=True))


def test_without_being_asked_for_there_is_none_of_them() -> None:
    """Nor is anything counted; counters of durations can be left out."""
    worker = StatsTally()
    worker.executed(1, [1000], 1000, 1000, 1000)
    fields = worker.drain()

    shown = page(fields, MetricsChoice())

    assert not [name for name in fields if name.startswith(("summary", "first_response"))]
    assert "_summary_" not in shown
    assert "histogram_ms" not in shown
    assert "nv_inference_queue_duration_us" in shown
    bare = page(fields, MetricsChoice(counters=False))
    assert "_duration_us" not in bare
    assert 'nv_inference_count{model="m",version="1"} 1' in bare


def test_quantiles_are_of_the_last_minute() -> None:
    """Everything in the first minute of a gateway, then what has come since the scrape that is a minute ago."""
    window, key = SlidingWindow(), ("m", 1)

    def at(now_s: float, count: int) -> int:
        return window.move(now_s, {key: {"summary:queue:9": count, "success_count": 99}})[key]["summary:queue:9"]

    assert at(0, 10) == 10
    assert at(30, 15) == 15
    assert at(60, 18) == 8
    assert at(89, 20) == 10
    assert at(90, 20) == 5
    assert at(600, 21) == 1


def test_statistics_that_began_anew_are_taken_as_they_are() -> None:
    """Somebody emptied Redis: no count may be below zero."""
    window, key = SlidingWindow(), ("m", 1)
    window.move(0, {key: {"summary:queue:9": 10}})

    assert window.move(100, {key: {"summary:queue:8": 2}}) == {key: {"summary:queue:8": 2}}


def test_the_settings_are_tritons() -> None:
    """Off unless asked for; quantiles with their errors, or without."""
    assert MetricsSettings().quantiles == ()
    assert MetricsSettings(summary_latencies=True).quantiles == (0.5, 0.9, 0.95, 0.99, 0.999)
    assert MetricsSettings(summary_latencies=True, summary_quantiles="0.5:0.05, 0.9").quantiles == (0.5, 0.9)


@pytest.mark.parametrize("text", ["", "0.5:", "2:0.1", "half", "0.5:0.1:0.1", "0.5;0.9", "nan"])
def test_wrong_quantiles_are_refused(text: str) -> None:
    """With the value and an example."""
    with pytest.raises(ValidationError, match=r"is no quantile with its error, each from 0 to 1, such as 0\.9:0\.01"):
        MetricsSettings(summary_quantiles=text)
