"""Choices and texts in a model's outputs."""

from collections.abc import Sequence

import numpy as np

from qinfer.errors import OutputMismatch
from qinfer.labeling.findings import Choice, Finding, Text
from qinfer.labeling.rules import ChoicesRule, TextRule
from qinfer.labeling.scores import allowed_name, class_number, probabilities
from qinfer.labeling.values import Outputs, numbers, output, texts


def find_choices(
    rule: ChoicesRule, outputs: Outputs, allowed: frozenset[str] | None
) -> tuple[Sequence[Finding], Sequence[float]]:
    """Returns the choice, and how sure it is; below its threshold there is none, and how sure the model was is known.

    Args:
        rule: What the outputs are.
        outputs: The model's outputs for the task.
        allowed: The labels that there may be; `None` = any.

    Raises:
        OutputMismatch: An output is missing, or has other values than the rule says.
        InvalidRequest: A label is not allowed.
    """
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
    """Returns the best candidates, as many as may be, and their scores; no scores = there are none."""
    if rule.scores:
        scores = probabilities(numbers(outputs, rule.scores), rule.scores, rule.activation)
        if len(scores) != len(rule.labels):
            raise OutputMismatch(f"output '{rule.scores}' has {len(scores)} scores for {len(rule.labels)} labels")
        order = np.argsort(-scores, kind="stable")[: rule.top]
        return [rule.labels[i] for i in order], scores[order].tolist()
    names = _names(rule, outputs)
    if not rule.score:
        return [name for name in names if name][: rule.top], []
    scores = probabilities(numbers(outputs, rule.score), rule.score, rule.activation)
    if len(scores) != len(names):
        raise OutputMismatch(f"output '{rule.score}' has {len(scores)} scores for the {len(names)} of '{rule.label}'")
    order = np.argsort(-scores, kind="stable")[: rule.top]
    return [names[i] for i in order], scores[order].tolist()


def find_text(rule: TextRule, outputs: Outputs) -> tuple[Sequence[Finding], Sequence[float]]:
    """Returns the texts, and how sure they are.

    Raises:
        OutputMismatch: An output is missing, or has other values than the rule says.
    """
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
    """Returns the labels that the output `label` says, as the model calls them."""
    if output(outputs, rule.label).dtype.kind in "OSU":
        return texts(outputs, rule.label)
    return [rule.labels[class_number(rule, value)] for value in numbers(outputs, rule.label)]
