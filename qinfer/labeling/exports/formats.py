"""Formats of pre-annotations: a task becomes items, and items become a file."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from qinfer.labeling.mapping import Mapping
from qinfer.labeling.results import Prediction
from qinfer.labeling.rules import RectanglesRule

Layout = Literal["lines", "array", "labels"]
"""`lines`: JSON lines. `array`: one JSON array. `labels`: `{"labels": {key: item, …}}`, items are key and value."""


class Task(NamedTuple):
    """A task and its prediction, as writers get it.

    Attributes:
        number: Its place among all, from 1 on.
        key: What tells it apart: the value of its key column, or else the number.
        data: Its fields, as JSON has them.
        prediction: The model's prediction.
    """

    number: int
    key: str | int
    data: dict[str, Any]
    prediction: Prediction


class Format(NamedTuple):
    """A format of pre-annotations.

    Attributes:
        name: Its name.
        items: Makes a task's items: JSON values, or for the layout `labels` pairs of key and value.
        problems: Yields the reasons why a mapping's results can't be written in it.
        layout: How items become a file.
    """

    name: str
    items: Callable[[Mapping, Task], Iterable[Any]]
    problems: Callable[[Mapping], Iterator[str]]
    layout: Layout

    def encode(self, mapping: Mapping, task: Task) -> bytes:
        """Returns a task's items as the file has them, with separators between them; empty = it has none.

        Raises:
            InvalidRequest: The format can't hold the task.
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


def boxes_of(mapping: Mapping) -> Sequence[RectanglesRule]:
    """Returns the rules of a mapping that find boxes."""
    return [rule for rule in mapping.results if isinstance(rule, RectanglesRule)]


def missing_sizes(mapping: Mapping, name: str) -> Iterator[str]:
    """Yields the results whose boxes can't be written in pixels."""
    for rule in boxes_of(mapping):
        if rule.size is None:
            yield f"{name} has boxes in pixels: '{rule.from_name}' needs size, the image's width and height"


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)
