"""A backend that fails for certain values, and its installation for worker processes.

It echoes. A first element of `CRASH` ends the process, `HOLD_GIL` keeps the interpreter for the model's `hold_s`
seconds, `SLOW` waits as long and lets others run, or until there is a file beside `trace` whose name ends with `.go`.
"""

import ctypes
import os
import signal
import time
from pathlib import Path

from qinfer.backends.base import Batch, Context, respond_rows
from qinfer.models.spec import Device, ModelSpec

ROOT = Path(__file__).resolve().parents[2]
CRASH, HOLD_GIL, SLOW = 666.0, 777.0, 888.0

CONFIG = """
name: "{name}" backend: "faulty" max_batch_size: {max_batch_size}
input {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 1 ] }}
dynamic_batching {{ max_queue_delay_microseconds: {delay_us} {more} }}
instance_group {{ count: 1 kind: KIND_CPU }}
{beside}
parameters {{ key: "hold_s" value {{ string_value: "{hold_s}" }} }}
parameters {{ key: "trace" value {{ string_value: "{trace}" }} }}
"""


class FaultyBackend:
    """See the module docstring; it appends the values of each batch to the file `trace`, a line each, at its start."""

    short_on_loop = False

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        del version_dir, device
        self._hold_s = float(spec.parameters["hold_s"])
        self._trace = Path(spec.parameters["trace"])

    def execute(self, batch: Batch, ctx: Context) -> None:
        x = batch.inputs["x"]
        values = {float(value) for value in x[:, 0]}
        with self._trace.open("a") as file:
            file.write(" ".join(str(float(value)) for value in x[:, 0]) + "\n")
        if CRASH in values:
            os.kill(os.getpid(), signal.SIGSEGV)
        if HOLD_GIL in values:
            ctypes.PyDLL(None).usleep(int(self._hold_s * 1e6))  # a PyDLL's functions run with the GIL held
        if SLOW in values:
            until_s = time.monotonic() + self._hold_s
            while time.monotonic() < until_s and not self._trace.with_suffix(".go").exists():
                time.sleep(0.02)
        y = x + batch.inputs["before"] if "before" in batch.inputs else x  # the state of a model with sequences
        respond_rows(batch, ctx, {"y": y} | dict.fromkeys(batch.states, y), dict.fromkeys(["y", *batch.states], "FP32"))

    def unload(self) -> None:
        return


def write_model(repository: Path, name: str = "faulty", **options: object) -> Path:
    """Writes a model of this backend; returns the file in which it notes what it executes."""
    trace = repository.parent / f"{name}.trace"
    fields = {"max_batch_size": 64, "delay_us": 0, "more": "", "beside": "", "hold_s": 1.0, **options}
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(name=name, trace=trace, **fields))
    trace.touch()
    return trace


def install(directory: Path) -> str:
    """Installs the backend as a third party would, by an entry point; returns the PYTHONPATH that finds it."""
    distribution = directory / "faulty-1.0.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text(
        "[qinfer.backends]\nfaulty = tests.support.faulty_backend:FaultyBackend\n"
    )
    return os.pathsep.join([str(directory), str(ROOT)])


def executed(trace: Path) -> list[list[float]]:
    """Returns the values of each batch that began."""
    return [[float(word) for word in line.split()] for line in trace.read_text().splitlines()]
