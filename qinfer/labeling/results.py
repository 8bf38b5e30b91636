"""What rules find → the predictions that Label Studio shows: result items, a score, the model's version."""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from qinfer.labeling.boxes import find_boxes
from qinfer.labeling.choices import find_choices, find_text
from qinfer.labeling.findings import Box, Choice, Finding
from qinfer.labeling.label_config import LabelConfig
from qinfer.labeling.rules import ChoicesRule, RectanglesRule, Rule, allowed_labels
from qinfer.labeling.values import Outputs, Task

Scoring = Literal["mean", "min", "max"]
"""How a task's confidence is made of those of its results."""

_DIGITS = 6
_ID_CHARACTERS = 10


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A model's prediction for one task.

    `{"result": …, "score": …, "model_version": …}` is what Label Studio takes: `as_json` returns it.

    Attributes:
        result: The result items, as Label Studio has them; empty = the model found nothing.
        score: The confidence, 0 … 1; 0 when there is none.
        model_version: The model that made it, `<model>:<version>`.
        findings: The same, for writers of other formats.
    """

    result: list[dict[str, Any]]
    score: float
    model_version: str
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns what Label Studio's `predictions` and an ML backend's `results` hold."""
        return {"result": self.result, "score": self.score, "model_version": self.model_version}


def make_prediction(
    rules: Sequence[Rule],
    scoring: Scoring,
    task: Task,
    outputs: Outputs,
    version: str,
    label_config: LabelConfig | None,
) -> Prediction:
    """Makes a task's prediction; see `Mapping.prediction`.

    Args:
        rules: What is made of the outputs.
        scoring: How the confidence is made of those of the results.
        task: The task.
        outputs: The model's outputs for it.
        version: What the prediction says of its model.
        label_config: What the results have to fit; `None` = that is not checked.

    Raises:
        OutputMismatch: An output is missing, or its values can't be what the rules say.
        InvalidRequest: The results do not fit the label config, or the task lacks the image's size.
    """
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
    """Returns a finding as Label Studio has it."""
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
    """Returns the same id for the same result of the same task, so that a repeated prediction is the same."""
    return hashlib.sha256(f"{origin}\0{from_name}\0{number}".encode()).hexdigest()[:_ID_CHARACTERS]


def rounded(value: float) -> float:
    """Returns a number as files have it: what a float32 knows of it."""
    return round(value, _DIGITS)
