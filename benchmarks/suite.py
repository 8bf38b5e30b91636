"""The whole comparison in one run: scenes of servers side by side, which take turns under each load.

Each server is checked, and warmed, before its first turn, and checked again after its last. Nothing else may run on the
machine: `measuring` watches each turn, and a run with too many disturbed ones publishes nothing.
"""

import os
import resource
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import httpx
import typer
from rich.console import Console

from benchmarks import (
    bars,
    environments,
    inprocess,
    load,
    machine,
    measuring,
    page,
    plan,
    processes,
    proxied,
    readme_table,
    report,
    servers,
    stateful,
)
from benchmarks.bodies import BINARY, GRPC, JSON, SHM, Body, WrongAnswer, check_answer, write_body
from benchmarks.measuring import Contestant, Tally, TooNoisy
from benchmarks.models import MODELS, BenchModel, write_repository
from benchmarks.results import BATCH, IN_PROCESS, Document, Sample, Setting, summarise

WORK = environments.HERE / ".work"
RESULTS = WORK / "results.json"
"""The turns of the last complete and quiet run; a run that may not be published writes to `PARTIAL`."""
PARTIAL = WORK / "partial.json"
ENCODINGS = (JSON, BINARY, SHM, GRPC, *proxied.ENCODINGS)
WARM_UP_CONNECTIONS = 64
OPEN_FILES = 8192
"""For 1,000 connections: of the load generator, and of each server, which inherits the limit."""
_FAILURES = (servers.ServerFailed, WrongAnswer, load.LoadFailed, httpx.HTTPError)


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


def prepare(model: BenchModel, directory: Path) -> Material:
    """Writes a model's repository and its request bodies."""
    repository = directory / "models" / model.name
    model_file = write_repository(model, repository)
    expected = inprocess.expected_answer(model, model_file)
    bodies = {
        encoding: write_body(model, encoding, expected, repository.parent) for encoding in (JSON, BINARY, SHM, GRPC)
    }
    if model.name == proxied.MODEL:
        session = inprocess.session(model_file)
        for encoding in proxied.ENCODINGS:
            bodies[encoding] = proxied.write_recording(model, encoding, session, repository.parent)
    return Material(model=model, repository=repository, model_file=model_file, bodies=bodies)


def start(kind: servers.ServerKind, material: Material, encoding: str = JSON) -> AbstractContextManager[servers.Server]:
    """Starts a server with a model; for `SHM`, with the region that the requests name.

    It is ready when it answers one request: in JSON where the encoding is not of plain HTTP.
    """
    is_shared = encoding == SHM
    launch = servers.Launch(
        model=material.model.name,
        model_file=material.model_file,
        repository=material.repository,
        directory=WORK / "servers" / kind.name,
        port=processes.free_port(),
        grpc_port=processes.free_port(),
        region=f"qinfer-bench-{os.getpid()}-{kind.name}" if is_shared else "",
    )
    return servers.running(kind, launch, material.bodies[encoding if encoding in (BINARY, SHM) else JSON])


def contestant(server: servers.Server, body: Body, setting: Setting, turns: int, seconds: float) -> Contestant:
    """Returns a server under a load, which takes turns."""
    generate = partial(
        load.run,
        server.address(body.encoding),
        body,
        setting.connections,
        seconds,
        streams=setting.streams,
        fresh=setting.fresh,
    )
    return Contestant(setting=setting, turns=turns, generate=generate, server=server)


def measure_scene(
    scene: plan.Scene, material: Material, seconds: float, tally: Tally, show: Callable[[Sample], None]
) -> None:
    """Starts the servers of a scene, and lets them take turns under each load."""
    body = material.bodies[scene.encoding]
    with ExitStack() as stack:
        running: dict[str, servers.Server] = {}
        for name in scene.servers:
            running[name] = server = stack.enter_context(start(servers.KINDS[name], material, scene.encoding))
            check_answer(server.address(scene.encoding), body)
            load.run(server.address(scene.encoding), body, WARM_UP_CONNECTIONS, min(plan.WARM_UP_S, seconds))
        for one in scene.loads:
            contestants = []
            for setting, turns in one.settings(scene.model, scene.encoding).items():
                if setting.encoding == BATCH:
                    loop = partial(inprocess.measure, material.model, material.model_file, setting.connections, seconds)
                    contestants.append(Contestant(setting=setting, turns=turns, generate=loop))
                else:
                    contestants.append(contestant(running[setting.server], body, setting, turns, seconds))
            measuring.take_turns(contestants, tally, show, running.values())
        for server in running.values():
            check_answer(server.address(scene.encoding), body)


