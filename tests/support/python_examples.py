"""Models in the shape of the examples of Triton's Python backend, and of its tests of rescheduled requests."""

from pathlib import Path

from onnx import helper

from tests.support import models
from tests.support.decoupled_models import SQUARE
from tests.support.python_models import DECOUPLED

INPUTS = """
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
OUTPUTS = """
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
MODEL_NAME = 'input { name: "MODEL_NAME" data_type: TYPE_STRING dims: [ 1 ] }'

ADD_SUB = """
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.model_config = model_config = json.loads(args["model_config"])
        self.dtypes = [
            pb_utils.triton_string_to_numpy(pb_utils.get_output_config_by_name(model_config, name)["data_type"])
            for name in ("OUTPUT0", "OUTPUT1")
        ]
        assert not pb_utils.using_decoupled_model_transaction_policy(model_config)

    def execute(self, requests):
        responses = []
        for request in requests:
            in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1")
            out_0, out_1 = (in_0.as_numpy() + in_1.as_numpy(), in_0.as_numpy() - in_1.as_numpy())
            out_tensor_0 = pb_utils.Tensor("OUTPUT0", out_0.astype(self.dtypes[0]))
            out_tensor_1 = pb_utils.Tensor("OUTPUT1", out_1.astype(self.dtypes[1]))
            responses.append(pb_utils.InferenceResponse(output_tensors=[out_tensor_0, out_tensor_1]))
        return responses

    def finalize(self):
        print("Cleaning up...")
"""

AUTO_COMPLETE = ADD_SUB.replace(
    "    def initialize",
    """    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        inputs = [{"name": name, "data_type": "TYPE_FP32", "dims": [4]} for name in ("INPUT0", "INPUT1")]
        outputs = [{"name": name, "data_type": "TYPE_FP32", "dims": [4]} for name in ("OUTPUT0", "OUTPUT1")]

        # Demonstrate the usage of `as_dict`, `add_input`, `add_output`, `set_max_batch_size`
        config = auto_complete_model_config.as_dict()
        input_names = [input["name"] for input in config["input"]]
        output_names = [output["name"] for output in config["output"]]
        for input in inputs:
            if input["name"] not in input_names:
                auto_complete_model_config.add_input(input)
        for output in outputs:
            if output["name"] not in output_names:
                auto_complete_model_config.add_output(output)
        auto_complete_model_config.set_max_batch_size(4)
        auto_complete_model_config.set_dynamic_batching()
        return auto_complete_model_config

    def initialize""",
    1,
)

BLS_SYNC = """
import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.model_config = json.loads(args["model_config"])

    def execute(self, requests):
        responses = []
        for request in requests:
            in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1")
            model_name = pb_utils.get_input_tensor_by_name(request, "MODEL_NAME")
            model_name_string = model_name.as_numpy()[0]
            infer_request = pb_utils.InferenceRequest(
                model_name=model_name_string,
                requested_output_names=["OUTPUT0", "OUTPUT1"],
                inputs=[in_0, in_1],
            )
            infer_response = infer_request.exec()
            if infer_response.has_error():
                raise pb_utils.TritonModelException(infer_response.error().message())
            responses.append(pb_utils.InferenceResponse(output_tensors=infer_response.output_tensors()))
        return responses
"""

BLS_ASYNC = """
import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            in_0 = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            in_1 = pb_utils.get_input_tensor_by_name(request, "INPUT1")
            awaits = []
            for model_name in ["pytorch", "add_sub"]:
                infer_request = pb_utils.InferenceRequest(
                    model_name=model_name, requested_output_names=["OUTPUT0", "OUTPUT1"], inputs=[in_0, in_1]
                )
                awaits.append(infer_request.async_exec())
            infer_responses = await asyncio.gather(*awaits)
            for infer_response in infer_responses:
                if infer_response.has_error():
                    raise pb_utils.TritonModelException(infer_response.error().message())
            out_0 = pb_utils.get_output_tensor_by_name(infer_responses[0], "OUTPUT0")
            out_1 = pb_utils.get_output_tensor_by_name(infer_responses[1], "OUTPUT1")
            responses.append(pb_utils.InferenceResponse(output_tensors=[out_0, out_1]))
        return responses
"""

