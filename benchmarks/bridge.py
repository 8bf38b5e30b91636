"""The bridge: how many messages a second go from a queue of RabbitMQ to a tiny model and back, and what each costs.

    python -m benchmarks.bridge              writes its section of RESULTS.md (about 15 minutes)
    python -m benchmarks.bridge --rounds 1 --messages 4000 --only "JSON, 1 row"

A queue is filled first, then bridges start; nobody takes the predictions meanwhile. The rate is that of predictions
that RabbitMQ has in their queue, between the first twentieth and the last one. Messages and predictions are persistent.
Each visit has new queues and a new `qinfer up` with its private Redis (AOF everysec), a gateway, and one worker; the
model is `tiny` (16 → 8), which takes nothing. CPU time is that of the processes over the measured time.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pyarrow as pa
import yaml

from benchmarks import environments, page, processes
from benchmarks.bridge_cases import MODEL, Case, cases
from benchmarks.machine import describe
from benchmarks.models import write_repository
from tests.support.servers.rabbitmq import RabbitServer, running_rabbitmq

WORK = environments.HERE / ".work" / "bridge"
BAR = 5000.0
BAR_CASE = "JSON, 1 row"
TASKS, DONE = "tasks", "tasks.done"
ROLES = (
    ("qinfer_workers.bridge", "bridge"),
    ("qinfer_workers.inference", "worker"),
    ("redis-server", "redis"),
    ("beam.smp", "rabbitmq"),
)
SHOWN = ("rabbitmq", "redis", "worker", "bridge", "other")
QINFER = str(Path(sys.executable).with_name("qinfer"))
_FIRST = 1 / 20
_POLL_S = 0.05
_WITHIN_S = 180.0
_BATCH = 500


class RunFailed(Exception):
    """What was to be measured did not happen."""


class Visit(NamedTuple):
    """What one run showed.

    Attributes:
        rate: Messages a second.
        cpu_us: CPU time of a message, in microseconds, by role.
        busy: The part of all cores' time that these processes used.
        idle: The part that nobody used, or waited for disks.
        largest: The part of one core that the busiest bridge used.
    """

    rate: float
    cpu_us: Mapping[str, float]
    busy: float
    idle: float
    largest: float


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[psutil.Popen]:
    """Runs `qinfer up` with the model, one gateway and one worker."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    write_repository(MODEL, directory / "models")
    port = processes.free_port()
    command = [QINFER, "up", "--model-repository", str(directory / "models"), "--data-dir", str(directory / "data")]
    command += ["--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0", "--workers", "1"]
    root = processes.start(command, log=directory / "log", env=_environment(), cwd=environments.ROOT)
    try:
        _wait(lambda: _is_ready(port), "qinfer is ready", directory / "log")
        yield root
    finally:
        processes.stop([root])


def start_bridges(count: int, case: Case, rabbit: RabbitServer, directory: Path) -> list[psutil.Popen]:
    """Starts bridges on one file; they begin with the messages as soon as they can."""
    route = {
        "name": "bench",
        "model": MODEL.name,
        "source": {"url": rabbit.url, "queue": TASKS},
        "sink": {"routing_key": DONE},
        "body": dict(case.options),
    }
    config = directory / "bridge.yaml"
    config.write_text(yaml.safe_dump({"routes": [route]}))
    command = [QINFER, "bridge", str(config), "--data-dir", str(directory / "data")]
    return [
        processes.start(command, log=directory / "log", env=_environment(), cwd=environments.ROOT) for _ in range(count)
    ]


def fill(rabbit: RabbitServer, case: Case, count: int) -> None:
    """Puts messages into a new queue, persistent and confirmed."""
    connection = rabbit.connect()
    channel = connection.channel()
    for queue in (TASKS, DONE, f"{TASKS}.dead"):
        channel.queue_delete(queue)
        channel.queue_declare(queue, durable=True, auto_delete=False)
    channel.confirm_select()
    confirmed = 0

    def confirm(tag: int, _: bool) -> None:  # noqa: FBT001 - as py-amqp calls it
        nonlocal confirmed
        confirmed = max(confirmed, tag)

    channel.events["basic_ack"].add(confirm)
    for number in range(count):
        properties = {"message_id": f"m{number}", "correlation_id": f"c{number}", "delivery_mode": 2}
        message = channel.prepare_message(case.body, content_type=case.content_type, properties=properties)
        channel.basic_publish(message, exchange="", routing_key=TASKS)
        while number - confirmed >= _BATCH or (number == count - 1 and confirmed < count):
            connection.drain_events(timeout=30)
    connection.release()