def run(chosen: plan.Plan, tally: Tally, console: Console) -> list[str]:
    """Measures all scenes and groups, and returns what went wrong; Ctrl-C ends it with what was measured so far."""
    problems: list[str] = []
    shutil.rmtree(WORK / "models", ignore_errors=True)
    materials = {name: prepare(MODELS[name], WORK) for name in dict.fromkeys(scene.model for scene in chosen.scenes)}

    def show(sample: Sample) -> None:
        console.print(f"{len(tally.samples) + 1:>4}/{tally.planned}  {_one_line(sample)}", highlight=False)

    jobs: dict[str, Callable[[], None]] = {
        f"{one.model} {one.encoding}": partial(measure_scene, one, materials[one.model], chosen.seconds, tally, show)
        for one in chosen.scenes
    }
    times = (chosen.seconds / 2, plan.WARM_UP_S / 2)
    jobs |= {one.name: partial(stateful.measure, one, WORK, times, tally, show) for one in chosen.groups}
    for title, job in jobs.items():
        console.rule(title, align="left")
        try:
            job()
        except _FAILURES as error:
            problems.append(f"{title}: {error}")
            console.print(problems[-1], style="red", markup=False)
        except TooNoisy as error:
            return [*problems, f"given up in {title}: {error}"]
        except KeyboardInterrupt:
            return [*problems, f"interrupted in {title}"]
    return problems


def publish(chosen: plan.Plan, tally: Tally, problems: list[str], console: Console) -> Document:
    """Judges a run and writes its file; a complete and quiet run also writes RESULTS.md, README's table and picture."""
    reasons = [*problems, *measuring.refusals(chosen.needed, tally.samples, tally.planned)]
    if not chosen.is_complete:
        reasons.insert(0, "the run was not complete: something was left out, or made shorter")
    facts = machine.describe()
    facts["disturbed"] = f"{tally.disturbed} of {len(tally.samples)} turns, which were not counted"
    if tally.restarts:
        times = ", ".join(f"{name} {count} x" for name, count in sorted(tally.restarts.items()))
        facts["started again"] = f"{times}; they gave no answer after they had been stopped for the turns of others"
    document = Document(machine=facts, run=str(chosen), refusals=reasons, samples=tally.samples)
    if reasons:
        document.write(PARTIAL)
        console.print("RESULTS.md was not written:", style="red")
        for reason in reasons:
            console.print(f"- {reason.splitlines()[0]}", style="red", markup=False, highlight=False)
        return document
    document.write(RESULTS)
    page.write("speed", report.markdown(document), facts, page.PAGE)
    console.print(f"written: {page.PAGE.name}")
    for line in readme_table.write(document, readme_table.README, readme_table.PICTURE):
        console.print(line, markup=False)
    return document


