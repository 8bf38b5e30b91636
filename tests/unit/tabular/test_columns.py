"""Arrow columns become the tensors of a model, and rows of which none can be made become errors."""

import re
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qinfer.errors import InvalidRequest
from qinfer.models.spec import TensorSpec
from qinfer.tabular.inputs import DecodedBatch, InputColumns
from qinfer.tabular.spec import Columns
from tests.support.jobs.bulk_data import job_of, model_of, tensor

FLOATS = pa.array([0.5, 1.5, -2.0], pa.float32())
REMEDY = "; 'null' of its input can give it a value"


def beyond(column: str, value: float, datatype: str) -> str:
    return (
        f"column '{column}' has the value {value}, which {datatype} can't hold; convert the column in the inputs, "
        "or map it to another input"
    )


def decode(record: pa.RecordBatch, inputs: list[TensorSpec], columns: dict[str, Any] | None = None) -> DecodedBatch:
    return InputColumns(job_of(columns), model_of(inputs), record.schema).decode(record)


def only(record: pa.RecordBatch, spec: TensorSpec, column: Any = None) -> np.ndarray[Any, Any]:
    """Returns the array of the one input of a batch without errors."""
    decoded = decode(record, [spec], {} if column is None else {spec.name: column})
    assert decoded.errors.count == 0
    (piece,) = decoded.pieces
    assert piece.rows is None
    assert piece.count == record.num_rows
    return piece.inputs[spec.name]


def messages(decoded: DecodedBatch) -> list[str | None]:
    codes, texts = decoded.errors.columns()
    assert [code is None for code in codes.to_pylist()] == [text is None for text in texts.to_pylist()]
    assert set(codes.to_pylist()) <= {None, "invalid_request"}
    found: list[str | None] = texts.to_pylist()
    return found


def good_rows(decoded: DecodedBatch) -> list[int]:
    (piece,) = decoded.pieces
    assert piece.rows is not None
    rows: list[int] = piece.rows.tolist()
    return rows


def test_a_column_of_the_same_type_is_not_copied() -> None:
    record = pa.record_batch({"x": FLOATS})

    array = only(record, tensor("x", "FP32", 1))

    assert array.shape == (3, 1)
    assert array.ctypes.data == record.column("x").buffers()[1].address


def test_several_columns_become_the_elements_of_a_row_in_their_order() -> None:
    record = pa.record_batch({"a": FLOATS, "b": pa.array([1, 2, 3], pa.int64()), "c": pa.array([True, False, True])})

    array = only(record, tensor("x", "FP32", 3), ("c", "a", "b"))

    assert array.tolist() == [[1.0, 0.5, 1.0], [0.0, 1.5, 2.0], [1.0, -2.0, 3.0]]
    assert array.dtype == np.float32


def test_several_columns_fill_a_shape_in_row_major_order() -> None:
    record = pa.record_batch({name: pa.array([ord(name)], pa.uint8()) for name in "abcd"})

    assert only(record, tensor("x", "UINT8", 2, 2), tuple("abcd")).tolist() == [[[97, 98], [99, 100]]]
    assert only(record, tensor("x", "UINT8", 2, -1), tuple("abcd")).shape == (1, 2, 2)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 2), pa.list_view(pa.float32())]
)
def test_lists_of_every_kind_become_vectors(kind: pa.DataType) -> None:
    record = pa.record_batch({"x": pa.array([[9, 9], [1, 2], [3, 4]], kind)}).slice(1)

    assert only(record, tensor("x", "FP32", 2)).tolist() == [[1, 2], [3, 4]]


def test_a_fixed_size_list_is_not_copied() -> None:
    column = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(8, dtype=np.float32)), 4)

    array = only(pa.record_batch({"x": column}), tensor("x", "FP32", 4))

    assert array.ctypes.data == column.values.buffers()[1].address


