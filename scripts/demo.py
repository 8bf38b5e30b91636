"""The demo: a digits classifier behind the whole server; every answer is compared with the in-process one.

    make demo            starts `qinfer up`, sends images, kills the worker, scores a file, prints the figures, stops
    make demo KEEP=1     the same, and leaves the server up

The model and its images are those of `qinfer example digits`. The demo exits with 1 when an answer is missing or
differs from ONNX Runtime's own, or the accuracy is below 0.95. It writes below `.demo/` only.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from rich.terminal_theme import MONOKAI

from qinfer.cli import example
from qinfer.observe import catalogue
from scripts import demo_bulk
from scripts.load import Answer, ask_all

ROOT = Path(__file__).resolve().parent.parent
READY_WITHIN_S = 60.0
STOP_WITHIN_S = 40.0
STATISTICS_WITHIN_S = 5.0  # workers add their statistics once a second
LEAST_ACCURACY = 0.95
LEASE_S = 3.0
"""Seconds after which another worker takes what a dead one held; 10 by default, less here to have it seen soon."""
MODEL = "digits"
INFER_PATH = f"/v2/models/{MODEL}/infer"


class DemoFailed(Exception):
    """The demo did not show what it promises; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, parsed."""

    directory: Path
    port: int
    rounds: int
    connections: int
    keep: bool
    svg: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """The model's file, and images that it was not trained on.

    Attributes:
        model_path: The ONNX file.
        images: float32[n, 64], pixels from 0 to 16.
        labels: int64[n], the digits that the images show.
    """

    model_path: Path
    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


class Server:
    """`qinfer up` as a process of its own, its output in a file."""

    def __init__(self, options: Options, port: int, grpc_port: int, metrics_port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.log = options.directory / "qinfer.log"
        self._command = [
            str(Path(sys.executable).with_name("qinfer")),
            *("up", "--model-repository", str(options.directory / "models")),
            *("--data-dir", str(options.directory / "data"), "--http-port", str(port)),
            *("--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port)),
            *("--allow-store", options.directory.resolve().as_uri()),
        ]

    def start(self) -> None:
        """Starts it and waits until the model is ready."""
        with self.log.open("ab") as log:
            environment = os.environ | {"QINFER_WORKER__LEASE_S": str(LEASE_S)}
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        deadline_s = time.monotonic() + READY_WITHIN_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise DemoFailed(f"the server did not become ready; the end of its log:\n{self._log_tail()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Asks it to drain and end; kills it when it does not."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise DemoFailed(f"the server did not stop within {STOP_WITHIN_S:.0f} s; it was killed") from None

    @property
    def worker(self) -> int:
        """The process id of its only worker."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        (worker,) = (pid for pid, command in commands.items() if b"qinfer_workers.inference" in command)
        return int(worker)

    def _is_ready(self) -> bool:
        try:
            fetch(f"{self.url}/v2/models/{MODEL}/ready")
        except OSError:
            return False
        return True

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


def main() -> int:
    """Runs the demo; returns the exit status."""
    options = parse_options()
    console = Console(highlight=False, record=options.svg is not None)
    try:
        run(options, console)
    except (DemoFailed, demo_bulk.BulkDemoFailed, OSError) as error:
        console.print(f"[red]demo failed:[/] {error}", markup=True)
        return 1
    return 0


def parse_options() -> Options:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Serve a digits classifier and check every answer.")
    parser.add_argument("--directory", type=Path, default=ROOT / ".demo", help="where models, data and log go")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port; another is picked when it is taken")
    parser.add_argument("--rounds", type=int, default=50, help="how often the 100 images are sent")
    parser.add_argument("--connections", type=int, default=32, help="concurrent connections")
    parser.add_argument("--keep", action="store_true", help="leave the server up at the end")
    parser.add_argument("--svg", type=Path, help="draw what is printed until the worker was killed, as README shows it")
    return Options(**vars(parser.parse_args()))


def picture(console: Console) -> str:
    """Draws what the console has printed; no font is fetched to show it."""
    drawn = console.export_svg(title="make demo", theme=MONOKAI)
    return re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")


