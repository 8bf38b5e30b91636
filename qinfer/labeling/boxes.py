"""Rectangles in a model's outputs."""

from collections.abc import Callable

import numpy as np

from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.labeling.findings import Box
from qinfer.labeling.rules import BoxFormat, ImageSize, RectanglesRule
from qinfer.labeling.scores import Numbers, activated, allowed_name, check_scores, class_number
from qinfer.labeling.values import Outputs, Task, field_of, numbers, output, texts

Class = tuple[str, int]
"""A box's label as the model calls it, and its number among the rule's labels; -1 = it is not among them."""

_SMALLEST = 1e-6
"""The width and height, as a share of the image's, that a box has at least."""


_PADDING = (-1.0, -np.inf)
"""Besides NaN, the scores of boxes that are none."""


def find_boxes(rule: RectanglesRule, task: Task, outputs: Outputs, allowed: frozenset[str] | None) -> list[Box]:
    """Returns the boxes that are sure enough and within the image, the best first.

    Args:
        rule: What the outputs are.
        task: May hold the image's size.
        outputs: The model's outputs for the task. Boxes without an area or a score, as models pad them, are left out.
        allowed: The labels that there may be; `None` = any.

    Raises:
        OutputMismatch: An output is missing, or has other values than the rule says.
        InvalidRequest: A label is not allowed, or the task lacks the image's size.
    """
    raw = numbers(outputs, rule.boxes)
    if len(raw) % 4:
        raise OutputMismatch(f"output '{rule.boxes}' has {len(raw)} numbers, which are no boxes of 4")
    raw = raw.reshape(-1, 4)
    class_of, scores = _classes_and_scores(rule, outputs, len(raw))
    order = np.arange(len(raw)) if scores is None else np.argsort(-scores, kind="stable")
    if scores is not None:
        check_scores(scores[~(np.isnan(scores) | np.isin(scores, _PADDING))], rule.scores)
        order = order[scores[order] >= rule.threshold]  # NaN is not
    size = _size(rule.size, task, outputs) if rule.size and len(order) else None
    edges = _edges(raw, rule, size)
    order = order[((edges[order, 2:] - edges[order, :2]) > _SMALLEST).all(axis=1)]
    found: list[Box] = []
    for i in order:
        name, number = class_of(i)
        if label := allowed_name(rule, name, allowed):
            x, y, right, bottom = (float(edge) for edge in edges[i])
            score = None if scores is None else min(1.0, float(scores[i]))
            place = (x, y, right - x, bottom - y)
            found.append(Box(rule.from_name, rule.to_name, label, score, *place, size, _category(rule, number)))
        if len(found) == rule.top:
            break
    return found


def _classes_and_scores(
    rule: RectanglesRule, outputs: Outputs, count: int
) -> tuple[Callable[[int], Class], Numbers | None]:
    """Returns what says a box's class, and the boxes' scores."""
    scores = numbers(outputs, rule.scores) if rule.scores else None
    if scores is not None and not rule.label and len(rule.labels) > 1:
        _check_count(rule.scores, len(scores), count * len(rule.labels), count)
        grid = activated(scores.reshape(count, len(rule.labels)), rule.activation)
        best = grid.argmax(axis=1)
        return lambda i: (rule.labels[best[i]], int(best[i])), grid[np.arange(count), best]
    if scores is not None:
        _check_count(rule.scores, len(scores), count, count)
        scores = activated(scores, rule.activation)
    if not rule.label:
        return lambda i: (rule.labels[0], 0), scores
    _check_count(rule.label, output(outputs, rule.label).size, count, count)
    if output(outputs, rule.label).dtype.kind in "OSU":
        names = texts(outputs, rule.label)
        return lambda i: (names[i], rule.labels.index(names[i]) if names[i] in rule.labels else -1), scores
    values = numbers(outputs, rule.label)
    return lambda i: (rule.labels[number := class_number(rule, values[i])], number), scores


def _check_count(name: str, found: int, expected: int, boxes: int) -> None:
    if found != expected:
        raise OutputMismatch(f"output '{name}' has {found} elements for {boxes} boxes; it should have {expected}")


def _category(rule: RectanglesRule, number: int) -> int:
    if number < 0:
        return 0
    return rule.category_ids[number] if rule.category_ids else number + 1


def _edges(boxes: Numbers, rule: RectanglesRule, size: tuple[float, float] | None) -> Numbers:
    """Returns left, upper, right and lower edges in 0 … 1 of the image, cut at its edges; 0 where one is no number."""
    if rule.units == "pixel":
        whole = rule.resized_to or size or (1.0, 1.0)  # without both there are no boxes
    else:
        whole = (1.0, 1.0) if rule.units == "fraction" else (100.0, 100.0)
    with np.errstate(all="ignore"):
        edges: Numbers = _corners(boxes, rule.format) / np.array([*whole, *whole], np.float64)
    edges[~np.isfinite(edges).all(axis=1)] = 0.0
    return np.clip(edges, 0.0, 1.0)


def _corners(boxes: Numbers, kind: BoxFormat) -> Numbers:
    one, two, three, four = boxes.T
    if kind == "xywh":
        edges = (one, two, one + three, two + four)
    elif kind == "cxcywh":
        edges = (one - three / 2, two - four / 2, one + three / 2, two + four / 2)
    else:
        edges = (one, two, three, four) if kind == "xyxy" else (two, one, four, three)
    return np.stack(edges, axis=1)


def _size(size: ImageSize, task: Task, outputs: Outputs) -> tuple[float, float]:
    if size.output:
        pair = numbers(outputs, size.output)
        if len(pair) != 2 or not (np.isfinite(pair).all() and (pair > 0).all()):
            raise OutputMismatch(f"output '{size.output}' is {pair[:4].tolist()}; it should be an image's two sizes")
        first, second = (float(value) for value in pair)
        return (second, first) if size.order == "hw" else (first, second)
    if not size.width_field:
        return float(size.width), float(size.height)
    return _length(task, size.width_field), _length(task, size.height_field)


def _length(task: Task, field: str) -> float:
    value = field_of(task, field)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9:
        return float(value)
    raise InvalidRequest(f"the task's field '{field}' is {str(value)[:60]!r}; it should be an image's size in pixels")
