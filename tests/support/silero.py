"""silero-vad as its package runs it, and calls to listen to: examples/sequences is compared with it."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from silero_vad.utils_vad import OnnxWrapper

from examples.sequences.build_model import Rate, packaged_model

Floats = npt.NDArray[np.float32]


def calls(rate: Rate, count: int, frames: int) -> Floats:
    """Makes float32[count, frames, rate.frame]: calls of noise, and tones that come and go like syllables."""
    random = np.random.default_rng(rate.hertz)
    time_s = np.arange(frames * rate.frame) / rate.hertz
    pitch = random.uniform(80, 300, (count, 1))
    tones = sum(np.sin(2 * np.pi * pitch * k * time_s + k) / k for k in range(1, 12))
    syllables = np.clip(np.sin(2 * np.pi * random.uniform(2, 6, (count, 1)) * time_s), 0, None)
    noise = random.standard_normal((count, time_s.size)) * random.uniform(0, 0.1, (count, 1))
    return (0.2 * tones * syllables + noise).astype(np.float32).reshape(count, frames, rate.frame)


def probabilities(rate: Rate, calls: Floats) -> Floats:
    """Returns float32[count, frames]: what the package's own wrapper says of each frame, one call after the other."""
    wrapper: Any = OnnxWrapper(str(packaged_model()), force_onnx_cpu=True)
    found = np.zeros(calls.shape[:2], np.float32)
    for row, call in enumerate(calls):
        wrapper.reset_states()
        found[row] = [wrapper(torch.from_numpy(frame), rate.hertz).item() for frame in call]
    return found
