"""`qinfer analyze`: the command."""

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import typer

from qinfer.cli.console import (
    CommandFailed,
    JsonOption,
    ModelArgument,
    Options,
    facts,
    gateway_client,
    option,
    show,
    table,
    with_options,
)
from qinfer.cli.models import RepositoryOption
from qinfer.errors import QinferError

if TYPE_CHECKING:
    from qinfer.cli.analyze.figures import Figures, Goal, MeterRules
    from qinfer.cli.analyze.measure import Meter
    from qinfer.cli.analyze.report import Facts
    from qinfer.cli.analyze.search import Search, Wanted
    from qinfer.cli.analyze.space import Candidate, Space
    from qinfer.cli.analyze.stack import Stack

EXAMPLE = "Example: qinfer analyze digits --model-repository ./models --p99-ms 20"
LEVELS = "1,2,4,8,16,32,64,128"
MOST_LEVEL = 10_000
MOST_BATCH = 64
"""The largest batch that is tried where the configuration has a smaller one."""


def _list_of_numbers(help_: str, default: str = "") -> Any:
    return option(str, default, help_, metavar="N,N,…")


OPTIONS: Options = {
    "model_repository": (RepositoryOption, None),
    "mode": option(
        Literal["quick", "brute", "optuna"],
        "quick",
        "quick: few measurements, chosen by what was found. brute: all. optuna: its sampler.",
    ),
    "objective": option(
        Literal["throughput", "p99", "goodput", "cost"],
        "throughput",
        "The measure of the best: requests/s, p99, requests/s within --deadline-ms, or --price-per-hour.",
    ),
    "p99_ms": option(float, 0.0, "The largest p99; 0 = any.", min=0),
    "memory_mb": option(float, 0.0, "The most memory of the server, in MiB; 0 = any.", min=0),
    "deadline_ms": option(float, 0.0, "The deadline of goodput.", min=0),
    "price_per_hour": option(float, 0.0, "The price of a core and hour, for cost.", min=0),
    "instances": _list_of_numbers("Instances; default: 1 to the number of cores."),
    "max_batch_size": _list_of_numbers("Rows of a batch; default: powers of two."),
    "delay_ms": _list_of_numbers("Waits for a fuller batch.", "0,1,5"),
    "threads": _list_of_numbers("Threads of an instance; default: 1 to the number of cores."),
    "backend": option(str, "", "Backends, such as onnxruntime,openvino; default: the model's."),
    "concurrency": _list_of_numbers("Concurrent requests.", LEVELS),
    "inputs": option(
        list[str] | None, None, "name=VALUE as in `qinfer infer`; default: one item of random data.", "--input", "-i"
    ),
    "data": option(
        Path | None,
        None,
        "Requests to send in turn: .jsonl, .parquet, or the .json of perf_analyzer's --input-data.",
    ),
    "window_s": option(float, 1.0, "Seconds of a window; a measurement has 2 to 8.", min=0.1, max=600),
    "output": option(Path | None, None, "Directory; default: analyze-MODEL.", "--output", "-o"),
    "apply": option(str, "", "URL of a gateway that loads the winner, in mode explicit."),
}
SPACE_OPTIONS = ("instances", "max_batch_size", "delay_ms", "threads", "backend", "concurrency")


@with_options(OPTIONS)
def analyze(model: ModelArgument, *, as_json: JsonOption = False, **given: Any) -> None:
    """Find the best configuration of a model by measurements on a private server.

    Writes report.html, config.pbtxt of the winner and all measurements into the output directory. The same command goes
    on after a kill. Let nothing else run on the machine.
    """
    from qinfer.cli.analyze.space import configured
    from qinfer.cli.analyze.stack import private_stack

    repositories = given["model_repository"] or ["models"]
    asked = _asked(model, repositories, given)
    directory = given["output"] or Path(f"analyze-{model}")
    if given["apply"]:
        with gateway_client(given["apply"]) as client:
            client.index()  # a wrong address is known before the search
    with private_stack(repositories, [model]) as stack:
        config = stack.client.config(model)
        found = _search(asked, stack, config, directory)
    best = found.figures[found.outcome.winner]
    if not found.goal.score(best).mean:
        error = f"; the first error: {best.first_error}" if best.errors else ""
        raise CommandFailed(f"no configuration keeps the limits without errors; see {directory}/report.html{error}")
    show(_as_json(found), lambda: _view(found, directory), as_json=as_json)
    if given["apply"]:
        _apply(given["apply"], model, configured(config, found.outcome.winner.candidate))


