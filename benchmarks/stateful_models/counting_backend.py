"""Does in the worker's own process what `counter.py` does in a process of the Python backend."""

from pathlib import Path

import numpy as np

from qinfer.backends import Batch, Context, Device, ModelSpec, respond_rows
from qinfer.tensors import from_numpy


class CountingBackend:
    short_on_loop = False

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        del version_dir, device
        self._responses = int(spec.parameters["responses"])

    def execute(self, batch: Batch, ctx: Context) -> None:
        items = range(len(batch.requests))
        if not ctx.is_decoupled:  # a warm-up
            respond_rows(batch, ctx, {"y": np.zeros((batch.size, 1), np.float32)}, {"y": "FP32"})
            return
        for number in range(self._responses):
            y = (from_numpy("y", np.full((1, 1), number, np.float32)),)
            for item in items:
                ctx.respond(item, y, final=False)
        for item in items:
            ctx.respond(item, ())

    def unload(self) -> None:
        """Has nothing to free."""
