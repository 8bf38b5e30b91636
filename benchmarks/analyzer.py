"""Proofs of `qinfer analyze` on real models: `python -m benchmarks.analyzer COMMAND --help` has the options.

    sweep MODEL     measures all points of the grid, and the best again by turns; writes tests/data/sweeps/MODEL.parquet
    judge           replays quick searches, and as many points chosen at random, on the recorded sweeps
    live MODEL      one quick search; then its winner and the best of the sweep by turns
    perf_analyzer   `qinfer bench` and NVIDIA's perf_analyzer on one server by turns (`scripts/tools perf_analyzer`)
    in-place        a search beside a model that callers use: their p99 before and meanwhile, and a guard that trips

The models are an MLP and a convolutional net with seeded weights, and all-MiniLM-L6-v2 for texts of a few tokens. A
sweep that was interrupted goes on. `tests/support/sweeps.py` has the grid, and tells how the best is chosen. With
`--smoke` a sweep has few points, and its file lies in `benchmarks/.work`: it shows that all works.
"""

import argparse
import csv
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import environments, models, processes
from benchmarks.measuring import rotated
from benchmarks.results import Ratio, ratio
from benchmarks.suite import WORK as ALL_WORK
from qinfer.cli.analyze.figures import Figures, Goal
from qinfer.cli.analyze.guard import Probes
from qinfer.cli.analyze.journal import FILE, Journal, Measured, Subject, digest
from qinfer.cli.analyze.loads import loaded_models, plan_of
from qinfer.cli.analyze.measure import Meter
from qinfer.cli.analyze.search import Wanted
from qinfer.cli.analyze.space import Candidate, Point, Space, configured
from qinfer.cli.analyze.stack import private_stack
from qinfer.cli.client import GatewayClient
from qinfer.cli.load import percentile
from qinfer.cli.local.machine import read_run
from tests.e2e.conftest import clean_environment, running
from tests.support import sweeps
from tests.support.sweeps import LEAST_SHARE, MODELS, PRESENT, SPACE, Sweep, path_of, rate_of, read_sweep

WORK = ALL_WORK / "analyzer"
QINFER = (sys.executable, "-m", "qinfer.cli.main")
PERF_ANALYZER = environments.ROOT / ".venv" / "tools" / "perf_analyzer"

MINILM = "minilm"
TOKENS = 8
"""Tokens of a text in the sweeps."""
WORDS = 30_522
"""The vocabulary of MiniLM."""

WINDOW_S = {"mlp": 0.15, "conv": 0.15, MINILM: 0.2}
"""Seconds of a sweep's windows: long enough for hundreds of requests, or for several of the largest batches."""
REPEATED, TURNS = 12, 3
"""Points that a sweep measures again, and how often."""
SMOKE = Space((1,), (1, 4), (0.0,), (1,), ("onnxruntime", "openvino"), (1, 8), PRESENT)

SEEDS = 20
LIVE_WINDOW_S, LIVE_TURNS = 0.3, 7
MOST_APART = 0.05
"""How far the figures of `qinfer bench` and perf_analyzer may differ."""

PLACE_TOKENS, CALLERS, CALM_S = 16, 3, 30.0
ENDS_WITHIN_S = 500.0


