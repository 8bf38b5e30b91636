"""Step `ocr_prepare`: `image` BYTES[1], a PNG or JPEG → the page, and the pixels in which text is looked for."""

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import UnidentifiedImageError
from rapidocr_onnxruntime.utils import LoadImage

from . import rapid


class TritonPythonModel:
    """Decodes images, and brings them to sizes that the detector takes."""

    def initialize(self, args: dict[str, str]) -> None:
        """Reads the package's settings."""
        self.ocr, self.detector, self.load = rapid.ocr(), rapid.detector(), LoadImage()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Returns the page of each request, an image each."""
        return [self.page(image.as_numpy()[0]) for request in requests for image in request.inputs()]

    def page(self, file: bytes) -> pb_utils.InferenceResponse:
        """Returns a page: uint8[height, width, 3], pixels float32[1, 3, h, w], and how it comes from the image."""
        try:
            image = self.load(file)
        except UnidentifiedImageError:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("the bytes are no image that Pillow reads"))
        height, width = image.shape[:2]
        page, ratio_h, ratio_w = self.ocr.preprocess(image)
        page, record = self.ocr.maybe_add_letterbox(page, {})
        pixels = self.detector.get_preprocess(max(page.shape[:2]))(page)
        origin = np.array([ratio_h, ratio_w, record["padding_1"]["top"], height, width], np.float32)
        tensors = {"page": np.ascontiguousarray(page), "pixels": pixels, "origin": origin}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])
