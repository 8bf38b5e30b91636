"""A `model.py` is imported and tested without a server, as its users do it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from qinfer.backends.python_host import utils
from tests.support.docs.doc_blocks import ROOT


def test_the_module_has_all_names_of_the_host() -> None:
    assert [name for name in utils.__all__ if getattr(pb_utils, name) is not getattr(utils, name)] == []


def test_a_model_answers_requests_in_a_test() -> None:
    spec = importlib.util.spec_from_file_location("sentences", ROOT / "examples/python_model/sentences/1/model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({"model_config": '{"name": "sentences"}', "model_instance_name": "sentences_0"})
    text = pb_utils.Tensor("text", np.array([[b"to be"]], object))

    (response,) = model.execute([pb_utils.InferenceRequest("", 0, [text], ["words"], "sentences")])

    words = pb_utils.get_output_tensor_by_name(response, "words")
    assert words is not None
    assert words.as_numpy().tolist() == [[2]]


def test_in_a_process_of_triton_it_becomes_the_module_of_triton(tmp_path: Path) -> None:
    """An installed qinfer is in front of Triton's own folder, which Triton appends to the path."""
    (tmp_path / "triton_python_backend_utils.py").write_text("OF = 'Triton'\n")
    program = (
        "import sys; sys.builtin_module_names += ('c_python_backend_utils',); sys.path.append(sys.argv[1]); "
        "import triton_python_backend_utils as pb_utils; print(pb_utils.OF, 'qinfer' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)

    assert done.stdout == "Triton False\n"