def repository_of(model: str, tokens: int = TOKENS) -> Path:
    """Writes a model with the configuration `PRESENT`, and `requests.json` beside it; returns the model repository."""
    repository = WORK / "repositories" / (f"{model}-{tokens}" if model == MINILM else model)
    directory = repository / model
    file = directory / "1" / "model.onnx"
    random = np.random.default_rng(7)
    if model == MINILM:
        inputs = {"input_ids": random.integers(1000, WORDS, tokens), "attention_mask": np.ones(tokens, np.int64)}
        kinds, output = "TYPE_INT64", 'name: "embedding" data_type: TYPE_FP32 dims: [ 384 ]'
    else:
        made = models.MODELS[model]
        inputs = {"x": made.example()[0]}
        kinds, output = "TYPE_FP32", f'name: "y" data_type: TYPE_FP32 dims: {list(made.output_dims)}'
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        _write_network(model, file)
    listed = [f'{{ name: "{name}" data_type: {kinds} dims: {list(one.shape)} }}' for name, one in inputs.items()]
    (directory / "config.pbtxt").write_text(
        f'name: "{model}"\nbackend: "{PRESENT.backend}"\nmax_batch_size: {PRESENT.max_batch}\n'
        f"input [ {', '.join(listed)} ]\noutput [ {{ {output} }} ]\ndynamic_batching {{ }}\n"
        f"instance_group [ {{ kind: KIND_CPU count: {PRESENT.instances} }} ]\n"
        f'parameters {{ key: "intra_op_thread_count" value {{ string_value: "{PRESENT.threads}" }} }}\n'
    )
    row = {name: {"content": one.ravel().tolist(), "shape": list(one.shape)} for name, one in inputs.items()}
    (repository / "requests.json").write_text(json.dumps({"data": [row]}))
    return repository


def _write_network(model: str, file: Path) -> None:
    part = file.with_suffix(".part")
    if model == MINILM:
        import torch

        from tests.support.real_models import Embedder, export_onnx

        ones = torch.ones(2, 8, dtype=torch.int64)
        export_onnx(Embedder(), (ones, ones), part)
    else:
        import onnx

        onnx.save(models.MODELS[model].build(), part)
    part.rename(file)


def analyze(model: str, repository: Path, output: Path, window_s: float, *options: str) -> dict[str, Any]:
    """Runs `qinfer analyze`, whose progress goes to stderr; returns its answer."""
    command = [*QINFER, "analyze", model, "--model-repository", str(repository), "--output", str(output), "--json"]
    command += ["--data", str(repository / "requests.json"), "--window-s", f"{window_s:g}", *options]
    began_s = time.monotonic()
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, env=clean_environment())
    if done.returncode:
        raise SystemExit(f"qinfer analyze failed: {done.stdout}")
    print(f"{model}: analyzed in {(time.monotonic() - began_s) / 60:.1f} minutes", file=sys.stderr)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def options_of(space: Space) -> list[str]:
    """Returns the options of `qinfer analyze` for a grid."""
    lists = {name: getattr(space, name) for name in ("instances", "max_batch", "delay_ms", "threads", "backend")}
    names = {"max_batch": "max-batch-size", "delay_ms": "delay-ms"}
    found = [("concurrency", space.levels), *((names.get(name, name), values) for name, values in lists.items())]
    return [part for name, values in found for part in (f"--{name}", ",".join(map(str, values)))]


def by_turns(
    model: str, repository: Path, points: Sequence[Point], turns: int, window_s: float, directory: Path
) -> list[tuple[Point, Figures]]:
    """Measures points by turns on a private server; goes on with the measurements in a directory, if there are any."""
    with private_stack([str(repository)], [model]) as server:
        loads = loaded_models(server.client, {model: 1.0}, [], [str(repository / "requests.json")])
        goal, plan = Goal(cores=os.cpu_count() or 1), plan_of(server.url, loads, 0)
        meter = Meter(server, plan, goal, window_s)
        files = f"{digest([repository / model])} {points}"
        journal = Journal(directory, Subject(files, {model: SPACE}, goal, "turns", window_s, plan.digest))
        loaded: Candidate | None = None
        for turn in range(turns):
            for point in sorted(points, reverse=turn % 2 == 1):
                wanted = Wanted(point, turn, model=model)
                if wanted in journal.known:
                    continue
                if point.candidate != loaded:
                    server.client.load(model, config=configured(loads[0].config, point.candidate))
                    loaded = point.candidate
                journal.add(wanted, meter.measure(wanted))
                rate = rate_of(journal.known[wanted])
                print(
                    f"turn {turn + 1}/{turns} {rate:10,.0f}/s  {point.candidate.text()} at {point.level}",
                    file=sys.stderr,
                )
        journal.close()
    return [(wanted.point, found) for wanted, found in journal.known.items()]


