"""A model's scores and labels: what makes probabilities of outputs, and what a label config calls them."""

import numpy as np
import numpy.typing as npt

from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.labeling.rules import Activation, ChoicesRule, RectanglesRule

Numbers = npt.NDArray[np.float64]

_TOLERANCE = 1e-3
"""How far beyond 0 … 1 rounding may lead a score."""


def probabilities(values: Numbers, name: str, activation: Activation) -> Numbers:
    """Returns scores, 0 … 1.

    Args:
        values: An output's values.
        name: The output, for messages.
        activation: What makes scores of them.

    Raises:
        OutputMismatch: They are beyond 0 … 1, or no numbers.
    """
    scores = activated(values, activation)
    check_scores(scores, name)
    return np.clip(scores, 0.0, 1.0)


def activated(values: Numbers, activation: Activation) -> Numbers:
    """Applies an activation; softmax along the last dimension."""
    if activation == "none":
        return values
    with np.errstate(all="ignore"):  # what is no number stays none, and is refused
        if activation == "sigmoid":
            return np.asarray(0.5 * (1.0 + np.tanh(0.5 * values)), np.float64)
        if values.size:
            powers = np.exp(values - values.max(axis=-1, keepdims=True))
            return np.asarray(powers / powers.sum(axis=-1, keepdims=True), np.float64)
    return values


def check_scores(scores: Numbers, name: str) -> None:
    """Checks that scores are 0 … 1.

    Raises:
        OutputMismatch: One is not.
    """
    wrong = scores[~((scores >= -_TOLERANCE) & (scores <= 1 + _TOLERANCE))]
    if wrong.size:
        raise OutputMismatch(
            f"output '{name}' has the score {wrong[0]:g}; scores are 0 … 1: set activation: softmax or sigmoid"
        )


def allowed_name(rule: ChoicesRule | RectanglesRule, name: str, allowed: frozenset[str] | None) -> str:
    """Returns what the label config calls a label; empty = it is dropped.

    Args:
        rule: The rule that gives it.
        name: What the model calls it.
        allowed: The labels that there may be; `None` = any.

    Raises:
        InvalidRequest: It is not allowed, and the rule does not drop it.
    """
    name = rule.rename.get(name, name)
    if not name or allowed is None or name in allowed:
        return name
    if rule.unknown == "drop":
        return ""
    raise InvalidRequest(
        f"the model says '{name[:60]}', which control '{rule.from_name}' of the label config does not have: "
        "add it there, rename it in the mapping, or set unknown: drop"
    )


def class_number(rule: ChoicesRule | RectanglesRule, value: float) -> int:
    """Returns a class that a model says by its number.

    Raises:
        OutputMismatch: The rule has no label of that number.
    """
    if 0 <= value < len(rule.labels) and value == int(value):
        return int(value)
    if not rule.labels:
        raise OutputMismatch(
            f"output '{rule.label}' has the number {value:g}, and '{rule.from_name}' no labels that it counts"
        )
    raise OutputMismatch(f"output '{rule.label}' has {value:g}; it should be 0 … {len(rule.labels) - 1}")
