"""Models that do what Triton's decoupled examples do, `repeat_int32` and `square_int32`, and their configurations."""

from pathlib import Path

from tests.support.python_models import DECOUPLED

REPEAT_CONFIG = """
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }, { name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] } ]
input { name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] }
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }, { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] } ]
"""

REPEAT = """
import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        if not pb_utils.using_decoupled_model_transaction_policy(config):
            raise pb_utils.TritonModelException(f"{args['model_name']} needs decoupled: true")
        self.dtypes = {
            name: pb_utils.triton_string_to_numpy(pb_utils.get_output_config_by_name(config, name)["data_type"])
            for name in ("OUT", "IDX")
        }
        self.idle = threading.Condition()
        self.running = 0

    def execute(self, requests):
        (request,) = requests
        numbers, delays, wait = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY", "WAIT")
        )
        with self.idle:
            self.running += 1
        arguments = (request.get_response_sender(), numbers, delays)
        threading.Thread(target=self.repeat, args=arguments, daemon=True).start()
        time.sleep(wait[0] / 1000)
        return None

    def repeat(self, sender, numbers, delays):
        for index, (number, delay) in enumerate(zip(numbers, delays)):
            time.sleep(delay / 1000)
            out = pb_utils.Tensor("OUT", np.array([number], self.dtypes["OUT"]))
            idx = pb_utils.Tensor("IDX", np.array([index], self.dtypes["IDX"]))
            sender.send(pb_utils.InferenceResponse(output_tensors=[out, idx]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.idle:
            self.running -= 1
            self.idle.notify_all()

    def finalize(self):
        with self.idle:
            self.idle.wait_for(lambda: not self.running)
"""

SQUARE_CONFIG = """
max_batch_size: 8 dynamic_batching { }
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""

SQUARE = """
import threading

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            number = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            threading.Thread(target=self.square, args=(request.get_response_sender(), number), daemon=True).start()
        return None

    def square(self, sender, number):
        for _ in range(number.item()):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", number)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write_examples(repository: Path) -> None:
    """Writes both models."""
    for name, code, text in (("repeat_int32", REPEAT, REPEAT_CONFIG), ("square_int32", SQUARE, SQUARE_CONFIG)):
        directory = repository / name / "1"
        directory.mkdir(parents=True)
        (directory / "model.py").write_text(code)
        (directory.parent / "config.pbtxt").write_text(f'backend: "python" {DECOUPLED} {text}')
