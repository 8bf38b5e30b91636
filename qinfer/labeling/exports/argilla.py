"""Argilla 2: records with suggestions, as `rg.Record.from_dict` and `dataset.records.from_json` read them.

Controls are questions: choices a label question (several: a multi-label question), texts a text question.
"""

from collections.abc import Iterator
from typing import Any

from qinfer.labeling.exports.formats import Task, boxes_of
from qinfer.labeling.findings import Choice, Text
from qinfer.labeling.mapping import Mapping
from qinfer.labeling.results import rounded


def items(mapping: Mapping, task: Task) -> Iterator[dict[str, Any]]:
    """Returns the record: what the model saw, and texts if that is none, are its fields, the rest is metadata."""
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


def problems(mapping: Mapping) -> Iterator[str]:
    """Yields the results that have no question in Argilla."""
    for rule in boxes_of(mapping):
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
