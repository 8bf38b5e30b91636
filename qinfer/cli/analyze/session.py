"""A run of `qinfer analyze`: a load, the joint search of the models that it reaches, and what is written about them."""

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, get_args

import typer

from qinfer.cli.analyze import search
from qinfer.cli.analyze.accuracy import Accuracy
from qinfer.cli.analyze.apply import as_own
from qinfer.cli.analyze.figures import Figures, Goal
from qinfer.cli.analyze.journal import Journal, Subject, digest
from qinfer.cli.analyze.loads import Loaded, loaded_models, models_of, plan_of, random_requests
from qinfer.cli.analyze.measure import Meter
from qinfer.cli.analyze.mix import joint, most_measurements
from qinfer.cli.analyze.report import Facts, limit_of, page
from qinfer.cli.analyze.search import Wanted
from qinfer.cli.analyze.space import (
    THREAD_PARAMETERS,
    Candidate,
    Precision,
    Space,
    computations,
    config_text,
    configured,
    powers_of_two,
    today_of,
)
from qinfer.cli.analyze.stack import TrialServer
from qinfer.cli.client import GatewayClient
from qinfer.cli.console import CommandFailed
from qinfer.errors import QinferError

MOST_LEVEL = 10_000
MOST_BATCH = 64
"""The largest batch that is tried where the configuration has a smaller one."""
MODES: Mapping[str, Callable[..., search.Search]] = {
    "quick": search.quick,
    "brute": search.brute,
    "optuna": search.optuna,
}


class Asked(NamedTuple):
    """The options of these names, read; `shares` are the load's by model, `values` the options of a space."""

    shares: Mapping[str, float]
    goal: Goal
    values: Mapping[str, str]
    model_repository: Sequence[str]
    mode: str
    composing: Sequence[str]
    inputs: Sequence[str]
    data: Sequence[str]
    arrivals: str
    per_sequence: int
    window_s: float


def tune(asked: Asked, server: TrialServer, directory: Path) -> list[Facts]:
    """Searches the best configurations of the models, and writes what was found into a directory.

    Raises:
        CommandFailed: The search was interrupted, or the server has ended.
        QinferError: The load can't be sent.
    """
    client, goal = server.client, asked.goal
    shares = {f"{server.prefix}{model}": share for model, share in asked.shares.items()}
    data = [f"{server.prefix}{text}" if "=" in text else text for text in asked.data]
    loads = loaded_models(client, shares, asked.inputs, data)
    for one in loads:
        one.ask_once(client)
    names = [*(name for one in loads for name in models_of(client, one.config)), *asked.composing]
    configs = {name: client.config(name) for name in dict.fromkeys(names)}
    spaces = {name: read_space(config, is_alone=len(configs) == 1, **asked.values) for name, config in configs.items()}
    traced = Path(asked.data[0].rpartition("=")[2]) if asked.arrivals else None
    plan = plan_of(server.url, loads, asked.per_sequence, traced)
    accuracy = _accuracy(asked, client, loads, spaces) if goal.accuracy else None
    sent = sha256(repr((plan.digest, [config_text(config) for config in configs.values()])).encode()).hexdigest()
    own_names = [name.removeprefix(server.prefix) for name in {**configs, **shares}]
    files = digest(Path(one) / name for name in own_names for one in asked.model_repository)
    journal = Journal(directory, Subject(files, spaces, goal, asked.mode, asked.window_s, sent))
    progress = _Progress(spaces, most_measurements(spaces, asked.mode), len(journal.known))
    measure = Measurer(configs, Meter(server, plan, goal, asked.window_s), journal, progress, accuracy)
    try:
        outcomes = search.drive(joint(spaces, goal, MODES[asked.mode]), measure)
    except KeyboardInterrupt:
        known = len(journal.known)
        raise CommandFailed(f"interrupted; the same command goes on after {known} measurements") from None
    finally:
        journal.close()
        progress.clear()
    journal.write_parquet(directory / "measurements.parquet")
    found, machine = list[Facts](), f"{platform.node()}, {os.cpu_count()} cores, {platform.machine()}"
    for name, outcome in outcomes.items():
        winner = as_own(configured(configs[name], outcome.winner.candidate))
        is_alone, is_mix = [one.model for one in loads] == [name], len(outcomes) > 1
        limit = limit_of(outcome.winner, outcome.figures[outcome.winner]) if is_alone else ""
        facts = Facts(winner["name"], machine, goal, outcome, winner, limit, is_mix)
        written = directory / facts.model if is_mix else directory
        written.mkdir(exist_ok=True)
        (written / "report.html").write_text(page(facts), encoding="utf-8")
        (written / "config.pbtxt").write_text(facts.config, encoding="utf-8")
        found.append(facts)
    return found


def _accuracy(asked: Asked, client: GatewayClient, loads: Sequence[Loaded], spaces: Mapping[str, Space]) -> Accuracy:
    if odd := next((one for one in loads if one.streams or one.is_stateful), None):
        kind = "streams" if odd.streams else "sequences"
        raise typer.BadParameter(f"{odd.model} answers by {kind}, which are not compared", param_hint="--accuracy")
    given = asked.inputs or asked.data
    compared = [(one.model, one.requests if given else random_requests(client, one.model)) for one in loads]
    return Accuracy(client, compared, {name: space.today for name, space in spaces.items()})


