"""Compares this checkout with another one of qinfer: both run at once, and take turns under load.

A noisy machine is 40 % slower a minute later: two runs one after the other say nothing about a change of 5 %. Turns of
half a second do, each compared with the one of the other checkout beside it, and CPU per request says most. The same
code in two processes differs by up to 5 % as long as they live (addresses, hash seeds), so both are started anew
several times.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks import environments, processes, servers
from benchmarks.bodies import JSON, SHM
from benchmarks.load import run_wrk
from benchmarks.measuring import Tally, take_turns
from benchmarks.models import MODELS
from benchmarks.results import CLIENT, Sample, Setting, ratio
from benchmarks.suite import ENCODINGS, WORK, Material, contestant, make_console, prepare, start

WARM_UP_S = 1.0
SETTINGS = "tiny:json:1,tiny:json:64,tiny:json:128,mlp:json:128,mlp:binary:128,conv:binary:32"

THIS, OTHER = "this", "other"


def compare(
    other: Annotated[
        Path, typer.Argument(help="The other checkout, such as `git worktree add ../before COMMIT` makes.")
    ],
    settings: Annotated[
        str, typer.Option(help="model:encoding:connections, by commas; 4x16: 16 calls on each of 4.")
    ] = SETTINGS,
    seconds: Annotated[float, typer.Option(help="Seconds of load each turn.")] = 0.5,
    rounds: Annotated[int, typer.Option(help="Turns of each checkout after each start.")] = 10,
    starts: Annotated[int, typer.Option(help="How often both are started.")] = 5,
) -> None:
    """Prints rate, p50 and CPU µs per request of both checkouts, medians of their turns.

    The ratio is the median of those of turns that follow each other; in brackets its 95 % interval.
    """
    console = make_console()
    trees = {THIS: environments.ROOT, OTHER: other.resolve()}
    for model, loads in _by_model(settings).items():
        tallies = {load: Tally(strict=False) for load in loads}
        with processes.alone(WORK):
            material = prepare(MODELS[model], WORK)
            for number in range(starts):
                console.print(f"{model}: start {number + 1} of {starts}")
                order = dict(sorted(trees.items(), reverse=number % 2 == 1))
                _load_once(order, material, tallies, rounds, seconds)
        for load, tally in tallies.items():
            disturbed = f"{tally.disturbed} of {2 * rounds * starts} turns disturbed"
            title = f"{model} {load.encoding}, {load.load} connections; {disturbed}"
            console.print(title, *_lines(tally.samples), sep="\n  ")


def _load_once(
    trees: Mapping[str, Path], material: Material, tallies: Mapping[Setting, Tally], rounds: int, seconds: float
) -> None:
    """Starts all checkouts, which take turns under each load."""
    encoding = SHM if any(load.encoding == SHM for load in tallies) else JSON
    with ExitStack() as stack:
        running = {name: stack.enter_context(_start(name, tree, material, encoding)) for name, tree in trees.items()}
        for server in running.values():
            run_wrk(server.url, material.bodies[JSON], 32, WARM_UP_S)
        for load, tally in tallies.items():
            body = material.bodies[load.encoding]
            pair = [
                contestant(server, body, replace(load, server=name), rounds, seconds)
                for name, server in running.items()
            ]
            take_turns(pair, tally, lambda _: None)


def _by_model(settings: str) -> dict[str, list[Setting]]:
    chosen: dict[str, list[Setting]] = defaultdict(list)
    for setting in settings.split(","):
        model, encoding, load = setting.split(":")
        if model not in MODELS or encoding not in ENCODINGS:
            known = f"model one of {', '.join(MODELS)}; encoding one of {', '.join(ENCODINGS)}"
            raise typer.BadParameter(f"'{setting}': {known}")
        connections, _, streams = load.partition("x")
        chosen[model].append(
            Setting(model=model, encoding=encoding, connections=int(connections), streams=int(streams or 1), server="")
        )
    return chosen


def _start(name: str, tree: Path, material: Material, encoding: str) -> AbstractContextManager[servers.Server]:
    """Starts `qinfer up` from a checkout: our virtual environment, its code."""
    return start(replace(servers.KINDS["qinfer"], name=name, commands=_commands(tree)), material, encoding)


def _commands(tree: Path) -> Callable[[servers.Launch], list[servers.Command]]:
    path = os.pathsep.join(str(tree / part) for part in ("", "api", "workers"))

    def commands(launch: servers.Launch) -> list[servers.Command]:
        [command] = servers.KINDS["qinfer"].commands(launch)
        argv = (sys.executable, "-m", "qinfer.cli.main", *command.argv[1:])
        return [servers.Command(argv=argv, env={"PYTHONPATH": path, "PYTHONSAFEPATH": "1"})]

    return commands


def _lines(turns: Sequence[Sample]) -> list[str]:
    samples = {name: [sample for sample in turns if sample.setting.server == name] for name in (THIS, OTHER)}

    def line(what: str, figure: Callable[[Sample], float]) -> str:
        this, other = ([figure(sample) for sample in samples[name]] for name in (THIS, OTHER))
        compared = ratio(this, other)
        shown = f"ratio {compared.value:.3f} ({compared.low:.3f} to {compared.high:.3f})"
        return f"{what:12} this {median(this):10,.1f}   other {median(other):10,.1f}   {shown}"

    def cpu(role: str) -> Callable[[Sample], float]:
        return lambda sample: sample.cpu_us.get(role, 0.0)

    roles: Sequence[str] = sorted(
        {r for own in samples.values() for s in own for r in s.cpu_us} - {CLIENT, "supervisor"}
    )
    errors = {name: sum(sum(sample.errors.values()) for sample in own) for name, own in samples.items()}
    return [
        line("requests/s", lambda sample: sample.rate),
        line("p50 ms", lambda sample: sample.p50_us / 1000),
        *(line(f"{role} µs", cpu(role)) for role in roles),
        f"failed       this {errors[THIS]}, other {errors[OTHER]}",
    ]


if __name__ == "__main__":
    typer.run(compare)
