"""A run of `qinfer analyze`: the tuned models one after another, each search with a journal of its own.

A model is searched while the others have the best configurations that were found before; the load is the same for all.
"""

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import typer

from qinfer.cli.analyze import search
from qinfer.cli.analyze.accuracy import Accuracy
from qinfer.cli.analyze.figures import Figures, Goal, MeterRules
from qinfer.cli.analyze.journal import Journal, Subject
from qinfer.cli.analyze.loads import Loaded, compared_requests, loaded_models, models_of, plan_of
from qinfer.cli.analyze.measure import Meter
from qinfer.cli.analyze.report import Facts, page
from qinfer.cli.analyze.search import Search, Wanted
from qinfer.cli.analyze.space import (
    MIXED_BACKENDS,
    THREAD_PARAMETERS,
    Candidate,
    Point,
    Precision,
    Space,
    configured,
    powers_of_two,
    today_of,
)
from qinfer.cli.analyze.stack import config_text
from qinfer.cli.client import GatewayClient
from qinfer.cli.console import CommandFailed
from qinfer.errors import QinferError
from qinfer.models.readiness import APART
from qinfer.observe.host import ProcessUse

MOST_LEVEL = 10_000
MOST_BATCH = 64
"""The largest batch that is tried where the configuration has a smaller one."""


class Asked(NamedTuple):
    """The options, read.

    Attributes:
        shares: The models of the load, and their shares.
        called: Further models to tune, which loaded ones call.
        mode: quick | brute | optuna
        goal: The objective.
        rules: How long a measurement lasts.
        values: The options with lists of values, by name.
        inputs: `--input` options.
        data: `--data` options.
        per_sequence: Steps of a sequence.
        is_traced: Whether requests arrive as they were recorded.
    """

    shares: Mapping[str, float]
    called: Sequence[str]
    mode: str
    goal: Goal
    rules: MeterRules
    values: Mapping[str, str]
    inputs: Sequence[str]
    data: Sequence[str]
    per_sequence: int
    is_traced: bool = False

    def apart(self) -> "Asked":
        """Returns the options for the models of a live installation that only workers of their own load."""
        return self._replace(shares={f"{APART}{model}": share for model, share in self.shares.items()})


