"""COCO: detection results, one object for each box (cocodataset.org/#format-results).

`image_id` is the task's key; `bbox` is x, y, width and height in pixels. `model_version` is more than COCO asks for;
FiftyOne keeps it as an attribute, and pycocotools leaves it alone.
"""

from collections.abc import Iterator
from typing import Any

from qinfer.errors import InvalidRequest
from qinfer.labeling.exports.formats import Task, boxes_of, missing_sizes
from qinfer.labeling.findings import Box
from qinfer.labeling.mapping import Mapping


def items(mapping: Mapping, task: Task) -> Iterator[dict[str, Any]]:
    """Returns the task's boxes.

    Raises:
        InvalidRequest: A box's label is none of the mapping's labels, so that it has no category id.
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
            "bbox": pixels(finding),
            "score": 1.0 if finding.score is None else round(finding.score, 6),
            "model_version": task.prediction.model_version,
        }


def problems(mapping: Mapping) -> Iterator[str]:
    """Yields what a mapping lacks for COCO."""
    if not boxes_of(mapping):
        yield "coco has boxes only: the mapping has no result of type rectanglelabels"
    for rule in boxes_of(mapping):
        if not rule.labels:
            yield f"coco numbers its labels: '{rule.from_name}' needs labels"
        if len(boxes_of(mapping)) > 1 and not rule.category_ids:
            yield f"coco numbers the labels of all boxes together: '{rule.from_name}' needs category_ids"
    yield from missing_sizes(mapping, "coco")


def pixels(box: Box) -> list[float]:
    """Returns x, y, width and height of a box in pixels of its image."""
    assert box.size is not None
    width, height = box.size
    return [round(part, 2) for part in (box.x * width, box.y * height, box.width * width, box.height * height)]
