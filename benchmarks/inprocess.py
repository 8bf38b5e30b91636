"""The upper bound: `InferenceSession.run` in a loop, in a process of its own, with the servers' thread options.

`python -m benchmarks.inprocess MODEL FILE BATCH SECONDS` prints items and seconds.
"""

import subprocess
import sys
import time
from pathlib import Path

import onnxruntime

from benchmarks.environments import ROOT
from benchmarks.load import LoadResult
from benchmarks.models import MODELS, THREADS, BenchModel, FloatArray


def session(model_file: Path) -> onnxruntime.InferenceSession:
    """Loads a model with the thread options of the comparison."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.inter_op_num_threads = THREADS
    return onnxruntime.InferenceSession(str(model_file), options, providers=["CPUExecutionProvider"])


def expected_answer(model: BenchModel, model_file: Path) -> FloatArray:
    """Returns the in-process answer to the example request, float32[1, *output_dims]."""
    answer: FloatArray = session(model_file).run(None, {"x": model.example()})[0]
    return answer


def measure(model: BenchModel, model_file: Path, batch: int, seconds: float) -> LoadResult:
    """Counts items at a batch size, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.inprocess", model.name, str(model_file), str(batch), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=seconds + 60)
    items, duration_s = done.stdout.split()
    return LoadResult(requests=int(items), duration_s=float(duration_s))


def main(arguments: list[str]) -> None:
    name, file, batch, seconds = arguments
    loaded, feed = session(Path(file)), {"x": MODELS[name].example(int(batch))}
    for _ in range(10):
        loaded.run(None, feed)
    runs, started_at = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_at) < float(seconds):
        loaded.run(None, feed)
        runs += 1
    print(runs * int(batch), elapsed_s)


if __name__ == "__main__":
    main(sys.argv[1:])
