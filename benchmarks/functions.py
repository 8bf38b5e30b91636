"""The same Python function from text to a vector, in qinfer, LitServe and mosec: `python -m benchmarks.functions`.

Each request has one text, as plain JSON; each answer the vector. All servers batch up to 32 requests, do not wait for
batches to fill, and have one process for the function, which has one thread. They run side by side and take turns under
a closed loop of connections. Needs `wrk`, `redis-server`, and a package index at the first time, for the peers'
environments; PyTorch comes from the environment of this program. `--help` has the length of turns.
"""

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import httpx
import numpy as np

from benchmarks import environments, processes
from benchmarks.bodies import JSON, TOLERANCE, Body, WrongAnswer
from benchmarks.load import run_wrk
from benchmarks.measuring import Contestant, Tally, take_turns
from benchmarks.results import CLIENT, Sample, Setting, ratio
from benchmarks.servers import Command, Launch, Server, ServerKind, started
from benchmarks.suite import WORK

TEXT = "The quick brown fox jumps over the lazy dog while the queue fills with requests for the next batch"
EMBEDDERS = ("counts", "encoder")
QINFER, LITSERVE, MOSEC, MOSEC_ORJSON = "qinfer", "litserve", "mosec", "mosec_orjson"
ROUTES = {QINFER: "/models/embed", LITSERVE: "/predict", MOSEC: "/embed", MOSEC_ORJSON: "/embed"}
LEAST = {"counts": 1.2, "encoder": 1.0}
"""The least ratio of qinfer's rate to that of each peer."""

_APP = environments.HERE / "peers" / "functions_app.py"


def kinds(embedder: str) -> list[ServerKind]:
    """Returns the servers of a function."""
    env = {"BENCH_EMBEDDER": embedder, "BENCH_SITE": sysconfig.get_paths()["purelib"]}

    def qinfer(launch: Launch) -> list[Command]:
        program = str(Path(sys.executable).with_name("qinfer"))
        app = launch.directory / "app.py"  # no variables of ours are in the environment of an app
        begin = (
            f"import os, sys\nos.environ['BENCH_EMBEDDER'] = {embedder!r}\nsys.path.insert(0, {str(_APP.parent)!r})\n"
        )
        app.write_text(begin + _APP.read_text())
        data = ("--data-dir", str(launch.directory / "data"), "--workers", "1", "--metrics-port", "0")
        ports = ("--http-port", str(launch.port), "--grpc-port", str(launch.grpc_port))
        return [Command(argv=(program, "up", str(app), *data, *ports), env=env)]

    def peer(name: str, launch: Launch, **more: str) -> list[Command]:
        argv = (str(environments.ensure(name)), "-m", f"benchmarks.peers.{name}.embed")
        return [Command(argv=argv, env={**env, **more, "BENCH_PORT": str(launch.port)})]

    roles = (("", "processes"),)
    return [
        ServerKind(name=QINFER, commands=qinfer, roles=roles, can_pause=False),
        ServerKind(name=LITSERVE, commands=partial(peer, LITSERVE), roles=roles),
        ServerKind(name=MOSEC, commands=partial(peer, MOSEC, BENCH_JSON="stock"), roles=roles),
        ServerKind(name=MOSEC_ORJSON, commands=partial(peer, MOSEC, BENCH_JSON="orjson"), roles=roles),
    ]


def url_of(server: Server) -> str:
    """Returns the URL of the function."""
    return f"http://127.0.0.1:{server.launch.port}{ROUTES[server.kind.name]}"


def checks(expected: Sequence[float]) -> Callable[[Server], None]:
    """Returns what raises `WrongAnswer` unless a server gives the vector of `TEXT`."""

    def check(server: Server) -> None:
        answer = httpx.post(url_of(server), json={"text": TEXT}, timeout=30)
        if answer.status_code != 200:
            raise WrongAnswer(f"{answer.status_code} {answer.text[:200]}")
        if not np.allclose(answer.json()["embedding"], expected, atol=TOLERANCE):
            raise WrongAnswer(f"another vector: {answer.text[:200]}")

    return check