def visit(rabbit: RabbitServer, case: Case, bridges: int, count: int) -> Visit:
    """Measures one case.

    Raises:
        RunFailed: Messages were refused, or not all were answered in time.
    """
    fill(rabbit, case, count)
    connection = rabbit.connect()
    channel = connection.channel()

    def waiting(queue: str) -> int:
        return int(channel.queue_declare(queue, passive=True).message_count)

    with serving(WORK / "up") as up:
        started = start_bridges(bridges, case, rabbit, WORK / "up")
        roots = [up, *started, psutil.Process(rabbit.process.pid)]
        log = WORK / "up" / "log"
        try:
            _wait(lambda: waiting(DONE) >= count * _FIRST, "the first predictions", log)
            first, begin_s, before = waiting(DONE), time.perf_counter(), processes.usage(roots, ROLES)
            shares, idle_before_s = [_cpu_s(one) for one in started], _idle_s()
            _wait(lambda: waiting(DONE) >= count, "all predictions", log)
            elapsed_s = time.perf_counter() - begin_s
            used, idle_s = processes.usage(roots, ROLES).cpu_since(before), _idle_s() - idle_before_s
            largest = max(_cpu_s(one) - share for one, share in zip(started, shares, strict=True)) / elapsed_s
        finally:
            processes.stop(started)
        _check(channel, case, count, waiting)
    connection.release()
    cpu_us = {role: seconds / (count - first) * 1e6 for role, seconds in used.items()}
    capacity_s = elapsed_s * (os.cpu_count() or 1)
    return Visit((count - first) / elapsed_s, cpu_us, sum(used.values()) / capacity_s, idle_s / capacity_s, largest)


def _check(channel: Any, case: Case, count: int, waiting: Any) -> None:
    """Raises RunFailed unless each message has one prediction of the right size."""
    left = {queue: waiting(queue) for queue in (TASKS, f"{TASKS}.dead", DONE)}
    if left != {TASKS: 0, f"{TASKS}.dead": 0, DONE: count}:
        raise RunFailed(f"{case.name}: expected {count} predictions and nothing else, found {left}")
    message = channel.message_to_python(channel.basic_get(DONE, no_ack=True))
    body = bytes(message.body)
    if message.content_type == "application/json":
        found = len(json.loads(body)["outputs"][0]["data"]) // 8
    elif message.content_type == "application/x-ndjson":
        found = len(body.splitlines())
    else:
        found = pa.ipc.open_stream(body).read_all().num_rows
    if found != case.rows:
        raise RunFailed(f"{case.name}: expected {case.rows} rows in a prediction, found {found}")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _idle_s() -> float:
    times = psutil.cpu_times()
    return float(times.idle + times.iowait)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QINFER_")}
    return {**kept, "QINFER_LOG__LEVEL": "WARNING"}


