"""Label Studio: tasks with predictions, for import (labelstud.io/guide/predictions).

A project's file import takes a JSON array, its cloud storages JSON lines too.
"""

from collections.abc import Iterator
from typing import Any

from qinfer.labeling.exports.formats import Task
from qinfer.labeling.mapping import Mapping


def items(mapping: Mapping, task: Task) -> Iterator[dict[str, Any]]:
    """Returns the task with its prediction."""
    yield {"data": task.data, "predictions": [task.prediction.as_json()]}


def problems(mapping: Mapping) -> Iterator[str]:
    """Says nothing: every result is one of Label Studio's."""
    return iter(())
