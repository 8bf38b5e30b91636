"""Findings in a model's outputs: choices, boxes, texts, each with its confidence. No tool's format yet."""

import msgspec


class Choice(msgspec.Struct, frozen=True):
    """The labels that a task has of one control, the best first.

    Attributes:
        from_name: The control.
        to_name: What it labels.
        labels: The labels.
        scores: The score of each; empty = there are none.
        is_single: Whether there can be one only.
    """

    from_name: str
    to_name: str
    labels: tuple[str, ...]
    scores: tuple[float, ...]
    is_single: bool


class Box(msgspec.Struct, frozen=True):
    """A rectangle on an image; its place is in 0 … 1 of the image's width and height.

    Attributes:
        from_name: The control.
        to_name: The image.
        label: Its label.
        score: Its score; `None` = there is none.
        x: The left edge.
        y: The upper edge.
        width: Its width.
        height: Its height.
        size: Width and height of the image in pixels; `None` = not known.
        category: Its label's id in COCO files; 0 = it has none.
    """

    from_name: str
    to_name: str
    label: str
    score: float | None
    x: float
    y: float
    width: float
    height: float
    size: tuple[float, float] | None
    category: int


class Text(msgspec.Struct, frozen=True):
    """Texts that a model wrote.

    Attributes:
        from_name: The control.
        to_name: What they are about.
        texts: The texts, none empty.
        score: Their score; `None` = there is none.
    """

    from_name: str
    to_name: str
    texts: tuple[str, ...]
    score: float | None


Finding = Choice | Box | Text
