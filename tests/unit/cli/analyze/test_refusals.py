"""Configurations that can't be loaded, options out of range, and a server that ends in the middle."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from qinfer.cli.analyze.figures import Figures, Goal, LoadWindow
from qinfer.cli.analyze.search import Wanted
from qinfer.cli.analyze.session import Measurer, parsed, read_space
from qinfer.cli.analyze.space import Candidate, Point
from qinfer.cli.analyze.stack import Stack
from qinfer.cli.console import CommandFailed
from qinfer.errors import ModelLoadFailed

ONE, TWO = (Candidate(count, 8, 0.0, 0, "python") for count in (1, 2))
CONFIG = {"max_batch_size": 8, "dynamic_batching": {}, "backend": "python"}
GOOD = Figures((LoadWindow(100.0, 1.0, 2.0, 100.0),))
GIVEN: dict[str, Any] = dict.fromkeys(
    ("instances", "max_batch_size", "delay_ms", "threads", "backend", "precision", "concurrency"), ""
)


class Server:
    """Refuses two instances; may have ended."""

    def __init__(self, ended: str = "") -> None:
        self.loads, self.ended = 0, ended

    def configure(self, model: str, config: dict[str, Any]) -> None:
        self.loads += 1
        if config.get("instance_group"):
            raise ModelLoadFailed(f"{model} needs more memory")

    def check(self) -> None:
        if self.ended:
            raise CommandFailed(self.ended)


def measure_of(server: Server, measure: Any = lambda _: GOOD) -> Any:
    kept: dict[Any, Figures] = {}
    journal = SimpleNamespace(known=kept, add=lambda wanted, found: kept.update({(wanted.point, wanted.turn): found}))
    progress = SimpleNamespace(announce=lambda _: None, note=lambda *_: None)
    meter = SimpleNamespace(measure=measure, goal=Goal())
    return Measurer(server, "m", CONFIG, meter, journal, progress)  # type: ignore[arg-type]


def test_a_configuration_that_cannot_be_loaded_is_refused_and_the_search_goes_on() -> None:
    server = Server()
    measure = measure_of(server)

    refused = measure(Wanted(Point(TWO, 1)))
    assert Goal().score(refused).mean == 0.0
    assert refused.first_error == "m needs more memory"
    measure(Wanted(Point(TWO, 2)))
    assert server.loads == 1
    assert measure(Wanted(Point(ONE, 1))) == GOOD


def test_a_server_that_has_ended_is_no_refusal() -> None:
    with pytest.raises(CommandFailed, match="killed"):
        measure_of(Server("killed"))(Wanted(Point(TWO, 1)))

    def lost(_: Wanted) -> Figures:
        raise CommandFailed("0 of 1 connections could be made")

    with pytest.raises(CommandFailed, match="killed"):
        measure_of(Server("killed"), lost)(Wanted(Point(ONE, 1)))
    with pytest.raises(CommandFailed, match="0 of 1"):
        measure_of(Server(), lost)(Wanted(Point(ONE, 1)))


def test_a_server_that_has_ended_says_its_last_lines(tmp_path: Path) -> None:
    import subprocess

    log = tmp_path / "up.log"
    log.write_text("out of memory\n")
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(CommandFailed, match="out of memory"):
        Stack(process, log, "http://127.0.0.1:1", SimpleNamespace()).check()  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["nan", "inf", "1e400", ",", "a", "-1"])
def test_lists_have_finite_numbers(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parsed("--delay-ms", text, float)


def test_a_space_has_levels_of_at_most_10_000() -> None:
    assert read_space(CONFIG, **GIVEN).levels[0] == 1
    with pytest.raises(typer.BadParameter, match="10001 are more than 10000"):
        read_space(CONFIG, **GIVEN | {"concurrency": "10001"})


def test_a_configuration_whose_answers_differ_is_refused_without_a_measurement() -> None:
    measure = measure_of(Server(), lambda _: pytest.fail("it was measured"))
    measure._meter.goal = Goal(accuracy=0.99)
    measure.compare_answers(SimpleNamespace(known={}, of=lambda candidate, load: 0.5))

    found = measure(Wanted(Point(ONE, 1)))

    assert (found.first_error, found.accuracy) == ("its answers agree by 0.5000, below 0.99", 0.5)


def test_a_limit_on_streams_refuses() -> None:
    late = Figures((LoadWindow(100.0, 1.0, 2.0, 100.0, first_ms=30.0, between_ms=5.0),))

    assert Goal(first_ms=30.0, between_ms=5.0).score(late).mean == 100.0
    assert Goal(first_ms=29.0).score(late).mean == 0.0
    assert Goal(between_ms=4.0).score(late).mean == 0.0


def test_of_several_models_options_hold_for_those_that_know_them() -> None:
    given = GIVEN | {"threads": "1,2", "backend": "onnxruntime,openvino", "precision": "full,mixed"}

    found = read_space(CONFIG, is_alone=False, **given)

    assert (found.backend, found.threads, found.precision) == (("python",), (0,), ("full",))
    with pytest.raises(typer.BadParameter, match="no list of full and mixed"):
        read_space({**CONFIG, "backend": "onnxruntime"}, **GIVEN | {"precision": "half"})


def test_a_stateful_model_keeps_its_batches() -> None:
    """Sequences have batches of their own."""
    stateful = {"max_batch_size": 8, "sequence_batching": {}, "backend": "python"}

    assert read_space(stateful, **GIVEN).max_batch == (1,)


def test_no_answer_at_all_is_no_score() -> None:
    silent = Figures((LoadWindow(0.0, 0.0, 0.0, 0.0),))
    assert Goal("p99").score(silent).mean == 0.0
