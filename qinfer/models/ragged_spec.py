"""`batch_input` and `batch_output` of a model's configuration, as specs.

The semantics are Triton's: docs/user_guide/ragged_batching.md of its server, and `model_config.proto`.
"""

from enum import StrEnum
from typing import NamedTuple


class BatchInputKind(StrEnum):
    """Kinds of batch inputs (`model_config.proto`)."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


class BatchInputSpec(NamedTuple):
    """An input of the model file that the server makes from the shapes of the input `source`.

    `rank` has no batch dimension.
    """

    kind: BatchInputKind
    name: str
    datatype: str
    source: str
    rank: int


class BatchOutputSpec(NamedTuple):
    """An output of one dimension that is cut by the shapes of the input `source`; -1 in `dims` = as there."""

    name: str
    dims: tuple[int, ...]
    source: str
