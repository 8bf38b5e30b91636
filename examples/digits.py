"""The demo's model: handwritten digits, trained in a second, written as ONNX into a model repository.

    python examples/digits.py models

makes `models/digits/config.pbtxt` and `models/digits/1/model.onnx`: input `image` float32[batch, 64] (8 by 8 pixels
from 0 to 16), outputs `label` int64[batch, 1] and `probabilities` float32[batch, 10]. With
`--version 4 --iterations 8` it makes a version that was trained too little, and is often wrong.
"""

import argparse
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from sklearn.neural_network import MLPClassifier

NAME = "digits"
CONFIG = """\
name: "digits"
backend: "onnxruntime"
max_batch_size: 64
input [ { name: "image" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [
  { name: "label" data_type: TYPE_INT64 dims: [ 1 ] },
  { name: "probabilities" data_type: TYPE_FP32 dims: [ 10 ] }
]
dynamic_batching { }
"""
PIXEL_MAX = 16.0
OPSET, IR_VERSION = 17, 8  # old enough for every onnxruntime that qinfer accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """The model's file, and the images it was not trained on.

    Attributes:
        model_path: The ONNX file.
        images: float32[n, 64], pixels from 0 to 16.
        labels: int64[n], the digits that the images show.
    """

    model_path: Path
    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def build(repository: Path, *, version: int = 1, iterations: int = 400, units: int = 64) -> Digits:
    """Trains the classifier on three quarters of the images and writes it into `repository`.

    Args:
        repository: The model repository.
        version: The version to write; others stay.
        iterations: At most so many passes over the images; with 5 the classifier is often wrong.
        units: The units of the hidden layer.
    """
    # They take longer to import than all else here, and most users of this file train nothing.
    from sklearn.datasets import load_digits
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import train_test_split
    from sklearn.neural_network import MLPClassifier

    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images.astype(np.float32), labels.astype(np.int64), test_size=0.25, random_state=0, stratify=labels
    )
    classifier = MLPClassifier(hidden_layer_sizes=(units,), max_iter=iterations, random_state=0)
    # The matrices are small: threads would wait for one another longer than they multiply.
    with threadpool_limits(1), warnings.catch_warnings():
        # With few iterations it has not learnt all that it could, on purpose.
        warnings.simplefilter("ignore", ConvergenceWarning)
        classifier.fit(train_images / PIXEL_MAX, train_labels)

    model = to_onnx(classifier).SerializeToString()  # before its directory, which a server may be looking for
    version_dir = repository / NAME / str(version)
    version_dir.mkdir(parents=True, exist_ok=True)
    (repository / NAME / "config.pbtxt").write_text(CONFIG)
    model_path = version_dir / "model.onnx"
    model_path.write_bytes(model)
    return Digits(model_path=model_path, images=test_images, labels=test_labels)


def to_onnx(classifier: "MLPClassifier") -> onnx.ModelProto:
    """Writes a classifier with one hidden ReLU layer as an ONNX graph; scaling the pixels is part of it."""
    weights = {
        "scale": np.array(1 / PIXEL_MAX),
        "w1": classifier.coefs_[0],
        "b1": classifier.intercepts_[0],
        "w2": classifier.coefs_[1],
        "b2": classifier.intercepts_[1],
    }
    nodes = [
        helper.make_node("Mul", ["image", "scale"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "w1"], ["product1"]),
        helper.make_node("Add", ["product1", "b1"], ["sum1"]),
        helper.make_node("Relu", ["sum1"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "w2"], ["product2"]),
        helper.make_node("Add", ["product2", "b2"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["probabilities"], ["label"], axis=1, keepdims=1),
    ]
    graph = helper.make_graph(
        nodes,
        NAME,
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 64])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, ["batch", 1]),
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10]),
        ],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    return model


def main() -> None:
    """Trains what the command line says; prints the path of the model."""
    parser = argparse.ArgumentParser(description="Trains a classifier of handwritten digits.")
    parser.add_argument("repository", nargs="?", type=Path, default=Path("models"), help="the model repository")
    parser.add_argument("--version", type=int, default=1, help="the version to write (%(default)s)")
    parser.add_argument("--iterations", type=int, default=400, help="passes over the images, at most (%(default)s)")
    parser.add_argument("--units", type=int, default=64, help="units of the hidden layer (%(default)s)")
    options = parser.parse_args()
    made = build(options.repository, version=options.version, iterations=options.iterations, units=options.units)
    print(made.model_path)


if __name__ == "__main__":
    main()
