"""Configurations that can't be loaded, options out of range, and a server that ends in the middle."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from qinfer.cli.analyze.figures import Figures, Goal, LoadWindow
from qinfer.cli.analyze.search import Wanted
from qinfer.cli.analyze.session import Measurer, parsed, read_space
from qinfer.cli.analyze.space import Candidate, Point, computations
from qinfer.cli.analyze.stack import check_running
from qinfer.cli.console import CommandFailed
from qinfer.cli.main import app
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

    @property
    def client(self) -> "Server":
        return self

    def load(self, model: str, config: dict[str, Any]) -> None:
        self.loads += 1
        if config.get("instance_group"):
            raise ModelLoadFailed(f"{model} needs more memory")

    def check(self) -> None:
        if self.ended:
            raise CommandFailed(self.ended)


def measure_of(server: Server, measure: Any = lambda _: GOOD, accuracy: Any = None, known: Any = ()) -> Any:
    kept: dict[Wanted, Figures] = dict(known)
    journal = SimpleNamespace(known=kept, add=lambda wanted, found: kept.update({wanted.key: found}))
    progress = SimpleNamespace(announce=lambda _: None, note=lambda *_: None)
    meter = SimpleNamespace(measure=measure, goal=Goal(accuracy=0.99 if accuracy else 0.0), server=server)
    return Measurer({"m": CONFIG, "n": CONFIG}, meter, journal, progress, accuracy)  # type: ignore[arg-type]


def wanted(candidate: Candidate, level: int = 1, **more: Any) -> Wanted:
    return Wanted(Point(candidate, level), model="m", **more)


def test_a_configuration_that_cannot_be_loaded_is_refused_and_the_search_goes_on() -> None:
    server = Server()
    measure = measure_of(server)

    refused = measure(wanted(TWO))
    assert Goal().score(refused).mean == 0.0
    assert refused.first_error == "m needs more memory"
    measure(wanted(TWO, 2))
    assert server.loads == 1
    assert measure(wanted(ONE)) == GOOD


def test_of_a_mix_only_models_whose_configuration_changes_are_loaded() -> None:
    server = Server()
    measure = measure_of(server)
    batched = ONE._replace(max_batch=4)

    for candidate, beside in ((ONE, ONE), (ONE, batched), (batched, batched), (batched, ONE)):
        assert measure(wanted(candidate, beside=(("n", beside),))) == GOOD

    assert server.loads == 5


def test_a_measurement_beside_others_serves_no_other_mix() -> None:
    """What was measured is not measured again, as long as the other models have the same configurations."""
    measured: list[Wanted] = []

    def found(one: Wanted) -> Figures:
        measured.append(one)
        return GOOD

    measure = measure_of(Server(), found)
    mixes = [
        wanted(ONE, beside=(("n", beside),), to_beat=n) for n, beside in enumerate((ONE, TWO._replace(instances=1)))
    ]
    other = wanted(ONE, beside=(("n", ONE._replace(max_batch=4)),))

    for one in (*mixes, other, *mixes):
        measure(one)

    assert measured == [mixes[0], other]


def test_a_server_that_has_ended_is_no_refusal() -> None:
    with pytest.raises(CommandFailed, match="killed"):
        measure_of(Server("killed"))(wanted(TWO))

    def lost(_: Wanted) -> Figures:
        raise CommandFailed("0 of 1 connections could be made")

    with pytest.raises(CommandFailed, match="killed"):
        measure_of(Server("killed"), lost)(wanted(ONE))
    with pytest.raises(CommandFailed, match="0 of 1"):
        measure_of(Server(), lost)(wanted(ONE))


def test_a_server_that_has_ended_says_its_last_lines(tmp_path: Path) -> None:
    import subprocess

    log = tmp_path / "up.log"
    log.write_text("out of memory\n")
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(CommandFailed, match="out of memory"):
        check_running(process, log)


@pytest.mark.parametrize("text", ["nan", "inf", "1e400", ",", "a", "-1"])
def test_lists_have_finite_numbers(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parsed("--delay-ms", text, float)


def test_a_space_has_levels_of_at_most_10_000() -> None:
    assert read_space(CONFIG, **GIVEN).levels[0] == 1
    with pytest.raises(typer.BadParameter, match="10001 are more than 10000"):
        read_space(CONFIG, **GIVEN | {"concurrency": "10001"})


def test_a_configuration_whose_answers_differ_is_refused_without_a_measurement() -> None:
    accuracy = SimpleNamespace(known={}, of=lambda candidates, load: 0.5)
    measure = measure_of(Server(), lambda _: pytest.fail("it was measured"), accuracy)

    found = measure(wanted(ONE))

    assert (found.first_error, found.accuracy) == ("its answers agree by 0.5000, below 0.99", 0.5)


def test_answers_that_were_compared_before_a_kill_are_not_compared_again() -> None:
    accuracy = SimpleNamespace(known={})

    measure_of(Server(), accuracy=accuracy, known={wanted(ONE): GOOD._replace(accuracy=0.995)})

    assert accuracy.known == {computations({"m": ONE}): 0.995}


def test_a_limit_on_streams_refuses() -> None:
    late = Figures((LoadWindow(100.0, 1.0, 2.0, 100.0, first_ms=30.0, between_ms=5.0),))

    assert Goal(first_p99_ms=30.0, between_p99_ms=5.0).score(late).mean == 100.0
    assert Goal(first_p99_ms=29.0).score(late).mean == 0.0
    assert Goal(between_p99_ms=4.0).score(late).mean == 0.0


def test_of_several_models_options_hold_for_those_that_know_them() -> None:
    given = GIVEN | {"threads": "1,2", "backend": "onnxruntime,openvino", "precision": "full,mixed"}

    found = read_space(CONFIG, is_alone=False, **given)

    assert (found.backend, found.threads, found.precision) == (("python",), (0,), ("full",))
    with pytest.raises(typer.BadParameter, match="python has none of them"):
        read_space(CONFIG, **GIVEN | {"precision": "full,mixed"})
    both = read_space({**CONFIG, "backend": "onnxruntime"}, **GIVEN | {"precision": "full,mixed"})
    assert both.precision == ("full", "mixed")


def test_a_stateful_model_keeps_its_batches() -> None:
    """Sequences have batches of their own."""
    stateful = {"max_batch_size": 8, "sequence_batching": {}, "backend": "python"}

    assert read_space(stateful, **GIVEN).max_batch == (1,)


def test_no_answer_at_all_is_no_score() -> None:
    silent = Figures((LoadWindow(0.0, 0.0, 0.0, 0.0),))
    assert Goal("p99").score(silent).mean == 0.0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["n"], "one model or ensemble"),
        (["--input", "x=1"], "one model or ensemble"),
        (["--composing", "n"], "not copies"),
    ],
)
def test_in_place_the_load_is_of_one_model_that_the_guard_can_watch(
    tmp_path: Path, options: list[str], why: str
) -> None:
    for model in ("m", "n"):
        (tmp_path / model).mkdir()

    refused = CliRunner().invoke(app, ["analyze", "m", *options, "--in-place", "--model-repository", str(tmp_path)])

    assert refused.exit_code == 64
    assert why in " ".join(refused.output.replace("│", " ").split())
