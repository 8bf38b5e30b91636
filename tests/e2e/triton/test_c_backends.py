"""The same C backends in NVIDIA's server and in qinfer: answers and errors are compared."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qinfer.backends.base import Batch
from qinfer.backends.parameters import use_triton_files
from qinfer.backends.python_host.errors import code_of
from qinfer.backends.triton import TritonBackend
from qinfer.backends.triton_host.library import TritonFiles
from qinfer.core.messages import InferRequest
from qinfer.errors import QinferError
from qinfer.models.spec import Device
from qinfer.tensors import DATATYPES, to_numpy
from tests.support.backends import Answers
from tests.support.c_backends import DATATYPES as OF_SUBJECTS
from tests.support.c_backends import compile_backends, server, triton, write_model
from tests.support.python_models import spec_of

CASES = [
    ("identity", [[1, 2, 3], [4, 5, 6]]),
    ("identity", [[-7]]),
    ("square", [[1.5, -2.0], [0.0, 1e20]]),
    ("leak", [[5]]),
    ("crash", [[5]]),
    ("errors", [[0]]),
    *(("errors", [[code]]) for code in range(1, 6)),
    ("errors", [[-1]]),
]
STATUS = {0: 400, 1: 500, 2: 404, 3: 400, 4: 503, 5: 501}
"""Triton's code → the status of its HTTP server (its `HttpCodeFromError`)."""


def asked(url: str, model: str, values: Any) -> tuple[int, Any]:
    """Returns the status, and the rows or the error's text."""
    array = np.array(values)
    body = {
        "inputs": [{"name": "INPUT", "datatype": OF_SUBJECTS.get(model, "INT32"), "shape": array.shape, "data": values}]
    }
    request = urllib.request.Request(f"{url}/v2/models/{model}/infer", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            output = json.load(answer)["outputs"][0]
            return answer.status, np.array(output["data"]).reshape(output["shape"]).tolist()
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def executed(repository: Path, model: str, values: Any) -> tuple[int, Any]:
    """Returns the same of qinfer's backend."""
    directory = repository / model / "1"
    backend, answers = TritonBackend(), Answers()
    backend.load(spec_of(directory), directory, Device())
    try:
        array = np.array(values, DATATYPES[OF_SUBJECTS.get(model, "INT32")].numpy)
        requests = [InferRequest(model=model, inputs=())]
        backend.execute(Batch(requests=requests, rows=[len(array)], inputs={"INPUT": array}), answers)
    finally:
        backend.unload()
    answer = answers.by_item[0]
    if isinstance(answer, QinferError):
        return STATUS[code_of(answer)], answer.message
    return 200, to_numpy(answer[0]).tolist()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_answers_and_errors_are_those_of_nvidias_server(tmp_path: Path) -> None:
    backends = compile_backends(tmp_path)
    repository = tmp_path / "models"
    for name in {name for name, _ in CASES}:
        write_model(repository, name, name=name)

    with server(repository, backends) as url:
        theirs = [asked(url, name, values) for name, values in CASES]
    use_triton_files(TritonFiles(str(triton()), str(backends)))
    try:
        ours = [executed(repository, name, values) for name, values in CASES]
    finally:
        use_triton_files(TritonFiles())

    assert ours == theirs
    assert [status for status, _ in theirs].count(200) == 6
