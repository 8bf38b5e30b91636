"""A backend without a runtime, for tests and trials.

The parameter `mode` is `echo` (each output is the input at the same position), `add` (every output is the sum of the
inputs), `raise` (fails with the parameter `message`) or `call:<model>` (the outputs of that model). `delay_s` is the
least duration of an execution.
"""

import threading
import time
from pathlib import Path

from qinfer.backends.base import Array, Batch, Context, respond_rows
from qinfer.core.messages import InferRequest
from qinfer.errors import ModelLoadFailed
from qinfer.models.spec import Device, ModelSpec
from qinfer.tensors import from_numpy, to_numpy

MODES = ("echo", "add", "raise")
CALL = "call:"


class StubBackend:
    """Runs no model; executions wait until `gate` is set."""

    short_on_loop = False

    def __init__(self, gate: threading.Event | None = None) -> None:
        self._gate = gate
        self.started = threading.Semaphore(0)
        """Released once by each execution that begins."""
        self.sizes: list[int] = []
        """The rows of each execution that began."""
        self.model = ""
        """The name of the loaded model."""
        self.loaded = False

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Reads the mode; there is no file."""
        del version_dir, device
        self.model = spec.name
        self._mode = spec.parameters.get("mode", "echo")
        self._message = spec.parameters.get("message", "the stub was told to raise")
        self._target = self._mode.removeprefix(CALL) if self._mode.startswith(CALL) else ""
        if self._mode not in MODES and not self._target:
            raise ModelLoadFailed(
                f"parameter 'mode' is '{self._mode}'; the stub backend knows {', '.join(MODES)}, {CALL}<model>"
            )
        self._delay_s = float(spec.parameters.get("delay_s", "0"))
        self._answered = [output.name for output in spec.outputs]
        self._names = [output.name for output in spec.file_outputs]
        self._datatypes = {output.name: output.datatype for output in spec.file_outputs}
        self.loaded = True

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Executes the mode."""
        self.sizes.append(batch.size)
        self.started.release()
        if self._gate is not None:
            self._gate.wait()
        if self._delay_s:
            time.sleep(self._delay_s)
        if self._mode == "raise":
            raise RuntimeError(self._message)
        arrays = list(batch.inputs.values())
        outputs: dict[str, Array] = dict(zip(self._names, arrays, strict=False))
        if self._target:
            inputs = tuple(from_numpy(name, array) for name, array in batch.inputs.items())
            answer = ctx.call(InferRequest(model=self._target, inputs=inputs))
            outputs = dict(zip(self._names, map(to_numpy, answer.outputs), strict=False))
        if self._mode == "add":
            total = sum(arrays[1:], start=arrays[0])
            outputs = dict.fromkeys(self._names, total)
        respond_rows(batch, ctx, outputs, self._datatypes, names=self._answered)

    def unload(self) -> None:
        """Clears `loaded`."""
        self.loaded = False
