"""Step `ocr_read`: crops, and which of them stand upside down → the text of each, in boxes that are kept.

The recogniser gets six lines at a time, the short ones first, each padded to the longest of the six, as in the package:
so it is called from here, by `ocr_recognise`, and is no step of its own.
"""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import triton_python_backend_utils as pb_utils
from rapidocr_onnxruntime.ch_ppocr_rec.utils import CTCLabelDecode

from . import rapid


class TritonPythonModel:
    """Reads lines of text."""

    def initialize(self, args: dict[str, str]) -> None:
        """Reads the package's settings, and the characters that the recogniser knows."""
        characters = (Path(__file__).parent / "characters.txt").read_text(encoding="utf-8").splitlines()
        self.decode, self.recognizer = CTCLabelDecode(characters), rapid.recognizer()
        self.at_once = rapid.SETTINGS["Rec"]["rec_batch_num"]

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Returns the texts of each request, a page each."""
        return [self.page(request) for request in requests]

    def page(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        """Returns the boxes whose text was read with confidence, those texts, and how confident that was."""
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        turned, sizes = given["turned"], given["sizes"].clip(1)
        upside_down = (turned.argmax(1) == 1) & (turned.max(1) > rapid.SETTINGS["Cls"]["cls_thresh"])
        lines = [crop[:height, :width] for crop, (height, width) in zip(given["crops"], sizes, strict=True)]
        lines = [cv2.rotate(a, cv2.ROTATE_180) if b else a for a, b in zip(lines, upside_down, strict=True)]
        found = self.texts(lines)
        kept = [number for number, (_, score) in enumerate(found) if score >= rapid.SETTINGS["Global"]["text_score"]]
        tensors = {
            "boxes_kept": given["boxes"][kept],
            "texts": np.array([found[number][0].encode() for number in kept], np.object_),
            "scores": np.array([found[number][1] for number in kept], np.float32),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])

    def texts(self, lines: list[Any]) -> list[tuple[str, float]]:
        """Returns text and confidence of each line."""
        ratios = [line.shape[1] / line.shape[0] for line in lines]
        order = np.argsort(ratios)
        _, height, width = self.recognizer.rec_image_shape
        found: list[tuple[str, float]] = [("", 0.0)] * len(lines)
        for first in range(0, len(lines), self.at_once):
            group = order[first : first + self.at_once]
            widest = max(width / height, *(ratios[number] for number in group))
            pixels = np.stack([self.recognizer.resize_norm_img(lines[number], widest) for number in group])
            for number, text in zip(group, self.decode(self.recognise(pixels)), strict=True):
                found[number] = text
        return found

    def recognise(self, pixels: Any) -> Any:
        """Returns float32[n, steps, characters] of lines float32[n, 3, 48, width]."""
        call = pb_utils.InferenceRequest(
            model_name="ocr_recognise",
            requested_output_names=["softmax_11.tmp_0"],
            inputs=[pb_utils.Tensor("x", pixels)],
        )
        response = call.exec()
        assert isinstance(response, pb_utils.InferenceResponse)
        if (error := response.error()) is not None:
            raise pb_utils.TritonModelException(error.message())
        (probabilities,) = response.output_tensors()
        return probabilities.as_numpy()
