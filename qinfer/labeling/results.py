"""Turns a model's outputs into predictions of labeling tools by the rules of a mapping, and reads fields of tasks."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.labeling.rules import (
    Activation,
    BoxFormat,
    ChoicesRule,
    ImageSize,
    LabelConfig,
    RectanglesRule,
    Rule,
    TextRule,
    allowed_labels,
)
from qinfer.tensors import Tensor, to_numpy

Task = Mapping[str, Any]
"""`id`, and `data` with its fields; other members that Label Studio sends are ignored."""

Array = npt.NDArray[Any]
Outputs = Mapping[str, Array]
"""BYTES are objects of `bytes` or `str`."""


class Choice(msgspec.Struct, frozen=True):
    """The labels of a task for one control, best first; `scores` may be empty."""

    from_name: str
    to_name: str
    labels: tuple[str, ...]
    scores: tuple[float, ...]
    is_single: bool


class Box(msgspec.Struct, frozen=True):
    """A rectangle on an image, in 0 … 1 of its width and height.

    `size` is the size of the image in pixels. `category` is the label's id in COCO files; 0 = no id.
    """

    from_name: str
    to_name: str
    label: str
    score: float | None
    x: float
    y: float
    width: float
    height: float
    size: tuple[float, float] | None
    category: int


class Text(msgspec.Struct, frozen=True):
    """Texts that a model wrote, none empty."""

    from_name: str
    to_name: str
    texts: tuple[str, ...]
    score: float | None


Finding = Choice | Box | Text


Numbers = npt.NDArray[np.float64]

_TOLERANCE = 1e-3


def probabilities(values: Numbers, name: str, activation: Activation) -> Numbers:
    """Returns an output's values as scores 0 … 1."""
    scores = activated(values, activation)
    check_scores(scores, name)
    return np.clip(scores, 0.0, 1.0)


def activated(values: Numbers, activation: Activation) -> Numbers:
    """Applies an activation; softmax along the last dimension."""
    if activation == "none":
        return values
    with np.errstate(all="ignore"):  # NaN stays NaN, and is refused later
        if activation == "sigmoid":
            return np.asarray(0.5 * (1.0 + np.tanh(0.5 * values)), np.float64)
        if values.size:
            powers = np.exp(values - values.max(axis=-1, keepdims=True))
            return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float64)
    return values


def check_scores(scores: Numbers, name: str) -> None:
    """Checks that scores are 0 … 1."""
    wrong = scores[~((scores >= -_TOLERANCE) & (scores <= 1 + _TOLERANCE))]
    if wrong.size:
        raise OutputMismatch(
            f"output '{name}' has the score {wrong[0]:g}; scores are 0 … 1: set activation: softmax or sigmoid"
        )


def allowed_name(rule: ChoicesRule | RectanglesRule, name: str, allowed: frozenset[str] | None) -> str:
    """Returns the label config's name of a label; empty if the rule drops it.

    `allowed` is `None` if all labels are.
    """
    name = rule.rename.get(name, name)
    if not name or allowed is None or name in allowed:
        return name
    if rule.unknown == "drop":
        return ""
    raise InvalidRequest(
        f"the model says '{name[:60]}', which control '{rule.from_name}' of the label config does not have: "
        "add it there, rename it in the mapping, or set unknown: drop"
    )


def class_number(rule: ChoicesRule | RectanglesRule, value: float) -> int:
    """Returns the class of a number that the model gives."""
    if 0 <= value < len(rule.labels) and value == int(value):
        return int(value)
    if not rule.labels:
        raise OutputMismatch(f"output '{rule.label}' has the number {value:g}, but '{rule.from_name}' has no labels")
    raise OutputMismatch(f"output '{rule.label}' has {value:g}; it should be 0 … {len(rule.labels) - 1}")


def find_choices(
    rule: ChoicesRule, outputs: Outputs, allowed: frozenset[str] | None
) -> tuple[Sequence[Finding], Sequence[float]]:
    """Returns choice and confidence; below the threshold, no choice."""
    names, scores = _scored(rule, outputs)
    named: dict[str, int] = {}  # two classes may have one name
    for i, name in enumerate(names):
        if scores and scores[i] < rule.threshold:
            break
        if label := allowed_name(rule, name, allowed):
            named.setdefault(label, i)
    if not named:
        return [], scores[:1]
    chosen = tuple(scores[i] for i in named.values()) if scores else ()
    found = Choice(rule.from_name, rule.to_name, tuple(named), chosen, rule.top == 1)
    return [found], [sum(chosen) / len(chosen)] if chosen else []