def test_nested_and_flat_lists_fill_a_shape() -> None:
    nested = pa.array([[[1, 2, 3], [4, 5, 6]]], pa.list_(pa.list_(pa.int32(), 3)))
    flat = pa.array([[1, 2, 3, 4, 5, 6]], pa.list_(pa.int32()))

    for column in (nested, flat):
        assert only(pa.record_batch({"x": column}), tensor("x", "INT64", 2, 3)).tolist() == [[[1, 2, 3], [4, 5, 6]]]


def test_the_job_may_fix_a_variable_dimension() -> None:
    record = pa.record_batch({"x": pa.array([[1.0] * 6, [2.0] * 5])})

    decoded = decode(record, [tensor("x", "FP64", -1, -1)], {"x": Columns(("x",), (2, 3))})

    assert decoded.pieces[0].inputs["x"].shape == (1, 2, 3)
    assert messages(decoded) == [None, "column 'x' has a list of 5, not 6"]


def test_one_dimension_of_a_flat_list_may_differ_from_row_to_row() -> None:
    record = pa.record_batch({"x": pa.array([[1.0] * 6, [2.0] * 3, [3.0] * 5, [4.0] * 6])})

    decoded = decode(record, [tensor("x", "FP64", -1, -1)], {"x": Columns(("x",), (-1, 3))})

    shapes = {tuple(piece.rows.tolist()): piece.inputs["x"].shape for piece in decoded.pieces if piece.rows is not None}
    assert shapes == {(0, 3): (2, 2, 3), (1,): (1, 1, 3)}
    assert messages(decoded) == [None, None, "column 'x' has a list of 5, not a multiple of 3", None]


TENSORS = np.arange(24, dtype=np.float32).reshape(4, 2, 3)


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ((2, 3), (2, 3)),
        ((-1, -1), (2, 3)),
        ((2, -1), (2, 3)),
        ((1, 2, 3), (1, 2, 3)),
        ((2, 1, -1), (2, 1, 3)),
        ((6,), (6,)),
        ((-1,), (6,)),
    ],
)
def test_fixed_shape_tensors_need_no_shape(dims: tuple[int, ...], shape: tuple[int, ...]) -> None:
    record = pa.record_batch({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(TENSORS)}).slice(1)

    array = only(record, tensor("x", "FP32", *dims))

    assert array.shape == (3, *shape)
    assert array.ravel().tolist() == list(range(6, 24))


def test_tensors_that_are_stored_in_another_order_are_put_in_theirs() -> None:
    other = np.transpose(TENSORS, (0, 2, 1))
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(other)
    assert (column.type.shape, column.type.permutation) == ([2, 3], [1, 0])

    for column_of, dims in (("x", (3, 2)), (Columns(("x",), (3, 1, 2)), (3, 1, 2))):
        array = only(pa.record_batch({"x": column}), tensor("x", "FP32", *dims), column_of)
        np.testing.assert_array_equal(array, other.reshape(4, *dims))


def test_tensors_of_another_shape_are_refused_unless_one_is_given() -> None:
    """An image of height, width, colour is not one of colour, height, width."""
    record = pa.record_batch({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(TENSORS)})

    with pytest.raises(InvalidRequest, match=r"tensors of the shape \[2, 3\]; a row .* has the shape \[3, 2\]; map"):
        decode(record, [tensor("x", "FP32", 3, 2)])
    array = only(record, tensor("x", "FP32", 3, 2), Columns(("x",), (3, 2)))
    assert array.ravel().tolist() == TENSORS.ravel().tolist()


def test_tensors_with_nulls_are_filled() -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), (1, 2))
    record = pa.record_batch(
        {"x": pa.ExtensionArray.from_storage(kind, pa.array([[1, None], None], kind.storage_type))}
    )

    decoded = decode(record, [tensor("x", "FP32", 2)], {"x": Columns(("x",), null=0)})

    assert sorted(piece.inputs["x"].tolist() for piece in decoded.pieces) == [[[0, 0]], [[1, 0]]]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(2)],
)
def test_texts_become_bytes(kind: pa.DataType) -> None:
    values = [b"ab", b"cd"] if "binary" in str(kind) else ["ab", "cd"]

    array = only(pa.record_batch({"x": pa.array(values, kind)}), tensor("x", "BYTES", 1))

    assert array.dtype == object
    assert array.tolist() == [[b"ab"], [b"cd"]]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.list_(pa.string_view(), 1)])
