"""Models that label, for tests, and the mappings of Label Studio's projects to them: file types, objects, captions.

filetype   magika's classifier behind its own features: content → label and score; text with POISON in it fails
looker     finds what is bright in a grey PNG: boxes with classes, and a sentence about them; what is no PNG fails
"""

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import magika
import numpy as np
import numpy.typing as npt
import yaml

POISON = "poison"
NOT_SCORED = "this content is poison"

LABELS: tuple[str, ...] = tuple(
    json.loads((Path(magika.__file__).parent / "models" / "standard_v3_3" / "config.min.json").read_text())[
        "target_labels_space"
    ]
)

FILE_TYPES_CONFIG = f"""<View>
  <Text name="content" value="$content"/>
  <Choices name="filetype" toName="content">{"".join(f'<Choice value="{label}"/>' for label in LABELS)}</Choices>
</View>"""

IMAGES_CONFIG = """<View>
  <Image name="image" value="$image"/>
  <RectangleLabels name="things" toName="image"><Label value="cat"/><Label value="dog"/></RectangleLabels>
  <TextArea name="caption" toName="image"/>
</View>"""

FILE_TYPES: dict[str, Any] = {
    "model": "filetype",
    "inputs": {"CONTENT": {"field": "content", "kind": "text"}},
    "results": [
        {"type": "choices", "from_name": "filetype", "to_name": "content", "label": "LABEL", "score": "SCORE"},
    ],
}
IMAGES: dict[str, Any] = {
    "model": "looker",
    "inputs": {"IMAGE": {"field": "image", "kind": "file"}},
    "results": [
        {
            "type": "rectanglelabels",
            "from_name": "things",
            "to_name": "image",
            "boxes": "BOXES",
            "size": {"output": "SIZE", "order": "wh"},
            "scores": "SCORES",
            "labels": ["cat", "dog"],
            "label": "CLASS",
        },
        {"type": "textarea", "from_name": "caption", "to_name": "image", "text": "CAPTION"},
    ],
}

_FILE_TYPE_CODE = f"""
import json
from pathlib import Path

import magika
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.magika = magika.Magika(prediction_mode=magika.PredictionMode.BEST_GUESS)

    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(each, "CONTENT").as_numpy()) for each in requests]

    def answer(self, contents):
        if any(b"{POISON}" in content for content in contents.ravel()):
            error = pb_utils.TritonError("{NOT_SCORED}", pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=error)
        found = [self.magika.identify_bytes(content).prediction for content in contents.ravel()]
        labels = np.array([str(each.dl.label).encode() for each in found], dtype=object).reshape(contents.shape)
        scores = np.array([each.score for each in found], dtype=np.float32).reshape(contents.shape)
        return pb_utils.InferenceResponse([pb_utils.Tensor("LABEL", labels), pb_utils.Tensor("SCORE", scores)])
"""
_FILE_TYPE_CONFIG = """
name: "filetype" backend: "python" max_batch_size: 16
input { name: "CONTENT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "LABEL" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "SCORE" data_type: TYPE_FP32 dims: [ 1 ] }
dynamic_batching { max_queue_delay_microseconds: 2000 }
"""

_LOOKER_CODE = """
import struct
import zlib

import numpy as np
import triton_python_backend_utils as pb_utils


def pixels(png):
    if png[:8] != bytes.fromhex("89504e470d0a1a0a"):
        raise ValueError("the image is no PNG")
    width, height = struct.unpack(">II", png[16:24])
    start = png.index(b"IDAT")
    (size,) = struct.unpack(">I", png[start - 4 : start])
    rows = np.frombuffer(zlib.decompress(png[start + 4 : start + 4 + size]), np.uint8).reshape(height, width + 1)
    return rows[:, 1:]


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(each, "IMAGE").as_numpy()) for each in requests]

    def answer(self, images):
        try:
            image = pixels(images.ravel()[0])
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        values = [value for value in np.unique(image) if value]
        boxes = []
        for value in values:
            y, x = np.nonzero(image == value)
            boxes.append([x.min(), y.min(), x.max() + 1, y.max() + 1])
        caption = f"{len(values)} things on {image.shape[1]} by {image.shape[0]} pixels".encode()
        outputs = {
            "BOXES": np.array(boxes, np.float32).reshape(1, -1, 4),
            "SCORES": np.array([[value / 255 for value in values]], np.float32),
            "CLASS": np.array([[int(value > 127) for value in values]], np.int64),
            "SIZE": np.array([[image.shape[1], image.shape[0]]], np.int32),
            "CAPTION": np.array([[caption]], dtype=object),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])
"""
_LOOKER_CONFIG = """
name: "looker" backend: "python" max_batch_size: 1
input { name: "IMAGE" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "BOXES" data_type: TYPE_FP32 dims: [ -1, 4 ] }
output { name: "SCORES" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "CLASS" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "SIZE" data_type: TYPE_INT32 dims: [ 2 ] }
output { name: "CAPTION" data_type: TYPE_STRING dims: [ 1 ] }
"""


def build(repository: Path) -> None:
    """Writes both models."""
    for name, code, config in (
        ("filetype", _FILE_TYPE_CODE, _FILE_TYPE_CONFIG),
        ("looker", _LOOKER_CODE, _LOOKER_CONFIG),
    ):
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(code)
        (version.parent / "config.pbtxt").write_text(config)


def write_mapping(directory: Path, name: str, mapping: dict[str, Any], **more: object) -> None:
    """Writes a mapping file."""
    (directory / f"{name}.yaml").write_text(yaml.safe_dump({**mapping, **more}))


def png(width: int, height: int, things: Sequence[tuple[int, int, int, int, int]]) -> bytes:
    """Returns a grey image with rectangles: left, upper, right and lower edge, and how bright, each another value."""
    image: npt.NDArray[np.uint8] = np.zeros((height, width), np.uint8)
    for left, upper, right, lower, value in things:
        image[upper:lower, left:right] = value
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    signature = bytes.fromhex("89504e470d0a1a0a")
    return signature + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