CUSTOM_METRICS = ADD_SUB.replace(
    "    def initialize(self, args):",
    """    def initialize(self, args):
        self.metric_family = pb_utils.MetricFamily(
            name="requests_process_latency_ns",
            description="Cumulative time spent processing requests",
            kind=pb_utils.MetricFamily.COUNTER,
        )
        self.metric = self.metric_family.Metric(labels={"model": "custom_metrics", "version": "1"})
        self.metric.increment(5)
        pb_utils.Logger.log_info("Cumulative requests processing latency: {}".format(self.metric.value()))
        assert self.metric.value() == 5""",
    1,
)

INSTANCE_KIND = ADD_SUB.replace(
    "    def initialize(self, args):",
    """    def initialize(self, args):
        device = "cuda" if args["model_instance_kind"] == "GPU" else "cpu"
        self.device = f"{device}:{args['model_instance_device_id']}"
        assert self.device == "cuda:1", self.device""",
    1,
)

CALL_DECOUPLED = """
import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


def asked(request):
    number = pb_utils.get_input_tensor_by_name(request, "IN")
    return pb_utils.InferenceRequest(
        model_name="square_int32", inputs=[number], requested_output_names=["OUT"]
    )


def summed(total, responses):
    for response in responses:
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        if len(response.output_tensors()) > 0:  # the last one may be empty
            total += pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
"""

BLS_DECOUPLED_SYNC = CALL_DECOUPLED + (
    """

class TritonPythonModel:
    def execute(self, requests):
        total = np.array([0])
        summed(total, asked(requests[0]).exec(decoupled=True))
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("SUM", total)])]
"""
)
"""Sums the responses of `square_int32`; the sum has another datatype than is declared, as in the example."""

BLS_DECOUPLED_ASYNC = CALL_DECOUPLED + (
    """

class TritonPythonModel:
    async def execute(self, requests):
        awaits = [asked(requests[0]).async_exec(decoupled=True) for _ in range(2)]
        total = np.array([0])
        for responses in await asyncio.gather(*awaits):
            summed(total, responses)
        return [pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("SUM", total)])]
"""
)
"""Sums the responses of two calls at once; reads them by a plain `for` within the coroutine."""

ERROR_SOURCE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            code = int(pb_utils.get_input_tensor_by_name(request, "ERROR_CODE").as_numpy()[0])
            error = pb_utils.TritonError(f"an error of code {code}", code)
            responses.append(pb_utils.InferenceResponse(error=error))
        return responses
"""

ERROR_CALLER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            code = pb_utils.get_input_tensor_by_name(request, "ERROR_CODE").as_numpy()
            called = pb_utils.InferenceRequest(
                model_name="error_source",
                requested_output_names=["OUTPUT"],
                inputs=[pb_utils.Tensor("ERROR_CODE", code)],
            ).exec()
            error = called.error()
            received = pb_utils.Tensor("RECEIVED_CODE", np.array([error.code()], dtype=np.int32))
            message = pb_utils.Tensor("ERROR_MESSAGE", np.array([error.message()], dtype=object))
            responses.append(pb_utils.InferenceResponse(output_tensors=[received, message]))
        return responses
"""

NO_BATCHES = AUTO_COMPLETE.replace("set_max_batch_size(4)", "set_max_batch_size(0)").replace(
    "        auto_complete_model_config.set_dynamic_batching()\n", ""
)

