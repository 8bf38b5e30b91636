"""qinfer's Python client: ask, submit, and stream, with the model of `examples/digits.py`.

make demo KEEP=1
python examples/client.py http://127.0.0.1:8000
"""

import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

import qinfer
from qinfer import InferResult

MODEL = "digits"


def images(count: int) -> Iterator[npt.NDArray[np.float32]]:
    """Makes images of noise, float32[1, 64] with pixels from 0 to 16."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        yield generator.uniform(0, 16, (1, 64)).astype(np.float32)


def main(url: str) -> None:
    """Asks the gateway at `url` in all three ways."""
    with qinfer.Client(url) as client:
        (image,) = images(1)
        result = client.infer(MODEL, {"image": image})
        print(f"{result.model} version {result.version} sees {result['label'].item()}")

        handle = client.submit(MODEL, {"image": image}, timeout_s=60)
        print(f"request {handle.id} is {client.status(handle).state}")
        print(f"its result: {client.result(handle)['label'].item()}")

        failures = 0
        counts = np.zeros(10, dtype=int)
        for _, outcome in client.stream(MODEL, ({"image": image} for image in images(1000)), concurrency=32):
            if isinstance(outcome, InferResult):
                counts[outcome["label"].item()] += 1
            else:
                failures += 1
        print(f"1000 images of noise: {counts.tolist()} of each digit, {failures} failed")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
