"""`qinfer.call`: a served function calls another model."""

import sys
from typing import Any

import numpy as np

from qinfer.errors import InferenceFailed
from qinfer.functions.values import Array
from qinfer.tensors import from_numpy


def call(model: str, /, **inputs: Any) -> dict[str, Array]:
    """Runs another model of the server from within a served function, and waits for its only response.

    In an `async` function, `await asyncio.to_thread(qinfer.call, "iris", x=x)` lets other calls run meanwhile.

    Args:
        model: The name of the model, or of an endpoint.
        **inputs: Arrays with the batch dimension, if the model has one, in the model's datatypes; lists become arrays.

    Returns:
        The outputs by name; BYTES are arrays of `bytes`.

    Raises:
        InferenceFailed: The model answered with an error, or this is a process of Triton.
        TritonModelException: No worker has started this process for a model, as in a unit test.
        UnsupportedDatatype: An input is no array of a datatype of tensors.
    """
    if "c_python_backend_utils" in sys.builtin_module_names:
        raise InferenceFailed(
            f"qinfer.call can't run model '{model}' in Triton, which must be told the outputs; write "
            "triton_python_backend_utils.InferenceRequest(…).exec()"
        )
    from qinfer.backends.python_host.inference import InferenceRequest
    from qinfer.backends.python_host.responses import InferenceResponse
    from qinfer.backends.python_host.tensor import Tensor

    tensors = []
    for name, value in inputs.items():
        array = np.asarray(value)
        array = array.astype(object) if array.dtype.kind in "US" else array
        from_numpy(name, array[:0] if array.ndim else array)  # refuses other datatypes
        tensors.append(Tensor(name, array))
    response = InferenceRequest(inputs=tensors, requested_output_names=[], model_name=model).exec()
    assert isinstance(response, InferenceResponse), "no stream was asked for"
    if (error := response.error()) is not None:
        raise InferenceFailed(f"model '{model}': {error.message()}")
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