def test_a_bad_row_among_views_costs_no_other(kind: pa.DataType) -> None:
    """Some libraries, polars for one, write texts as views; pyarrow can't leave out rows of these."""
    values = ["ab", None, "ef"] if pa.types.is_string_view(kind) else [["ab"], None, ["ef"]]

    decoded = decode(pa.record_batch({"x": pa.array(values, kind)}), [tensor("x", "BYTES", 1)])

    assert decoded.pieces[0].inputs["x"].tolist() == [[b"ab"], [b"ef"]]
    assert messages(decoded) == [None, f"column 'x' is null{REMEDY}", None]


def test_a_dictionary_is_read_as_its_values() -> None:
    record = pa.record_batch({"x": pa.array(["é", "b", "é"]).dictionary_encode()})

    assert only(record, tensor("x", "BYTES", 1)).ravel().tolist() == ["é".encode(), b"b", "é".encode()]


def test_a_null_in_a_dictionary_is_a_null() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", None]))

    decoded = decode(pa.record_batch({"x": column}), [tensor("x", "BYTES", 1)])

    assert messages(decoded) == [None, f"column 'x' is null{REMEDY}", None]
    assert decoded.pieces[0].inputs["x"].tolist() == [[b"a"], [b"a"]]


@pytest.mark.parametrize(
    ("values", "kind", "datatype", "expected"),
    [
        ([1.1, -2.5], pa.float64(), "FP32", np.array([1.1, -2.5], np.float32)),
        ([1.5, 2.5], pa.float16(), "FP16", np.array([1.5, 2.5], np.float16)),
        ([1.5, 2.5], pa.float64(), "FP16", np.array([1.5, 2.5], np.float16)),
        ([1.5, 2.5], pa.float64(), "BF16", np.array([1.5, 2.5], np.float32)),
        ([1, 300], pa.int64(), "UINT16", np.array([1, 300], np.uint16)),
        ([1, 300], pa.uint64(), "FP64", np.array([1, 300], np.float64)),
        ([True, False], pa.bool_(), "BOOL", np.array([True, False])),
        ([1, 0], pa.int8(), "BOOL", np.array([True, False])),
        ([True, False], pa.bool_(), "INT32", np.array([1, 0], np.int32)),
        ([float("inf"), float("-inf")], pa.float64(), "FP32", np.array([np.inf, -np.inf], np.float32)),
    ],
)
def test_numbers_are_cast(values: list[Any], kind: pa.DataType, datatype: str, expected: Any) -> None:
    array = only(pa.record_batch({"x": pa.array(values, kind)}), tensor("x", datatype, 1))

    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array.ravel(), expected)


def test_not_a_number_is_a_value() -> None:
    assert np.isnan(only(pa.record_batch({"x": pa.array([float("nan")])}), tensor("x", "FP32", 1))).all()


@pytest.mark.parametrize(
    ("values", "kind", "datatype"),
    [
        ([1, 2**31], pa.int64(), "INT32"),
        ([1, -1], pa.int64(), "UINT64"),
        ([1, 2**63], pa.uint64(), "INT64"),
        ([1.0, 1e39], pa.float64(), "FP32"),
        ([1.0, 70000.0], pa.float32(), "FP16"),
        ([1, 70000], pa.int32(), "FP16"),
        ([1, 2], pa.uint8(), "BOOL"),
    ],
)
def test_a_number_that_does_not_fit_is_its_rows_error(values: list[Any], kind: pa.DataType, datatype: str) -> None:
    decoded = decode(pa.record_batch({"x": pa.array(values, kind)}), [tensor("x", datatype, 1)])

    assert good_rows(decoded) == [0]
    assert messages(decoded) == [None, beyond("x", values[1], datatype)]
    assert decoded.pieces[0].inputs["x"].tolist() == [[1]]


