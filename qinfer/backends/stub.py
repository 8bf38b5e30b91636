"""A backend without a runtime, for tests and trials: echoes, adds or raises, and stops where a test tells it to.

The model's parameter `mode` chooses: `echo` (each output is the input at the same position), `add` (every output is the
sum of the inputs), `raise` (fails with the parameter `message`).
"""

import threading
from pathlib import Path

from qinfer.backends.base import Array, Batch, Context, respond_rows
from qinfer.errors import ModelLoadFailed
from qinfer.repository.spec import ModelSpec

MODES = ("echo", "add", "raise")


class StubBackend:
    """See the module docstring.

    Args:
        gate: Executions wait until it is set; `None` = they don't wait.
    """

    short_on_loop = False

    def __init__(self, gate: threading.Event | None = None) -> None:
        self._gate = gate
        self.started = threading.Semaphore(0)
        """Released once by each execution that begins."""
        self.sizes: list[int] = []
        """Rows of each execution that began."""
        self.loaded = False

    def load(self, spec: ModelSpec, version_dir: Path) -> None:
        """Reads the mode; there is no file.

        Raises:
            ModelLoadFailed: There is no such mode.
        """
        del version_dir
        self._mode = spec.parameters.get("mode", "echo")
        self._message = spec.parameters.get("message", "the stub was told to raise")
        if self._mode not in MODES:
            raise ModelLoadFailed(f"parameter 'mode' is '{self._mode}'; the stub backend knows {', '.join(MODES)}")
        self._names = [output.name for output in spec.outputs]
        self._datatypes = {output.name: output.datatype for output in spec.outputs}
        self.loaded = True

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Does what the mode says."""
        self.sizes.append(batch.size)
        self.started.release()
        if self._gate is not None:
            self._gate.wait()
        if self._mode == "raise":
            raise RuntimeError(self._message)
        arrays = list(batch.inputs.values())
        outputs: dict[str, Array] = dict(zip(self._names, arrays, strict=False))
        if self._mode == "add":
            total = sum(arrays[1:], start=arrays[0])
            outputs = dict.fromkeys(self._names, total)
        respond_rows(batch, ctx, outputs, self._datatypes)

    def unload(self) -> None:
        """Forgets that it was loaded."""
        self.loaded = False
