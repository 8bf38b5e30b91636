"""The page: what it shows, and that names can't break it."""

import math
from xml.etree import ElementTree as ET

import pytest

from qinfer.cli.analyze.figures import Figures, Goal, Interval, LoadWindow, interval, learnt
from qinfer.cli.analyze.report import Facts, limit_of, page, pareto, rows, ticks
from qinfer.cli.analyze.search import Outcome
from qinfer.cli.analyze.space import Candidate, Point

TODAY, BEST = Candidate(1, 8, 0.0, 1, "onnxruntime"), Candidate(2, 32, 1.0, 1, "<b>&")


def figures(rate: float, p99_ms: float, mean_batch: float = 8.0) -> Figures:
    return Figures(
        tuple(LoadWindow(rate + step, 1.0, p99_ms, rate) for step in (-1, 0, 1)), mean_batch, 50.0, ((8, 4.0),)
    )


FIGURES = {
    Point(TODAY, 8): figures(1000, 5.0),
    Point(TODAY, 32): figures(1500, 20.0),
    Point(BEST, 8): figures(900, 6.0),
    Point(BEST, 32): figures(3000, 15.0),
}
RANKED = [Point(BEST, 32), Point(TODAY, 32)]
FACTS = Facts(
    "m<script>alert(1)</script>",
    "a machine",
    Goal(p99_ms=30.0),
    Outcome(Point(BEST, 32), Point(TODAY, 32), Interval(1.9, 2.0, 2.1), 30, RANKED, FIGURES, Point(BEST, 32)),
    {"name": "m<&>"},
)


def test_the_page_is_well_formed_without_scripts_and_addresses() -> None:
    text = page(FACTS)
    body = text[text.index("<body>") : text.index("</html>")]

    found = ET.fromstring(body)
    assert not list(found.iter("script"))
    assert "http" not in text
    assert len(list(found.iter("svg"))) == 2
    assert len(list(found.iter("circle"))) == 8
    words = "".join(found.itertext())
    assert "2.00 times the present one" in words
    assert "m<script>alert(1)</script>" in words
    assert 'name: "m<&>"' in words


def test_a_gain_of_several_models_is_said_to_be_of_all_together() -> None:
    assert (
        FACTS._replace(is_mix=True).verdict == "2.00 times the present one (1.90 to 2.10 at 95 %), all models together"
    )
    assert (
        FACTS._replace(outcome=FACTS.outcome._replace(winner=Point(TODAY, 8))).verdict
        == "the present configuration stays"
    )


def test_the_front_has_points_that_no_other_beats() -> None:
    assert pareto(FIGURES) == [Point(TODAY, 8), Point(BEST, 32)]


def test_the_best_load_of_each_configuration_is_listed() -> None:
    assert [(row[0], row[5], row[6]) for row in rows(FACTS)] == [("2", "32", "3,000"), ("1", "32", "1,500")]


@pytest.mark.parametrize(
    ("rate", "mean_batch", "words"),
    [(2000.0, 8.0, "The model limits it"), (100.0, 2.0, "The load limits it"), (500.0, 8.0, "The way to the model")],
)
def test_what_limits_a_point(rate: float, mean_batch: float, words: str) -> None:
    assert words in limit_of(Point(Candidate(1, 8, 0.0, 1, "x"), 2), figures(rate, 5.0, mean_batch))


def test_ticks_are_round() -> None:
    assert ticks(10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.9) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert ticks(math.inf) == [0.0]


def test_an_interval_covers_the_mean_of_its_windows() -> None:
    found = interval([9.0, 10.0, 11.0])

    assert found.mean == 10.0
    assert found.high - 10.0 == pytest.approx(4.303 / math.sqrt(3))
    assert interval([5.0]) == Interval(0.0, 5.0, math.inf)


def test_the_time_of_an_execution_is_learnt() -> None:
    model = learnt([(1, 3.0), (2, 4.0), (8, 10.0)])

    assert model is not None
    assert (round(model.fixed_ms, 6), round(model.each_ms, 6)) == (2.0, 1.0)
    assert model.rows_per_s(Candidate(2, 8, 0.0, 1, "x")) == pytest.approx(1600.0)
    assert learnt([(4, 1.0)]) is None