def test_a_null_is_its_rows_error_and_the_first_error_is_kept() -> None:
    record = pa.record_batch(
        {
            "a": pa.array([1.0, None, 3.0, None, 1e300]),
            "b": pa.array(["x", "y", None, None, "z"]),
        }
    )

    decoded = decode(record, [tensor("a", "FP32", 1), tensor("b", "BYTES", 1)])

    assert good_rows(decoded) == [0]
    assert messages(decoded) == [
        None,
        f"column 'a' is null{REMEDY}",
        f"column 'b' is null{REMEDY}",
        f"column 'a' is null{REMEDY}",
        beyond("a", 1e300, "FP32"),
    ]
    assert decoded.pieces[0].inputs["b"].tolist() == [[b"x"]]


@pytest.mark.parametrize(
    ("values", "kind", "datatype", "null", "expected"),
    [
        ([1.5, None], pa.float64(), "FP32", "nan", np.array([1.5, np.nan], np.float32)),
        ([1, None], pa.int64(), "FP64", "nan", np.array([1, np.nan])),
        ([None, None], pa.null(), "BF16", "nan", np.array([np.nan, np.nan], np.float32)),
        ([2**62 + 1, None], pa.int64(), "INT64", -1, np.array([2**62 + 1, -1])),
        ([1, None], pa.uint8(), "FP16", 0.5, np.array([1, 0.5], np.float16)),
        ([True, None], pa.bool_(), "BOOL", True, np.array([True, True])),
        ([Decimal("1.50"), None], pa.decimal128(5, 2), "FP32", 0, np.array([1.5, 0], np.float32)),
        (["a", None], pa.string(), "BYTES", "é", np.array([b"a", "é".encode()], object)),
        (["a", None], pa.dictionary(pa.int8(), pa.string()), "BYTES", "", np.array([b"a", b""], object)),
    ],
)
def test_a_null_becomes_what_the_job_says(
    values: list[Any], kind: pa.DataType, datatype: str, null: Any, expected: Any
) -> None:
    record = pa.record_batch({"x": pa.array([*values, *values], kind).slice(2)})

    array = only(record, tensor("x", datatype, 1), Columns(("x",), null=null))

    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array.ravel(), expected)


def test_nulls_of_several_columns_become_what_the_job_says_of_each() -> None:
    record = pa.record_batch({name: pa.array([1.0, None], pa.float64()) for name in "abc"})

    decoded = decode(
        record.slice(0, 2), [tensor("x", "FP32", 3)], {"x": Columns(tuple("abc"), null={"a": "nan", "b": -1})}
    )

    assert messages(decoded) == [None, f"column 'c' is null{REMEDY}"]
    whole = Columns(tuple("abc"), null={"a": "nan", "b": -1, "c": 0.5})
    np.testing.assert_array_equal(only(record, tensor("x", "FP32", 3), whole), [[1, 1, 1], [np.nan, -1, 0.5]])


def test_nulls_in_lists_and_in_place_of_lists_are_filled() -> None:
    rows = [[1.0, None], None, [3.0, 4.0], [5.0], None]
    record = pa.record_batch({"x": pa.array(rows, pa.list_(pa.float32()))})

    decoded = decode(record, [tensor("x", "FP32", 2)], {"x": Columns(("x",), null=-1)})

    found: dict[int, list[float]] = {}
    for piece in decoded.pieces:
        assert piece.rows is not None
        found |= dict(zip(piece.rows.tolist(), piece.inputs["x"].tolist(), strict=True))
    assert found == {0: [1, -1], 1: [-1, -1], 2: [3, 4], 4: [-1, -1]}
    assert messages(decoded) == [None, None, None, "column 'x' has a list of 1, not 2", None]


def test_a_null_in_place_of_a_list_of_no_known_length_is_an_error() -> None:
    record = pa.record_batch({"x": pa.array([[1.0, None], None], pa.list_(pa.float32()))})

    decoded = decode(record, [tensor("x", "FP32", -1)], {"x": Columns(("x",), null=0)})

    assert messages(decoded) == [None, "column 'x' is null, of no known length"]
    assert decoded.pieces[0].inputs["x"].tolist() == [[1, 0]]