def sweep(given: argparse.Namespace) -> None:
    """Records a sweep."""
    model, space = given.model, SMOKE if given.smoke else SPACE
    began_s, repository, window_s = time.monotonic(), repository_of(model), WINDOW_S[model]
    directory = WORK / ("smoke" if given.smoke else "sweeps") / model
    analyze(model, repository, directory, window_s, "--mode", "brute", *options_of(space))
    first, *lines = (directory / FILE).read_bytes().splitlines()
    recorded = json.loads(first)["spaces"][model]
    if recorded != json.loads(msgspec.json.encode(space)):
        raise SystemExit(f"the sweep is of another grid: {recorded} is not {space}")
    measured = [(one.point, one.figures) for one in (msgspec.json.decode(line, type=Measured) for line in lines)]
    once = dict(reversed(measured))
    best = sorted(once, key=lambda point: -rate_of(once[point]))[:REPEATED]
    measured += by_turns(model, repository, best, TURNS, window_s, directory / "repeats")
    path = path_of(model, WORK / "smoke") if given.smoke else path_of(model)
    info = {"window_s": window_s, "machine": f"{os.cpu_count()} cores, {platform.machine()}"}
    sweeps.write_sweep(path, measured, info | ({"tokens": TOKENS} if model == MINILM else {}))
    print(f"{path}: {path.stat().st_size / 1024:.0f} KB, {(time.monotonic() - began_s) / 60:.1f} minutes")
    describe(model, read_sweep(path))


def describe(model: str, found: Sweep) -> None:
    """Prints the best of a sweep, and how far figures differ by chance."""
    best = found.best
    near = sum(found.share(point) >= LEAST_SHARE for point in found.truth)
    print(f"{model}: the best of {len(found.truth)} points is {best.candidate.text()} at {best.level}:")
    print(f"  {found.truth[best]:,.0f}/s, {found.gain:.2f} x the present one; {near} points have {LEAST_SHARE:g} of it")
    windows = (f"{statistics.pstdev(noise):.1%} at {level}" for level, noise in sorted(found.noise.items()))
    print(f"  repeats differ by {statistics.pstdev(found.drifts):.1%}, windows by {', '.join(windows)}")


def judge(given: argparse.Namespace) -> None:
    """Replays searches on the recorded sweeps."""
    for model in given.models.split(","):
        found = read_sweep(path_of(model))
        describe(model, found)
        for name, search in (("quick", sweeps.by_quick_search), ("random", sweeps.by_chance)):
            results = [search(found, seed) for seed in range(SEEDS)]
            shares, most = sorted(one.share for one in results), max(one.measured for one in results)
            met = sum(share >= LEAST_SHARE for share in shares)
            print(
                f"  {name}: {met} of {SEEDS} seeds find {LEAST_SHARE:g} of it; worst {shares[0]:.3f}, median "
                f"{statistics.median(shares):.3f}; at most {most} measurements, {most / SPACE.size:.1%}"
            )


def live(given: argparse.Namespace) -> None:
    """Searches once, and measures the winner beside the best of the sweep."""
    model, repository = given.model, repository_of(given.model)
    directory, space = WORK / "live" / model, SMOKE if given.smoke else SPACE
    best = read_sweep(path_of(model, WORK / "smoke") if given.smoke else path_of(model)).best
    shutil.rmtree(directory, ignore_errors=True)
    answer = analyze(model, repository, directory, LIVE_WINDOW_S, *options_of(space))
    level = answer["winner"].pop("concurrency")
    winner = Point(Candidate(**answer["winner"]), level)
    part = answer["measurements"] / space.size
    print(f"{model}: {answer['measurements']} measurements, {part:.1%} of the sweep's points")
    print(
        f"  the winner is {winner.candidate.text()} at {winner.level}, {answer['gain']['mean']:.2f} x the present one"
    )
    if winner == best:
        print(f"{model}: the winner is the best of the sweep")
        return
    turns = 2 if given.smoke else LIVE_TURNS
    rates: dict[Point, list[float]] = {winner: [], best: []}
    for point, figures in by_turns(model, repository, list(rates), turns, LIVE_WINDOW_S, directory / "turns"):
        rates[point].append(rate_of(figures))
    found = ratio(rates[winner], rates[best])
    verdict = "PASS" if found.value >= LEAST_SHARE else "MISS"
    print(f"{verdict} {model}: winner ÷ best of the sweep = {found.value:.3f} ({found.low:.3f} to {found.high:.3f})")
    print(f"  the best is {best.candidate.text()} at {best.level}")