def run(options: Options, console: Console) -> None:
    """Builds, serves, asks, checks, prints."""
    options.directory.mkdir(parents=True, exist_ok=True)
    data = write_example(options.directory)
    console.print(f"model    {shown(data.model_path)}")
    port, grpc_port, metrics_port = (free_port(options.port and options.port + offset) for offset in range(3))
    if port != options.port:
        console.print(f"port     {options.port} is taken; using {port}")
    server = Server(options, port, grpc_port, metrics_port)
    with console.status("starting qinfer: Redis, gateway, worker"):
        server.start()
    try:
        console.print(f"server   {server.url}  (log: {shown(server.log)})")
        console.print(f"gRPC     127.0.0.1:{grpc_port}\n")
        measure(server, data, options, console)
        show_curl(server, options.directory, console)
        kill_the_worker(server, data, options, console)
        if options.svg is not None:
            options.svg.write_text(picture(console))
        demo_bulk.score(server.url, data.images, data.labels, options.directory, console)
    except BaseException:
        server.stop()
        raise
    if options.keep:
        console.print("\nThe server stays up. For the command line: source .demo/venv/bin/activate, then for instance")
        console.print(f"    qinfer status --data-dir {shown(options.directory / 'data')}", soft_wrap=True, markup=False)
        console.print(f"To stop it: kill {server.process.pid}")
    else:
        server.stop()
        console.print("\nStopped; the queue is empty. make demo KEEP=1 leaves it up.")


def write_example(directory: Path) -> Digits:
    """Writes the files of `qinfer example digits`; returns where the model is, and the images."""
    example.write(example.Name.digits, directory)
    rows = [json.loads(line) for line in (directory / "digits.jsonl").read_text().splitlines()]
    return Digits(
        model_path=directory / "models" / MODEL / "1" / "model.onnx",
        images=np.array([row["pixels"] for row in rows], np.float32),
        labels=np.array([row["digit"] for row in rows]),
    )


def measure(server: Server, data: Digits, options: Options, console: Console) -> None:
    """Sends the images, prints the figures, and checks the answers."""
    bodies = [request_body(image) for image in data.images]
    total = len(bodies) * options.rounds
    before = read_metrics(server)
    with console.status(f"sending {total} images one by one over {options.connections} connections"):
        began_s = time.perf_counter()
        answers = uvloop.run(
            ask_all(server.port, INFER_PATH, bodies, rounds=options.rounds, connections=options.connections)
        )
        took_s = time.perf_counter() - began_s
    accuracy, differing = compare(answers, data)
    after = wait_for_statistics(server, before, total)
    latencies_ms = np.array([answer.latency_s for answer in answers]) * 1000
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("requests", f"{total}, each one image, {options.connections} at a time")
    table.add_row("accuracy", f"{accuracy:.4f} on {len(bodies)} images the model never saw")
    table.add_row("same as in process", "every answer" if not differing else f"[red]{differing} answers differ[/]")
    table.add_row("throughput", f"{total / took_s:,.0f} requests/s (this client shares the machine)")
    table.add_row(
        "latency", f"p50 {np.percentile(latencies_ms, 50):.1f} ms, p99 {np.percentile(latencies_ms, 99):.1f} ms"
    )
    table.add_row("mean batch size", f"{mean_batch_size(before, after):.1f} images an execution")
    table.add_row("backlog afterwards", f"{after.get(catalogue.BACKLOG.name, 0.0):.0f} requests in the queue")
    console.print(table)
    if differing:
        raise DemoFailed(f"{differing} answers differ from ONNX Runtime's own")
    if accuracy < LEAST_ACCURACY:
        raise DemoFailed(f"accuracy {accuracy:.4f} is below {LEAST_ACCURACY}")
    if after.get(catalogue.BACKLOG.name, 0.0):
        raise DemoFailed("requests stayed behind in the queue")


def kill_the_worker(server: Server, data: Digits, options: Options, console: Console) -> None:
    """Kills the only worker while all connections ask; every request is answered all the same.

    Raises:
        DemoFailed: An answer is not that of ONNX Runtime.
    """
    bodies, worker = [request_body(image) for image in data.images], server.worker

    def kill() -> None:
        console.print(f"\n    kill -9 {worker}", markup=False)
        os.kill(worker, signal.SIGKILL)

    asking = ask_all(
        server.port, INFER_PATH, bodies, rounds=2 * options.rounds, connections=options.connections, halfway=kill
    )
    answers = uvloop.run(asking)
    _, differing = compare(answers, data)
    longest_s = max(answer.latency_s for answer in answers)
    console.print(f"    {len(answers)} requests: every one answered, half of them after the kill")
    console.print(f"    longest wait {longest_s:.1f} s: the dead worker held it, and its lease is {LEASE_S:g} s")
    if differing:
        raise DemoFailed(f"{differing} answers differ from ONNX Runtime's own")


