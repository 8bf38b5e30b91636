"""Tensors for people: text, class scores, images and numbers, each cut to what fits on a page. Pure."""

import math
import re
import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qinfer.errors import QinferError
from qinfer.tensors import Tensor, element_count, iter_bytes, to_numpy

MOST_ELEMENTS = 256
MOST_TEXTS, MOST_TEXT_CHARACTERS = 50, 2000
MOST_CLASSES = 8
_LEAST_SIDE, _MOST_SIDE = 8, 2048
_CHANNELS = (1, 3)
_IMAGES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}
_RANKED = re.compile(r"(-?\d{1,30}\.\d{1,30}(?:e[+-]?\d{1,3})?):(\d{1,9})(?::(.{0,200}))?")
"""An element of Triton's classification: value, index, and perhaps label."""
_MOST_IMAGE_BYTES = 2 * 2**20

Array = npt.NDArray[Any]


class ClassScore(NamedTuple):
    """A class and its score; `part` is its share of the greatest score's bar."""

    label: str
    score: float
    part: int


class ShownTensor(NamedTuple):
    """A tensor on a page; `image` is a `data:` URL, `numbers` the first elements as text."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int
    texts: Sequence[str] = ()
    classes: Sequence[ClassScore] = ()
    image: str = ""
    numbers: str = ""
    left_out: int = 0
    problem: str = ""


def view_of(tensor: Tensor, labels: Sequence[str] = ()) -> ShownTensor:
    """Returns a tensor as a page shows it; damaged ones have a `problem`."""
    view = ShownTensor(tensor.name, tensor.datatype, tensor.shape, tensor.nbytes)
    try:
        if tensor.datatype == "BYTES":
            return _of_texts(view, tensor)
        array = to_numpy(tensor)
    except QinferError as error:
        return view._replace(problem=error.message)
    flat = array.reshape(-1)
    left_out = max(flat.size - MOST_ELEMENTS, 0)
    numbers = ", ".join(_written(value) for value in flat[:MOST_ELEMENTS].tolist())
    return view._replace(
        numbers=numbers, left_out=left_out, image=image_of(array), classes=_classes(array, labels) if labels else ()
    )


def _of_texts(view: ShownTensor, tensor: Tensor) -> ShownTensor:
    elements = [bytes(element) for element in iter_bytes(tensor.data)]
    if element_count(tensor.shape) == 1 and elements and (kind := _kind_of(elements[0])):
        return view._replace(image=_data_url(kind, elements[0]), numbers=f"{len(elements[0])} bytes of {kind}")
    shown = [element.decode(errors="replace") for element in elements[:MOST_TEXTS]]
    ranked = [found for text in shown if (found := _RANKED.fullmatch(text)) is not None]
    are_classes = bool(ranked) and len(ranked) == len(shown)
    classes = _best_classes([(found[3] or found[2], float(found[1])) for found in ranked]) if are_classes else ()
    texts = [text if len(text) <= MOST_TEXT_CHARACTERS else f"{text[:MOST_TEXT_CHARACTERS]}…" for text in shown]
    return view._replace(texts=texts, classes=classes, left_out=max(len(elements) - MOST_TEXTS, 0))


def _kind_of(content: bytes) -> str:
    if len(content) > _MOST_IMAGE_BYTES:
        return ""
    return next((kind for begin, kind in _IMAGES.items() if content.startswith(begin)), "")


def _written(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _classes(array: Array, labels: Sequence[str]) -> list[ClassScore]:
    scores = array.reshape(-1, array.shape[-1])[0].astype(float) if array.ndim else array.reshape(1).astype(float)
    if not len(scores) or len(scores) > len(labels) or not np.isfinite(scores).all():
        return []
    return _best_classes(list(zip(labels, map(float, scores), strict=False)))


def _best_classes(pairs: Sequence[tuple[str, float]]) -> list[ClassScore]:
    best = sorted(pairs, key=lambda pair: -pair[1])[:MOST_CLASSES]
    low, high = min(0.0, *(score for _, score in pairs)), best[0][1]
    span = (high - low) or 1.0
    return [ClassScore(label, score, round(20 * max(score - low, 0.0) / span)) for label, score in best]


def image_of(array: Array) -> str:
    """Returns an array of the shape of one image, in rows or channels first, as a PNG; else an empty text."""
    shape = [size for size in array.shape if size != 1]
    if array.dtype.kind not in "uif" or not 2 <= len(shape) <= 3:
        return ""
    pixels = array.reshape(shape)
    if pixels.ndim == 3:
        if shape[0] == 3 and shape[2] != 3:
            pixels = np.moveaxis(pixels, 0, 2)
        if pixels.shape[2] not in _CHANNELS:
            return ""
    if not all(_LEAST_SIDE <= side <= _MOST_SIDE for side in pixels.shape[:2]):
        return ""
    return _data_url("image/png", png(_in_bytes(pixels)))


def _in_bytes(pixels: Array) -> npt.NDArray[np.uint8]:
    if pixels.dtype == np.uint8:
        return pixels
    values = np.nan_to_num(pixels.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif low >= 0 and high <= 255 and high > 1:
        low, high = 0.0, 255.0
    scaled: npt.NDArray[np.uint8] = ((values - low) * (255.0 / ((high - low) or 1.0))).astype(np.uint8)
    return scaled


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encodes `uint8[height, width]` or `uint8[height, width, 3]` (PNG, W3C, §11)."""
    height, width = pixels.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    colour = 2 if pixels.ndim == 3 else 0
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"
