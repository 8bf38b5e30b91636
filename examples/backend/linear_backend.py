"""A backend of qinfer, as an example: `y = x @ weights + bias`, with both read from `model.npz`.

`pip install ./examples/backend` makes it known to workers as `backend: "linear"`.
"""

from pathlib import Path

import numpy as np

from qinfer.backends import Batch, Context, Device, ModelSpec, respond_rows
from qinfer.errors import ModelLoadFailed

FILE = "model.npz"


class LinearBackend:
    """One linear model; the worker makes an object of this class for each instance."""

    short_on_loop = True  # a matrix product waits for nothing

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        """Reads the weights, and compares them with the configuration.

        Raises:
            ModelLoadFailed: The file is missing or wrong, or the configuration asks for what this backend can't do.
        """
        if device.kind != "cpu":
            raise ModelLoadFailed(f"model '{spec.name}': backend 'linear' runs on the CPU; set KIND_CPU")
        if len(spec.inputs) != 1 or len(spec.outputs) != 1 or not spec.max_batch_size:
            raise ModelLoadFailed(f"model '{spec.name}': backend 'linear' has one input, one output, and batches")
        try:
            with np.load(version_dir / FILE, allow_pickle=False) as arrays:
                self._weights, self._bias = arrays["weights"], arrays["bias"]
        except (OSError, KeyError, ValueError) as error:
            raise ModelLoadFailed(f"model '{spec.name}': {FILE} can't be read: {type(error).__name__}") from error
        self._input, self._output = spec.inputs[0], spec.outputs[0]
        shape = (*self._input.dims, *self._output.dims)
        if self._weights.shape != shape or self._bias.shape != self._output.dims:
            raise ModelLoadFailed(
                f"model '{spec.name}': the weights are {self._weights.shape}, its configuration says {shape}"
            )

    def execute(self, batch: Batch, ctx: Context) -> None:
        """Multiplies the whole batch at once; `respond_rows` gives each item its rows."""
        y = batch.inputs[self._input.name] @ self._weights + self._bias
        respond_rows(batch, ctx, {self._output.name: y.astype("<f4")}, {self._output.name: "FP32"})

    def unload(self) -> None:
        """Frees the weights."""
        del self._weights, self._bias