def test_filled_rows_take_no_memory_however_large_their_tensors_are() -> None:
    """A file of kilobytes may have a million nulls in place of images."""
    record = pa.record_batch({"x": pa.nulls(65_536, pa.list_(pa.float32()))})

    array = only(record, tensor("x", "FP32", 3, 512, 512), Columns(("x",), null="nan"))

    assert (array.shape, array.base is not None and array.base.size) == ((65_536, 3, 512, 512), 1)


@pytest.mark.parametrize(
    ("datatype", "null", "remedy"),
    [
        ("INT32", "nan", "give a value of INT32"),
        ("INT32", 2**31, "give a value of INT32"),
        ("UINT8", -1, "give a value of UINT8"),
        ("INT32", 0.5, "give a value of INT32"),
        ("BOOL", 2, "give a value of BOOL"),
        ("FP32", 1e39, 'give a value of FP32, or "error", or "nan"'),
        ("FP64", 2**53 + 1, 'or "nan"'),
        ("FP32", "mean", "give a value of FP32"),
        ("BYTES", 0, 'give a text, or "error"'),
        ("BYTES", "nan", "give a text"),
    ],
)
def test_a_value_that_the_input_can_not_have_is_refused(datatype: str, null: Any, remedy: str) -> None:
    columns = {"x": Columns(("x",), null=null)}

    with pytest.raises(InvalidRequest, match=r"field 'columns\.x\.null' is .*" + re.escape(remedy)):
        InputColumns(job_of(columns), model_of([tensor("x", datatype, 1)]), pa.schema([("x", pa.null())]))


@pytest.mark.parametrize("kind", [pa.decimal32(9, 2), pa.decimal64(18, 2), pa.decimal128(38, 2), pa.decimal256(76, 2)])
def test_decimals_become_floats_and_no_integers(kind: pa.DataType) -> None:
    values = pa.array([Decimal("-1234567.25"), Decimal("0.10")], kind)

    for column in (values, pa.array([[value] for value in values.to_pylist()], pa.list_(kind))):
        array = only(pa.record_batch({"x": column}), tensor("x", "FP64", 1))
        assert array.ravel().tolist() == [-1234567.25, 0.1]
        with pytest.raises(InvalidRequest, match="decimal"):
            decode(pa.record_batch({"x": column}), [tensor("x", "INT64", 1)])


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "BF16"])
def test_an_integer_that_would_be_rounded_is_its_rows_error(datatype: str) -> None:
    """Beyond 2^53 even FP64 has not every integer: whoever has such numbers means identifiers."""
    fine = [2**53, 2**60, 2**63, 0, -(2**53), -(2**63)]
    wrong = [2**53 + 1, 2**64 - 1, 2**63 + 1, -(2**53) - 1, 2**63 - 1]
    for kind in (pa.uint64(), pa.int64()):
        low, high = (0, 2**64) if kind == pa.uint64() else (-(2**63), 2**63)
        values = [value for value in (*fine, *wrong) if low <= value < high]
        for column in (pa.array(values, kind), pa.array([[value] for value in values], pa.list_(kind))):
            decoded = decode(pa.record_batch({"x": column}), [tensor("x", datatype, 1)])

            assert messages(decoded) == [beyond("x", v, datatype) if v in wrong else None for v in values]
            assert decoded.pieces[0].inputs["x"].ravel().tolist() == [float(v) for v in values if v in fine]


def test_integers_below_2_to_53_are_rounded_as_floats_are() -> None:
    record = pa.record_batch({"x": pa.array([2**24 + 1, 2**53 - 1])})

    assert only(record, tensor("x", "FP32", 1)).ravel().tolist() == [2.0**24, 2.0**53]


def test_values_that_are_too_many_to_name_have_one_message() -> None:
    record = pa.record_batch({"x {y}": pa.array(range(300, 600))})

    texts = set(messages(decode(record, [tensor("x", "UINT8", 1)], {"x": "x {y}"})))

    assert texts == {
        "column 'x {y}' has a value that UINT8 can't hold; convert the column in the inputs, or map it to another input"
    }


