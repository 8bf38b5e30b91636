"""`pb_utils.MetricFamily`, as models use it, and what the worker reads of it."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from qinfer.backends.python_host import telemetry
from qinfer.backends.python_host import utils as pb_utils
from qinfer.backends.python_host.telemetry import MetricMemory, MetricTable
from qinfer.observe.exposition import model_families, render

COUNTER, GAUGE, HISTOGRAM = pb_utils.MetricKind
LABELS = {"a": "1", "b": "2"}


@pytest.fixture
def memory(collected: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricMemory]:
    """The memory of a process, which is this one."""
    memory = MetricMemory()
    monkeypatch.setattr(telemetry, "_table", MetricTable(memory.descriptor))
    yield memory
    gc.collect()
    assert memory.read() == []
    assert telemetry._families == {}
    memory.close()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for few series."""
    monkeypatch.setattr(telemetry, "MOST_BYTES", 4096)


def family(name: str = "own", kind: pb_utils.MetricKind = COUNTER, text: str = "the first") -> pb_utils.MetricFamily:
    return pb_utils.MetricFamily(name=name, description=text, kind=kind)


def shown(memory: MetricMemory) -> list[str]:
    return render(model_families(memory.read())).decode().splitlines()


def test_a_value_that_was_set_is_read_next(memory: MetricMemory) -> None:
    counts, levels = family("counts_total"), family("levels", GAUGE, "with a\nbreak")
    counter, gauge = counts.Metric(LABELS), levels.Metric()

    for value, text in ((2023.0, "2023"), (0.5, "2023.5")):
        counter.increment(value)
        assert f'counts_total{{a="1",b="2"}} {text}' in shown(memory)
    for value in (999.9, -3.0):
        gauge.set(value)
        assert gauge.value() == value
    gauge.increment(-0.25)

    assert shown(memory) == [
        "# HELP counts_total the first", "# TYPE counts_total counter", 'counts_total{a="1",b="2"} 2023.5',
        "# HELP levels with a\\nbreak", "# TYPE levels gauge", "levels -3.25",
    ]  # fmt: skip


def test_a_histogram_is_shown_as_tritons(memory: MetricMemory) -> None:
    times = family("times", HISTOGRAM)
    metric = times.Metric({"a": "x"}, buckets=[0.1, 1.0, 2.5])

    for value in (0.05, 1.0, 6.5):
        metric.observe(value)

    assert shown(memory)[2:] == [
        'times_count{a="x"} 3',
        'times_sum{a="x"} 7.55',
        'times_bucket{a="x",le="0.1"} 1',
        'times_bucket{a="x",le="1"} 2',
        'times_bucket{a="x",le="2.5"} 2',
        'times_bucket{a="x",le="+Inf"} 3',
    ]


def test_an_observed_nan_is_in_the_first_bucket(memory: MetricMemory) -> None:
    """As in Triton: prometheus-cpp 1.0.1, which it uses, counts NaN there."""
    times = family("times", HISTOGRAM)

    times.Metric(buckets=[0.1, 1.0]).observe(float("nan"))

    assert shown(memory)[2:] == [
        "times_count 1", "times_sum Nan", 'times_bucket{le="0.1"} 1', 'times_bucket{le="1"} 1',
        'times_bucket{le="+Inf"} 1',
    ]  # fmt: skip


def test_infinite_values_and_bounds_are_shown_as_tritons(memory: MetricMemory) -> None:
    level, times = family("level", GAUGE), family("times", HISTOGRAM)

    level.Metric().set(float("inf"))
    times.Metric(buckets=[float("-inf"), 1]).observe(float("-inf"))

    assert [line for line in shown(memory) if not line.startswith("#")] == [
        "level +Inf", "times_count 1", "times_sum -Inf", 'times_bucket{le="-Inf"} 1', 'times_bucket{le="1"} 1',
        'times_bucket{le="+Inf"} 1',
    ]  # fmt: skip


def test_equal_labels_share_one_value(memory: MetricMemory) -> None:
    """In whatever order they are, of families that were declared twice."""
    first, second = family(), family(text="the second")
    one, other = first.Metric(LABELS), second.Metric(dict(reversed(LABELS.items())))
    third = first.Metric({"a": "1"})

    one.increment(7.5)

    assert (other.value(), third.value()) == (7.5, 0.0)
    assert shown(memory) == ["# HELP own the first", "# TYPE own counter", 'own{a="1",b="2"} 7.5', 'own{a="1"} 0']


