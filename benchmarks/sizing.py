"""How much memory of Redis a request takes: while it waits, and while its result is kept.

    python -m benchmarks.sizing              writes its section of RESULTS.md (about 2 minutes)

A model that gives back its bytes, without a worker at first: requests of a known size are sent by HTTP and wait. What
`INFO memory` says more than before, divided by their number, is what one takes. Then a worker runs, and what is left is
what the results take. The bytes of the append-only file are those that were written for a request, all its steps.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import onnx
import psutil
import redis
from onnx import TensorProto, helper

from benchmarks import environments, page, processes
from benchmarks.machine import describe

WORK = environments.HERE / ".work" / "sizing"
MODEL = "echo_bytes"
SIZES = (64, 1024, 16 * 1024, 128 * 1024)
"""Bytes of a request's tensor, and of its result."""
MANY_BYTES = 64 * 2**20
"""A case sends as many requests as make this many bytes, within `FEWEST` and `MOST`."""
FEWEST, MOST = 200, 4000
AT_ONCE = 32
_WITHIN_S = 120.0
_LENGTH = "Inference-Header-Content-Length"


class Row(NamedTuple):
    """One size of request, as all requests together took.

    Attributes:
        size: Bytes of the tensor.
        count: Requests sent.
        waiting: Bytes of memory a synchronous request takes while it waits.
        accepted: The same of an asynchronous one.
        kept: Bytes of memory an asynchronous request takes once it has its result.
        written: Bytes of the append-only file for an asynchronous request, from the POST to its result.
    """

    size: int
    count: int
    waiting: float
    accepted: float
    kept: float
    written: float


def main() -> None:
    """Measures, prints and writes the table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    with processes.alone(WORK):
        rows = []
        for size in SIZES:
            rows.append(asyncio.run(measure(size)))
            print(line(rows[-1]), flush=True)
    page.write("sizing", report(rows), describe())


async def measure(size: int) -> Row:
    """Measures one size, on a Redis of its own."""
    directory = WORK / str(size)
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "models" / MODEL / "1").mkdir(parents=True)
    write_model(directory / "models" / MODEL)
    count = min(max(MANY_BYTES // size, FEWEST), MOST)
    redis_port, port = processes.free_port(), processes.free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("QINFER_")},
        "QINFER_REDIS__URL": f"redis://127.0.0.1:{redis_port}/0",
        "QINFER_REPOSITORY__PATH": str(directory / "models"),
        "QINFER_HTTP__PORT": str(port),
        "QINFER_GRPC__PORT": "0",
        "QINFER_METRICS__PORT": "0",
    }
    argv = ["redis-server", "--port", str(redis_port), "--dir", str(directory), "--save", "", "--appendonly", "yes"]
    argv += ["--auto-aof-rewrite-percentage", "0", "--maxmemory-policy", "noeviction"]
    with contextlib.ExitStack() as opened:
        opened.enter_context(program(argv, directory, environment))
        client = opened.enter_context(redis.Redis(port=redis_port))
        await until(lambda: answers(client))
        await asyncio.to_thread(sync, environment)
        opened.enter_context(program([sys.executable, "-m", "qinfer_api"], directory, environment))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=_WITHIN_S) as http:
            await until(lambda: is_ready(port))
            await submit(http, size, 10)  # so that keys that are made once are there
            waiting = await measure_waiting(client, port, size, min(count, 500))
            memory, file = used(client)
            await submit(http, size, count)
            accepted = (used(client)[0] - memory) / count
            with program([sys.executable, "-m", "qinfer_workers.inference"], directory, environment):
                await until(lambda: not entries(client))
            after = used(client)
    return Row(size, count, waiting, accepted, (after[0] - memory) / count, (after[1] - file) / count)


def sync(environment: Mapping[str, str]) -> None:
    """Writes the desired state."""
    argv = [sys.executable, "-m", "qinfer.cli.main", "models", "sync"]
    subprocess.run(argv, env=dict(environment), check=True, capture_output=True)


async def measure_waiting(client: redis.Redis, port: int, size: int, count: int) -> float:
    """Returns how much memory each of so many synchronous requests takes while it waits."""
    before, there = used(client)[0], entries(client)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=_WITHIN_S, limits=limits) as http:
        content, headers = body(size)
        path = f"/v2/models/{MODEL}/infer"
        tasks = [asyncio.create_task(http.post(path, content=content, headers=headers)) for _ in range(count)]
        await until(lambda: entries(client) == there + count)
        taken = (used(client)[0] - before) / count
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    await until(lambda: entries(client) == there)
    return taken


async def submit(http: httpx.AsyncClient, size: int, count: int) -> None:
    """Has so many asynchronous requests accepted."""
    content, headers = body(size)
    turn = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with turn:
            reply = await http.post(f"/v1/models/{MODEL}/requests", content=content, headers=headers)
            reply.raise_for_status()

    await asyncio.gather(*(one() for _ in range(count)))


def body(size: int) -> tuple[bytes, dict[str, str]]:
    """Returns a request of one tensor, with random bytes, and its headers."""
    about = f'{{"name":"x","shape":[{size}],"datatype":"UINT8","parameters":{{"binary_data_size":{size}}}}}'
    wanted = '{"name":"y","parameters":{"binary_data":true}}'
    head = f'{{"inputs":[{about}],"outputs":[{wanted}]}}'.encode()
    return head + os.urandom(size), {"content-type": "application/octet-stream", _LENGTH: str(len(head))}


def write_model(directory: Path) -> None:
    """Writes the model: UINT8[n] → the same; READY without a worker."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.UINT8, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], MODEL, tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(model, str(directory / "1" / "model.onnx"))
    (directory / "config.pbtxt").write_text(
        f'name: "{MODEL}" backend: "onnxruntime" max_batch_size: 0\n'
        'input [ { name: "x" data_type: TYPE_UINT8 dims: [ -1 ] } ]\n'
        'output [ { name: "y" data_type: TYPE_UINT8 dims: [ -1 ] } ]\n'
        'parameters { key: "qinfer.min_workers" value { string_value: "0" } }\n'
        'parameters { key: "qinfer.lane_capacity" value { string_value: "100000" } }\n'
    )