RESCHEDULED_ADD_SUB = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.executed = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
            self.executed += 1
            if self.executed == 1:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
                continue
            tensors = [pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
"""
"""Reschedules the first request that it gets, once."""

WRONG_RETURN_TYPE = RESCHEDULED_ADD_SUB.replace("responses.append(None)", "responses.append(pb_utils.Tensor)")

ITERATIVE = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        assert pb_utils.using_decoupled_model_transaction_policy(config)
        assert pb_utils.get_input_config_by_name(config, "IN")["dims"] == [1]
        self.remaining = 0

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if self.remaining == 0:
                self.remaining = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            self.remaining -= 1
            out = pb_utils.Tensor("OUT", np.array([self.remaining], np.int32))
            response = pb_utils.InferenceResponse(output_tensors=[out])
            if self.remaining == 0:
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                sender.send(response)
        return None
"""
"""Sends as many responses as `IN` says, one with each execution; tells by its own state which one it is."""

FINAL_FLAG_FIRST = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([0], np.int32))]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return None
"""
"""Reschedules a request whose final flag it has sent."""

BLS_RESCHEDULING = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


def call(name, outputs, **arrays):
    inputs = [pb_utils.Tensor(key, array) for key, array in arrays.items()]
    return pb_utils.InferenceRequest(model_name=name, inputs=inputs, requested_output_names=outputs)


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            number = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            row = np.arange(4, dtype=np.float32)
            summed = call("rescheduled_add_sub", ["OUTPUT0"], INPUT0=row, INPUT1=row).exec()
            wrong = call("wrong_return_type", ["OUTPUT0"], INPUT0=row, INPUT1=row).exec()
            counted = [
                int(pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()[0])
                for response in call("iterative_sequence", ["OUT"], IN=number).exec(decoupled=True)
                if response.output_tensors()
            ]
            told = {
                "sums": pb_utils.get_output_tensor_by_name(summed, "OUTPUT0").as_numpy().tolist(),
                "counted": counted,
                "wrong": wrong.error().message(),
            }
            text = pb_utils.Tensor("TOLD", np.array([json.dumps(told)], dtype=object))
            responses.append(pb_utils.InferenceResponse(output_tensors=[text]))
        return responses
"""

INSTANCE = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.told = {name: args[f"model_{name}"] for name in ("instance_kind", "instance_device_id", "version", "name")}

    def execute(self, requests):
        responses = []
        for request in requests:
            result = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() * 2
            output = pb_utils.Tensor.from_dlpack("OUTPUT", result)
            told = pb_utils.Tensor("TOLD", np.array([json.dumps(self.told)], dtype=object))
            responses.append(pb_utils.InferenceResponse([output, told]))
        return responses
"""

PREPROCESS = """
import io
import json

import numpy as np
import triton_python_backend_utils as pb_utils

MEAN, DEVIATION = (np.array(values, np.float32) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))


