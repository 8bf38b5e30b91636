"""Metrics of models in several processes and workers, shown as those of one server."""

from qinfer.observe.exposition import ModelSeries, merged, model_families, render


def series(kind: str, *values: float, name: str = "own", bounds: tuple[float, ...] = (), text: str = "") -> ModelSeries:
    return ModelSeries(name, kind, text, (("a", "1"),), bounds, values)


def values(*given: ModelSeries) -> list[tuple[float, ...]]:
    return [one.values for one in merged(given)]


def test_counters_and_histograms_are_added() -> None:
    assert values(series("counter", 1.5), series("counter", 2.0)) == [(3.5,)]
    histograms = [series("histogram", *of, bounds=(1.0,)) for of in ((1, 2, 7.5), (0, 1, 3.0))]
    assert values(*histograms) == [(1, 3, 10.5)]


def test_of_gauges_the_last_that_was_set_holds() -> None:
    assert values(series("gauge", 5, 20.0), series("gauge", 7, 10.0)) == [(5, 20.0)]


def test_gauges_that_were_incremented_only_are_added() -> None:
    assert values(series("gauge", 1, 0), series("gauge", 2, 0), series("gauge", 5, 20.0)) == [(8, 20.0)]


def test_of_what_differs_the_first_is_kept() -> None:
    """In kind, buckets or text."""
    given = [
        series("counter", 1, text="one"),
        series("gauge", 2, 0),
        series("counter", 3, text="two"),
        series("histogram", 1, 0, 1, name="h", bounds=(1.0,)),
        series("histogram", 1, 1, name="h"),
    ]

    found = merged(given)

    assert [(one.name, one.kind, one.text, one.values) for one in found] == [
        ("own", "counter", "one", (4,)),
        ("h", "histogram", "", (1, 0, 1)),
    ]


def test_a_metric_of_qinfers_own_name_is_left_out() -> None:
    assert model_families([series("counter", 1, name="qinfer_requests_total")]) == []


def test_openmetrics_has_them_too() -> None:
    """A counter that is not named as one there is of an unknown kind."""
    shown = model_families([series("counter", 2, name="seen_total"), series("counter", 1)])

    assert render(shown).decode().splitlines()[1:3] == ["# TYPE seen_total counter", 'seen_total{a="1"} 2']
    assert render(shown, as_openmetrics=True).decode().splitlines() == [
        "# HELP seen ", "# TYPE seen counter", 'seen_total{a="1"} 2.0',
        "# HELP own ", "# TYPE own unknown", 'own{a="1"} 1.0', "# EOF",
    ]  # fmt: skip
