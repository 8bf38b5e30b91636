"""Throughput of frameworks' models through the whole server, as a share of the framework's own loop at its best batch.

    python -m benchmarks.frameworks                            all that are installed; prints a table
    python -m benchmarks.frameworks --only litert,forest --turns 5 --seconds 3

The loop executes batches of 1 … 64 rows over and over, in a process with the framework alone. The server runs as
`qinfer up`, under requests of one row, four times the best batch of them in flight. Both have one thread for the model,
stay alive for the whole run, and take turns; a share is the median of the shares of the rounds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qinfer.backends.isolated import PACKAGES
from qinfer.backends.python_host.messages import LoadFramework
from qinfer.cli.load import Load, LoadConnection, LoadReport, LoadTarget, run_load
from qinfer.models.config.config import FILES_OF
from qinfer.tensors import Tensor
from qinfer.wire.kserve_client import encode_request
from tests.e2e.conftest import Stack, running

BATCHES = (1, 4, 16, 64)
WIDTHS = (1024, 4096, 4096, 64)
"""The widths of the dense layers: with 42 MFLOP a row, the model takes most of the time."""

FEATURES, TREES, DEPTH = 64, 1000, 10
NEEDS = {"litert": ("tensorflow",), "forest": ("sklearn",)}
"""Further packages that build the model."""

_IN_FLIGHT = 4

Array = npt.NDArray[np.float32]
Loop = Callable[[int, float], float]
"""Takes a batch and seconds; returns rows per second."""


class Turns(NamedTuple):
    """The turns of a framework; rates are rows per second."""

    framework: str
    by_batch: Mapping[int, float]
    raw: Sequence[float]
    served: Sequence[float]

    @property
    def share(self) -> float:
        return statistics.median(served / raw for served, raw in zip(self.served, self.raw, strict=True))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default=",".join(PACKAGES), help="frameworks, with commas between them")
    options.add_argument("--turns", type=int, default=7)
    options.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    given = options.parse_args()
    names = [name for name in given.only.split(",") if is_there(name)]
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    found = [measured(name, given.turns, given.seconds) for name in names]
    print(table(found))
    return 0


def is_there(framework: str) -> bool:
    missing = [name for name in (*PACKAGES[framework], *NEEDS.get(framework, ())) if find_spec(name) is None]
    if missing:
        print(f"{framework} is left out, because {', '.join(missing)} is not installed: scripts/setup frameworks")
    return not missing


def measured(framework: str, turns: int, seconds: float) -> Turns:
    """Measures a framework in turns."""
    with tempfile.TemporaryDirectory() as directory:
        repository = Path(directory) / "models"
        command = [sys.executable, "-m", "benchmarks.frameworks", "build", framework, str(repository)]
        subprocess.run(command, check=True)
        with running(repository, Path(directory)) as stack, raw_loop(framework, repository) as loop:
            return _in_turns(framework, stack, loop, turns, seconds)


def _in_turns(framework: str, stack: Stack, loop: Loop, turns: int, seconds: float) -> Turns:
    name, width = ports_of(framework)
    row = np.random.default_rng(7).random((1, width), np.float32)
    body, json_length = encode_request([Tensor(name, "FP32", row.shape, row.tobytes())], binary=True)
    path = f"/v2/models/{framework}/infer"
    target = LoadTarget.for_url(f"http://{stack.address}", path, body, json_length)
    by_batch = {batch: loop(batch, seconds / 2) for batch in BATCHES}
    best = max(by_batch, key=lambda batch: by_batch[batch])

    def serve(duration_s: float) -> float:
        load = Load(partial(LoadConnection, lambda: target.request))
        report = run_load(target, LoadReport(concurrency=_IN_FLIGHT * best), duration_s, load)
        if report.errors:
            raise SystemExit(f"{framework}: {report.errors} requests failed: {report.first_error}")
        return report.requests_per_s

    serve(seconds)
    raw: list[float] = []
    served: list[float] = []
    for turn in range(turns):
        order = (raw.append, loop, (best, seconds)), (served.append, serve, (seconds,))
        for keep, measure, arguments in order if turn % 2 else order[::-1]:
            keep(measure(*arguments))
    print(f"{framework}: {statistics.median(served):,.0f} of {statistics.median(raw):,.0f} rows per second", flush=True)
    return Turns(framework, by_batch, raw, served)


def table(found: Sequence[Turns]) -> str:
    lines = [
        f"| backend | {' | '.join(f'loop, batch {each}' for each in BATCHES)} | loop, turns | served, turns | share |",
        "|---|" + "---:|" * (len(BATCHES) + 3),
    ]
    for one in found:
        rates = [*one.by_batch.values(), statistics.median(one.raw), statistics.median(one.served)]
        shares = [served / raw for served, raw in zip(one.served, one.raw, strict=True)]
        lines.append(
            f"| {one.framework} | {' | '.join(f'{rate:,.0f}' for rate in rates)} "
            f"| {one.share:.2f} ({min(shares):.2f} … {max(shares):.2f}) |"
        )
    return "\n".join(lines)


@contextmanager
def raw_loop(framework: str, repository: Path) -> Iterator[Loop]:
    """Starts the process of the loop."""
    command = [sys.executable, "-m", "benchmarks.frameworks", "loop", framework, str(repository)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, told = process.stdin, process.stdout

        def loop(batch: int, seconds: float) -> float:
            print(batch, seconds, file=asked, flush=True)
            return float(told.readline())

        yield loop
        asked.close()


def run_loop(framework: str, repository: Path) -> None:
    """Executes batches as standard input asks, in the framework's process."""
    path = repository / framework / "1" / FILES_OF[framework][0]
    found = [one for one in (path, *(path.parent / name for name in FILES_OF[framework])) if one.exists()]
    asked = LoadFramework(framework, framework, str(found[0]), {}, 1, max_batch_size=BATCHES[-1])
    model = import_module(f"qinfer.backends.frameworks.{framework}").load(asked)
    outputs = [port.name for port in model.outputs]
    name, width = ports_of(framework)
    for line in sys.stdin:
        batch, seconds = line.split()
        inputs = {name: np.random.default_rng(7).random((int(batch), width), np.float32)}
        for _ in range(3):
            model.execute(inputs, outputs)
        count, begin_s = 0, time.perf_counter()
        while (passed_s := time.perf_counter() - begin_s) < float(seconds):
            model.execute(inputs, outputs)
            count += 1
        print(count * int(batch) / passed_s, flush=True)