def _is_ready(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/v2/models/{MODEL.name}/ready").status_code == 200
    return False


def _wait(condition: Any, what: str, log: Path) -> None:
    give_up_s = time.monotonic() + _WITHIN_S
    while not condition():
        if time.monotonic() > give_up_s:
            raise RunFailed(f"not in time: {what}; the log ends:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(_POLL_S)


def measure(names: Sequence[str], rounds: int, messages: int) -> dict[tuple[str, int], list[Visit]]:
    """Returns the visits by case and number of bridges; rounds are outermost, and their order rotates."""
    found: dict[tuple[str, int], list[Visit]] = {}
    plan = [(case, bridges) for case in map(cases().__getitem__, names) for bridges in (1, 2)]
    shutil.rmtree(WORK / "rabbitmq", ignore_errors=True)
    with running_rabbitmq(WORK / "rabbitmq") as rabbit:
        for number in range(rounds):
            start = number * len(plan) // rounds
            for case, bridges in plan[start:] + plan[:start]:
                one = visit(rabbit, case, bridges, messages if case.rows == 1 else messages // 4)
                found.setdefault((case.name, bridges), []).append(one)
                print(f"{case.name}, {bridges} bridge(s): {one}", flush=True)
    return found


def table(found: Mapping[tuple[str, int], Sequence[Visit]]) -> str:
    """Returns the figures and the verdict as Markdown."""
    lines = [
        "| message | bridges | messages/s | least, most | rows/s | "
        + " | ".join(f"{role} µs" for role in SHOWN)
        + " | cores busy | idle | busiest bridge |",
        "|---|---:|---:|---:|---:|" + "---:|" * (len(SHOWN) + 3),
    ]
    settings = [(case, bridges) for case in cases().values() for bridges in (1, 2)]
    lines += [_line(*one, found[one[0].name, one[1]]) for one in settings if (one[0].name, one[1]) in found]
    return "\n".join([*lines, "", verdict(found), ""])


def _line(case: Case, bridges: int, visits: Sequence[Visit]) -> str:
    rates = [one.rate for one in visits]
    rate = statistics.median(rates)
    cpu = [statistics.median(one.cpu_us.get(role, 0.0) for one in visits) for role in SHOWN]
    parts = [statistics.median(getattr(one, name) for one in visits) for name in ("busy", "idle", "largest")]
    words = [case.name, str(bridges), f"{rate:,.0f}", f"{min(rates):,.0f}, {max(rates):,.0f}"]
    words += [f"{rate * case.rows:,.0f}", *(f"{value:.0f}" for value in cpu), *(f"{part:.0%}" for part in parts)]
    return f"| {' | '.join(words)} |"


def verdict(found: Mapping[tuple[str, int], Sequence[Visit]]) -> str:
    """Says whether the bar is met, and what limits."""
    best = max(
        (statistics.median(one.rate for one in visits), bridges, visits)
        for (name, bridges), visits in found.items()
        if name == BAR_CASE or len(found) <= 2
    )
    rate, bridges, visits = best
    cpu = {role: statistics.median(one.cpu_us.get(role, 0.0) for one in visits) for role in SHOWN}
    total, most = sum(cpu.values()), max(cpu, key=lambda role: cpu[role])
    busy, idle, largest = (
        statistics.median(getattr(one, name) for one in visits) for name in ("busy", "idle", "largest")
    )
    cores = f"the {os.cpu_count()} cores"
    if idle < 0.1:
        limit = f"{cores} are busy, {busy:.0%} of their time with these programs: a message costs {total:.0f} µs"
    elif largest > 0.9:
        limit = f"one core is busy with the bridge ({largest:.0%}): more bridges are faster where there are cores"
    else:
        limit = f"{cores} are idle for {idle:.0%} of the time: one waits for another; a message costs {total:.0f} µs"
    share = f"most of it, {cpu[most]:.0f} µs, is {most}'s"
    return (
        f"- {'PASS' if rate >= BAR else 'MISS'}: {rate:,.0f} messages/s with {bridges} bridge(s), at least {BAR:,.0f}\n"
        f"- What limits: {limit}; {share}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=20_000, help="of one row; of 32 rows a fourth")
    parser.add_argument("--only", nargs="*", default=[], help=f"of: {', '.join(cases())}")
    options = parser.parse_args()
    if unknown := set(options.only) - set(cases()):
        parser.error(f"there is no case {sorted(unknown)}")
    WORK.mkdir(parents=True, exist_ok=True)
    with processes.alone(WORK):
        text = table(measure(options.only or list(cases()), options.rounds, options.messages))
    print(text)
    if (options.rounds, options.messages) >= (3, 20_000) and not options.only:
        page.write("bridge", f"Made by `python -m benchmarks.bridge`, which says how.\n\n{text}", describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
