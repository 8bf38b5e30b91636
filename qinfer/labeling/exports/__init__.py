"""Files of pre-annotations: one module for each tool, which says what a task looks like there. Pure.

`FORMATS` has them all; `formats` says what a format is.
"""

from qinfer.labeling.exports import argilla, coco, fiftyone, label_studio, prodigy
from qinfer.labeling.exports.formats import Format, Layout, Task

FORMATS: dict[str, Format] = {
    "label-studio": Format("label-studio", label_studio.items, label_studio.problems, "lines"),
    "argilla": Format("argilla", argilla.items, argilla.problems, "lines"),
    "prodigy": Format("prodigy", prodigy.items, prodigy.problems, "lines"),
    "coco": Format("coco", coco.items, coco.problems, "array"),
    "fiftyone": Format("fiftyone", fiftyone.items, fiftyone.problems, "labels"),
}
"""Name, as `qinfer label --format` takes it → the format."""

__all__ = ["FORMATS", "Format", "Layout", "Task"]