class Measurer:
    """Measures points: loads candidates, compares answers, and notes what it found, so that it is never asked twice."""

    def __init__(
        self,
        configs: Mapping[str, Mapping[str, Any]],
        meter: Meter,
        journal: Journal,
        progress: "_Progress",
        accuracy: Accuracy | None = None,
    ) -> None:
        self._configs = configs
        self._meter, self._journal, self._progress, self._accuracy = meter, journal, progress, accuracy
        self._loaded: dict[str, Candidate] = {}
        self._refusals: dict[Wanted, str] = {}
        for wanted, found in journal.known.items():
            if accuracy is not None and found.accuracy is not None:
                accuracy.known[computations(wanted.candidates)] = found.accuracy

    def __call__(self, wanted: Wanted) -> Figures:
        """Returns the figures of a point, which may be known."""
        if known := self._journal.known.get(wanted.key):
            return known
        agrees = None
        self._progress.announce(wanted)
        reason = self._refusal(wanted)
        try:
            if not reason and self._accuracy is not None:
                agrees, least = self._accuracy.of(wanted.candidates, self._load_candidates), self._meter.goal.accuracy
                reason = f"its answers agree by {agrees:.4f}, below {least:g}" if agrees < least else ""
            found = Figures.refused(reason) if reason else self._meter.measure(wanted)
        except QinferError:
            self._meter.server.check()
            raise
        found = found._replace(accuracy=agrees)
        self._journal.add(wanted, found)
        self._progress.note(wanted, found)
        return found

    def _refusal(self, wanted: Wanted) -> str:
        """Loads candidates; returns why they can't be loaded, or empty."""
        at_any_load = Wanted(wanted.point._replace(level=0), model=wanted.model, beside=wanted.beside)
        if at_any_load not in self._refusals:
            try:
                self._load_candidates(wanted.candidates)
            except QinferError as error:
                self._meter.server.check()
                self._refusals[at_any_load] = error.message
        return self._refusals.get(at_any_load, "")

    def _load_candidates(self, candidates: Mapping[str, Candidate]) -> None:
        for name, candidate in candidates.items():
            if self._loaded.get(name) != candidate:
                self._loaded.pop(name, None)
                self._meter.server.client.load(name, config=configured(self._configs[name], candidate))
                self._loaded[name] = candidate


class _Progress:
    """A line for each measurement on stderr, with the time left."""

    def __init__(self, spaces: Mapping[str, Space], most: int, known: int) -> None:
        self._most, self._done, self._known = most, known, known
        self._began_s = time.monotonic()
        if known:
            print(f"goes on after {known} measurements", file=sys.stderr)
        sizes = ", ".join(f"{name}: {space.size} points" for name, space in spaces.items())
        print(f"{sizes}; at most {most} measurements", file=sys.stderr)

    def announce(self, wanted: Wanted) -> None:
        self._print(f"{self._text(wanted)} …", end="")

    def note(self, wanted: Wanted, found: Figures) -> None:
        self._done += 1
        each_s = (time.monotonic() - self._began_s) / (self._done - self._known)
        left_min = max(self._most - self._done, 0) * each_s / 60
        errors = f"; {found.errors} errors, first: {found.first_error[:300]}" if found.errors else ""
        self._print(
            f"{self._done:4d}/{self._most}  {found.throughput.mean:10,.0f}/s  p99 {found.p99_ms:8.2f} ms  "
            f"{self._text(wanted)}; at most {left_min:.0f} min left{errors}"
        )

    def clear(self) -> None:
        self._print("", end="")

    def _print(self, text: str, end: str = "\n") -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end=end, file=sys.stderr)
        elif end:
            print(text, file=sys.stderr)

    def _text(self, wanted: Wanted) -> str:
        return f"{wanted.model}: {wanted.point.candidate.text()} at {wanted.point.level}"


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
    can_vary = all(name in THREAD_PARAMETERS for name in backends)
    if is_alone and not can_vary and (given["threads"] or given["precision"]):
        raise typer.BadParameter(f"{', '.join(backends)} has none of them", param_hint="--threads, --precision")
    precisions = tuple(one for one in get_args(Precision) if one in given["precision"].split(","))
    can_batch = today.max_batch and "sequence_batching" not in config
    batches = powers_of_two(max(today.max_batch, MOST_BATCH))
    levels = parsed("--concurrency", given["concurrency"] or "1", int)
    if levels[-1] > MOST_LEVEL:
        raise typer.BadParameter(f"{levels[-1]} are more than {MOST_LEVEL}", param_hint="--concurrency")
    return Space(
        parsed("--instances", given["instances"], int) or cores,
        (parsed("--max-batch-size", given["max_batch_size"], int) or batches) if can_batch else (today.max_batch,),
        (parsed("--delay-ms", given["delay_ms"], float) or (0.0,)) if can_batch else (today.delay_ms,),
        (parsed("--threads", given["threads"], int) or cores) if can_vary else (0,),
        backends,
        levels,
        today,
        precisions if can_vary and precisions else (today.precision,),
    )


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