def compare_generators(given: argparse.Namespace) -> None:
    """Measures one server by `qinfer bench` and by perf_analyzer in turns."""
    if not (PERF_ANALYZER / "perf_analyzer").exists():
        raise SystemExit("no perf_analyzer in .venv/tools: `scripts/tools perf_analyzer` fetches it")
    for model in given.models.split(","):
        repository = repository_of(model)
        directory = fresh(WORK / "generators" / model)
        with running(repository, directory) as stack:
            ways: dict[str, Callable[[], float]] = {
                "qinfer bench": partial(bench_rate, model, f"http://{stack.address}", given.concurrency, given.seconds),
            }
            for protocol, address in (("http", stack.address), ("grpc", stack.grpc_address)):
                ways[f"perf_analyzer, {protocol}"] = partial(
                    perf_analyzer_rate, model, protocol, address, given.concurrency, given.seconds
                )
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(given.turns + 1):
                for name in rotated([*ways], turn):
                    rate = ways[name]()
                    print(f"{model}, turn {turn}: {name} {rate:,.1f}/s", file=sys.stderr)
                    rates[name] += [rate] if turn else []  # the first turn warms the server up
        ours = rates["qinfer bench"]
        for name in [*ways][1:]:
            print_ratio(
                f"{model} at {given.concurrency}: qinfer bench {statistics.median(ours):,.0f}/s ÷ {name}",
                ratio(ours, rates[name]),
            )


def print_ratio(what: str, found: Ratio) -> None:
    verdict = "PASS" if abs(found.value - 1) <= MOST_APART else "MISS"
    print(f"{verdict} {what} = {found.value:.3f} ({found.low:.3f} to {found.high:.3f})")


def bench_rate(model: str, url: str, concurrency: int, seconds: float) -> float:
    """Returns the requests per second that `qinfer bench` counts."""
    command = [*QINFER, "bench", model, "--url", url, "-c", str(concurrency), "-d", str(seconds), "--json"]
    command += ["--data", str(repository_of(model) / "requests.json")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=clean_environment())
    if done.returncode:
        raise SystemExit(f"qinfer bench failed: {done.stdout}{done.stderr}")
    return float(json.loads(done.stdout)["requests_per_s"])


