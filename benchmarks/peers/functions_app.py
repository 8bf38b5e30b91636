"""The embedding as a function of qinfer: `qinfer up benchmarks/peers/functions_app.py`."""

from typing import Annotated

import numpy as np
from embedding import MAX_BATCH_SIZE, WIDTH, Embedder

import qinfer


@qinfer.model(output="embedding", max_batch_size=MAX_BATCH_SIZE)
class Embed:
    def setup(self) -> None:
        self._embedder = Embedder()

    def predict(self, text: list[str]) -> Annotated[np.ndarray, "FP32", WIDTH]:
        return self._embedder.embed(text)