def ports_of(framework: str) -> tuple[str, int]:
    """Returns the name of the input, and its width."""
    return ("input__0", FEATURES) if framework == "forest" else ("x", WIDTHS[0])


CONFIG = """
backend: "{framework}" max_batch_size: 64 dynamic_batching {{ }}
input {{ name: "{name}" data_type: TYPE_FP32 dims: [ {width} ] }}
output {{ name: "{output}" data_type: TYPE_FP32 dims: [ {outputs} ] }}
parameters {{ key: "{threads}" value {{ string_value: "1" }} }}
"""
THREADS = {"tensorflow": "TF_NUM_INTRA_THREADS"}


def build(framework: str, repository: Path) -> None:
    """Writes a framework's model."""
    version = repository / framework / "1"
    version.mkdir(parents=True)
    name, width = ports_of(framework)
    output, outputs = ("output__0", 2) if framework == "forest" else ("y", WIDTHS[-1])
    fields = {"framework": framework, "name": name, "width": width, "output": output, "outputs": outputs}
    text = CONFIG.format(**fields, threads=THREADS.get(framework, "num_threads"))
    if framework == "forest":
        text += 'parameters { key: "predict_proba" value { string_value: "true" } }\n'
    (version.parent / "config.pbtxt").write_text(text)
    globals()[f"_{framework}"](version)


def _weights() -> list[Array]:
    rng = np.random.default_rng(3)
    return [rng.normal(0, (2 / a) ** 0.5, (a, b)).astype(np.float32) for a, b in pairwise(WIDTHS)]


def _saved(directory: Path) -> Any:
    import tensorflow as tf

    module = tf.Module()
    module.weights = [tf.Variable(each) for each in _weights()]

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTHS[0]], tf.float32, name="x")])  # type: ignore[untyped-decorator,unused-ignore]
    def serve(x: Any) -> Any:
        for each in module.weights[:-1]:
            x = tf.nn.relu(x @ each)
        return {"y": x @ module.weights[-1]}

    module.serve = serve
    tf.saved_model.save(module, str(directory), signatures={"serving_default": serve})
    return tf


def _tensorflow(version: Path) -> None:
    _saved(version / "model.savedmodel")


def _litert(version: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tf = _saved(Path(directory))
        content = tf.lite.TFLiteConverter.from_saved_model(directory).convert()
    (version / "model.tflite").write_bytes(content)


def _forest(version: Path) -> None:
    import treelite
    from sklearn.ensemble import RandomForestClassifier

    rng = np.random.default_rng(3)
    rows = rng.random((4000, FEATURES), np.float32)
    model = RandomForestClassifier(TREES, max_depth=DEPTH, random_state=3, n_jobs=-1)
    model.fit(rows, rows[:, 0] + rows[:, 1] > rng.random(4000) + 0.5)
    treelite.sklearn.import_model(model).serialize(str(version / "checkpoint.tl"))


def _jax(version: Path) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    from jax import export

    weights = _weights()

    def serve(arrays: Any) -> Any:
        x = arrays["x"]
        for each in weights[:-1]:
            x = jax.nn.relu(x @ each)
        return {"y": x @ weights[-1]}

    (rows,) = export.symbolic_shape("rows")
    shape = {"x": jax.ShapeDtypeStruct((rows, WIDTHS[0]), jnp.float32)}
    (version / "model.jax").write_bytes(export.export(jax.jit(serve))(shape).serialize())


_CODE = """
import mlflow
import numpy as np


class Dense(mlflow.pyfunc.PythonModel):
    def load_context(self, context):
        with np.load(context.artifacts["weights"]) as found:
            self.weights = [found[name] for name in found.files]

    def predict(self, context, model_input, params=None):
        x = model_input["x"]
        for each in self.weights[:-1]:
            x = np.maximum(x @ each, 0)
        return x @ self.weights[-1]


mlflow.models.set_model(Dense())
"""


def _mlflow(version: Path) -> None:
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    version.rmdir()
    inputs = Schema([TensorSpec(np.dtype(np.float32), (-1, WIDTHS[0]), "x")])
    outputs = Schema([TensorSpec(np.dtype(np.float32), (-1, WIDTHS[-1]), "y")])
    with ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        (directory / "dense.py").write_text(_CODE)
        np.savez(directory / "weights.npz", *_weights())
        mlflow.pyfunc.save_model(
            str(version),
            python_model=str(directory / "dense.py"),
            artifacts={"weights": str(directory / "weights.npz")},
            signature=ModelSignature(inputs=inputs, outputs=outputs),
            pip_requirements=[],
        )


if __name__ == "__main__":
    steps = {"build": build, "loop": run_loop}
    if sys.argv[1:2] and sys.argv[1] in steps:
        steps[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
