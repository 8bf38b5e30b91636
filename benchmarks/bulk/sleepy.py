"""A backend whose models sleep for each row and note what they execute: slow models that leave the cores to others."""

import os
import time
from pathlib import Path

from qinfer.backends.base import Batch, Context, respond_rows
from qinfer.models.spec import Device, ModelSpec

CONFIG = """
name: "{name}" backend: "sleepy" max_batch_size: 64
input {{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }}
parameters {{ key: "row_s" value {{ string_value: "{row_s}" }} }}
parameters {{ key: "trace" value {{ string_value: "{trace}" }} }}
"""


class SleepyBackend:
    """See the module docstring; a line of the file `trace` has process, time and rows of a batch that begins."""

    short_on_loop = False

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        del version_dir, device
        self._row_s, self._trace = float(spec.parameters["row_s"]), Path(spec.parameters["trace"])

    def execute(self, batch: Batch, ctx: Context) -> None:
        rows = sum(batch.rows)
        with self._trace.open("a") as trace:
            trace.write(f"{os.getpid()} {time.time()} {rows}\n")
        time.sleep(self._row_s * rows)
        respond_rows(batch, ctx, {"y": batch.inputs["x"]}, {"y": "FP32"})

    def unload(self) -> None:
        return


def install(directory: Path) -> None:
    """Installs the backend as a third party would, by an entry point, for programs that are started from now on."""
    distribution = directory / "sleepy-1.0.dist-info"
    distribution.mkdir(parents=True, exist_ok=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: sleepy\nVersion: 1.0\n")
    (distribution / "entry_points.txt").write_text("[qinfer.backends]\nsleepy = benchmarks.bulk.sleepy:SleepyBackend\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(directory), str(Path(__file__).resolve().parents[2])])


def write_model(repository: Path, name: str, row_s: float, trace: Path) -> None:
    """Writes a model that sleeps so long for a row."""
    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(name=name, row_s=row_s, trace=trace))
