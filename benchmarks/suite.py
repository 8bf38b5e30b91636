"""The whole comparison in one run: rounds x models x servers, interleaved, so that drift of the machine hits all alike.

A server is started for its visit and stopped after it: an idle peer would take CPU time from the measured one. The
order of the servers rotates from round to round.
"""

import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import bars, environments, inprocess, load, machine, processes, proxied, report, servers, stateful
from benchmarks.bodies import BINARY, GRPC, JSON, Body, WrongAnswer, check_answer, write_body
from benchmarks.measuring import measure
from benchmarks.models import MODELS, THREADS, BenchModel, write_repository
from benchmarks.results import BATCH, IN_PROCESS, Sample, Setting, summarise

WORK = environments.HERE / ".work"
ENCODINGS = (JSON, BINARY, GRPC, *proxied.ENCODINGS)
CONNECTIONS = (1, 32, 64, 128)
MULTIPLEXED = (4, 16)
"""Connections and concurrent calls of each, for gRPC besides one call each: as clients share connections."""
WARM_UP_CONNECTIONS = 64
BUSY_PERCENT = 10
SCENES = (*MODELS, *stateful.GROUPS)
"""What can be measured: a server is started for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run measures.

    Attributes:
        servers: Names of `servers.KINDS`, and `in_process`.
        models: Names of `MODELS`, and groups of `stateful`.
        encodings: Names of `ENCODINGS`.
        connections: Concurrent connections.
        rounds: How often each setting is measured.
        seconds: Length of one measurement.
        warm_up_s: Length of the load before the first measurement of a visit.
    """

    servers: tuple[str, ...]
    models: tuple[str, ...]
    encodings: tuple[str, ...]
    connections: tuple[int, ...]
    rounds: int
    seconds: float
    warm_up_s: float

    @property
    def is_complete(self) -> bool:
        """Whether the run measures all that the bars ask for, at full length."""
        return (
            set(self.servers) == {*servers.KINDS, IN_PROCESS}
            and set(self.models) == set(SCENES)
            and set(self.encodings) == set(ENCODINGS)
            and set(self.connections) >= set(CONNECTIONS)
            and self.rounds >= 3
            and self.seconds >= 5
        )

    @property
    def visits(self) -> list[tuple[int, str, str]]:
        """(round, model, server) in the order of the run."""
        return [
            (number, model, server)
            for number in range(1, self.rounds + 1)
            for model in self.models
            for server in rotated(self.servers, number - 1)
            if model in MODELS or stateful.cases(model, server)
        ]

    def loads(self, model: str, encoding: str) -> list[tuple[int, int]]:
        """Returns (connections, calls at once on each) of all measurements of a model in an encoding."""
        if encoding in proxied.ENCODINGS:
            return [(proxied.CONNECTIONS, 1)] if model == proxied.MODEL else []
        plain = [(connections, 1) for connections in self.connections]
        return [*plain, MULTIPLEXED] if encoding == GRPC else plain

    def stateful_visit(self, group: str, server: str, number: int) -> stateful.Visit:
        """Returns the visit of a server that has a group of stateful or decoupled models."""
        return stateful.Visit(
            group=group,
            server=server,
            encodings=self.encodings,
            number=number,
            seconds=self.seconds,
            warm_up_s=self.warm_up_s / 2,
        )

    def __str__(self) -> str:
        return (
            f"{self.rounds} rounds of {self.seconds:g} s per setting, medians; warm-up {self.warm_up_s:g} s per start; "
            f"one worker process and {THREADS} ONNX Runtime thread everywhere"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """A model on disk, with the requests for it."""

    model: BenchModel
    repository: Path
    model_file: Path
    bodies: dict[str, Body]


def make_console() -> Console:
    """Returns a console that is wide enough for the tables when the output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Returns the names, beginning `by` places later."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


def prepare(model: BenchModel, directory: Path) -> Material:
    """Writes a model's repository and its request bodies."""
    repository = directory / "models" / model.name
    model_file = write_repository(model, repository)
    expected = inprocess.expected_answer(model, model_file)
    bodies = {encoding: write_body(model, encoding, expected, repository.parent) for encoding in (JSON, BINARY, GRPC)}
    if model.name == proxied.MODEL:
        session = inprocess.session(model_file)
        for encoding in proxied.ENCODINGS:
            bodies[encoding] = proxied.write_recording(model, encoding, session, repository.parent)
    return Material(model=model, repository=repository, model_file=model_file, bodies=bodies)


def measure_once(
    server: servers.Server, body: Body, connections: int, number: int, seconds: float, *, streams: int = 1
) -> Sample:
    """Loads a running server once and takes what its processes used meanwhile."""
    setting = Setting(
        model=body.model.name,
        encoding=body.encoding,
        connections=connections,
        streams=streams,
        server=server.kind.name,
    )
    address = server.address(body.encoding)
    return measure(server, setting, number, lambda: load.run(address, body, connections, seconds, streams=streams))


def visit(plan: Plan, material: Material, name: str, number: int, keep: Callable[[Sample], None]) -> None:
    """Measures one server with one model: starts it, checks its answer, warms it, loads it, stops it."""
    model = material.model
    if name == IN_PROCESS:
        for batch in inprocess.BATCHES:
            rate = inprocess.measure(model, material.model_file, batch, plan.seconds)
            setting = Setting(model=model.name, encoding=BATCH, connections=batch, server=IN_PROCESS)
            keep(Sample(setting=setting, round=number, rate=rate))
        return
    kind = servers.KINDS[name]
    launch = servers.Launch(
        model=model.name,
        model_file=material.model_file,
        repository=material.repository,
        directory=WORK / "servers" / name,
        port=processes.free_port(),
        grpc_port=processes.free_port(),
    )
    with servers.running(kind, launch, material.bodies[JSON]) as server:
        for encoding in (e for e in plan.encodings if e in kind.encodings and plan.loads(model.name, e)):
            body, url = material.bodies[encoding], server.address(encoding)
            check_answer(url, body)
            load.run(url, body, WARM_UP_CONNECTIONS, plan.warm_up_s)
            for connections, streams in plan.loads(model.name, encoding):
                keep(measure_once(server, body, connections, number, plan.seconds, streams=streams))
            check_answer(url, body)


def run(plan: Plan, console: Console) -> tuple[list[Sample], list[str]]:
    """Makes all visits and returns the samples, with what went wrong; Ctrl-C ends it with what was measured so far."""
    samples: list[Sample] = []
    problems: list[str] = []
    shutil.rmtree(WORK / "models", ignore_errors=True)
    materials = {name: prepare(MODELS[name], WORK) for name in plan.models if name in MODELS}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} visits"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(plan.visits))

        def keep(sample: Sample) -> None:
            samples.append(sample)
            console.print(_one_line(sample), highlight=False)

        for number, model, server in plan.visits:
            progress.update(task, description=f"round {number}: {model} on {server}")
            try:
                if model in stateful.GROUPS:
                    stateful.visit(plan.stateful_visit(model, server, number), WORK, keep)
                else:
                    visit(plan, materials[model], server, number, keep)
            except (servers.ServerFailed, WrongAnswer, load.LoadFailed) as error:
                problems.append(f"round {number}, {model} on {server}: {error}")
                console.print(problems[-1], style="red", markup=False)
            except KeyboardInterrupt:
                problems.append(f"interrupted in round {number}, {model} on {server}")
                break
            progress.advance(task)
    return samples, problems


