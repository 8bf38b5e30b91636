"""The model of a host process that runs a function, without the process."""

import numpy as np

from qinfer.backends.python_host.inference import InferenceRequest
from qinfer.backends.python_host.utils import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    Tensor,
)
from qinfer.functions.hints import read_function
from qinfer.functions.hosted import STATES_OF_A_SLOT, Hosted, serves
from tests.support import functions_app


def hosted(name: str) -> Hosted:
    model = serves(functions_app.__file__, name, "")()
    model.initialize({"model_instance_kind": "CPU", "model_instance_device_id": "0"})
    return model


def total(model: Hosted, sequence: int, number: int, flags: int = 0) -> int:
    tensor = Tensor("number", np.array([[number]]))
    request = InferenceRequest("", sequence, [tensor], [], "total", flags=flags)
    (response,) = model.execute([request])
    return int(response.output_tensors()[0].as_numpy().item())


def test_states_of_sequences_that_never_end_are_limited() -> None:
    model = hosted("total")
    kept = STATES_OF_A_SLOT * read_function(functions_app.total).options.max_batch_size

    for sequence in range(1, kept + 1):
        total(model, sequence, sequence, TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
    assert total(model, 1, 5) == 6
    total(model, kept + 1, 1, TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)

    assert total(model, 1, 0, TRITONSERVER_REQUEST_FLAG_SEQUENCE_END) == 6
    assert [total(model, sequence, 0) for sequence in (1, 3, 2)] == [0, 3, 0]
