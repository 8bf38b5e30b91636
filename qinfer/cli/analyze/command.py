"""`qinfer analyze`: the command."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from qinfer.cli.console import (
    DEFAULT_URL,
    CommandFailed,
    DataDirOption,
    JsonOption,
    Options,
    RedisOption,
    UrlOption,
    facts,
    gateway_client,
    model_names,
    option,
    show,
    table,
    with_options,
)
from qinfer.cli.models import RepositoryOption

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from qinfer.cli.analyze.report import Facts
    from qinfer.cli.analyze.session import Asked
    from qinfer.cli.analyze.stack import TrialServer

EXAMPLE = "Example: qinfer analyze digits --model-repository ./models --p99-ms 20"
LEVELS, LEVELS_IN_PLACE = "1,2,4,8,16,32,64,128", "1,2,4,8"


def _list_of_numbers(help_: str, default: str = "") -> Any:
    return option(str, default, help_, metavar="N,N,…")


def _limit(help_: str) -> Any:
    return option(float, 0.0, f"{help_}; 0 = any.", min=0)


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
    "p99_ms": _limit("The largest p99; of several models, that of each"),
    "first_p99_ms": _limit("Streams: the largest p99 of the time to the first response"),
    "between_p99_ms": _limit("Streams: the largest p99 of the time between two responses"),
    "memory_mb": _limit("The most memory of the server, in MiB"),
    "accuracy": option(
        float, 0.0, "The least agreement with the present answers, such as 0.99; 0 = not compared.", min=0, max=1
    ),
    "deadline_ms": option(float, 0.0, "The deadline of goodput.", min=0),
    "price_per_hour": option(float, 0.0, "The price of a core and hour, for cost.", min=0),
    "instances": _list_of_numbers("Instances; default: 1 to the number of cores."),
    "max_batch_size": _list_of_numbers("Rows of a batch; default: powers of two."),
    "delay_ms": _list_of_numbers("Waits for a fuller batch.", "0,1,5"),
    "threads": _list_of_numbers("Threads of an instance; default: 1 to the number of cores."),
    "backend": option(str, "", "Backends, such as onnxruntime,openvino; default: the model's."),
    "precision": option(
        Literal["", "full", "mixed", "full,mixed"],
        "",
        "full, mixed (accelerator auto_mixed_precision), or full,mixed to try both; default: the model's.",
        show_default=False,
    ),
    "concurrency": _list_of_numbers("Concurrent requests, streams or sequences; in place: 1,2,4,8.", LEVELS),
    "composing": option(list[str] | None, None, "A model that the load's models call, to be tuned, too."),
    "inputs": option(
        list[str] | None, None, "name=VALUE as in `qinfer infer`; default: one item of random data.", "--input", "-i"
    ),
    "data": option(
        list[str] | None,
        None,
        "Requests to send in turn: .jsonl, .parquet, or the .json of perf_analyzer's --input-data; MODEL=FILE for each "
        "of several models.",
    ),
    "arrivals": option(
        Literal["", "trace"],
        "",
        "trace: requests arrive with the gaps of --data, a file of `qinfer record`; --concurrency bounds them.",
        show_default=False,
    ),
    "per_sequence": option(int, 20, "Steps from START to END of a stateful model.", "--steps-per-sequence", min=1),
    "window_s": option(float, 1.0, "Seconds of a window; a measurement has 2 to 8.", min=0.1, max=600),
    "in_place": option(
        bool,
        False,
        "Measure on the live installation at --url, by a worker of its own; stops if the model's callers would notice.",
        "--in-place",
    ),
    "redis": (RedisOption, ""),
    "data_dir": (DataDirOption, Path(".qinfer")),
    "output": option(Path | None, None, "Directory; default: analyze-MODEL.", "--output", "-o"),
    "apply": option(
        Literal["", "load", "canary"],
        "",
        "Hand the winner to the gateway at --url, which loads it, or tries it as a canary.",
        show_default=False,
    ),
    "endpoint": option(str, "", "The canary's endpoint; default: one of the model's own name, in front of it."),
    "url": (UrlOption, DEFAULT_URL),
}
SPACE_OPTIONS = ("instances", "max_batch_size", "delay_ms", "threads", "backend", "precision", "concurrency")
ModelsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="A model, or several with shares of the load: digits=3 text=1.",
        autocompletion=model_names,
    ),
]


@with_options(OPTIONS)
def analyze(models: ModelsArgument, *, as_json: JsonOption = False, **given: Any) -> None:
    """Find the best configuration of a model by measurements on a private server.

    Writes report.html, config.pbtxt of the winner and all measurements into the output directory. The same command goes
    on after a kill. Let nothing else run on the machine. Several models, and an ensemble's steps, are tuned together
    under the load of all.
    """
    from qinfer.cli.analyze.apply import check_callers, hand_over
    from qinfer.cli.analyze.session import tune

    asked = _asked(models, given)
    directory = given["output"] or Path(f"analyze-{'-'.join(asked.shares)}")
    if given["apply"]:
        with gateway_client(given["url"]) as client:
            client.index()  # a wrong address is known before the search
            if given["apply"] == "canary":
                check_callers(client, list(asked.shares), asked.composing, given["endpoint"])
    with _server(asked, given) as server:
        found = tune(asked, server, directory)
    _check_winners(found, directory)
    answers = [_as_json(one) for one in found]
    show({"models": answers} if len(found) > 1 else answers[0], lambda: _views(found, directory), as_json=as_json)
    if given["apply"]:
        hand_over(found, given["url"], given["endpoint"], as_canary=given["apply"] == "canary")


def _server(asked: "Asked", given: Mapping[str, Any]) -> "AbstractContextManager[TrialServer]":
    from qinfer.cli.analyze.live import live_server
    from qinfer.cli.analyze.stack import private_stack
    from qinfer.cli.overview import program_variables

    repositories, models = asked.model_repository, [*asked.shares, *asked.composing]
    for model in models:
        if not any((Path(one) / model).is_dir() for one in repositories):
            raise CommandFailed(f"no {model} in {', '.join(repositories)}; give --model-repository, a local directory")
    if not given["in_place"]:
        return private_stack(repositories, models)
    if asked.composing:
        raise typer.BadParameter("in place, models call those that callers use, not copies", param_hint="--composing")
    if len(models) > 1 or asked.inputs:
        raise typer.BadParameter(
            "give one model or ensemble, whose callers the guard watches, and --data in place of --input",
            param_hint="--in-place",
        )
    variables = program_variables(given["redis"], given["data_dir"])
    return live_server(given["url"], models[0], variables, repositories, asked.data)


def _asked(models: Sequence[str], given: Mapping[str, Any]) -> "Asked":
    from qinfer.cli.analyze.figures import Goal
    from qinfer.cli.analyze.loads import read_shares
    from qinfer.cli.analyze.session import Asked

    if given["objective"] == "goodput" and not given["deadline_ms"]:
        raise typer.BadParameter("goodput needs it", param_hint="--deadline-ms")
    if given["objective"] == "cost" and not given["price_per_hour"]:
        raise typer.BadParameter("cost needs it", param_hint="--price-per-hour")
    goal = Goal(cores=os.cpu_count() or 1, **{name: given[name] for name in Goal._fields if given.get(name)})
    values = {name: given[name] for name in SPACE_OPTIONS}
    if given["arrivals"] and not given["data"]:
        raise typer.BadParameter("give a file of `qinfer record`", param_hint="--data")
    if given["arrivals"] and given["objective"] == "throughput":
        raise typer.BadParameter("arrivals fix the throughput; choose p99, goodput or cost", param_hint="--objective")
    if values["concurrency"] == LEVELS and (given["in_place"] or given["arrivals"]):
        values["concurrency"] = LEVELS.rpartition(",")[2] if given["arrivals"] else LEVELS_IN_PLACE
    options: dict[str, Any] = {name: given[name] or () for name in Asked._fields if name in given}
    options["model_repository"] = options["model_repository"] or ["models"]
    return Asked(read_shares(models), goal, values, **options)


def _check_winners(found: "Sequence[Facts]", directory: Path) -> None:
    """Raises `CommandFailed` if a model has no configuration that keeps the limits."""
    for one in found:
        if not one.goal.score(one.best).mean:
            error = f"; the first error: {one.best.first_error}" if one.best.errors else ""
            which = f" of {one.model}" if len(found) > 1 else ""
            raise CommandFailed(
                f"no configuration{which} keeps the limits without errors; see report.html in {directory}{error}"
            )


def _views(found: "Sequence[Facts]", directory: Path) -> Any:
    from rich.console import Group

    views = (_view(one, directory / one.model if one.is_mix else directory) for one in found)
    return Group(*views, facts("", {"measurements": directory / "measurements.parquet"}))


def _view(found: "Facts", directory: Path) -> Any:
    from rich.console import Group

    from qinfer.cli.analyze.report import rows

    outcome, best = found.outcome, found.best
    values = {
        "winner": f"{outcome.winner.candidate.text()}, at {outcome.winner.level} concurrent requests",
        "gain": found.verdict,
        "requests per second": f"{best.throughput.mean:,.0f}",
        "p50, p99": f"{best.p50_ms:.2f} ms, {best.p99_ms:.2f} ms",
        **({"first response, p99": f"{best.first_ms:.2f} ms"} if best.first_ms else {}),
        **({"between responses, p99": f"{best.between_ms:.2f} ms"} if best.between_ms else {}),
        **({"agreement with today's answers": f"{best.accuracy:.4f}"} if best.accuracy is not None else {}),
        **({"price of a million": f"{found.goal.per_million(best):.3g}"} if found.goal.price_per_hour else {}),
        "limit": found.limit or "unknown",
        "files": f"{directory}/report.html, config.pbtxt",
    }
    listed = rows(found)[:10]
    columns = "inst!, batch!, delay!, thr!, backend!, load!, req/s!, ±!, p50!, p99!, rows!, MiB!"
    return Group(table("", columns, listed), facts(f"{found.model}: {outcome.measured} measurements", values))


def _as_json(found: "Facts") -> dict[str, Any]:
    outcome, best = found.outcome, found.best
    return {
        "model": found.model,
        "winner": {**outcome.winner.candidate._asdict(), "concurrency": outcome.winner.level},
        "today": {**outcome.today.candidate._asdict(), "concurrency": outcome.today.level},
        "gain": outcome.gain._asdict(),
        "measurements": outcome.measured,
        "requests_per_s": round(best.throughput.mean, 1),
        "p50_ms": round(best.p50_ms, 3),
        "p99_ms": round(best.p99_ms, 3),
        **({"first_response_p99_ms": round(best.first_ms, 3)} if best.first_ms else {}),
        **({"between_responses_p99_ms": round(best.between_ms, 3)} if best.between_ms else {}),
        **({"accuracy": best.accuracy} if best.accuracy is not None else {}),
        **({"price_per_million": found.goal.per_million(best)} if found.goal.price_per_hour else {}),
        "config": found.config,
    }
