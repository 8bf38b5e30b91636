"""Files of pre-annotations for labeling tools (`FORMATS`), as docs/how-to/pre-annotations.md describes them."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

import msgspec

from qinfer.errors import InvalidRequest
from qinfer.labeling.mapping import Mapping
from qinfer.labeling.results import Box, Choice, Prediction, Text, rounded
from qinfer.labeling.rules import ChoicesRule, RectanglesRule, TextRule

Layout = Literal["lines", "array", "labels"]
"""`lines`: JSON lines. `array`: one JSON array. `labels`: `{"labels": {key: item, …}}`."""


class Task(NamedTuple):
    """A task and its prediction, for formats.

    Attributes:
        number: The place of the task among all tasks, from 1.
        key: The value of the task's key column, or else the number.
    """

    number: int
    key: str | int
    data: dict[str, Any]
    prediction: Prediction


class Format(NamedTuple):
    """A format of pre-annotations.

    Attributes:
        items: Makes a task's items: JSON values, or for the layout `labels` pairs of key and value.
        problems: Yields why a mapping's results do not fit it.
    """

    name: str
    items: Callable[[Mapping, Task], Iterable[Any]]
    problems: Callable[[Mapping], Iterator[str]]
    layout: Layout

    def encode(self, mapping: Mapping, task: Task) -> bytes:
        """Returns a task's items as in the file, with separators between them; empty without items.

        Raises:
            InvalidRequest: The format can't represent the task.
        """
        made = self.items(mapping, task)
        if self.layout == "labels":
            return b",\n".join(_encode(str(key)) + b":" + _encode(value) for key, value in made)
        return self.separator.join(map(_encode, made))

    @property
    def separator(self) -> bytes:
        """The bytes between two items."""
        return b"\n" if self.layout == "lines" else b",\n"

    @property
    def frame(self) -> tuple[bytes, bytes]:
        """The bytes before the first item, and after the last."""
        return {"lines": (b"", b"\n"), "array": (b"[\n", b"\n]\n"), "labels": (b'{"labels": {\n', b"\n}}\n")}[
            self.layout
        ]

    def as_array(self) -> "Format":
        """Returns the format as one JSON array instead of lines."""
        return self._replace(layout="array") if self.layout == "lines" else self


def _boxes_of(mapping: Mapping) -> Sequence[RectanglesRule]:
    return [rule for rule in mapping.results if isinstance(rule, RectanglesRule)]


def _missing_sizes(mapping: Mapping, name: str) -> Iterator[str]:
    for rule in _boxes_of(mapping):
        if rule.size is None:
            yield f"{name} has boxes in pixels: '{rule.from_name}' needs size, the image's width and height"


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def _argilla_items(mapping: Mapping, task: Task) -> Iterator[dict[str, Any]]:
    """Yields a record for Argilla 2's `rg.Record.from_dict` and `dataset.records.from_json`.

    Fields are the texts of the model's inputs, or else all texts; all other values are metadata.
    """
    seen = {each.field for each in mapping.inputs.values()}
    texts = {name: value for name, value in task.data.items() if isinstance(value, str)}
    fields = {name: value for name, value in texts.items() if name in seen} or texts
    metadata = {
        name: str(value) if isinstance(value, bool) else value
        for name, value in task.data.items()
        if name not in fields and isinstance(value, str | int | float)
    }
    yield {
        "id": str(task.key),
        "fields": fields,
        "metadata": metadata,
        "suggestions": dict(_suggestions(task)),
        "responses": {},
        "vectors": {},
    }


def _argilla_problems(mapping: Mapping) -> Iterator[str]:
    for rule in _boxes_of(mapping):
        yield f"argilla has no question for boxes on images: leave '{rule.from_name}' out of the mapping"


def _suggestions(task: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    for finding in task.prediction.findings:
        if isinstance(finding, Choice):
            scores = [rounded(score) for score in finding.scores]
            value: object = finding.labels[0] if finding.is_single else list(finding.labels)
            score: object = (scores[0] if finding.is_single else scores) if scores else None
        elif isinstance(finding, Text):
            value = "\n".join(finding.texts)
            score = None if finding.score is None else rounded(finding.score)
        else:
            continue
        yield finding.from_name, {"value": value, "score": score, "agent": task.prediction.model_version}


def _coco_items(mapping: Mapping, task: Task) -> Iterator[dict[str, Any]]:
    """Yields COCO detection results (cocodataset.org/#format-results).

    FiftyOne keeps the extension `model_version` as an attribute, and pycocotools ignores it.
    """
    for finding in task.prediction.findings:
        if not isinstance(finding, Box):
            continue
        if not finding.category:
            raise InvalidRequest(
                f"label '{finding.label[:60]}' has no category id: name it in the labels of '{finding.from_name}'"
            )
        yield {
            "image_id": task.key,
            "category_id": finding.category,
            "bbox": _pixels(finding),
            "score": 1.0 if finding.score is None else round(finding.score, 6),
            "model_version": task.prediction.model_version,
        }


def _coco_problems(mapping: Mapping) -> Iterator[str]:
    if not _boxes_of(mapping):
        yield "coco has boxes only: the mapping has no result of type rectanglelabels"
    for rule in _boxes_of(mapping):
        if not rule.labels:
            yield f"coco numbers its labels: '{rule.from_name}' needs labels"
        if len(_boxes_of(mapping)) > 1 and not rule.category_ids:
            yield f"coco numbers the labels of all boxes together: '{rule.from_name}' needs category_ids"
    yield from _missing_sizes(mapping, "coco")


def _pixels(box: Box) -> list[float]:
    """Returns x, y, width and height."""
    assert box.size is not None
    width, height = box.size
    return [round(part, 2) for part in (box.x * width, box.y * height, box.width * width, box.height * height)]


_FILE_NAME = re.compile(r"\S+\.[A-Za-z0-9]{2,5}")


def _fiftyone_items(mapping: Mapping, task: Task) -> Iterator[tuple[str, Any]]:
    """Yields an image's entry in `labels.json`; the key, by which FiftyOne sorts, is its name without extension."""
    attributes = {"model_version": task.prediction.model_version}
    found = task.prediction.findings
    if _boxes_of(mapping):
        yield (
            _image(mapping, task),
            [
                {
                    "label": box.label,
                    "bounding_box": [rounded(part) for part in (box.x, box.y, box.width, box.height)],
                    **({} if box.score is None else {"confidence": rounded(box.score)}),
                    "attributes": attributes,
                }
                for box in found
                if isinstance(box, Box)
            ],
        )
        return
    choice = next((each for each in found if isinstance(each, Choice)), None)
    yield _image(mapping, task), None if choice is None else _class(choice, attributes)


def _fiftyone_problems(mapping: Mapping) -> Iterator[str]:
    """Yields the reasons why one dataset file of FiftyOne can't combine all results."""
    choices = [rule for rule in mapping.results if isinstance(rule, ChoicesRule)]
    if not _boxes_of(mapping) and not choices:
        yield "fiftyone has boxes or classes: the mapping has neither rectanglelabels nor choices"
    if len(_boxes_of(mapping)) + len(choices) > 1:
        yield "fiftyone has one kind of label in a file: leave one of the mapping's results"
    if wrong := next((rule for rule in choices if rule.top > 1), None):
        yield f"fiftyone has one class for an image: set top: 1 for '{wrong.from_name}'"


def _class(choice: Choice, attributes: dict[str, str]) -> dict[str, Any]:
    confidence = {"confidence": rounded(choice.scores[0])} if choice.scores else {}
    return {"label": choice.labels[0], **confidence, "attributes": attributes}


def _image(mapping: Mapping, task: Task) -> str:
    if isinstance(task.key, str):
        return task.key
    files = [each.field for each in mapping.inputs.values() if each.kind == "file"]
    for field in [*files, *(name for name in task.data if not name.startswith("_"))]:  # `_file` is the job's input
        value = task.data.get(field)
        if isinstance(value, str) and _FILE_NAME.fullmatch(path := value.partition("?")[0]):
            return PurePosixPath(path).stem
    raise InvalidRequest("no field of the row is the name of an image; name the column with --id")


_SHOWN_AS = {"text": "text", "file": "image"}


def _prodigy_items(mapping: Mapping, task: Task) -> Iterator[dict[str, Any]]:
    """Yields a task for Prodigy's interfaces choice, image_manual and text_input (prodi.gy/docs/api-interfaces)."""
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


def _prodigy_problems(mapping: Mapping) -> Iterator[str]:
    """Yields a problem where the mapping has several results of a kind, of which Prodigy takes one."""
    for name, kind in (("choice", ChoicesRule), ("text", TextRule)):
        if sum(isinstance(rule, kind) for rule in mapping.results) > 1:
            yield f"prodigy has one {name} in a task: leave one in the mapping"
    yield from _missing_sizes(mapping, "prodigy")


def _span(box: Box) -> dict[str, Any]:
    x, y, width, height = _pixels(box)
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


def _label_studio_items(mapping: Mapping, task: Task) -> Iterator[dict[str, Any]]:
    yield {"data": task.data, "predictions": [task.prediction.as_json()]}


FORMATS: dict[str, Format] = {
    "label-studio": Format("label-studio", _label_studio_items, lambda mapping: iter(()), "lines"),
    "argilla": Format("argilla", _argilla_items, _argilla_problems, "lines"),
    "prodigy": Format("prodigy", _prodigy_items, _prodigy_problems, "lines"),
    "coco": Format("coco", _coco_items, _coco_problems, "array"),
    "fiftyone": Format("fiftyone", _fiftyone_items, _fiftyone_problems, "labels"),
}
"""Format by the name that `qinfer label --format` takes."""

__all__ = ["FORMATS", "Format", "Layout", "Task"]