def perf_analyzer_rate(model: str, protocol: str, address: str, concurrency: int, seconds: float) -> float:
    """Returns the inferences per second that perf_analyzer counts in three windows."""
    report = WORK / "generators" / "report.csv"
    report.unlink(missing_ok=True)
    command = [str(PERF_ANALYZER / "perf_analyzer"), "-m", model, "-i", protocol, "-u", address, "-f", str(report)]
    command += ["--concurrency-range", str(concurrency), "--input-data", str(repository_of(model) / "requests.json")]
    command += ["--measurement-mode", "time_windows", "-p", str(int(seconds * 1000 / 3)), "-r", "3", "-s", "999"]
    environment = clean_environment() | {"LD_LIBRARY_PATH": str(PERF_ANALYZER)}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=120 + 10 * seconds
    )
    if done.returncode or not report.exists():
        raise SystemExit(f"perf_analyzer failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    (row,) = csv.DictReader(report.read_text().splitlines())
    return float(row["Inferences/Second"])


def in_place(given: argparse.Namespace) -> None:
    """Analyses a model that callers use, on cores of its own and then on theirs.

    The installation and its callers have one core, the worker and the load of the analysis the others, as if they ran
    on a machine of their own. The guard has to let this search end, and to stop one on the callers' core. Its probes
    are further requests to the model, so the callers' p99 beside probes alone is measured, too.
    """
    repository = repository_of(MINILM, PLACE_TOKENS)
    directory = fresh(WORK / "in-place")
    theirs, *others = sorted(os.sched_getaffinity(0))
    explicit = ("--model-control-mode", "explicit", "--load-model", MINILM)
    with (
        on_core(theirs),
        running(repository, directory, 1, explicit) as stack,
        steady_callers(stack.address, repository, CALLERS) as taken,
    ):
        time.sleep(given.calm_s / 3)
        taken()
        time.sleep(given.calm_s)
        print_callers("callers alone", taken())
        with steady_callers(stack.address, repository, 1):
            time.sleep(given.calm_s)
        print_callers("beside probes of a guard", taken())
        end = beside_callers(repository, directory, "1", others or [theirs], "calm")
        print_callers("beside a search on cores of its own", taken())
        print(f"  {end}")
        time.sleep(given.calm_s)
        print_callers("callers alone", taken())
        end = beside_callers(repository, directory, "8", [theirs], "provoked")
        print_callers("beside a search on their core, 8 requests at a time", taken())
        print(f"  {end}")


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Restricts this thread, and the threads and processes that it starts, to a core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [core])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def steady_callers(address: str, repository: Path, count: int) -> Iterator[Callable[[], list[float]]]:
    """Asks the model as several callers do; yields a function that returns the latencies since its last call, in ms."""
    with ExitStack() as stack:
        callers = []
        for _ in range(count):
            client = stack.enter_context(GatewayClient(f"http://{address}"))
            (one,) = loaded_models(client, {MINILM: 1.0}, [], [str(repository / "requests.json")])
            callers.append(Probes(partial(one.ask_once, client)))
            stack.callback(callers[-1].close)
        yield lambda: [latency_ms for caller in callers for latency_ms in caller.taken()]


def beside_callers(repository: Path, directory: Path, concurrency: str, cores: Sequence[int], name: str) -> str:
    """Analyses the live model by processes on some cores; returns how that ended."""
    run = read_run(directory / "data")
    assert run is not None
    command = ["taskset", "-c", ",".join(map(str, cores)), *QINFER, "analyze", MINILM, "--in-place", "--json"]
    command += ["--url", run.url, "--redis", run.redis_url, "--model-repository", str(repository)]
    command += ["--data", str(repository / "requests.json"), "--concurrency", concurrency]
    command += ["--instances", "1", "--max-batch-size", "1,4", "--delay-ms", "0", "--threads", "1"]
    command += ["--output", str(directory / name)]
    began_s = time.monotonic()
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=clean_environment(), timeout=ENDS_WITHIN_S
    )
    took_s = time.monotonic() - began_s
    answer = json.loads(done.stdout)
    if done.returncode:
        return f"after {took_s:.0f} s: {answer['error']['message']}"
    return f"after {took_s:.0f} s and {answer['measurements']} measurements: the guard did not stop it"


def print_callers(what: str, latencies_ms: Sequence[float]) -> None:
    p50_ms, p99_ms = (percentile(latencies_ms, percent) for percent in (50, 99))
    print(f"{what}: p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms of {len(latencies_ms)} requests", flush=True)


def fresh(directory: Path) -> Path:
    """Makes an empty directory."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run in (("sweep", sweep), ("live", live)):
        command = commands.add_parser(name, help=run.__doc__)
        command.add_argument("model", choices=MODELS)
        command.add_argument("--smoke", action="store_true", help="a grid of few points")
        command.set_defaults(run=run)
    command = commands.add_parser("judge", help=judge.__doc__)
    command.add_argument("--models", default=",".join(MODELS))
    command.set_defaults(run=judge)
    command = commands.add_parser("perf_analyzer", help=compare_generators.__doc__)
    command.add_argument("--models", default=f"conv,{MINILM}")
    command.add_argument("--concurrency", type=int, default=16)
    command.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    command.add_argument("--turns", type=int, default=7)
    command.set_defaults(run=compare_generators)
    command = commands.add_parser("in-place", help=str(in_place.__doc__).partition("\n")[0])
    command.add_argument("--calm-s", type=float, default=CALM_S, help="seconds before each search")
    command.set_defaults(run=in_place)
    given = parser.parse_args()
    with processes.alone(ALL_WORK):
        given.run(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
