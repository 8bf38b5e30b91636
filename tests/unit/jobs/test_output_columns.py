"""A model's outputs become columns: in the inputs' row order, with nulls where a row failed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from qinfer.errors import InvalidRequest, OutputMismatch
from qinfer.jobs.job import Output
from qinfer.jobs.outputs import OutputColumns, ScoredRows
from qinfer.models.spec import TensorSpec
from qinfer.tabular.batches import Array, RowBatch, RowErrors, Segment
from qinfer.tabular.schemas import list_type
from qinfer.tensors import Tensor, from_numpy
from tests.support.jobs.bulk_data import job_of, model_of, tensor

URLS = ("s3://bucket/a.parquet", "s3://bucket/b.parquet")
X = tensor("x", "FP32", 1)
LAST = ["_file", "_row_group", "_row", "error_code", "error_message"]


def batch_of(rows: int, **columns: Any) -> RowBatch:
    record = pa.record_batch({"x": pa.array(np.arange(rows, dtype=np.float32)), **columns})
    return RowBatch(record, (Segment(URLS[0], 3, 100, rows),))


def columns_of(batch: RowBatch, *outputs: TensorSpec, **job: Any) -> OutputColumns:
    binary = job.pop("binary", "")
    model = model_of([X], outputs, qinfer__binary_outputs=binary)
    return OutputColumns(job_of(**job), model, batch.record.schema, URLS)


def encode(output: TensorSpec, array: Array | Tensor, **job: Any) -> pa.Array:
    """Encodes one output of as many rows as it has."""
    batch = batch_of(array.shape[0])
    columns = columns_of(batch, output, **job)
    record = columns.encode(batch, [ScoredRows(None, {output.name: array})], RowErrors(array.shape[0]))
    assert record.schema.equals(columns.schema)
    record.validate(full=True)
    return record.column(output.name)


def test_the_place_of_each_row_is_told() -> None:
    record = pa.record_batch({"x": pa.array([1.0, 2.0, 3.0], pa.float32())})
    batch = RowBatch(record, (Segment(URLS[0], 1, 7, 1), Segment(URLS[1], 0, 0, 2)))
    columns = columns_of(batch, tensor("y", "FP32", 1))

    found = columns.encode(batch, [ScoredRows(None, {"y": np.array([[1], [2], [3]], np.float32)})], RowErrors(3))

    assert found.schema.names == ["y", *LAST]
    assert found.schema.equals(columns.schema)
    assert found.to_pydict() == {
        "y": [1.0, 2.0, 3.0],
        "_file": [URLS[0], URLS[1], URLS[1]],
        "_row_group": [1, 0, 0],
        "_row": [7, 0, 1],
        "error_code": [None] * 3,
        "error_message": [None] * 3,
    }


def test_a_key_is_copied_in_place_of_the_row_numbers() -> None:
    batch = batch_of(2, id=pa.array(["p", "q"]), other=pa.array([1, 2]))
    columns = columns_of(batch, tensor("y", "FP32", 1), key="id")

    found = columns.encode(batch, [ScoredRows(None, {"y": np.zeros((2, 1), np.float32)})], RowErrors(2))

    assert found.schema.names == ["y", "id", "error_code", "error_message"]
    assert found.column("id").to_pylist() == ["p", "q"]
    assert columns.copied == ("id",)


def test_columns_are_passed_through_but_the_excluded() -> None:
    batch = batch_of(1, a=pa.array([1]), b=pa.array([2]), c=pa.array(["u"]).dictionary_encode())
    columns = columns_of(batch, tensor("y", "FP32", 1), passthrough=("*",), exclude=("b", "c"), key="a")

    assert columns.schema.names == ["y", "x", "a", "error_code", "error_message"]
    kinds = columns_of(batch, passthrough=("c",)).schema
    assert kinds.field("c").type == pa.string()


@pytest.mark.parametrize(
    ("datatype", "kind"),
    [
        ("FP32", pa.float32()),
        ("FP64", pa.float64()),
        ("FP16", pa.float16()),
        ("INT64", pa.int64()),
        ("UINT8", pa.uint8()),
        ("BOOL", pa.bool_()),
    ],
)
def test_a_tensor_becomes_the_column_of_its_shape(datatype: str, kind: pa.DataType) -> None:
    array = np.array([[[0, 1], [1, 0], [1, 1]], [[1, 1], [0, 0], [0, 1]]]).astype(from_dtype(kind))

    plain = encode(tensor("y", datatype), array[:, 0, 0])
    vector = encode(tensor("y", datatype, 2), array[:, 0])
    matrix = encode(tensor("y", datatype, 3, 2), array)

    inner = pa.list_(pa.field("element", kind, nullable=False), 2)
    assert plain.type == kind
    assert plain.to_pylist() == array[:, 0, 0].tolist()
    assert vector.type == inner
    assert vector.to_pylist() == array[:, 0].tolist()
    assert matrix.type == pa.list_(pa.field("element", inner, nullable=False), 3)
    assert matrix.to_pylist() == array.tolist()


def from_dtype(kind: pa.DataType) -> Any:
    return kind.to_pandas_dtype()


def test_one_element_a_row_is_a_plain_column() -> None:
    assert encode(tensor("y", "FP32", 1), np.array([[1.5], [2.5]], np.float32)).to_pylist() == [1.5, 2.5]
    assert encode(tensor("y", "INT32", 1, 1), np.array([[[3]]], np.int32)).to_pylist() == [3]


def test_values_are_not_copied() -> None:
    array = np.arange(8, dtype=np.float32).reshape(2, 4)

    column = encode(tensor("y", "FP32", 4), array)

    assert column.values.buffers()[1].address == array.ctypes.data


def test_bf16_becomes_floats() -> None:
    column = encode(tensor("y", "BF16", 2), from_numpy("y", np.array([[1.5, 2.0]], np.float32), "BF16"))

    assert column.to_pylist() == [[1.5, 2.0]]
    assert column.type.value_type == pa.float32()


def test_a_variable_dimension_becomes_lists_of_any_size() -> None:
    batch = batch_of(3)
    columns = columns_of(batch, tensor("y", "INT64", -1, 2))
    scored = [
        ScoredRows(np.array([0, 2]), {"y": np.arange(4).reshape(2, 1, 2)}),
        ScoredRows(np.array([1]), {"y": np.arange(4).reshape(1, 2, 2)}),
    ]

    found = columns.encode(batch, scored, RowErrors(3))

    assert pa.types.is_list(columns.schema.field("y").type)
    assert found.column("y").to_pylist() == [[[0, 1]], [[0, 1], [2, 3]], [[2, 3]]]


@pytest.mark.parametrize("kind", [bytes, str])
def test_texts_become_strings(kind: type) -> None:
    values = ["é", "", "b"] if kind is str else ["é".encode(), b"", b"b"]
    array = np.array(values, dtype=object).reshape(3, 1)

    assert encode(tensor("y", "BYTES", 1), array).to_pylist() == ["é", "", "b"]
    assert encode(tensor("y", "BYTES", 1), from_numpy("y", array)).to_pylist() == ["é", "", "b"]
    assert encode(tensor("y", "BYTES", 1), array, binary="z, y").to_pylist() == ["é".encode(), b"", b"b"]


def test_bytes_that_are_no_text_are_their_rows_error() -> None:
    batch = batch_of(4)
    columns = columns_of(batch, tensor("y", "BYTES", 2))
    array = np.array([[b"a", b"b"], [b"\xff", b"c"], [b"d", "\ufffd".encode()]], dtype=object)
    errors = RowErrors(4)

    found = columns.encode(batch, [ScoredRows(np.array([0, 2, 3]), {"y": array})], errors)

    assert found.column("y").to_pylist() == [["a", "b"], None, None, ["d", "\ufffd"]]
    assert found.column("error_code").to_pylist() == [None, None, "output_mismatch", None]
    assert "'qinfer.binary_outputs'" in found.column("error_message")[2].as_py()
    found.validate(full=True)


@pytest.mark.parametrize("dims", [(), (3,), (2, 2), (-1,)])
@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BOOL", "BYTES"])
def test_failed_rows_have_nulls(dims: tuple[int, ...], datatype: str) -> None:
    batch = batch_of(4)
    shape = tuple(2 if dim == -1 else dim for dim in dims)
    columns = columns_of(batch, tensor("y", datatype, *dims), tensor("z", "INT64", 1))
    dtype = {"FP32": np.float32, "FP16": np.float16, "BOOL": np.bool_, "BYTES": object}[datatype]
    fill = b"v" if datatype == "BYTES" else 1
    errors = RowErrors(4)
    errors.mark(np.array([False, True, False, False]), "invalid_request", "column 'x' is null")
    errors.mark(np.array([1, 3]), "execution_failed", "the model failed")
    outputs = {"y": np.full((2, *shape), fill, dtype), "z": np.array([[7], [8]])}

    found = columns.encode(batch, [ScoredRows(np.array([0, 2]), outputs)], errors)

    found.validate(full=True)
    assert found.column("y").is_null().to_pylist() == [False, True, False, True]
    assert found.column("z").to_pylist() == [7, None, 8, None]
    assert found.column("_row").to_pylist() == [100, 101, 102, 103]
    assert found.column("error_code").to_pylist() == [None, "invalid_request", None, "execution_failed"]
    assert found.column("error_message").to_pylist() == [None, "column 'x' is null", None, "the model failed"]


def test_a_batch_without_any_output_is_all_nulls() -> None:
    batch = batch_of(2)
    columns = columns_of(batch, tensor("y", "FP32", 3))
    errors = RowErrors(2)
    errors.mark(np.array([0, 1]), "invalid_request", "bad")

    found = columns.encode(batch, [], errors)

    assert found.column("y").null_count == 2
    assert found.schema.equals(columns.schema)


def test_an_output_of_a_row_that_failed_later_is_not_told() -> None:
    batch = batch_of(2)
    columns = columns_of(batch, tensor("y", "FP32", 1))
    errors = RowErrors(2)
    errors.mark(np.array([1]), "execution_failed", "late")

    found = columns.encode(batch, [ScoredRows(None, {"y": np.ones((2, 1), np.float32)})], errors)

    assert found.column("y").to_pylist() == [1.0, None]


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((3, 2), np.float32), r"shape \[3, 2\] for 2 rows of \[2\]"),
        (np.zeros((2, 3), np.float32), r"shape \[2, 3\]"),
        (np.zeros(2, np.float32), r"shape \[2\]"),
        (np.zeros((2, 2), np.float64), "array of float64, not of FP32"),
        (None, "no output 'y'"),
    ],
)
def test_an_output_that_is_not_the_configurations_is_refused(array: Any, text: str) -> None:
    batch = batch_of(2)
    columns = columns_of(batch, tensor("y", "FP32", 2))

    with pytest.raises(OutputMismatch, match=text):
        columns.encode(batch, [ScoredRows(None, {} if array is None else {"y": array})], RowErrors(2))


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'x'"):
        columns_of(batch_of(1), tensor("y", "FP32", 1), passthrough=("*",), output=named("x"))


def test_an_output_is_named_as_the_job_says() -> None:
    assert columns_of(batch_of(1), tensor("y", "FP32", 1), output=named("score")).schema.names == ["score", *LAST]


def named(name: str) -> Output:
    return Output(url="file:///out", columns={"y": name})


PROBABILITIES = tensor("p", "FP32", 4, labels=("cat", "", "dog"))


def test_only_chosen_outputs_are_columns() -> None:
    batch = batch_of(1)
    outputs = (tensor("y", "FP32", 1), tensor("z", "FP32", 1))
    columns = columns_of(batch, *outputs, output=Output("file:///out", tensors=("z",)))

    found = columns.encode(batch, [ScoredRows(None, {"z": np.ones((1, 1), np.float32)})], RowErrors(1))

    assert found.schema.names == ["z", *LAST]


def ranked(array: Array, output: TensorSpec = PROBABILITIES, count: int = 1, **names: str) -> pa.RecordBatch:
    batch = batch_of(len(array))
    columns = columns_of(batch, output, output=Output("file:///out", top_k={"p": count}, columns=names))
    found = columns.encode(batch, [ScoredRows(None, {"p": array})], RowErrors(len(array)))
    assert found.schema.equals(columns.schema)
    found.validate(full=True)
    return found


def test_the_greatest_element_is_three_plain_columns() -> None:
    """Ties go to the lower index, NaN is last, and a class without a label has none."""
    array = np.array([[0.1, 0.2, 0.7, 0], [0, 1, 1, 0], [np.nan, 0, 0, 2], [3, np.nan, 0, 0]], np.float32)

    found = ranked(array)

    assert found.select(["p_label", "p_index", "p_score"]).to_pydict() == {
        "p_label": ["dog", None, None, "cat"],
        "p_index": [2, 1, 3, 0],
        "p_score": [np.float32(0.7), 1.0, 2.0, 3.0],
    }
    assert "p" not in found.schema.names


def test_the_greatest_elements_are_lists_under_the_column_of_the_output() -> None:
    found = ranked(np.array([[1, 4, 3, 2], [4, 4, 0, 0]], np.float32), count=3, p="class")

    assert found.select(["class_label", "class_index", "class_score"]).to_pydict() == {
        "class_label": [[None, "dog", None], ["cat", None, "dog"]],
        "class_index": [[1, 2, 3], [0, 1, 2]],
        "class_score": [[4, 3, 2], [4, 4, 0]],
    }


def test_an_output_without_labels_has_no_column_of_them() -> None:
    found = ranked(np.array([[[1, 4], [3, 2]]], np.int8), tensor("p", "INT8", 2, 2))

    assert found.schema.names == ["p_index", "p_score", *LAST]
    assert found.column("p_index").to_pylist() == [1]


@pytest.mark.parametrize("count", [1, 2])
def test_rows_with_fewer_elements_have_fewer_ranked(count: int) -> None:
    """Of a variable dimension, down to none."""
    output = tensor("p", "FP32", -1)

    none = ranked(np.zeros((2, 0), np.float32), output, count)
    one = ranked(np.ones((2, 1), np.float32), output, count)

    expected: Any = ([None, None], [0, 0]) if count == 1 else ([[], []], [[0], [0]])
    assert (none.column("p_index").to_pylist(), one.column("p_index").to_pylist()) == expected


def test_failed_rows_have_no_greatest_element() -> None:
    batch = batch_of(2)
    columns = columns_of(batch, PROBABILITIES, output=Output("file:///out", top_k={"p": 2}))
    errors = RowErrors(2)
    errors.mark(np.array([0]), "invalid_request", "no")

    found = columns.encode(batch, [ScoredRows(np.array([1]), {"p": np.eye(1, 4, dtype=np.float32)})], errors)

    assert found.column("p_index").to_pylist() == [None, [0, 1]]
    assert found.column("p_label").to_pylist() == [None, ["cat", None]]
    assert columns.encode(batch, [], errors).column("p_score").null_count == 2


def listed(output: TensorSpec, *rows: Sequence[Any], binary: str = "") -> tuple[pa.Array, RowErrors]:
    """Encodes one output of a decoupled model, of rows with the responses given."""
    batch, errors = batch_of(len(rows)), RowErrors(len(rows))
    model = replace(model_of([X], [output], qinfer__binary_outputs=binary), decoupled=True)
    columns = OutputColumns(job_of(), model, batch.record.schema, URLS)
    kind = object if output.datatype == "BYTES" else np.float32
    array = np.empty(len(rows), object)
    for number, row in enumerate(rows):
        array[number] = tuple(np.array(response, kind) for response in row)
    record = columns.encode(batch, [ScoredRows(None, {output.name: array})], errors)
    assert record.schema.equals(columns.schema)
    record.validate(full=True)
    return record.column(output.name), errors


@pytest.mark.parametrize(
    ("dims", "kind", "rows"),
    [
        ((1,), pa.float32(), [[[1]], [], [[2], [3]]]),
        ((2,), list_type(pa.float32(), 2), [[], [[1, 2], [3, 4]], [[5, 6]]]),
        ((-1,), list_type(pa.float32(), -1), [[[1], [2, 3], []], [[4]], []]),
        ((-1,), list_type(pa.float32(), -1), [[], []]),
    ],
)
def test_a_row_of_a_decoupled_model_is_the_list_of_its_responses(
    dims: tuple[int, ...], kind: pa.DataType, rows: list[Any]
) -> None:
    """None, one or many, each as the one of another model would be; of one shape or several."""
    column, errors = listed(tensor("y", "FP32", *dims), *rows)

    expected = [[response[0] for response in row] for row in rows] if dims == (1,) else rows
    assert (column.type, column.to_pylist()) == (list_type(kind, -1), expected)
    assert not errors.count


def test_a_response_that_is_no_text_is_the_error_of_its_row() -> None:
    column, errors = listed(tensor("y", "BYTES", 1), [[b"a"], [b"b"]], [[b"c"], [b"\xff"]], [[b"d"]])
    raw, _ = listed(tensor("y", "BYTES", 1), [[b"\xff"]], binary="y")

    assert column.to_pylist() == [["a", "b"], None, ["d"]]
    assert errors.count == 1
    assert raw.to_pylist() == [[b"\xff"]]


def test_rows_of_a_decoupled_model_that_failed_are_null() -> None:
    """Not an empty list, which is no response."""
    batch, errors = batch_of(3), RowErrors(3)
    model = replace(model_of([X], [tensor("y", "FP32", 1)]), decoupled=True)
    columns = OutputColumns(job_of(), model, batch.record.schema, URLS)
    errors.mark(np.array([1]), "execution_failed", "no")
    array = np.empty(2, object)
    array[0], array[1] = (), (np.ones(1, np.float32),)

    found = columns.encode(batch, [ScoredRows(np.array([2, 0]), {"y": array})], errors)

    assert found.column("y").to_pylist() == [[1.0], None, []]


def test_the_greatest_elements_of_a_decoupled_model_are_refused() -> None:
    model = replace(model_of([X], [PROBABILITIES]), decoupled=True)
    job = job_of(output=Output("file:///out", top_k={"p": 1}))
    with pytest.raises(InvalidRequest, match=r"'p' of 'm', which is decoupled: .*leave it out of 'output.top_k'"):
        OutputColumns(job, model, batch_of(1).record.schema, URLS)