def _asked(model: str, repositories: Sequence[str], given: Mapping[str, Any]) -> "_Asked":
    from qinfer.cli.analyze.figures import Goal, MeterRules

    if given["objective"] == "goodput" and not given["deadline_ms"]:
        raise typer.BadParameter("goodput needs it", param_hint="--deadline-ms")
    if given["objective"] == "cost" and not given["price_per_hour"]:
        raise typer.BadParameter("cost needs it", param_hint="--price-per-hour")
    places = [Path(one) for one in repositories if (Path(one) / model).is_dir()]
    if not places:
        raise CommandFailed(f"no {model} in {', '.join(repositories)}; give --model-repository, a local directory")
    limits = (given["p99_ms"] or math.inf, given["memory_mb"] or math.inf, given["price_per_hour"])
    return _Asked(
        model,
        places[0],
        given["mode"],
        Goal(given["objective"], *limits, os.cpu_count() or 1),
        MeterRules(given["window_s"], given["deadline_ms"] or math.inf),
        {name: given[name] for name in SPACE_OPTIONS},
        given["inputs"] or [],
        given["data"],
    )


class _Asked(NamedTuple):
    """The options, read."""

    model: str
    repository: Path
    mode: str
    goal: "Goal"
    rules: "MeterRules"
    values: dict[str, str]
    inputs: list[str]
    data: Path | None


def _search(asked: _Asked, stack: "Stack", config: dict[str, Any], directory: Path) -> "Facts":
    """Searches, and writes what was found into a directory."""
    from qinfer.cli.analyze import search
    from qinfer.cli.analyze.journal import Journal, Subject, digest
    from qinfer.cli.analyze.measure import Meter
    from qinfer.cli.analyze.report import Facts
    from qinfer.cli.analyze.space import configured, today_of
    from qinfer.cli.analyze.stack import config_text
    from qinfer.cli.load import LoadTarget
    from qinfer.client.model_flows import model_path

    model, goal, mode = asked.model, asked.goal, asked.mode
    space = _space(today_of(config), **asked.values)
    bodies = _bodies(stack, model, asked.inputs, asked.data)
    path = f"{model_path(model, 0, 'v2')}/infer"
    targets = [LoadTarget.for_url(stack.url, path, body, json_length) for body, json_length in bodies]
    sent = sha256(b"".join(body for body, _ in bodies)).hexdigest()
    # an ensemble's steps, too
    steps = [step["model_name"] for step in (config.get("ensemble_scheduling") or {}).get("step", ())]
    files = " ".join(digest(asked.repository / name) for name in [model, *steps] if (asked.repository / name).exists())
    following = cycle([target.request for target in targets]).__next__
    meter = Meter(stack.client, model, targets[0], following, goal, asked.rules, stack.use)
    journal = Journal(directory, Subject(model, files, space, goal, mode, asked.rules, sent))
    progress = _Progress(space, search.budget_of(space, mode), len(journal.known))
    plan: Search = {"quick": search.quick, "brute": search.brute, "optuna": search.optuna}[mode](space, goal)
    try:
        outcome = search.drive(plan, _measurer(stack, model, config, meter, journal, progress))
    except KeyboardInterrupt:
        known = len(journal.known)
        raise CommandFailed(f"interrupted; the same command goes on after {known} measurements") from None
    finally:
        journal.close()
        progress.clear()
    figures: dict[Any, Figures] = {}
    for (point, _), one in journal.known.items():
        figures[point] = figures[point].joined(one) if point in figures else one
    text = config_text(configured(config, outcome.winner.candidate))
    found = Facts(model, _machine(), goal, outcome, figures, text)
    _write(directory, found, journal)
    return found


def _measurer(
    stack: "Stack", model: str, config: dict[str, Any], meter: "Meter", journal: Any, progress: "_Progress"
) -> "Callable[[Wanted], Figures]":
    from qinfer.cli.analyze.figures import Figures
    from qinfer.cli.analyze.space import configured

    loaded: list[Candidate] = []
    refusals: dict[Candidate, str] = {}

    def refusal(candidate: "Candidate") -> str:
        """Loads a candidate; returns why it can't be loaded, or empty."""
        if loaded != [candidate] and candidate not in refusals:
            loaded.clear()
            try:
                stack.configure(model, configured(config, candidate))
                loaded.append(candidate)
            except QinferError as error:
                stack.check()
                refusals[candidate] = error.message
        return refusals.get(candidate, "")

    def measure(wanted: "Wanted") -> "Figures":
        known: Figures | None = journal.known.get((wanted.point, wanted.turn))
        if known is not None:
            return known
        progress.announce(wanted)
        reason = refusal(wanted.point.candidate)
        try:
            found = Figures.refused(reason) if reason else meter.measure(wanted)
        except QinferError:
            stack.check()
            raise
        journal.add(wanted, found)
        progress.note(wanted, found)
        return found

    return measure


class _Progress:
    """A line for each measurement on stderr, with the time left."""

    def __init__(self, space: "Space", most: int, known: int) -> None:
        self._most, self._done, self._known = most, known, known
        self._began_s = time.monotonic()
        if known:
            print(f"goes on after {known} measurements", file=sys.stderr)
        print(f"{space.size} points; at most {most} measurements", file=sys.stderr)

    def announce(self, wanted: "Wanted") -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{wanted.point.candidate.text()} at {wanted.point.level} …", end="", file=sys.stderr)

    def note(self, wanted: "Wanted", found: "Figures") -> None:
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


