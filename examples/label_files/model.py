"""The model of the tutorial: magika's classifier of file types, which its package ships as ONNX, made ready to serve.

    python -m examples.label_files.model demo

makes `demo/models/magika`, `demo/filetypes.yaml`, the mapping from its output to labels, and `demo/filetypes.xml`, the
labeling configuration of a project in Label Studio.
"""

import json
import shutil
import sys
from pathlib import Path

import magika
import yaml

NAME = "magika"
FEATURES = 2048
FIELD = "text"
"""The field of a task that people see."""

_PACKAGE = Path(magika.__file__).parent / "models" / "standard_v3_3"
_CONFIG = """\
name: "magika"
backend: "onnxruntime"
max_batch_size: 64
input [ {{ name: "bytes" data_type: TYPE_INT32 dims: [ {features} ] }} ]
output [ {{ name: "target_label" data_type: TYPE_FP32 dims: [ {labels} ] }} ]
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
"""


def labels() -> list[str]:
    """Returns the model's classes, in the order of its output."""
    return [str(label) for label in json.loads((_PACKAGE / "config.min.json").read_text())["target_labels_space"]]


def build(directory: Path) -> None:
    """Writes model repository, mapping and labeling configuration."""
    known = labels()
    version = directory / "models" / NAME / "1"
    version.mkdir(parents=True, exist_ok=True)
    shutil.copy(_PACKAGE / "model.onnx", version / "model.onnx")
    (version.parent / "config.pbtxt").write_text(_CONFIG.format(features=FEATURES, labels=len(known)))
    result = {
        "type": "choices",
        "from_name": "filetype",
        "to_name": "text",
        "scores": "target_label",
        "labels": known,
    }
    # The input is made by the program, which people never see: no field of a task is one.
    (directory / "filetypes.yaml").write_text(yaml.safe_dump({"model": NAME, "results": [result]}, sort_keys=False))
    choices = "\n".join(f'    <Choice value="{label}"/>' for label in known)
    (directory / "filetypes.xml").write_text(
        f'<View>\n  <Text name="text" value="${FIELD}"/>\n'
        f'  <Choices name="filetype" toName="text">\n{choices}\n  </Choices>\n</View>\n'
    )


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
