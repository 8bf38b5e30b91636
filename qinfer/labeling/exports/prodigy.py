"""Prodigy: tasks as JSON lines (prodi.gy/docs/api-interfaces), for the interfaces choice, image_manual and text_input.

Choices are `options` with the model's as `accept`, boxes are `spans` in pixels, a text is the value of `field_id`.
"""

from collections.abc import Iterator
from typing import Any

from qinfer.labeling.exports.coco import pixels
from qinfer.labeling.exports.formats import Task, missing_sizes
from qinfer.labeling.findings import Box, Choice
from qinfer.labeling.mapping import Mapping
from qinfer.labeling.results import rounded
from qinfer.labeling.rules import ChoicesRule, RectanglesRule, TextRule

_SHOWN_AS = {"text": "text", "file": "image"}
"""Kind of input → the field that Prodigy shows."""


def items(mapping: Mapping, task: Task) -> Iterator[dict[str, Any]]:
    """Returns the task: its own fields, and what the interfaces that fit the results read."""
    prediction = task.prediction
    made: dict[str, Any] = dict(task.data)
    for each in mapping.inputs.values():
        if each.field in made and each.kind in _SHOWN_AS:
            made.setdefault(_SHOWN_AS[each.kind], made[each.field])
    made["meta"] = {"score": prediction.score, "model": prediction.model_version, "id": task.key}
    boxes: list[dict[str, Any]] = []
    for finding in prediction.findings:
        if isinstance(finding, Choice):
            made["accept"] = list(finding.labels)
        elif isinstance(finding, Box):
            assert finding.size is not None
            made |= {"width": round(finding.size[0]), "height": round(finding.size[1])}
            boxes.append(_span(finding))
        else:
            made[finding.from_name] = "\n".join(finding.texts)
    for rule in mapping.results:
        if isinstance(rule, ChoicesRule):
            labels = dict.fromkeys([*(rule.rename.get(label, label) for label in rule.labels), *made.get("accept", ())])
            made["options"] = [{"id": label, "text": label} for label in labels if label]
            made.setdefault("accept", [])
        elif isinstance(rule, RectanglesRule):
            made["spans"] = boxes
        else:
            made["field_id"] = rule.from_name
    yield made


def problems(mapping: Mapping) -> Iterator[str]:
    """Yields the results of which Prodigy's interfaces have one only, and those that lack sizes."""
    for name, kind in (("choice", ChoicesRule), ("text", TextRule)):
        if sum(isinstance(rule, kind) for rule in mapping.results) > 1:
            yield f"prodigy has one {name} in a task: leave one in the mapping"
    yield from missing_sizes(mapping, "prodigy")


def _span(box: Box) -> dict[str, Any]:
    x, y, width, height = pixels(box)
    right, bottom = round(x + width, 2), round(y + height, 2)
    span: dict[str, Any] = {
        "label": box.label,
        "x": x,
        "y": y,
        "width": width,
        "height": height,
        "points": [[x, y], [x, bottom], [right, bottom], [right, y]],
        "type": "rect",
    }
    return span if box.score is None else {**span, "score": rounded(box.score)}
