"""Step `ocr_crop`: the map of where text is → boxes, and a crop of the page for each: any number of them."""

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from rapidocr_onnxruntime.ch_ppocr_det.utils import DBPostProcess

from . import rapid

_OF_BOXES = ("thresh", "box_thresh", "max_candidates", "unclip_ratio", "use_dilation", "score_mode")


class TritonPythonModel:
    """Cuts the lines of text out of pages."""

    def initialize(self, args: dict[str, str]) -> None:
        """Reads the package's settings."""
        self.ocr, self.detector, self.classifier = rapid.ocr(), rapid.detector(), rapid.classifier()
        self.boxes = DBPostProcess(**{name: rapid.SETTINGS["Det"][name] for name in _OF_BOXES})

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Returns the crops of each request, a page each."""
        return [self.crops(**{tensor.name(): tensor.as_numpy() for tensor in request.inputs()}) for request in requests]

    def crops(self, map: Any, page: Any, origin: Any) -> pb_utils.InferenceResponse:
        """Returns n boxes float32[n, 4, 2], crops uint8[n, height, width, 3], their sizes, lines to classify."""
        shape = page.shape[:2]
        boxes = self.detector.filter_tag_det_res(self.boxes(map, shape)[0], shape)
        boxes = self.ocr.sorted_boxes(boxes) if len(boxes) else []
        cut = self.ocr.get_crop_img_list(page, boxes)
        sizes = np.array([one.shape[:2] for one in cut], np.int32).reshape(-1, 2)
        crops = np.zeros((len(cut), *sizes.max(0, initial=1), 3), np.uint8)
        lines = np.zeros((len(cut), *rapid.SETTINGS["Cls"]["cls_image_shape"]), np.float32)
        for number, one in enumerate(cut):
            crops[number, : one.shape[0], : one.shape[1]] = one
            lines[number] = self.classifier.resize_norm_img(one)
        tensors = {"boxes": self.on_image(boxes, origin), "crops": crops, "sizes": sizes, "lines": lines}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])

    def on_image(self, boxes: list[Any], origin: Any) -> Any:
        """Returns where boxes of the page are on the image."""
        if not boxes:
            return np.zeros((0, 4, 2), np.float32)
        ratio_h, ratio_w, top, height, width = map(float, origin)
        record = {"preprocess": {"ratio_h": ratio_h, "ratio_w": ratio_w}, "padding_1": {"top": top, "left": 0}}
        return self.ocr._get_origin_points(boxes, record, height, width).astype(np.float32)
