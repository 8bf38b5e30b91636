"""Parts of rapidocr-onnxruntime that the Python steps use: how it prepares and reads images, without its sessions."""

from pathlib import Path
from typing import Any

import rapidocr_onnxruntime
from rapidocr_onnxruntime.ch_ppocr_cls import TextClassifier
from rapidocr_onnxruntime.ch_ppocr_det import TextDetector
from rapidocr_onnxruntime.ch_ppocr_rec import TextRecognizer
from rapidocr_onnxruntime.main import RapidOCR
from rapidocr_onnxruntime.utils import read_yaml

SETTINGS: dict[str, dict[str, Any]] = read_yaml(Path(rapidocr_onnxruntime.__file__).parent / "config.yaml")


def ocr() -> Any:
    """Returns the package's way from images to pages, and from boxes to crops."""
    return _without_session(RapidOCR, SETTINGS["Global"])


def detector() -> Any:
    """Returns what it does before and after detection."""
    return _without_session(TextDetector, SETTINGS["Det"])


def classifier() -> Any:
    """Returns what it does before classification."""
    return _without_session(TextClassifier, SETTINGS["Cls"])


def recognizer() -> Any:
    """Returns what it does before recognition."""
    return _without_session(TextRecognizer, {"rec_image_shape": SETTINGS["Rec"]["rec_img_shape"]})


def _without_session(kind: Any, settings: dict[str, Any]) -> Any:
    """Returns an object whose `__init__`, which would load a model, did not run."""
    made = kind.__new__(kind)
    vars(made).update(settings)
    return made