def expected_of(embedder: str) -> list[float]:
    """Returns the vector of `TEXT`, made in this process."""
    os.environ["BENCH_EMBEDDER"] = embedder
    sys.modules.pop("benchmarks.peers.embedding", None)
    from benchmarks.peers.embedding import Embedder

    vector: list[float] = Embedder().embed([TEXT])[0].tolist()
    return vector


def measured(embedder: str, options: argparse.Namespace) -> list[Sample]:
    """Starts the servers, and loads them by turns."""
    directory = WORK / "functions" / embedder
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "body"
    path.write_text(json.dumps({"text": TEXT}))
    body = Body(model=None, encoding=JSON, path=path, headers={"Content-Type": "application/json"}, expected=None)  # type: ignore[arg-type]
    check = checks(expected_of(embedder))
    tally = Tally(strict=False)
    with ExitStack() as stack:
        contestants = []
        for kind in kinds(embedder):
            if kind.name not in options.only.split(","):
                continue
            launch = Launch(
                model="embed",
                model_file=path,
                repository=directory,
                directory=directory / kind.name,
                port=processes.free_port(),
                grpc_port=processes.free_port(),
            )
            server = stack.enter_context(started(kind, launch, check))
            run = partial(run_wrk, url_of(server), body, options.connections, options.seconds)
            run_wrk(url_of(server), body, options.connections, 1)  # warms it up
            setting = Setting(model=embedder, encoding=JSON, connections=options.connections, server=kind.name)
            contestants.append(Contestant(setting=setting, turns=options.rounds, generate=run, server=server))
        take_turns(contestants, tally, show)
    return tally.samples


def show(sample: Sample) -> None:
    """Prints a turn."""
    lost = f"   lost {sample.lost:.0%} of the cores" if sample.lost > 0.03 else ""
    failed = f"   failed: {sample.errors}" if sample.errors else ""
    print(
        f"  {sample.setting.server:<14}{sample.rate:>9,.0f} req/s   p50 {sample.p50_us / 1000:>7.2f} ms{lost}{failed}"
    )


def table(samples: Sequence[Sample]) -> tuple[list[str], bool]:
    """Returns the medians of each server and qinfer's ratios, and whether all ratios are as they should be."""
    lines, is_fine = [], True
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.setting.server, []).append(sample)
    for name, own in by_name.items():
        rate, p50 = median(one.rate for one in own), median(one.p50_us for one in own) / 1000
        cpu_us = median(sum(us for role, us in one.cpu_us.items() if role != CLIENT) for one in own)
        share = "1"
        if name != QINFER and QINFER in by_name:
            found = ratio([one.rate for one in by_name[QINFER]], [one.rate for one in own])
            share = f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
            is_fine = is_fine and found.value >= LEAST[own[0].setting.model]
        is_fine = is_fine and not any(one.errors for one in own)
        lines.append(f"| {name} | {rate:,.0f} | {p50:.2f} | {cpu_us:,.0f} | {share} |")
    return lines, is_fine


def main() -> int:
    """Measures both functions and prints a table of each; returns 1 where a bar is missed and `--check` is given."""
    parser = argparse.ArgumentParser(description="A Python function in qinfer, LitServe and mosec.")
    parser.add_argument("--embedders", default=",".join(EMBEDDERS))
    parser.add_argument("--only", default=",".join(ROUTES), help="servers, by commas")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each server")
    parser.add_argument("--check", action="store_true", help="a missed bar is the exit code")
    options = parser.parse_args()
    is_fine = True
    with processes.alone(WORK):
        for embedder in options.embedders.split(","):
            lines, fine = table(measured(embedder, options))
            is_fine = is_fine and fine
            print(f"\n{embedder}, {options.connections} connections; at least {LEAST[embedder]:g} x each peer\n")
            print("| server | req/s | p50 ms | CPU µs per request | qinfer ÷ it |\n|---|---|---|---|---|")
            print("\n".join([*lines, ""]))
    return int(options.check and not is_fine)


if __name__ == "__main__":
    sys.exit(main())