def request_body(image: npt.NDArray[np.float32]) -> bytes:
    """Encodes one image as the protocol's JSON."""
    inputs = [{"name": "image", "shape": [1, 64], "datatype": "FP32", "data": image.tolist()}]
    return json.dumps({"inputs": inputs}).encode()


def compare(answers: Sequence[Answer], data: Digits) -> tuple[float, int]:
    """Returns the accuracy, and how many answers are not what ONNX Runtime says in this process."""
    session = onnxruntime.InferenceSession(data.model_path, providers=["CPUExecutionProvider"])
    labels, probabilities = session.run(["label", "probabilities"], {"image": data.images})
    right = differing = 0
    for answer in answers:
        if answer.status != 200:
            raise DemoFailed(f"status {answer.status}: {answer.reply}")
        outputs = {output["name"]: output["data"] for output in answer.reply["outputs"]}
        label = outputs["label"][0]
        right += label == data.labels[answer.item]
        same = label == labels[answer.item, 0] and np.allclose(
            outputs["probabilities"], probabilities[answer.item], rtol=1e-4, atol=1e-6
        )
        differing += not same
    return right / len(answers), differing


def show_curl(server: Server, directory: Path, console: Console) -> None:
    """Prints the line that asks about one digit, and what it answers."""
    path = directory / "digit.json"
    image = json.loads(path.read_text())["inputs"][0]["data"]
    command = ["curl", "-s", f"{server.url}{INFER_PATH}", "-d", f"@{shown(path)}"]
    console.print("\nOne of the images, and the line that asks what it is:\n")
    for row in np.reshape(image, (8, 8)):
        console.print("    " + "".join(" ░▒▓█"[int(pixel) // 4] * 2 for pixel in row))
    console.print(f"\n    {shlex.join(command)}", soft_wrap=True, markup=False)
    if shutil.which("curl"):
        reply = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    else:
        reply = fetch(command[2], path.read_bytes())
    console.print(f"    {reply.strip()}", soft_wrap=True, markup=False)


# --- what /metrics says ---------------------------------------------------------------------------------------------

BATCH_COUNT, BATCH_SUM = f"{catalogue.BATCH_SIZE.name}_count", f"{catalogue.BATCH_SIZE.name}_sum"


def read_metrics(server: Server) -> dict[str, float]:
    """Reads the demo model's samples, summed over labels."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(fetch(f"{server.url}/metrics")):
        for sample in family.samples:
            if sample.labels.get("model") == MODEL:
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return samples


def wait_for_statistics(server: Server, before: dict[str, float], total: int) -> dict[str, float]:
    """Reads the metrics until the worker has reported every image, or gives up and returns what there is."""
    deadline_s = time.monotonic() + STATISTICS_WITHIN_S
    while True:
        after = read_metrics(server)
        reported = after.get(BATCH_SUM, 0.0) - before.get(BATCH_SUM, 0.0)
        if reported >= total or time.monotonic() > deadline_s:
            return after
        time.sleep(0.1)


def mean_batch_size(before: dict[str, float], after: dict[str, float]) -> float:
    """Returns images per execution between two readings."""
    executions = after.get(BATCH_COUNT, 0.0) - before.get(BATCH_COUNT, 0.0)
    images = after.get(BATCH_SUM, 0.0) - before.get(BATCH_SUM, 0.0)
    return images / executions if executions else float("nan")


# --- small helpers --------------------------------------------------------------------------------------------------


def free_port(wanted: int) -> int:
    """Returns `wanted` when nobody listens there, else a port that is free."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise DemoFailed("no free port on 127.0.0.1")


def fetch(url: str, body: bytes | None = None) -> str:
    """Gets a URL, or posts to it; an error status raises `OSError`."""
    with urllib.request.urlopen(url, data=body, timeout=10) as reply:  # noqa: S310 - always our own http:// URL
        return str(reply.read().decode())


def shown(path: Path) -> str:
    """Returns a path as the user would type it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