class TrialServer(Protocol):
    """A server on which configurations are tried."""

    url: str
    client: GatewayClient

    def configure(self, model: str, config: Mapping[str, Any]) -> None:
        """Loads a model with a configuration, and waits until it is ready."""
        ...

    def check(self) -> None:
        """Raises `CommandFailed` if the server can't be used any longer."""
        ...

    def use(self) -> ProcessUse:
        """Returns CPU time and memory of the server's processes."""
        ...

    def files_digest(self, model: str) -> str:
        """Returns a digest of a model's files."""
        ...

    def told(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a configuration as the model's own."""
        ...


class Tuned(NamedTuple):
    """A model's result: what was found, and its present configuration."""

    facts: Facts
    config: Mapping[str, Any]


def tune(asked: Asked, server: TrialServer, directory: Path) -> list[Tuned]:
    """Searches the best configuration of each model, and writes what was found into a directory.

    Raises:
        CommandFailed: The search was interrupted, or the server has ended.
        QinferError: The load can't be sent.
    """
    client = server.client
    loads = loaded_models(client, asked.shares, asked.inputs, asked.data)
    if asked.goal.accuracy and (odd := next((one for one in loads if one.streams or one.is_stateful), None)):
        kind = "streams" if odd.streams else "sequences"
        raise typer.BadParameter(f"{odd.model} answers by {kind}, which are not compared", param_hint="--accuracy")
    for one in loads:
        one.ask_once(client)
    names = list(dict.fromkeys([*(name for one in loads for name in models_of(client, one.config)), *asked.called]))
    run = _Run(asked, server, loads, {name: client.config(name) for name in names})
    found = []
    for name in names:
        config = run.configs[name]
        facts = run.search_model(name, directory if len(names) == 1 else directory / name)
        found.append(Tuned(facts, server.told(config)))
        if name != names[-1]:
            run.configs[name] = configured(config, facts.outcome.winner.candidate)
            server.configure(name, run.configs[name])
    return found


class _Run:
    """The load, and the configurations that the models have now."""

    def __init__(
        self, asked: Asked, server: TrialServer, loads: Sequence[Loaded], configs: dict[str, Mapping[str, Any]]
    ) -> None:
        self._asked, self._server, self._loads, self.configs = asked, server, loads, configs
        traced = Path(next(iter(asked.data), "")) if asked.is_traced else None
        self._plan = plan_of(server.url, loads, asked.per_sequence, traced)
        is_given = bool(asked.inputs or asked.data)
        self._compared = [
            (one.model, compared_requests(server.client, one, is_given=is_given))
            for one in loads
            if asked.goal.accuracy
        ]

    def search_model(self, model: str, directory: Path) -> Facts:
        """Searches a model's best configuration beside the others."""
        asked, goal, server, config = self._asked, self._asked.goal, self._server, self.configs[model]
        space = read_space(config, is_alone=len(self.configs) == 1, **asked.values)
        others = {name: config_text(of) for name, of in self.configs.items() if name != model}
        files = " ".join(server.files_digest(name) for name in dict.fromkeys([*self.configs, *asked.shares]))
        sent = sha256(repr((self._plan.digest, sorted(others.items()))).encode()).hexdigest()
        meter = Meter(server.client, model, self._plan, goal, asked.rules, server.use, server.check)
        journal = Journal(directory, Subject(model, files, space, goal, asked.mode, asked.rules, sent))
        progress = _Progress(model, space, search.budget_of(space, asked.mode), len(journal.known))
        plan: Search = {"quick": search.quick, "brute": search.brute, "optuna": search.optuna}[asked.mode](space, goal)
        measure = Measurer(server, model, config, meter, journal, progress)
        if goal.accuracy:
            measure.compare_answers(Accuracy(server.client, self._compared, space.today))
        try:
            outcome = search.drive(plan, measure)
        except KeyboardInterrupt:
            known = len(journal.known)
            raise CommandFailed(f"interrupted; the same command goes on after {known} measurements") from None
        finally:
            journal.close()
            progress.clear()
        figures: dict[Point, Figures] = {}
        for (point, _), one in journal.known.items():
            figures[point] = figures[point].joined(one) if point in figures else one
        text = config_text(server.told(configured(config, outcome.winner.candidate)))
        is_alone = [one.model for one in self._loads] == [model]
        found = Facts(server.told(config)["name"], _machine(), goal, outcome, figures, text, is_alone)
        (directory / "report.html").write_text(page(found), encoding="utf-8")
        (directory / "config.pbtxt").write_text(found.config, encoding="utf-8")
        journal.write_parquet(directory / "measurements.parquet")
        return found


class Measurer:
    """Measures points: loads their candidates, compares answers, and notes what was found."""

    def __init__(
        self,
        server: TrialServer,
        model: str,
        config: Mapping[str, Any],
        meter: Meter,
        journal: Any,
        progress: "_Progress",
    ) -> None:
        self._server, self._model, self._config = server, model, config
        self._meter, self._journal, self._progress = meter, journal, progress
        self._accuracy: Accuracy | None = None
        self._loaded: Candidate | None = None
        self._refusals: dict[Candidate, str] = {}

    def compare_answers(self, accuracy: Accuracy) -> None:
        """Compares answers, too, except those that the journal has compared."""
        for (point, _), found in self._journal.known.items():
            if found.accuracy is not None:
                accuracy.known[point.candidate.computation] = found.accuracy
        self._accuracy = accuracy

    def __call__(self, wanted: Wanted) -> Figures:
        """Returns the figures of a point, which may be known."""
        known: Figures | None = self._journal.known.get((wanted.point, wanted.turn))
        if known is not None:
            return known
        candidate, agrees = wanted.point.candidate, None
        self._progress.announce(wanted)
        reason = self._refusal(candidate)
        try:
            if not reason and self._accuracy is not None:
                agrees = self._accuracy.of(candidate, self._load_candidate)
                reason = _disagreement(agrees, self._meter.goal)
            found = Figures.refused(reason) if reason else self._meter.measure(wanted)
        except QinferError:
            self._server.check()
            raise
        found = found._replace(accuracy=agrees)
        self._journal.add(wanted, found)
        self._progress.note(wanted, found)
        return found

    def _refusal(self, candidate: Candidate) -> str:
        """Loads a candidate; returns why it can't be loaded, or empty."""
        if self._loaded != candidate and candidate not in self._refusals:
            try:
                self._load_candidate(candidate)
            except QinferError as error:
                self._server.check()
                self._refusals[candidate] = error.message
        return self._refusals.get(candidate, "")

    def _load_candidate(self, candidate: Candidate) -> None:
        self._loaded = None
        self._server.configure(self._model, configured(self._config, candidate))
        self._loaded = candidate


def _disagreement(agrees: float, goal: Goal) -> str:
    return "" if agrees >= goal.accuracy else f"its answers agree by {agrees:.4f}, below {goal.accuracy:g}"


class _Progress:
    """A line for each measurement on stderr, with the time left."""

    def __init__(self, model: str, space: Space, most: int, known: int) -> None:
        self._most, self._done, self._known = most, known, known
        self._began_s = time.monotonic()
        if known:
            print(f"goes on after {known} measurements", file=sys.stderr)
        print(f"{model}: {space.size} points; at most {most} measurements", file=sys.stderr)

    def announce(self, wanted: Wanted) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{wanted.point.candidate.text()} at {wanted.point.level} …", end="", file=sys.stderr)

    def note(self, wanted: Wanted, found: Figures) -> None:
        self._done += 1
        each_s = (time.monotonic() - self._began_s) / (self._done - self._known)
        left_min = max(self._most - self._done, 0) * each_s / 60
        start = "\r\033[K" if sys.stderr.isatty() else ""
        errors = f"; {found.errors} errors, first: {found.first_error[:300]}" if found.errors else ""
        print(
            f"{start}{self._done:4d}/{self._most}  {found.throughput.mean:10,.0f}/s  p99 {found.p99_ms:8.2f} ms  "
            f"{wanted.point.candidate.text()} at {wanted.point.level}; at most {left_min:.0f} min left{errors}",
            file=sys.stderr,
        )

    def clear(self) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)


