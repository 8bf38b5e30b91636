"""An app for tests of served functions."""

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, TypedDict

import msgspec
import numpy as np
from PIL import Image

import qinfer


@qinfer.model(output="embedding", max_delay_ms=2)
class Embed:
    """Lengths and the numbers of batches, as a class with state of its own."""

    def setup(self, device: qinfer.Device) -> None:
        self.device = device

    def predict(self, text: list[str]) -> Annotated[np.ndarray, "FP32", 2]:
        return np.array([[len(each), each.count("a")] for each in text], np.float32)


class Review(msgspec.Struct):
    title: str
    stars: int = 3


class Rated(TypedDict):
    label: str
    score: float


@qinfer.model
def rate(review: Review) -> Rated:
    if review.title == "bad":
        raise ValueError("no bad titles")
    return {"label": review.title.upper(), "score": review.stars / 2}


@qinfer.model
def write(prompt: str, most: int = 2) -> Iterator[str]:
    for number in range(most):
        yield f"{prompt} {number}"


@qinfer.model
async def write_later(prompt: str) -> AsyncIterator[str]:
    yield prompt
    raise RuntimeError("the pen broke")


@qinfer.model
async def upper(text: str) -> str:
    return text.upper()


@qinfer.model
def total(number: int, state: qinfer.State) -> int:
    state["sum"] = state.get("sum", 0) + number
    found: int = state["sum"]
    return found


CALLS: list[int] = []


@qinfer.model
def calls(number: int, state: qinfer.State) -> int:
    """Counts the calls of its process."""
    CALLS.append(number)
    return len(CALLS)


@qinfer.model(max_batch_size=2)
def size(image: Image.Image, thumbnail: bool = False) -> bytes:  # noqa: FBT001, FBT002  an input
    return f"{image.width}x{image.height} {thumbnail}".encode()


@qinfer.model
def longest(texts: str) -> str:
    """Asks another model for the lengths of the words."""
    words = texts.split()
    lengths = qinfer.call("embed", text=[[word] for word in words])["embedding"][:, 0]
    return words[int(lengths.argmax())]