def main(
    *,
    only: Annotated[str, typer.Option(help="Servers, comma-separated: qinfer, a peer, in_process.")] = "",
    models: Annotated[str, typer.Option(help=f"Of {', '.join(plan.MODELS)}; comma-separated.")] = "",
    encodings: Annotated[str, typer.Option(help=f"Of {', '.join(plan.ENCODINGS)}; comma-separated.")] = "",
    connections: Annotated[str, typer.Option(help="Concurrent connections, comma-separated.")] = "",
    seconds: Annotated[float, typer.Option(min=1, help="Length of a turn.")] = plan.TURN_S,
    turns: Annotated[int, typer.Option(min=1, help="At most so many turns of each setting.")] = 99,
    quick: Annotated[bool, typer.Option("--quick", help="1 turn of 1 s: shows that all works, not how fast.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when a bar is missed.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Only what the last run left; it keeps the others.")] = False,
) -> None:
    """Measures qinfer against its peers by turns, judges the bars, and writes the results.

    A complete run on a quiet machine writes benchmarks/RESULTS.md, and README's table with its picture. Other runs
    print their tables, keep their turns in benchmarks/.work/partial.json, and exit with 1.
    """
    console = make_console()
    needed = plan.Plan().needed
    wanted = {
        "server": _chosen(only, plan.SERVERS, "server"),
        "model": _chosen(models, plan.MODELS, "model"),
        "encoding": _chosen(encodings, (*plan.ENCODINGS, BATCH), "encoding"),
        "connections": _chosen(connections, tuple({str(one.connections) for one in needed}), "number of connections"),
    }
    missing = _missing(wanted["server"], console)

    def keep(setting: Setting) -> bool:
        given = {name: str(getattr(setting, name)) in names for name, names in wanted.items()}
        has_tools = setting.server not in missing and setting.encoding not in missing
        loop = setting.server == IN_PROCESS
        return has_tools and (given["server"] and given["model"] if loop else all(given.values()))

    whole = plan.Plan(seconds=1 if quick else seconds, is_complete=seconds >= plan.TURN_S and not quick)
    chosen = plan.restricted(whole, keep, 1 if quick else turns)
    if not chosen.needed:
        raise typer.BadParameter("there is no such setting")
    tally = Tally(planned=chosen.turns, strict=not quick, samples=_kept(chosen) if resume else [])
    left = plan.without(chosen, {sample.setting for sample in tally.samples})
    _prepare(left, console)
    console.print(f"{left.turns} turns, about {left.estimate_s / 60:.0f} minutes if the machine is quiet")
    with processes.alone(WORK):
        problems = run(left, tally, console)
    # What is printed of a disturbed run shows that all works; it is not published.
    rows = summarise(tally.samples, float("inf"))
    report.print_tables(console, rows)
    document = publish(chosen, tally, problems, console)
    if document.refusals or (check and any(one.outcome is bars.Outcome.MISS for one in bars.judge(rows))):
        raise typer.Exit(1)


def _kept(chosen: plan.Plan) -> list[Sample]:
    """Returns the turns of the last run that need not be made again.

    Raises:
        typer.BadParameter: There are none, they were made otherwise, or of another product.
    """
    if not PARTIAL.exists():
        raise typer.BadParameter("there is no unfinished run; start one without --resume")
    document = Document.read(PARTIAL)
    if document.run != str(chosen) or machine.has_changed(document.machine["commit"]):
        raise typer.BadParameter("the last run had other turns, or another qinfer; start one without --resume")
    done = plan.finished(chosen, document.samples)
    return [sample for sample in document.samples if sample.setting in done]


def _prepare(chosen: plan.Plan, console: Console) -> None:
    """Makes the peers' environments, and allows as many open files as connections need."""
    load.require_wrk()
    signal.signal(signal.SIGTERM, interrupt)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))
    names = {setting.server for setting in chosen.needed} & set(servers.KINDS)
    for peer in sorted({servers.KINDS[name].environment for name in names} - {""}):
        with console.status(f"environment of {peer}"):
            environments.ensure(peer)


def _chosen(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else known
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown {what} {unknown[0]!r}; there are: {', '.join(known)}")
    return names


def _missing(names: tuple[str, ...], console: Console) -> Mapping[str, str]:
    """Returns the servers that can't be started here and the encodings without a load generator, and says why."""
    missing = {name: reason for name in names if (reason := servers.why_not(name))}
    if load.find_h2load() is None:
        missing[GRPC] = load.NO_H2LOAD
    for name, reason in missing.items():
        console.print(f"[yellow]without {name}:[/] {reason}")
    return missing


def _one_line(sample: Sample) -> str:
    setting = sample.setting
    where = f"{setting.model:<10} {setting.encoding:<12} {setting.load:>8}  {setting.server:<14}"
    lost = f"   lost {sample.lost:>4.0%}"
    if setting.encoding == BATCH:
        return f"{where} {sample.rate:>10,.0f} items/s{lost}"
    failed = f"  [red]failed: {sample.errors}[/]" if sample.errors else ""
    used = " ".join(f"{role} {us:.0f}" for role, us in sample.cpu_us.items())
    return (
        f"{where} {sample.rate:>8,.0f} req/s   p50 {sample.p50_us / 1000:>7.2f} ms   "
        f"p99 {sample.p99_us / 1000:>7.2f} ms{lost}   CPU µs: {used}{failed}"
    )


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """Treats SIGTERM as Ctrl-C, so that the servers are stopped."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    typer.run(main)