def _space(today: Any, **given: str) -> "Space":
    from qinfer.cli.analyze.space import THREAD_PARAMETERS, Space, powers_of_two

    cores = powers_of_two(os.cpu_count() or 1)
    backends = tuple(dict.fromkeys(name for name in given["backend"].split(",") if name)) or (today.backend,)
    can_thread = all(name in THREAD_PARAMETERS for name in backends)
    if given["threads"] and not can_thread:
        raise typer.BadParameter(f"{', '.join(backends)} has no such parameter", param_hint="--threads")
    batches = powers_of_two(max(today.max_batch, MOST_BATCH)) if today.max_batch else (0,)
    levels = _parsed("--concurrency", given["concurrency"] or LEVELS, int)
    if levels[-1] > MOST_LEVEL:
        raise typer.BadParameter(f"{levels[-1]} are more than {MOST_LEVEL}", param_hint="--concurrency")
    return Space(
        _parsed("--instances", given["instances"], int) or cores,
        (_parsed("--max-batch-size", given["max_batch_size"], int) or batches) if today.max_batch else (0,),
        (_parsed("--delay-ms", given["delay_ms"], float) or (0.0,)) if today.max_batch else (0.0,),
        (_parsed("--threads", given["threads"], int) or cores) if can_thread else (0,),
        backends,
        levels,
        today,
    )


def _parsed(option: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        values = tuple(sorted({kind(value) for value in text.split(",") if value}))
        if (text and not values) or not all(map(math.isfinite, values)):
            raise ValueError
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"'{text}' is no list of numbers, such as 1,2,4", param_hint=option) from None
    if values and (values[0] < 0 or (values[0] == 0 and kind is int)):
        raise typer.BadParameter(f"'{text}' has {values[0]:g}, and values must be positive", param_hint=option)
    return values


def _bodies(stack: "Stack", model: str, inputs: Sequence[str], data: Path | None) -> list[tuple[bytes, int | None]]:
    """Returns the bodies of the requests, with the lengths of their JSON, once the first one was answered."""
    from qinfer.cli.request_data import requests_of
    from qinfer.wire.kserve_client import encode_request

    each = requests_of(stack.client, model, 0, inputs, data)
    first = each[0]
    stack.client.infer(model, {one.name: one for one in first.tensors}, parameters=first.parameters)
    return [encode_request(one.tensors, parameters=one.parameters, binary=True) for one in each]


def _write(directory: Path, found: "Facts", journal: Any) -> None:
    from qinfer.cli.analyze.report import page

    (directory / "report.html").write_text(page(found), encoding="utf-8")
    (directory / "config.pbtxt").write_text(found.config, encoding="utf-8")
    journal.write_parquet(directory / "measurements.parquet")


def _view(found: "Facts", directory: Path) -> Any:
    from rich.console import Group

    from qinfer.cli.analyze.report import limit_of, rows

    outcome = found.outcome
    is_same = outcome.winner.candidate == outcome.today.candidate
    gain = "stays" if is_same else f"{outcome.gain.mean:.2f} ({outcome.gain.low:.2f} to {outcome.gain.high:.2f})"
    best = found.figures[outcome.winner]
    values = {
        "winner": f"{outcome.winner.candidate.text()}, at {outcome.winner.level} concurrent requests",
        "times today's": gain,
        "requests per second": f"{best.throughput.mean:,.0f}",
        "p50, p99": f"{best.p50_ms:.2f} ms, {best.p99_ms:.2f} ms",
        **({"price of a million": f"{found.goal.per_million(best):.3g}"} if found.goal.price_per_hour else {}),
        "limit": limit_of(outcome.winner, best) or "unknown",
        "files": f"{directory}/report.html, config.pbtxt, measurements.parquet",
    }
    listed = rows(found)[:10]
    columns = "inst!, batch!, delay!, thr!, backend!, load!, req/s!, ±!, p50!, p99!, rows!, MiB!"
    return Group(table("", columns, listed), facts(f"{found.model}: {outcome.measured} measurements", values))


def _as_json(found: "Facts") -> dict[str, Any]:
    outcome = found.outcome
    best = found.figures[outcome.winner]
    return {
        "model": found.model,
        "winner": {**outcome.winner.candidate._asdict(), "concurrency": outcome.winner.level},
        "today": {**outcome.today.candidate._asdict(), "concurrency": outcome.today.level},
        "gain": outcome.gain._asdict(),
        "measurements": outcome.measured,
        "requests_per_s": round(best.throughput.mean, 1),
        "p50_ms": round(best.p50_ms, 3),
        "p99_ms": round(best.p99_ms, 3),
        **({"price_per_million": found.goal.per_million(best)} if found.goal.price_per_hour else {}),
        "config": found.config,
    }


def _machine() -> str:
    return f"{platform.node()}, {os.cpu_count()} cores, {platform.machine()}"


def _apply(url: str, model: str, config: dict[str, Any]) -> None:
    with gateway_client(url) as client:
        client.load(model, config=config)
    print(f"{url} has loaded {model} with the winner's configuration", file=sys.stderr)