def _scored(rule: ChoicesRule, outputs: Outputs) -> tuple[list[str], list[float]]:
    """Returns at most `top` candidates, best first, and their scores, if any."""
    names = rule.labels if rule.scores else _names(rule, outputs)
    scored = rule.scores or rule.score
    if not scored:
        return [name for name in names if name][: rule.top], []
    scores = probabilities(numbers(outputs, scored), scored, rule.activation)
    if len(scores) != len(names):
        wanted = f"{len(names)} labels" if rule.scores else f"the {len(names)} of '{rule.label}'"
        raise OutputMismatch(f"output '{scored}' has {len(scores)} scores for {wanted}")
    order = np.argsort(-scores, kind="stable")[: rule.top]
    return [names[i] for i in order], scores[order].tolist()


def find_text(rule: TextRule, outputs: Outputs) -> tuple[Sequence[Finding], Sequence[float]]:
    """Returns the texts and their confidence."""
    written = tuple(text for text in texts(outputs, rule.text) if text)
    score: float | None = None
    if rule.score:
        values = probabilities(numbers(outputs, rule.score), rule.score, "none")
        if len(values) != 1:
            raise OutputMismatch(f"output '{rule.score}' has {len(values)} elements; it should be one score")
        score = float(values[0])
    found = [Text(rule.from_name, rule.to_name, written, score)] if written else []
    return found, [] if score is None else [score]


def _names(rule: ChoicesRule, outputs: Outputs) -> list[str]:
    if output(outputs, rule.label).dtype.kind in "OSU":
        return texts(outputs, rule.label)
    return [rule.labels[class_number(rule, value)] for value in numbers(outputs, rule.label)]


Class = tuple[str, int]
"""The name that the model gives a label, and the label's place in the rule; -1 = the rule has no such label."""

_SMALLEST = 1e-6
"""A share of the image's width and height."""


_PADDING = (-1.0, -np.inf)
"""Scores of padding, besides NaN."""


def find_boxes(rule: RectanglesRule, task: Task, outputs: Outputs, allowed: frozenset[str] | None) -> list[Box]:
    """Returns the boxes above the threshold and within the image, best first.

    Boxes without an area or a score are padding.
    """
    raw = numbers(outputs, rule.boxes)
    if len(raw) % 4:
        raise OutputMismatch(f"output '{rule.boxes}' has {len(raw)} numbers, not a multiple of 4")
    raw = raw.reshape(-1, 4)
    class_of, scores = _classes_and_scores(rule, outputs, len(raw))
    order = np.arange(len(raw)) if scores is None else np.argsort(-scores, kind="stable")
    if scores is not None:
        check_scores(scores[~(np.isnan(scores) | np.isin(scores, _PADDING))], rule.scores)
        order = order[scores[order] >= rule.threshold]  # false for NaN
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
    """Returns left, upper, right and lower edges within the image, in 0 … 1; all are 0 for a box with a NaN."""
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


Scoring = Literal["mean", "min", "max"]
"""The task's confidence from its results'."""

_DIGITS = 6
_ID_CHARACTERS = 10


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A model's prediction for one task.

    Attributes:
        result: Items in Label Studio's format; empty = the model found nothing.
        score: The confidence, 0 … 1; 0 = unknown.
    """

    result: list[dict[str, Any]]
    score: float
    model_version: str
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns an item of Label Studio's `predictions` and of an ML backend's `results`."""
        return {"result": self.result, "score": self.score, "model_version": self.model_version}


def make_prediction(
    rules: Sequence[Rule],
    scoring: Scoring,
    task: Task,
    outputs: Outputs,
    version: str,
    label_config: LabelConfig | None,
) -> Prediction:
    """Makes a task's prediction; see `Mapping.prediction`."""
    findings: list[Finding] = []
    scores: list[float] = []
    for rule in rules:
        found, sure = _find(rule, task, outputs, allowed_labels(rule, label_config))
        findings += found
        scores += sure
    origin = f"{task.get('id', '')}\0{version}"
    items = [_item(finding, _item_id(origin, finding.from_name, i)) for i, finding in enumerate(findings)]
    return Prediction(result=items, score=_overall(scores, scoring), model_version=version, findings=tuple(findings))


