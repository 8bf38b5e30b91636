"""Throughput of models on a GPU through the whole server, as a share of the raw backend loop at its best batch.

    python -m benchmarks.gpu              writes benchmarks/GPU.md
    python -m benchmarks.gpu --cpu        the same on the CPU: prints, to try the script; writes nothing

The raw loop calls the backend's `execute` over and over in this process, with batches of 1 … 64: what the runtime gives
when nothing else is to be done. The server runs as `qinfer up`, under `qinfer bench` with one row per request and four
times the best batch in flight. Both have one instance of the model, and run one after the other.
"""

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.machine import describe
from qinfer.backends.base import Batch
from qinfer.backends.registry import factory
from qinfer.core.messages import InferRequest
from qinfer.core.settings import LimitSettings
from qinfer.models.config.config import normalise, parse, to_spec
from qinfer.models.spec import Device
from tests.e2e.conftest import running
from tests.gpu.conftest import usable
from tests.support import real_models
from tests.support.backends import Answers

OUT = Path(__file__).parent / "GPU.md"
TOKENS = 64
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MODELS = {"embed_onnx": "onnxruntime", "embed_torch": "pytorch", "embed_export": "pytorch", "embed_plan": "tensorrt"}

_FACTS = ("date", "commit", "processor", "memory", "kernel", "python", "redis-server", "qinfer")
"""The machine's facts that such figures depend on: neither peers nor HTTP clients run here."""


class Row(NamedTuple):
    """One line of the table; rates are rows per second."""

    model: str
    backend: str
    raw: dict[int, float]
    served: float

    @property
    def best(self) -> int:
        return max(self.raw, key=lambda size: self.raw[size])


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cpu", action="store_true", help="run on the CPU, and write nothing")
    options.add_argument("--seconds", type=float, default=10.0, help="of each measurement of the server")
    arguments = options.parse_args()
    runtimes = ["onnxruntime", "pytorch"] if arguments.cpu else usable()
    if not runtimes:
        print("no runtime that is installed can use a GPU of this machine; nothing was measured")
        return 1
    kind = "KIND_CPU" if arguments.cpu else "KIND_GPU"
    rows = []
    with tempfile.TemporaryDirectory() as name:
        repository = Path(name) / "models"
        _write_models(repository, kind, runtimes)
        for model in sorted(path.name for path in repository.iterdir()):
            print(f"{model} …", flush=True)
            raw = _raw(repository / model, Device("cpu" if arguments.cpu else "gpu"), arguments.seconds / len(BATCHES))
            rows.append(Row(model, MODELS[model], raw, _served(repository / model, raw, arguments.seconds)))
    text = _table(rows)
    print(text)
    if not arguments.cpu:
        OUT.write_text(_page(text, runtimes))
    return 0


def _write_models(repository: Path, kind: str, runtimes: list[str]) -> None:
    """Writes the embedders for the usable runtimes, at one length, so that all requests meet in batches."""
    real_models.build_embedders(repository, kind=kind)
    for model in MODELS:
        directory = repository / model
        if model == "embed_plan":
            (directory / "1").mkdir(parents=True)
            (directory / "1" / "model.onnx").write_bytes((repository / "embed_onnx/1/model.onnx").read_bytes())
            text = (repository / "embed_onnx" / "config.pbtxt").read_text().replace("onnxruntime", "tensorrt")
            (directory / "config.pbtxt").write_text(text + 'default_model_filename: "model.onnx"\n')
        config = directory / "config.pbtxt"
        text = config.read_text().replace("dims: [ -1 ]", f"dims: [ {TOKENS} ]")
        config.write_text(text.replace("max_batch_size: 32", f"max_batch_size: {BATCHES[-1]}"))
    for model, runtime in MODELS.items():
        if runtime not in runtimes:
            shutil.rmtree(repository / model)


def _raw(directory: Path, device: Device, seconds: float) -> dict[int, float]:
    """Returns rows per second of the backend alone, by batch size."""
    config = normalise(parse((directory / "config.pbtxt").read_text()), directory.name, gpus=1)
    spec = to_spec(config, LimitSettings())
    backend = factory(spec.backend)()
    backend.load(spec, directory / "1", device)
    rates = {}
    for size in BATCHES:
        batch = Batch(
            requests=[InferRequest(model=spec.name, inputs=()) for _ in range(size)],
            rows=[1] * size,
            inputs={i.name: np.ones((size, TOKENS), np.int64) for i in spec.inputs},
        )
        for _ in range(3):
            backend.execute(batch, Answers())
        count, begin_s = 0, time.perf_counter()
        while (passed_s := time.perf_counter() - begin_s) < seconds:
            backend.execute(batch, Answers())
            count += 1
        rates[size] = count * size / passed_s
    backend.unload()
    return rates


def _served(directory: Path, raw: dict[int, float], seconds: float) -> float:
    """Returns requests, each of one row, per second of the whole server with this model only."""
    best = max(raw, key=lambda size: raw[size])
    ones = json.dumps([[1] * TOKENS])
    with tempfile.TemporaryDirectory() as name:
        only = Path(name) / "models"
        only.mkdir()
        (only / directory.name).symlink_to(directory, target_is_directory=True)
        with running(only, Path(name)) as stack:
            command = [sys.executable, "-m", "qinfer.cli.main", "bench", directory.name, "--json"]
            command += ["--url", f"http://{stack.address}", "-c", str(4 * best)]
            command += [f"-i{tensor}={ones}" for tensor in ("input_ids", "attention_mask")]
            for duration in ("3", str(seconds)):
                done = subprocess.run([*command, "-d", duration], check=False, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"qinfer bench failed: {done.stdout}{done.stderr}")
    report = json.loads(done.stdout)
    return float(report["requests_per_s"])


def _table(rows: list[Row]) -> str:
    lines = [
        f"| model | backend | {' | '.join(f'raw, batch {size}' for size in BATCHES)} | served | share of the best |",
        "|---|---|" + "---:|" * (len(BATCHES) + 2),
    ]
    for row in rows:
        raw = " | ".join(f"**{rate:,.0f}**" if size == row.best else f"{rate:,.0f}" for size, rate in row.raw.items())
        share = row.served / row.raw[row.best]
        lines.append(f"| {row.model} | {row.backend} | {raw} | {row.served:,.0f} | {share:.0%} |")
    return "\n".join(lines) + "\n"


def _version(runtime: str) -> str:
    if runtime == "pytorch":
        import torch

        return f"PyTorch {torch.__version__}"
    module = importlib.import_module(runtime)
    return f"{runtime} {module.__version__}"


def _page(table: str, runtimes: list[str]) -> str:
    missing = sorted(set(MODELS.values()) - set(runtimes))
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    machine = describe()
    facts = {"GPU": gpu} | {name: machine[name] for name in _FACTS} | {"runtimes": ", ".join(map(_version, runtimes))}
    about = "\n".join(f"- {name}: {fact}" for name, fact in facts.items())
    note = f"\nNot measured, because it can't use a GPU here: {', '.join(missing)}.\n" if missing else ""
    return (
        "# Throughput on a GPU\n\nMade by `make bench-gpu`: all-MiniLM-L6-v2, 64 tokens, one instance. Rows per second "
        "of the backend alone\nby batch size (the best is bold), and of the whole server with one row per request.\n\n"
        f"{table}{note}\n{about}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