def test_a_family_of_another_kind_is_refused(memory: MetricMemory) -> None:
    one = family()

    with pytest.raises(pb_utils.TritonModelException, match="'own' is a counter already"):
        family(kind=GAUGE)
    del one

    assert family(kind=GAUGE).Metric().value() == 0.0


def test_a_series_lives_as_long_as_a_family_of_it(memory: MetricMemory) -> None:
    """A new one begins at 0; what is left of a deleted one is refused."""
    first, second = family(), family()
    one, other = first.Metric(LABELS), second.Metric(LABELS)
    one.increment(1)

    del first

    with pytest.raises(pb_utils.TritonModelException, match="Failed to increment metric value: Invalid metric operat"):
        one.increment(1)
    assert other.value() == 1.0
    assert len(memory.read()) == 1
    del second
    assert memory.read() == []
    again = family()
    assert again.Metric(LABELS).value() == 0.0


def test_memory_of_series_that_are_gone_is_used_again(memory: MetricMemory, few: None) -> None:
    for number in range(200):
        one = family()
        one.Metric({"a": f"{number:08}"}).increment(1)
        del one

    assert memory.read() == []


def test_series_without_end_are_refused(memory: MetricMemory, few: None) -> None:
    one = family()

    made = [one.Metric({"a": str(number)}) for number in range(4096 // 64)]

    with pytest.raises(pb_utils.TritonModelException, match="the metrics of a model's process may take 4096 bytes"):
        one.Metric({"a": "one more"})

    made[1].increment(1)
    assert one.Metric({"a": "1"}).value() == 1.0


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (HISTOGRAM, {}),
        (HISTOGRAM, {"buckets": None}),
        (HISTOGRAM, {"buckets": "12"}),
        (HISTOGRAM, {"buckets": [2.5, 0.1]}),
        (HISTOGRAM, {"buckets": [1, 1, 2]}),
        (HISTOGRAM, {"buckets": [1, float("nan")]}),
        (COUNTER, {"buckets": [1]}),
        (COUNTER, {"labels": [("a", "1")]}),
        (COUNTER, {"labels": {"a": 1}}),
        (COUNTER, {"labels": {"a-b": "1"}}),
        (COUNTER, {"labels": {"__a": "1"}}),
    ],
)
def test_arguments_of_a_series_are_checked(memory: MetricMemory, kind: Any, given: dict[str, Any]) -> None:
    one = family(kind=kind)

    with pytest.raises(pb_utils.TritonModelException, match="Failed to create metric"):
        one.Metric(**given)


def test_a_histogram_may_have_the_infinite_bucket_only(memory: MetricMemory) -> None:
    none, infinite = family("none", HISTOGRAM), family("infinite", HISTOGRAM)
    none.Metric(buckets=[]).observe(3)
    infinite.Metric(buckets=[float("inf")]).observe(3)

    lines = [line for line in shown(memory) if "_bucket" in line]
    assert lines == ['none_bucket{le="+Inf"} 1', 'infinite_bucket{le="+Inf"} 1']


def test_a_name_must_be_one_of_prometheus(memory: MetricMemory) -> None:
    for name in ("", "1a", "a-b", "a b"):
        with pytest.raises(pb_utils.TritonModelException, match="is not a valid metric name"):
            family(name)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [(COUNTER, ("set", "observe")), (GAUGE, ("observe",)), (HISTOGRAM, ("set", "increment", "value"))],
)
def test_each_kind_has_its_operations(memory: MetricMemory, kind: Any, refused: tuple[str, ...]) -> None:
    one = family(kind=kind)
    metric = one.Metric(buckets=[1] if kind is HISTOGRAM else None)

    for operation in refused:
        with pytest.raises(pb_utils.TritonModelException, match="has no such operation"):
            getattr(metric, operation)(*([] if operation == "value" else [1.0]))
    if kind is COUNTER:
        with pytest.raises(pb_utils.TritonModelException, match="can't be incremented by -1"):
            metric.increment(-1)


def test_without_a_worker_metrics_work_all_the_same() -> None:
    one = family()

    one.Metric().increment(2)

    assert one.Metric().value() == 2.0