def _find(
    rule: Rule, task: Task, outputs: Outputs, allowed: frozenset[str] | None
) -> tuple[Sequence[Finding], Sequence[float]]:
    if isinstance(rule, ChoicesRule):
        return find_choices(rule, outputs, allowed)
    if isinstance(rule, RectanglesRule):
        boxes = find_boxes(rule, task, outputs, allowed)
        return boxes, [box.score for box in boxes if box.score is not None]
    return find_text(rule, outputs)


def _overall(scores: Sequence[float], scoring: Scoring) -> float:
    if not scores:
        return 0.0
    if scoring == "mean":
        return rounded(sum(scores) / len(scores))
    return rounded(min(scores) if scoring == "min" else max(scores))


def _item(finding: Finding, item_id: str) -> dict[str, Any]:
    item: dict[str, Any] = {"id": item_id, "from_name": finding.from_name, "to_name": finding.to_name}
    if isinstance(finding, Choice):
        value: dict[str, Any] = {"choices": list(finding.labels)}
        score = sum(finding.scores) / len(finding.scores) if finding.scores else None
        item |= {"type": "choices", "value": value}
    elif isinstance(finding, Box):
        score = finding.score
        x, y, width, height = (rounded(100 * part) for part in (finding.x, finding.y, finding.width, finding.height))
        value = {"x": x, "y": y, "width": width, "height": height, "rotation": 0}
        item |= {"type": "rectanglelabels", "value": {**value, "rectanglelabels": [finding.label]}, "image_rotation": 0}
        if finding.size:
            item |= {"original_width": round(finding.size[0]), "original_height": round(finding.size[1])}
    else:
        score = finding.score
        item |= {"type": "textarea", "value": {"text": list(finding.texts)}}
    if score is not None:
        item["score"] = rounded(score)
    return item


def _item_id(origin: str, from_name: str, number: int) -> str:
    """Returns the same id for the same result of a task, so that repeated predictions are equal."""
    return hashlib.sha256(f"{origin}\0{from_name}\0{number}".encode()).hexdigest()[:_ID_CHARACTERS]


def rounded(value: float) -> float:
    """Rounds a number to a float32's precision, for files."""
    return round(value, _DIGITS)


def outputs_of(tensors: Iterable[Tensor]) -> dict[str, Array]:
    """Returns the outputs of a response as arrays."""
    return {tensor.name: to_numpy(tensor) for tensor in tensors}


def field_of(task: Task, field: str) -> Any:
    """Returns a field of a task; dots lead into objects, unless a field has the whole name."""
    data = task.get("data")
    if not isinstance(data, Mapping):
        raise InvalidRequest("the task has no object 'data'")
    value: Any = data
    parts = [field] if field in data else field.split(".")
    for number, part in enumerate(parts, 1):
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(str(name)[:60] for name in list(data)[:20]) or "none"
            raise InvalidRequest(f"the task's data has no field '{field}'; it has {known}")
        value = value[part]
        if value is None:
            raise InvalidRequest(f"field '{'.'.join(parts[:number])}' of the task's data is null")
    return value


def numbers(outputs: Outputs, name: str) -> npt.NDArray[np.float64]:
    """Returns an output's numbers in one dimension."""
    array = output(outputs, name)
    if array.dtype.kind not in "biuf":
        raise OutputMismatch(f"output '{name}' has {_kind(array)}, not numbers")
    return array.astype(np.float64).reshape(-1)


def texts(outputs: Outputs, name: str) -> list[str]:
    """Returns an output's texts in one dimension; invalid UTF-8 is replaced."""
    array = output(outputs, name)
    if array.dtype.kind not in "OSU":
        raise OutputMismatch(f"output '{name}' has {_kind(array)}, not text")
    return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in array.ravel()]


def output(outputs: Outputs, name: str) -> Array:
    """Returns an output."""
    try:
        return outputs[name]
    except KeyError:
        raise OutputMismatch(f"there is no output '{name}'; there are {', '.join(outputs) or 'none'}") from None


def _kind(array: Array) -> str:
    return "text" if array.dtype.kind in "OSU" else f"values of {array.dtype}"