def write(samples: list[Sample], plan: Plan, directory: Path, busy_percent: float) -> None:
    """Writes RESULTS.md and results.json."""
    rows = summarise(samples)
    facts = machine.describe()
    facts["stolen"] = f"at most {max((s.stolen for s in samples), default=0.0):.1%} of the cores in any measurement"
    facts["busy before the run"] = f"{busy_percent:.0f} % of the cores"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "RESULTS.md").write_text(report.markdown(rows, bars.judge(rows), facts, str(plan)))
    document = {"machine": facts, "plan": plan, "samples": samples}
    (directory / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


def main(
    *,
    only: Annotated[str, typer.Option(help="Servers, comma-separated: qinfer, a peer, in_process.")] = "",
    models: Annotated[str, typer.Option(help="Models, sequences, streams, pipelines, comma-separated.")] = ",".join(
        SCENES
    ),
    encodings: Annotated[str, typer.Option(help="json, binary, grpc, …")] = ",".join(ENCODINGS),
    connections: Annotated[str, typer.Option(help="Concurrent connections.")] = ",".join(map(str, CONNECTIONS)),
    seconds: Annotated[float, typer.Option(min=1, help="Length of one measurement.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the medians count.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="1 round of 1 s: shows that all works, not how fast.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when a bar is missed.")] = False,
) -> None:
    """Measures qinfer against its peers, judges the bars, and writes the results.

    A complete run writes benchmarks/RESULTS.md and benchmarks/results.json; a partial one writes to benchmarks/.work.
    """
    console = make_console()
    plan = Plan(
        servers=_available(_chosen(only, (*servers.KINDS, IN_PROCESS), "server"), console),
        models=_chosen(models, SCENES, "model"),
        encodings=_drivable(_chosen(encodings, ENCODINGS, "encoding"), console),
        connections=tuple(int(count) for count in connections.split(",")),
        rounds=1 if quick else rounds,
        seconds=1 if quick else seconds,
        warm_up_s=1 if quick else 2,
    )
    if set(plan.models) & set(MODELS):
        load.require_wrk()
    signal.signal(signal.SIGTERM, interrupt)
    for peer in sorted({kind.environment for name, kind in servers.KINDS.items() if name in plan.servers} - {""}):
        with console.status(f"environment of {peer}"):
            environments.ensure(peer)
    busy = psutil.cpu_percent(interval=1.0)
    if busy > BUSY_PERCENT:
        console.print(f"[yellow]the machine is {busy:.0f} % busy with other things: measure again when it is quiet[/]")
    with processes.alone(WORK):
        samples, problems = run(plan, console)
    verdicts = bars.judge(rows := summarise(samples))
    report.print_tables(console, rows, verdicts)
    target = environments.HERE if plan.is_complete and not problems else WORK
    write(samples, plan, target, busy)
    for problem in problems:
        console.print(f"incomplete: {problem.splitlines()[0]}", style="red", markup=False)
    console.print(f"written: {(target / 'RESULTS.md').relative_to(environments.ROOT)}")
    if problems or (check and any(verdict.outcome is bars.Outcome.MISS for verdict in verdicts)):
        raise typer.Exit(1)


def _chosen(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else known
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown {what} {unknown[0]!r}; there are: {', '.join(known)}")
    return names


def _available(names: tuple[str, ...], console: Console) -> tuple[str, ...]:
    """Leaves out the servers that can't be started here, and says so."""
    missing = {name: reason for name in names if (reason := servers.why_not(name))}
    for name, reason in missing.items():
        console.print(f"[yellow]without {name}:[/] {reason}")
    return tuple(name for name in names if name not in missing)


def _drivable(encodings: tuple[str, ...], console: Console) -> tuple[str, ...]:
    """Leaves out what there is no load generator for, and says so."""
    if GRPC in encodings and load.find_h2load() is None:
        console.print(f"[yellow]without {GRPC}:[/] {load.NO_H2LOAD}")
        return tuple(encoding for encoding in encodings if encoding != GRPC)
    return encodings


def _one_line(sample: Sample) -> str:
    setting = sample.setting
    at_once = report.concurrency(setting)
    where = f"{setting.model:<10} {setting.encoding:<12} {at_once:>6}  {setting.server:<15}"
    if setting.encoding == BATCH:
        return f"{where} {sample.rate:>10,.0f} items/s"
    failed = f"  [red]failed: {sample.errors}[/]" if sample.errors else ""
    used = " ".join(f"{role} {us:.0f}" for role, us in sample.cpu_us.items())
    return (
        f"{where} {sample.rate:>10,.0f} req/s   p50 {sample.p50_us / 1000:>7.2f} ms   "
        f"p99 {sample.p99_us / 1000:>7.2f} ms   CPU µs: {used}{failed}"
    )


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Treats SIGTERM as Ctrl-C, so that the servers are stopped."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    typer.run(main)