class TritonPythonModel:
    def initialize(self, args):
        config = pb_utils.get_output_config_by_name(json.loads(args["model_config"]), "OUTPUT_0")
        self.dtype = pb_utils.triton_string_to_numpy(config["data_type"])
        self.side = config["dims"][1]

    def execute(self, requests):
        responses = []
        for request in requests:
            file = io.BytesIO(pb_utils.get_input_tensor_by_name(request, "INPUT_0").as_numpy().tobytes())
            assert file.readline() == b"P6\\n"
            width, height = map(int, file.readline().split())
            assert file.readline() == b"255\\n"
            pixels = np.frombuffer(file.read(), np.uint8).reshape(height, width, 3)
            rows, columns = (np.arange(self.side) * size // self.side for size in (height, width))
            image = (pixels[rows][:, columns] / 255 - MEAN) / DEVIATION
            output = pb_utils.Tensor("OUTPUT_0", image.transpose(2, 0, 1)[np.newaxis].astype(self.dtype))
            responses.append(pb_utils.InferenceResponse(output_tensors=[output]))
        return responses
"""
"""Decodes an image (PPM), resizes and normalises it."""

IMAGE_ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input { name: "INPUT" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 3 ] }
ensemble_scheduling {
  step {
    model_name: "preprocess" model_version: -1
    input_map { key: "INPUT_0" value: "INPUT" } output_map { key: "OUTPUT_0" value: "image" }
  }
  step {
    model_name: "colours" model_version: -1
    input_map { key: "image" value: "image" } output_map { key: "scores" value: "OUTPUT" }
  }
}
"""

IN_OUT = (
    'input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }'
)
IN_SUM = IN_OUT.replace('"OUT"', '"SUM"')
ITERATED = "sequence_batching { iterative_sequence: true }"
ERROR_CODE = 'input { name: "ERROR_CODE" data_type: TYPE_INT32 dims: [ 1 ] }'
TOLD = 'output { name: "TOLD" data_type: TYPE_STRING dims: [ 1 ] }'

EXAMPLES = {
    "add_sub": (ADD_SUB, INPUTS + OUTPUTS),
    "pytorch": (ADD_SUB, INPUTS + OUTPUTS),
    "bls_sync": (BLS_SYNC, INPUTS + MODEL_NAME + OUTPUTS),
    "bls_async": (BLS_ASYNC, INPUTS + OUTPUTS),
    "square_int32": (SQUARE, IN_OUT + DECOUPLED),
    "bls_decoupled_sync": (BLS_DECOUPLED_SYNC, IN_SUM),
    "bls_decoupled_async": (BLS_DECOUPLED_ASYNC, IN_SUM),
    "error_source": (ERROR_SOURCE, ERROR_CODE + 'output { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] }'),
    "error_caller": (
        ERROR_CALLER,
        ERROR_CODE
        + """
output { name: "RECEIVED_CODE" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "ERROR_MESSAGE" data_type: TYPE_STRING dims: [ 1 ] }
""",
    ),
    "batch_auto_complete": (AUTO_COMPLETE, ""),
    "nobatch_auto_complete": (NO_BATCHES, ""),
    "custom_metrics": (CUSTOM_METRICS, INPUTS + OUTPUTS),
    "rescheduled_add_sub": (RESCHEDULED_ADD_SUB, INPUTS + OUTPUTS + ITERATED),
    "wrong_return_type": (WRONG_RETURN_TYPE, INPUTS + OUTPUTS + ITERATED),
    "iterative_sequence": (ITERATIVE, IN_OUT + DECOUPLED + ITERATED),
    "final_flag_first": (FINAL_FLAG_FIRST, IN_OUT + DECOUPLED + ITERATED),
    "bls_rescheduling": (BLS_RESCHEDULING, 'input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }' + TOLD),
    "instance_kind": (
        INSTANCE,
        """
max_batch_size: 0
input { name: "INPUT" data_type: TYPE_FP32 dims: [ 4 ] } output { name: "OUTPUT" data_type: TYPE_FP32 dims: [ 4 ] }
instance_group [ { kind: KIND_CPU } ]
"""
        + TOLD,
    ),
    "preprocess": (
        PREPROCESS,
        """
max_batch_size: 8
input { name: "INPUT_0" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "OUTPUT_0" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] }
""",
    ),
}
"""Code and configuration of each by its name; without a configuration there is no file."""


def write_examples(repository: Path) -> None:
    """Writes all of them, and `ensemble_python_colours`, whose first step is `preprocess`."""
    for name, (code, text) in EXAMPLES.items():
        directory = repository / name / "1"
        directory.mkdir(parents=True)
        (directory / "model.py").write_text(code)
        if text:
            (directory.parent / "config.pbtxt").write_text(f'backend: "python" {text}')
    nodes = [
        helper.make_node("GlobalAveragePool", ["image"], ["means"]),
        helper.make_node("Flatten", ["means"], ["scores"]),
    ]
    models.write(repository, "colours", nodes, [("image", "FP32", (3, 8, 8))], [("scores", "FP32", (3,))])
    (repository / "ensemble_python_colours" / "1").mkdir(parents=True)
    (repository / "ensemble_python_colours" / "config.pbtxt").write_text(IMAGE_ENSEMBLE)
