"""Boxes of a model's outputs, for a picture of "Try it". Pure.

An output has boxes if its rows have 4 numbers, or 6: four, a score and a class. `[1, N, 4]` is the same as `[N, 4]`.
The output has a name with `box`, or `dets` or `detections`; or it has three dimensions, and 6 numbers a row or scores
beside it. Outputs beside it with an element for each box are scores or classes by their names; scores may have a column
for each class. The output of one number whose name begins with `num` counts the boxes that are meant.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qinfer.labeling.rules import BoxFormat
from qinfer.tensors import Tensor, iter_bytes, to_numpy

MOST_BOXES = 300
COLOURS = 6
_BOXES = re.compile("box|dets$|^detections$")
_SCORES = re.compile("score|conf|prob")
_CLASSES = re.compile("label|class|categor")
_GREATEST_FRACTION = 1.5

Array = npt.NDArray[Any]
Labels = Mapping[str, Sequence[str]]
"""Output → the names of its classes."""


class DrawnBox(NamedTuple):
    """A box as the model wrote its four numbers; `colour` is the number of its label's."""

    place: tuple[float, ...]
    score: float | None
    label: str
    colour: int


class Boxes(NamedTuple):
    """The best of `total` boxes, best first; numbers are fractions of the image's sides, or pixels of the input."""

    boxes: Sequence[DrawnBox]
    total: int
    form: BoxFormat
    are_fractions: bool


def detected_boxes(outputs: Sequence[Tensor], labels: Labels) -> Boxes | None:
    """Returns the boxes of the first output that has some; `None` = no output has boxes."""
    arrays = {tensor.name: _elements(tensor) for tensor in outputs}
    for name, array in arrays.items():
        if array.dtype.kind not in "iuf" or array.ndim < 2 or math.prod(array.shape[:-2]) != 1:
            continue
        rows = array.reshape(array.shape[-2:]).astype(np.float64)
        beside = {other: values for other, values in arrays.items() if other != name}
        width = array.shape[-1]
        has_shape = array.ndim > 2 and (width == 6 or _of_rows(beside, _SCORES, len(rows)) is not None)
        if width in (4, 6) and (has_shape or _BOXES.search(name.lower())):
            return _boxes(name, rows, beside, labels)
    return None


def _elements(tensor: Tensor) -> Array:
    if tensor.datatype == "BYTES":
        return np.array([bytes(one).decode(errors="replace") for one in iter_bytes(tensor.data)], dtype=object)
    return to_numpy(tensor)


def _of_rows(arrays: Mapping[str, Array], names: re.Pattern[str], count: int) -> tuple[str, Array] | None:
    """Returns the output of such a name whose elements are divided among the boxes."""
    for name, array in arrays.items():
        if names.search(name.lower()) and count and array.size and array.size % count == 0:
            return name, array.reshape(count, -1)
    return None


def _boxes(name: str, rows: Array, beside: Mapping[str, Array], labels: Labels) -> Boxes:
    count, names = len(rows), labels.get(name, ())
    scores, classes = rows[:, 4:].T if rows.shape[1] == 6 else np.full((2, count), np.nan)
    if (found := _of_rows(beside, _SCORES, count)) is not None and found[1].dtype.kind in "iuf":
        scores = found[1].astype(np.float64).max(axis=1)
        if found[1].shape[1] > 1:
            classes, names = found[1].argmax(axis=1), labels.get(found[0]) or names
    if (found := _of_rows(beside, _CLASSES, count)) is not None and found[1].shape[1] == 1:
        classes, names = found[1][:, 0], labels.get(found[0]) or names
    is_meant = np.isfinite(rows[:, :4]).all(axis=1) & (np.arange(count) < _meant(beside, count))
    kept = np.flatnonzero(is_meant)
    best = kept[np.argsort(-np.nan_to_num(scores[kept]), kind="stable")][:MOST_BOXES]
    texts = [_label(classes[at], names) for at in best]
    colours = {text: number % COLOURS for number, text in enumerate(dict.fromkeys(texts))}
    boxes = [
        DrawnBox(tuple(rows[at, :4].tolist()), _known(scores[at]), text, colours[text])
        for at, text in zip(best, texts, strict=True)
    ]
    edges = rows[best, :4]
    are_fractions = bool(not edges.size or np.abs(edges).max() <= _GREATEST_FRACTION)
    return Boxes(boxes, len(kept), _form(name, edges), are_fractions)


def _meant(beside: Mapping[str, Array], count: int) -> float:
    for name, array in beside.items():
        if name.lower().startswith("num") and array.size == 1 and array.dtype.kind in "iuf":
            return float(np.nan_to_num(array.reshape(-1)[0]))
    return count


def _form(name: str, edges: Array) -> BoxFormat:
    """Returns the likely meaning of four numbers; those of TensorFlow's detection API begin with y."""
    if name == "detection_boxes":
        return "yxyx"
    return "cxcywh" if (edges[:, 2:] < edges[:, :2]).any() else "xyxy"


def _known(score: Any) -> float | None:
    return float(score) if math.isfinite(score) else None


def _label(value: Any, names: Sequence[str]) -> str:
    if isinstance(value, str):
        return value[:80]
    if not math.isfinite(value):
        return ""
    return names[int(value)] if 0 <= value < len(names) else f"{value:g}"