@pytest.mark.parametrize("sizes", [[3], list(range(3, 203))])
def test_a_name_with_braces_is_a_name(sizes: list[int]) -> None:
    record = pa.record_batch({"x {y}": pa.array([[0] * size for size in sizes])})

    texts = messages(decode(record, [tensor("x", "INT64", 2)], {"x": "x {y}"}))

    assert texts[0] == f"column 'x {{y}}' has a list of {'3' if len(sizes) == 1 else 'a wrong length'}, not 2"


def test_wrong_lists_are_their_rows_errors() -> None:
    lists = pa.array([[1, 2], None, [1], [1, None], [], [3, 4], [1, 2**40]], pa.list_(pa.int64()))

    decoded = decode(pa.record_batch({"x": lists}), [tensor("x", "INT32", 2)])

    assert good_rows(decoded) == [0, 5]
    assert decoded.pieces[0].inputs["x"].tolist() == [[1, 2], [3, 4]]
    assert messages(decoded) == [
        None,
        f"column 'x' is null{REMEDY}",
        "column 'x' has a list of 1, not 2",
        f"column 'x' has a null in its list{REMEDY}",
        "column 'x' has a list of 0, not 2",
        None,
        beyond("x", 2**40, "INT32"),
    ]


def test_wrong_inner_lists_are_their_rows_errors() -> None:
    lists = pa.array(
        [[[1, 2], [3, 4]], [[1, 2], [3]], [[1, 2], None], [[1, 2]], None, [[1, 2], [3, None]], [[5, 6], [7, 8]]],
        pa.list_(pa.list_(pa.float32())),
    )

    decoded = decode(pa.record_batch({"x": lists}), [tensor("x", "FP32", 2, 2)])

    assert good_rows(decoded) == [0, 6]
    assert decoded.pieces[0].inputs["x"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert messages(decoded)[1:6] == [
        "column 'x' has lists of different lengths in one row",
        "column 'x' has a list with a null in it",
        "column 'x' has a list of 1, not 2",
        f"column 'x' is null{REMEDY}",
        f"column 'x' has a null in its list{REMEDY}",
    ]


def test_fixed_size_lists_with_nulls_are_left_out() -> None:
    lists = pa.array([[1, 2], None, [3, None], [5, 6]], pa.list_(pa.float32(), 2))

    decoded = decode(pa.record_batch({"x": lists}), [tensor("x", "FP32", 2)])

    assert good_rows(decoded) == [0, 3]
    assert decoded.pieces[0].inputs["x"].tolist() == [[1, 2], [5, 6]]


def test_a_batch_of_which_no_row_is_fine_has_no_piece() -> None:
    decoded = decode(pa.record_batch({"x": pa.nulls(3, pa.list_(pa.float32()))}), [tensor("x", "FP32", 2)])

    assert decoded.pieces == ()
    assert decoded.errors.count == 3


def test_an_empty_batch_is_no_piece() -> None:
    decoded = decode(pa.record_batch({"x": pa.array([], pa.float32())}), [tensor("x", "FP32", 1)])

    assert decoded.pieces == ()
    assert decoded.errors.count == 0


def test_rows_of_one_shape_are_one_piece_where_a_dimension_is_variable() -> None:
    tokens = pa.array([[1, 2], [3], None, [4, 5], [6], []], pa.list_(pa.int64()))
    scale = pa.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], pa.float32())

    decoded = decode(
        pa.record_batch({"tokens": tokens, "scale": scale}), [tensor("tokens", "INT64", -1), tensor("scale", "FP32", 1)]
    )

    found = {
        tuple(piece.rows.tolist()): (piece.inputs["tokens"].tolist(), piece.inputs["scale"].ravel().tolist())
        for piece in decoded.pieces
        if piece.rows is not None
    }
    assert found == {(0, 3): ([[1, 2], [4, 5]], [0.0, 3.0]), (1, 4): ([[3], [6]], [1.0, 4.0]), (5,): ([[]], [5.0])}


