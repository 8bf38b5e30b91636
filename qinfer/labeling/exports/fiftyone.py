"""FiftyOne: the `labels.json` of a FiftyOneImageDetectionDataset, or without boxes of a …ClassificationDataset.

Its keys are the images' names without their extensions. FiftyOne sorts by them, whatever the order in the file.
"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from qinfer.errors import InvalidRequest
from qinfer.labeling.exports.formats import Task, boxes_of
from qinfer.labeling.findings import Box, Choice
from qinfer.labeling.mapping import Mapping
from qinfer.labeling.results import rounded
from qinfer.labeling.rules import ChoicesRule

_FILE_NAME = re.compile(r"\S+\.[A-Za-z0-9]{2,5}")


def items(mapping: Mapping, task: Task) -> Iterator[tuple[str, Any]]:
    """Returns the image's name, and its boxes or its class; `None` = no class.

    Raises:
        InvalidRequest: No field of the task is the name of an image.
    """
    attributes = {"model_version": task.prediction.model_version}
    found = task.prediction.findings
    if boxes_of(mapping):
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


def problems(mapping: Mapping) -> Iterator[str]:
    """Yields the results that FiftyOne's dataset files can't have together."""
    choices = [rule for rule in mapping.results if isinstance(rule, ChoicesRule)]
    if not boxes_of(mapping) and not choices:
        yield "fiftyone has boxes or classes: the mapping has neither rectanglelabels nor choices"
    if len(boxes_of(mapping)) + len(choices) > 1:
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
    for field in [*files, *(name for name in task.data if not name.startswith("_"))]:  # _file is the job's input
        value = task.data.get(field)
        if isinstance(value, str) and _FILE_NAME.fullmatch(path := value.partition("?")[0]):
            return PurePosixPath(path).stem
    raise InvalidRequest("no field of the row is the name of an image; name the column with --id")