def read_space(config: Mapping[str, Any], *, is_alone: bool = True, **given: str) -> Space:
    """Returns the space that the options ask for.

    Of several models, each has the dimensions that its backend knows; an option that a model does not know is an error
    for a single model.
    """
    today = today_of(config)
    cores = powers_of_two(os.cpu_count() or 1)
    backends = tuple(dict.fromkeys(name for name in given["backend"].split(",") if name)) or (today.backend,)
    if not is_alone and today.backend not in backends:
        backends = (today.backend,)
    can_thread = all(name in THREAD_PARAMETERS for name in backends)
    if given["threads"] and not can_thread and is_alone:
        raise typer.BadParameter(f"{', '.join(backends)} has no such parameter", param_hint="--threads")
    can_mix = all(name in MIXED_BACKENDS for name in backends)
    if given["precision"] and not can_mix and is_alone:
        raise typer.BadParameter(f"{', '.join(backends)} has no mixed precision", param_hint="--precision")
    can_batch = today.max_batch and "sequence_batching" not in config
    batches = powers_of_two(max(today.max_batch, MOST_BATCH))
    levels = parsed("--concurrency", given["concurrency"] or "1", int)
    if levels[-1] > MOST_LEVEL:
        raise typer.BadParameter(f"{levels[-1]} are more than {MOST_LEVEL}", param_hint="--concurrency")
    return Space(
        parsed("--instances", given["instances"], int) or cores,
        (parsed("--max-batch-size", given["max_batch_size"], int) or batches) if can_batch else (today.max_batch,),
        (parsed("--delay-ms", given["delay_ms"], float) or (0.0,)) if can_batch else (today.delay_ms,),
        (parsed("--threads", given["threads"], int) or cores) if can_thread else (0,),
        backends,
        levels,
        today,
        _precisions(given["precision"]) if can_mix and given["precision"] else (today.precision,),
    )


def _precisions(text: str) -> tuple[Precision, ...]:
    known: tuple[Precision, ...] = ("full", "mixed")
    words = text.split(",")
    if not set(words) <= set(known):
        raise typer.BadParameter(f"'{text}' is no list of full and mixed", param_hint="--precision")
    return tuple(one for one in known if one in words)


def parsed(option: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """Reads a list of positive numbers, or of delays."""
    try:
        values = tuple(sorted({kind(value) for value in text.split(",") if value}))
        if (text and not values) or not all(map(math.isfinite, values)):
            raise ValueError
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"'{text}' is no list of numbers, such as 1,2,4", param_hint=option) from None
    if values and (values[0] < 0 or (values[0] == 0 and kind is int)):
        raise typer.BadParameter(f"'{text}' has {values[0]:g}, and values must be positive", param_hint=option)
    return values


def _machine() -> str:
    return f"{platform.node()}, {os.cpu_count()} cores, {platform.machine()}"