def test_rows_that_happen_to_have_one_shape_are_one_piece() -> None:
    record = pa.record_batch({"x": pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.float32())))})

    assert only(record, tensor("x", "FP32", -1, 2)).tolist() == [[[1, 2]], [[3, 4]]]


def test_an_optional_input_without_a_column_is_left_out() -> None:
    record = pa.record_batch({"x": FLOATS})

    decoded = decode(record, [tensor("x", "FP32", 1), tensor("mask", "BOOL", 1, optional=True)])

    assert set(decoded.pieces[0].inputs) == {"x"}


@pytest.mark.parametrize(
    ("kind", "spec", "columns", "text"),
    [
        (
            pa.float32(),
            tensor("x", "INT64", 1),
            {},
            "column 'x' is of type float, which does not fit input 'x' of INT64",
        ),
        (pa.string(), tensor("x", "FP32", 1), {}, "column 'x' is of type string"),
        (pa.int64(), tensor("x", "BYTES", 1), {}, "column 'x' is of type int64"),
        (pa.timestamp("s"), tensor("x", "INT64", 1), {}, "column 'x' is of type timestamp"),
        (pa.struct([("a", pa.int32())]), tensor("x", "INT64", 1), {}, "column 'x' is of type struct"),
        (pa.float32(), tensor("y", "FP32", 1), {}, "input 'y' is made of column 'y', which the inputs lack"),
        (pa.float32(), tensor("y", "FP32", 1), {"z": "x"}, "field 'columns' names input 'z'"),
        (pa.float32(), tensor("x", "FP32", 4), {}, "make[s]? 1 element"),
        (pa.float32(), tensor("x", "FP32", 4), {"x": ("x", "x")}, "2 columns make 2 element"),
        (pa.list_(pa.float32(), 3), tensor("x", "FP32", 4), {}, "another size"),
        (pa.list_(pa.float32(), 3), tensor("x", "FP32", 2, 2), {}, "another number of elements"),
        (pa.list_(pa.list_(pa.float32())), tensor("x", "FP32", 4), {}, "nest the lists 1 deep"),
        (pa.list_(pa.float32()), tensor("x", "FP32", -1, -1), {}, "give 'shape'"),
        (pa.list_(pa.float32()), tensor("x", "FP32", 4), {"x": Columns(("x",), (5,))}, "'columns.x.shape' is"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_name(
    kind: pa.DataType, spec: TensorSpec, columns: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        InputColumns(job_of(columns), model_of([spec]), pa.schema([("x", kind)]))


def test_a_column_is_read_once() -> None:
    schema = pa.schema([("a", pa.float32()), ("b", pa.float32())])

    columns = InputColumns(
        job_of({"x": ("a", "b"), "y": "a"}), model_of([tensor("x", "FP32", 2), tensor("y", "FP32", 1)]), schema
    )

    assert columns.columns == ("a", "b")


@given(
    st.lists(
        st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(-(2**40), 2**40)), min_size=0, max_size=3)),
        max_size=20,
    ),
    st.integers(0, 5),
)
def test_every_row_is_either_in_a_piece_or_an_error(rows: list[Any], offset: int) -> None:
    """Whatever the lists are, the pieces have the fine rows' values, and the errors the others."""
    record = pa.record_batch({"x": pa.array(rows, pa.list_(pa.int64()))}).slice(min(offset, len(rows)))
    rows = rows[min(offset, len(rows)) :]

    decoded = decode(record, [tensor("x", "INT32", -1)])

    fine = {
        index: row
        for index, row in enumerate(rows)
        if row is not None and all(value is not None and abs(value) < 2**31 for value in row)
    }
    found: dict[int, Any] = {}
    for piece in decoded.pieces:
        numbers = range(len(rows)) if piece.rows is None else piece.rows.tolist()
        found |= dict(zip(numbers, piece.inputs["x"].tolist(), strict=True))
    assert found == fine
    assert decoded.errors.count == len(rows) - len(fine)
