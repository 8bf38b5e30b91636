"""The model of a host process that runs a function, without the process."""

from typing import Any

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


def executed(name: str, titles: list[list[bytes]], stars: list[int] | None = None) -> Any:
    """Returns the outputs of requests with such titles, or of each one its output, or its error."""
    titled = np.array([[title] for of_one in titles for title in of_one], object)
    inputs = {"title" if name == "rate" else "text": titled}
    inputs |= {} if stars is None else {"stars": np.array(stars).reshape(-1, 1)}
    found = hosted(name).execute_rows(
        inputs, [len(of_one) for of_one in titles], [str(at) for at in range(len(titles))]
    )
    if found is None:
        return None
    if isinstance(found, list):
        return [
            str(e) if (e := one.error()) else [t.as_numpy().tolist() for t in one.output_tensors()] for one in found
        ]
    return {name: array.tolist() for name, array in found.items()}


def test_a_batch_is_executed_as_a_whole() -> None:
    assert executed("rate", [[b"a"], [b"b", b"c"]]) == {"label": [[b"A"], [b"B"], [b"C"]], "score": [[1.5]] * 3}
    assert executed("rate", [[b"a"], [b"b"]], [1, 2]) == {"label": [[b"A"], [b"B"]], "score": [[0.5], [1.0]]}
    assert executed("Embed", [[b"a", b"ba"], [b""]]) == {"embedding": [[1, 1], [2, 1], [0, 0]]}


def test_in_a_batch_each_request_has_its_own_error() -> None:
    assert executed("rate", [[b"a"], [b"b", b"bad"], [b"c"]]) == [
        [[[b"A"]], [[1.5]]],
        "ValueError: no bad titles",
        [[[b"C"]], [[1.5]]],
    ]


def test_a_batch_with_a_wrong_input_is_not_executed_as_a_whole() -> None:
    model, texts = hosted("Embed"), np.array([[b"a"], [b"\xff"], [b"c"]], object)
    requests = [InferenceRequest("", 0, [Tensor("text", texts[at : at + 1])], [], "embed") for at in range(3)]

    assert executed("Embed", [[b"a"], [b"\xff"]]) is None
    first, wrong, third = model.execute(requests)
    assert "not UTF-8" in str(wrong.error())
    assert [one.output_tensors()[0].as_numpy().tolist() for one in (first, third)] == [[[1, 1]], [[1, 0]]]


def test_states_of_sequences_that_never_end_are_limited() -> None:
    model = hosted("total")
    kept = STATES_OF_A_SLOT * read_function(functions_app.total).options.max_batch_size

    for sequence in range(1, kept + 1):
        total(model, sequence, sequence, TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
    assert total(model, 1, 5) == 6
    total(model, kept + 1, 1, TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)

    assert total(model, 1, 0, TRITONSERVER_REQUEST_FLAG_SEQUENCE_END) == 6
    assert [total(model, sequence, 0) for sequence in (1, 3, 2)] == [0, 3, 0]
