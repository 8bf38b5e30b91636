"""The messages that `benchmarks.bridge` sends: rows for the model `tiny` in every form."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from benchmarks.models import MODELS

MODEL = MODELS["tiny"]
COLUMNS = [f"c{number}" for number in range(16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of message.

    Attributes:
        name: Its name in tables and options.
        rows: Rows of a message.
        content_type: Its content type.
        body: It.
        options: The route's `body`.
    """

    name: str
    rows: int
    content_type: str
    body: bytes
    options: Mapping[str, Any] = field(default_factory=dict)


def cases() -> dict[str, Case]:
    """Returns all kinds of messages by name."""
    return {case.name: case for case in (_json(1), _json(32), _raw(), _lines(1), _lines(32), _arrow(32))}


def _json(rows: int) -> Case:
    example = MODEL.example(rows)
    data = [float(str(value)) for value in example.ravel()]
    tensor = {"name": "x", "shape": list(example.shape), "datatype": "FP32", "data": data}
    body = json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()
    return Case(name=f"JSON, {_rows(rows)}", rows=rows, content_type="application/json", body=body)


def _raw() -> Case:
    body = MODEL.example().tobytes()
    return Case(name="raw, 1 row", rows=1, content_type="application/octet-stream", body=body, options={"input": "x"})


def _records(rows: int) -> list[dict[str, float]]:
    return [dict(zip(COLUMNS, (float(str(value)) for value in row), strict=True)) for row in MODEL.example(rows)]


def _lines(rows: int) -> Case:
    body = "\n".join(json.dumps(record, separators=(",", ":")) for record in _records(rows)).encode()
    options = {"columns": {"x": COLUMNS}}
    return Case(
        name=f"JSON lines, {_rows(rows)}", rows=rows, content_type="application/x-ndjson", body=body, options=options
    )


def _arrow(rows: int) -> Case:
    table = pa.Table.from_pylist(_records(rows))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return Case(
        name=f"Arrow, {_rows(rows)}",
        rows=rows,
        content_type="application/vnd.apache.arrow.stream",
        body=bytes(sink.getvalue()),
        options={"columns": {"x": COLUMNS}},
    )


def _rows(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"
