"""The `body` part of a route: how message bodies become requests, and what form replies have."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from qinfer.errors import InvalidRequest
from qinfer.jobs.job import Columns, JobSpec, Output, check_spec

ReplyForm = Literal["same", "kserve", "jsonl", "arrow"]
"""`same` = as the request: rows for rows, Arrow for Arrow, KServe for all else."""


class InputMap(BaseModel):
    """The columns that one input tensor is made of, and the shape of a row.

    Attributes:
        columns: One column, or several scalar columns that become the elements of a row in this order.
        shape: The shape of one row, without the batch dimension; empty = the tensor's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    columns: tuple[str, ...]
    shape: tuple[int, ...] = ()


class BodyOptions(BaseModel):
    """How the bodies of a route's messages are read, and its replies written.

    Attributes:
        input: The input that raw bodies are for; empty = the model's only one of BYTES or UINT8.
        columns: Input → its column, its scalar columns, or columns and shape, for JSON lines and Arrow; default: the
            column of the input's name. As in bulk jobs.
        reply: The form of replies.
        content_type: What messages are that have no content type; empty = KServe JSON where they begin with `{`, raw
            otherwise.
        max_bytes: Larger bodies are refused, and those that are larger when they are unpacked.
        max_json_depth: Deepest JSON nesting.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: str = ""
    columns: Mapping[str, str | tuple[str, ...] | InputMap] = Field(default_factory=dict)
    reply: ReplyForm = "same"
    content_type: str = ""
    max_bytes: int = Field(64 * 2**20, gt=0, le=2**31)
    max_json_depth: int = Field(100, gt=0, le=1000)

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            check_spec(_job("model", columns))
        except InvalidRequest as error:
            raise ValueError(error.message) from None
        return columns

    def job(self, model: str) -> JobSpec:
        """Returns the bulk job that would read the same columns."""
        return _job(model, self.columns)


def _job(model: str, columns: Mapping[str, str | tuple[str, ...] | InputMap]) -> JobSpec:
    given = {
        tensor: Columns(value.columns, value.shape) if isinstance(value, InputMap) else value
        for tensor, value in columns.items()
    }
    return JobSpec(model=model, inputs=("message",), output=Output(url="reply"), columns=given)
