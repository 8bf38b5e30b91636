"""The part of a model's configuration that is about ragged batches: `batch_input` and `batch_output`, as specs.

What they mean is Triton's: docs/user_guide/ragged_batching.md of its server, `BatchInput` and `BatchOutput` of its
`model_config.proto`. `qinfer/backends/ragged.py` does it.
"""

from enum import StrEnum
from typing import NamedTuple


class BatchInputKind(StrEnum):
    """Kinds of batch inputs, which tell a model the shapes or sizes of a batch's requests (`model_config.proto`)."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


class BatchInputSpec(NamedTuple):
    """An input of the model file that the server makes of the shapes of a batch's requests.

    Attributes:
        kind: What it tells.
        name: The model file's input.
        datatype: `INT32` or `FP32`.
        source: The input of requests that it tells about.
        rank: How many dimensions that has without the batch dimension.
    """

    kind: BatchInputKind
    name: str
    datatype: str
    source: str
    rank: int


class BatchOutputSpec(NamedTuple):
    """An output that the model gives as one dimension, and that is cut by the shapes of an input.

    Attributes:
        name: The output.
        dims: Its dimensions with the batch dimension; one of -1 is as long as the same dimension of the source.
        source: The input of requests that tells.
    """

    name: str
    dims: tuple[int, ...]
    source: str
