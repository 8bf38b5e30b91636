"""What pages of the documentation take for granted: models, files, a server that runs, an object store."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples import digits
from qinfer.cli.example import Name, write
from tests.support.servers import object_stores

UP = "qinfer up --model-repository models --allow-store ."
ROWS = 100
SENTIMENT_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "PROBS" data_type: TYPE_FP32 dims: [ 2 ] }
"""
SENTIMENT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("PROBS", self.score(request))]) for request in requests]

    def score(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
        good = np.array([[float(b"good" in row[0])] for row in text], np.float32)
        return np.concatenate([1 - good, good], axis=1)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What is there before the first block of a page runs.

    Attributes:
        prepare: Makes files in the working directory.
        serves: The command of a server that runs, which the page tells to start elsewhere; empty = there is none.
        bucket: The bucket of an object store; empty = there is none.
        upload: Fills the bucket.
    """

    prepare: Callable[[Path], None] = lambda _: None
    serves: str = ""
    bucket: str = ""
    upload: Callable[[object_stores.ObjectStore, Path], None] = lambda _, __: None


@contextmanager
def set_up(scene: Scene, directory: Path) -> Iterator[Mapping[str, str]]:
    """Makes a scene in a directory; gives the variables that belong to it."""
    scene.prepare(directory)
    if not scene.bucket:
        yield {}
        return
    with object_stores.s3(scene.bucket) as store:
        scene.upload(store, directory)
        yield store.environment


def digits_model(directory: Path) -> None:
    """Makes `models/digits`, and the files that pages ask it with."""
    data = digits.build(directory / "models")
    table = {"id": list(range(ROWS)), "pixels": pa.array(list(data.images[:ROWS]), pa.list_(pa.float32()))}
    (directory / "data").mkdir()
    pq.write_table(pa.table(table), directory / "data" / "rows.parquet")
    pq.write_table(pa.table(table), directory / "digits.parquet")
    body = {"inputs": [{"name": "image", "shape": [1, 64], "datatype": "FP32", "data": data.images[0].tolist()}]}
    (directory / "digit.json").write_text(json.dumps(body))
    np.save(directory / "digit.npy", data.images[:1])


def versions(directory: Path, iterations: int = 8) -> None:
    """Makes `models/digits` with versions 3 and 4, of which the second was trained badly, and files to score."""
    digits_model(directory)
    shutil.move(directory / "models" / "digits" / "1", directory / "models" / "digits" / "3")
    digits.build(directory / "models", version=4, iterations=iterations)
    config = directory / "models" / "digits" / "config.pbtxt"
    config.write_text(f"{config.read_text()}version_policy: {{ all {{ }} }}\n")


def successors(directory: Path) -> None:
    """Makes `models/digits` with versions 3 and 4, which are equally good."""
    versions(directory, iterations=400)


def example(directory: Path) -> None:
    """Makes what `qinfer example digits` makes."""
    write(Name.digits, directory)


def replacements(directory: Path) -> None:
    """Makes `models/digits`, and what takes its place."""
    digits_model(directory)
    (directory / "config.json").write_text('{"backend": "onnxruntime", "max_batch_size": 16}')
    os.link(directory / "models" / "digits" / "1" / "model.onnx", directory / "new.onnx")


def reviews(directory: Path) -> None:
    """Makes a model of texts, and texts."""
    version = directory / "models" / "sentiment" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(SENTIMENT_CONFIG)
    (version / "model.py").write_text(SENTIMENT)
    (directory / "data").mkdir()
    texts = [f"{'good' if number % 3 else 'bad'} {number}" for number in range(ROWS)]
    pq.write_table(pa.table({"id": list(range(ROWS)), "text": texts}), directory / "data" / "reviews.parquet")


def another_model(store: object_stores.ObjectStore, directory: Path) -> None:
    """Puts a model into the bucket, under another name than the local one: no two repositories may have the same."""
    store.upload(directory / "models" / "digits", "models/others")
    config = (directory / "models" / "digits" / "config.pbtxt").read_text()
    store.put("models/others/config.pbtxt", config.replace(f'"{digits.NAME}"', '"others"').encode())


SCENES = {
    "README.md": Scene(prepare=example, serves=UP),
    "docs/how-to/asynchronous-requests.md": Scene(prepare=digits_model, serves=UP),
    "docs/how-to/autoscale.md": Scene(prepare=digits_model),
    "docs/how-to/bulk-jobs.md": Scene(prepare=digits_model),
    "docs/how-to/call-from-python.md": Scene(prepare=digits_model, serves=UP),
    "docs/how-to/canaries.md": Scene(prepare=successors),
    "docs/how-to/compare-versions.md": Scene(prepare=versions),
    "docs/how-to/control-models.md": Scene(prepare=replacements),
    "docs/how-to/model-repositories.md": Scene(prepare=digits_model, bucket="bucket", upload=another_model),
    "docs/how-to/move-from-triton.md": Scene(prepare=digits_model),
    "docs/how-to/pre-annotations.md": Scene(prepare=reviews, serves=UP),
    "docs/how-to/python-models.md": Scene(prepare=digits_model),
    "docs/how-to/split-traffic.md": Scene(prepare=successors, serves=UP),
    "docs/how-to/store-on-s3.md": Scene(prepare=digits_model, bucket="my-bucket"),
}
"""The scenes of pages that need one; the others begin in a directory with a copy of the examples and documents."""
