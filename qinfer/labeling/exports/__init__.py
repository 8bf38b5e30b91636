"""Files of pre-annotations: a module for each tool, which makes its items of a task and its prediction. Pure.

`FORMATS` has them all; `formats` defines a format. Label Studio's items are a prediction as it is: tasks with
`predictions`, for import (labelstud.io/guide/predictions). A project's file import takes a JSON array, its cloud
storages JSON lines too.
"""

from collections.abc import Iterator
from typing import Any

from qinfer.labeling.exports import argilla, coco, fiftyone, prodigy
from qinfer.labeling.exports.formats import Format, Layout, Task
from qinfer.labeling.mapping import Mapping


def _label_studio_items(mapping: Mapping, task: Task) -> Iterator[dict[str, Any]]:
    yield {"data": task.data, "predictions": [task.prediction.as_json()]}


FORMATS: dict[str, Format] = {
    "label-studio": Format("label-studio", _label_studio_items, lambda mapping: iter(()), "lines"),
    "argilla": Format("argilla", argilla.items, argilla.problems, "lines"),
    "prodigy": Format("prodigy", prodigy.items, prodigy.problems, "lines"),
    "coco": Format("coco", coco.items, coco.problems, "array"),
    "fiftyone": Format("fiftyone", fiftyone.items, fiftyone.problems, "labels"),
}
"""Name, as `qinfer label --format` takes it → the format."""

__all__ = ["FORMATS", "Format", "Layout", "Task"]