@contextlib.contextmanager
def program(argv: list[str], directory: Path, environment: Mapping[str, str]) -> Iterator[psutil.Popen]:
    """Runs a program; stops it at the end."""
    process = processes.start(argv, log=directory / "log", env=environment, cwd=environments.ROOT)
    try:
        yield process
    finally:
        processes.stop([process])


def used(client: redis.Redis) -> tuple[int, int]:
    """Returns the bytes of memory and of the append-only file that Redis uses."""
    memory: Any = client.info("memory")
    file: Any = client.info("persistence")
    return memory["used_memory_dataset"], file["aof_current_size"]


def entries(client: redis.Redis) -> int:
    """Returns how many entries wait in the model's lanes, or are in hand."""
    lanes: Any = list(client.scan_iter(f"qinfer:{{{MODEL}#0}}:1:*", _type="stream"))
    return sum(int(client.xlen(lane)) for lane in lanes)  # type: ignore[arg-type]


def answers(client: redis.Redis) -> bool:
    """Tells whether Redis is up."""
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def is_ready(port: int) -> bool:
    """Tells whether the gateway takes requests for the model."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/v2/models/{MODEL}/ready").status_code == 200
    except httpx.HTTPError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something.

    Raises:
        TimeoutError: It did not come.
    """
    ends_s = time.monotonic() + _WITHIN_S
    while not condition():
        if time.monotonic() > ends_s:
            raise TimeoutError("what was to be measured did not happen; see the log")
        await asyncio.sleep(0.05)


def line(row: Row) -> str:
    """Returns a row of the table."""
    taken = " | ".join(f"{value:,.0f}" for value in (row.waiting, row.accepted, row.kept, row.written))
    return f"| {row.size:,} | {row.count:,} | {taken} |"


def report(rows: list[Row]) -> str:
    """Returns the section."""
    table = "\n".join(line(row) for row in rows)
    return (
        "Made by `python -m benchmarks.sizing`; bytes a request.\n\n"
        "| tensor = result | requests | waiting, synchronous | waiting, asynchronous | with its result | in the AOF |\n"
        f"|---|---|---|---|---|---|\n{table}\n"
    )


if __name__ == "__main__":
    main()
