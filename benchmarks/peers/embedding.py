"""The functions from texts to vectors that `benchmarks.functions` compares; they import nothing of qinfer.

`BENCH_EMBEDDER` names one of them. `counts` costs almost nothing, so that the figures show the server. `encoder` has
the size of all-MiniLM-L6-v2 (22 million weights, random, with a fixed seed); words become numbers by their CRC-32.
`BENCH_SITE` is the folder of packages that has PyTorch, if this environment has none.
"""

import os
import sys
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]

NAME = os.environ.get("BENCH_EMBEDDER", "counts")
WIDTH = {"counts": 8, "encoder": 384}[NAME]
MAX_BATCH_SIZE = 32
_LETTERS = "etaoinsh"
_WORDS, _LAYERS, _HEADS, _MOST_WORDS = 30522, 6, 12, 256


class Embedder:
    """A function from texts to vectors: `float32[texts, WIDTH]`, on one thread."""

    def __init__(self) -> None:
        self.embed = counts if NAME == "counts" else _encoder()


def counts(texts: Sequence[str]) -> Vectors:
    """Counts letters."""
    return np.array([[text.count(letter) for letter in _LETTERS] for text in texts], np.float32)


def _encoder():  # type: ignore[no-untyped-def]
    sys.path.append(os.environ.get("BENCH_SITE", ""))
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = torch.nn.Embedding(_WORDS, WIDTH)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, _HEADS, 4 * WIDTH, batch_first=True, activation="gelu")
    layers = torch.nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False).eval()

    def embed(texts: Sequence[str]) -> Vectors:
        rows = [[zlib.crc32(word.encode()) % _WORDS for word in text.split()[:_MOST_WORDS]] or [0] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        is_padding = torch.tensor([[False] * len(row) + [True] * (longest - len(row)) for row in rows])
        with torch.inference_mode():
            hidden = layers(table(ids), src_key_padding_mask=is_padding).masked_fill(is_padding[..., None], 0)
            vectors: Vectors = (hidden.sum(1) / (~is_padding).sum(1, keepdim=True)).numpy()
        return vectors

    return embed
