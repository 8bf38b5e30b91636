"""Fields of `optimization` on a GPU: answers stay those of the plain configuration, nearly so with mixed precision."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qinfer.backends.base import Array
from qinfer.models.spec import Accelerator
from tests.gpu.conftest import require
from tests.support.backends import GPU, run, save_torchscript, spec, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

X = np.random.default_rng(3).standard_normal((64, 512)).astype(np.float32)  # large enough for pinned memory
PORTS = tensors(("x", "FP32", (512,))), tensors(("y", "FP32", (8,)))


def answer(version_dir: Path, **changes: Any) -> Array:
    from qinfer.backends.torch import TorchBackend

    backend = TorchBackend()
    backend.load(spec("pytorch", *PORTS, max_batch_size=64, **changes), version_dir, GPU)
    try:
        return run(backend, {"x": X}, rows=(64,)).arrays()["y"]
    finally:
        backend.unload()


def test_torch(tmp_path: Path) -> None:
    require("pytorch")
    import torch

    torch.manual_seed(5)
    save_torchscript(torch.nn.Linear(512, 8).eval(), tmp_path / "model.pt", (torch.ones(3, 512),))
    exact = answer(tmp_path)

    plain = answer(tmp_path, urgent=True, pins_inputs=False, pins_outputs=False)
    rough = answer(tmp_path, gpu_accelerators=(Accelerator("auto_mixed_precision", {}),))

    np.testing.assert_array_equal(plain, exact)
    np.testing.assert_allclose(rough, exact, atol=0.02)
    assert not np.array_equal(rough, exact)
