"""Which argument of `forward` an input is, and which result an output: Triton's naming conventions, as pure functions.

https://github.com/triton-inference-server/pytorch_backend#model-configuration
"""

from collections.abc import Sequence

from qinfer.errors import ModelLoadFailed

_SEPARATOR = "__"


def input_positions(model: str, inputs: Sequence[str], arguments: Sequence[str]) -> list[int]:
    """Returns the position in `forward` of each configured input.

    The names are those of the arguments, or all end in `__<position>`, or are taken in the configuration's order.

    Args:
        model: The model's name, for messages.
        inputs: The names of the configured inputs.
        arguments: The names of `forward`'s arguments; empty when they are not known.

    Raises:
        ModelLoadFailed: There are more inputs than arguments, or a position exists twice or not at all.
    """
    if arguments and set(inputs) <= set(arguments):
        return [arguments.index(name) for name in inputs]
    limit = len(arguments) or len(inputs)
    if len(inputs) > limit:
        raise ModelLoadFailed(
            f"model '{model}' has {limit} inputs ({', '.join(arguments)}), its configuration {len(inputs)}"
        )
    return _by_index(model, "input", inputs, limit) or list(range(len(inputs)))


def output_positions(model: str, outputs: Sequence[str]) -> list[int]:
    """Returns the position in the model's result of each configured output: by `__<position>`, else in order.

    Raises:
        ModelLoadFailed: A position exists twice.
    """
    return _by_index(model, "output", outputs, None) or list(range(len(outputs)))


def _by_index(model: str, kind: str, names: Sequence[str], limit: int | None) -> list[int] | None:
    endings = [name.rpartition(_SEPARATOR) for name in names]
    if not all(stem and end.isascii() and end.isdecimal() for stem, _, end in endings):
        return None
    positions = [int(end) for _, _, end in endings]
    if len(set(positions)) < len(positions):
        raise ModelLoadFailed(f"model '{model}' has two {kind}s of the same position: {', '.join(names)}")
    if limit is not None and max(positions) >= limit:
        raise ModelLoadFailed(
            f"model '{model}': {kind} '{names[positions.index(max(positions))]}' has no such position; "
            f"the model has {limit} {kind}s, counted from 0"
        )
    return positions
