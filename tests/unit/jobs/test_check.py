"""Whether a job, a model and the inputs' columns fit together; each problem has its column or field."""

from dataclasses import replace

import pyarrow as pa
import pytest

from qinfer.errors import InvalidRequest
from qinfer.jobs.columns import check, copied_columns, problems
from qinfer.jobs.job import JobSpec, Output, OutputFormat
from qinfer.models.sequence_spec import DirectSpec, SequenceSpec
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tabular.spec import Columns

Given = str | tuple[str, ...] | Columns

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("age", pa.float64()),
        ("size", pa.int32()),
        ("name", pa.string()),
        ("vector", pa.list_(pa.float32())),
        ("fixed", pa.list_(pa.float32(), 4)),
        ("when", pa.timestamp("us")),
        ("pair", pa.struct([("a", pa.float32()), ("b", pa.float32())])),
        ("twice", pa.int8()),
        ("twice", pa.int8()),
        ("nothing", pa.null()),
    ]
)


def model(*dims: int, datatype: str = "FP32", optional: bool = False) -> ModelSpec:
    return ModelSpec(
        name="digits",
        backend="stub",
        max_batch_size=8,
        inputs=(TensorSpec(name="pixels", datatype=datatype, dims=dims, optional=optional),),
        outputs=(
            TensorSpec(name="label", datatype="INT64", dims=()),
            TensorSpec(name="score", datatype="FP32", dims=(3,)),
        ),
    )


def job(
    pixels: Given | None = None,
    *,
    key: str = "",
    passthrough: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    columns: dict[str, Given] | None = None,
    outputs: dict[str, str] | None = None,
    output_format: OutputFormat = "parquet",
    tensors: tuple[str, ...] = (),
    top_k: dict[str, int] | None = None,
) -> JobSpec:
    given = dict(columns or {}) | ({"pixels": pixels} if pixels is not None else {})
    output = Output("file:///out", output_format, columns=outputs or {}, tensors=tensors, top_k=top_k or {})
    return JobSpec(
        model="digits", inputs=("*",), output=output, columns=given, key=key, passthrough=passthrough, exclude=exclude
    )


@pytest.mark.parametrize(
    ("pixels", "fitting"),
    [
        ("age", model(1)),
        ("age", model()),
        ("size", model(-1)),
        (("age", "size"), model(2)),
        (("age", "size", "age", "size"), model(2, 2)),
        (Columns(("age", "size"), (1, 2)), model(-1, -1)),
        ("vector", model(7)),
        ("vector", model(-1)),
        (Columns(("vector",), (2, 3)), model(-1, 3)),
        ("fixed", model(4)),
        ("fixed", model(2, -1)),
        ("name", model(1, datatype="BYTES")),
        ("nothing", model(1)),
    ],
)
def test_columns_that_fit(pixels: Given, fitting: ModelSpec) -> None:
    """Scalars, several scalars, lists of any or a fixed size, texts, and a column without any value."""
    check(job(pixels), fitting, SCHEMA)


@pytest.mark.parametrize(
    ("pixels", "unfit", "said"),
    [
        (None, model(1), r"no column 'pixels' of field 'columns.pixels'; there are id, age, .*, and 2 more"),
        ("agee", model(1), r"no column 'agee' of field 'columns.pixels'; did you mean 'age'\?"),
        (("age", "siz"), model(2), r"no column 'siz' .* did you mean 'size'\?"),
        ("twice", model(1), r"2 columns named 'twice'"),
        ("name", model(1), r"column 'name' is of type string, which does not fit input 'pixels' of FP32"),
        ("when", model(1), r"column 'when' is of type timestamp\[us\], which does not fit"),
        ("pair", model(1), r"column 'pair' is of type struct<.*>, which does not fit"),
        ("age", model(1, datatype="INT64"), r"column 'age' is of type double, which does not fit .* INT64"),
        ("size", model(1, datatype="BYTES"), r"column 'size' is of type int32, which does not fit .* BYTES"),
        (("age", "size"), model(3), r"2 columns make 2 element\(s\) of input 'pixels', .* \[3\]"),
        ("age", model(784), r"the scalar column 'age' makes 1 element\(s\) of input 'pixels', .* \[784\]"),
        ("fixed", model(5), r"column 'fixed' is of type fixed_size_list.*another size"),
        (("vector", "fixed"), model(8), r"column 'vector' .* does not fit|2 columns make 2"),
        (Columns(("vector",), (3,)), model(4), r"field 'columns.pixels.shape' is \[3\]; .* \[4\]"),
        ("vector", model(-1, -1), r"give 'shape'"),
    ],
)
def test_columns_that_do_not_fit_are_named(pixels: Given | None, unfit: ModelSpec, said: str) -> None:
    """With their type, the tensor's, and what to write instead."""
    with pytest.raises(InvalidRequest, match=said):
        check(job(pixels), unfit, SCHEMA)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (job("age", columns={"pixel": "age"}), r"'columns' names 'pixel', which is no input of 'digits'; .*'pixels'"),
        (job("age", outputs={"labl": "x"}), r"'output.columns' names 'labl', which is no output of .*'label'"),
        (job("age", tensors=("labl",)), r"'output.tensors' names 'labl', which is no output of .*'label'"),
        (job("age", top_k={"scor": 1}), r"'output.top_k' names 'scor', which is no output of .*'score'"),
        (
            job("age", tensors=("label",), outputs={"score": "s"}),
            r"'output.columns' names 'score', which 'output.tensors'",
        ),
        (job("age", tensors=("label",), top_k={"score": 1}), r"'output.top_k' names 'score', which 'output.tensors'"),
        (job("age", top_k={"score": 4}), r"'output.top_k.score' is 4; the output has 3 element\(s\) a row"),
        (job("age", key="id", outputs={"label": "ID"}), r"the columns 'ID' and 'id', which many readers take for one"),
        (job("age", outputs={"label": "_FILE"}), r"the columns '_file' and '_FILE', which many readers"),
        (job("age", passthrough=("name",), outputs={"label": "Name"}), r"the columns 'Name' and 'name', which many"),
        (job("age", top_k={"score": 1}, outputs={"label": "score_index"}), r"'score' and output 'label' would both be"),
        (job("age", key="idd"), r"no column 'idd' of field 'key'; did you mean 'id'\?"),
        (job("age", passthrough=("id", "nam")), r"no column 'nam' of field 'passthrough'; did you mean 'name'\?"),
        (job("age", passthrough=("*",), exclude=("naem", "twice")), r"no column 'naem' of field 'exclude'"),
        (job("age", passthrough=("twice",)), r"2 columns named 'twice', of field 'passthrough'"),
        (job("age", passthrough=("*",)), r"2 columns named 'twice'; exclude or rename them"),
        (job("age", outputs={"label": "same", "score": "same"}), r"'score' and output 'label' would both be .* 'same'"),
        (job("age", outputs={"label": "error_code"}), r"the server's own column would both be the column 'error_code'"),
        (job("age", outputs={"label": "_row"}), r"would both be the column '_row'"),
        (job("age", passthrough=("id",), outputs={"label": "id"}), r"copied column 'id' and output 'label'"),
        (job("age", key="id", outputs={"label": "id"}), r"column 'id' and output 'label' .*; rename one of them"),
    ],
)
def test_names_of_nothing_and_names_of_several_are_refused(spec: JobSpec, said: str) -> None:
    """A reader of the output could not tell its columns apart."""
    with pytest.raises(InvalidRequest, match=said):
        check(spec, model(1), SCHEMA)


def test_several_problems_are_told_at_once() -> None:
    """Up to five: who has a typing error has more."""
    with pytest.raises(InvalidRequest) as caught:
        check(job(("a", "b", "c"), key="k", passthrough=("p", "q")), model(3), SCHEMA)
    assert caught.value.message.count("have no column") == 5


def test_a_key_frees_the_names_of_the_places() -> None:
    """A job with a key has no `_row`."""
    check(job("age", key="id", outputs={"label": "_row"}), model(1), SCHEMA)


def test_an_optional_input_is_left_out_where_nothing_names_it() -> None:
    """But not where the job does."""
    check(job(), model(1, optional=True), SCHEMA)
    with pytest.raises(InvalidRequest, match="no column 'agee'"):
        check(job("agee"), model(1, optional=True), SCHEMA)


def test_copied_columns_are_those_asked_for_and_the_key_last() -> None:
    """Unless it is among them."""
    schema = pa.schema([("a", pa.int8()), ("b", pa.int8()), ("c", pa.int8())])
    assert copied_columns(job(key="a"), schema) == ("a",)
    assert copied_columns(job(passthrough=("c", "b"), key="a"), schema) == ("c", "b", "a")
    assert copied_columns(job(passthrough=("*",), exclude=("b",), key="a"), schema) == ("a", "c")


UNWRITABLE = [
    pa.struct([]),
    pa.list_(pa.struct([("a", pa.struct([]))])),
    pa.dense_union([pa.field("a", pa.int8()), pa.field("b", pa.string())]),
    pa.month_day_nano_interval(),
    pa.binary(0),
]


@pytest.mark.parametrize("kind", UNWRITABLE, ids=str)
def test_a_copied_column_that_parquet_can_not_hold_is_refused(kind: pa.DataType) -> None:
    """Each shard would fail; what is not copied may be there, and Arrow has all types."""
    schema = pa.schema([("age", pa.float64()), ("meta", kind), ("id", pa.int64())])

    with pytest.raises(InvalidRequest) as caught:
        check(job("age", passthrough=("id", "meta")), model(1), schema)
    check(job("age", passthrough=("id",)), model(1), schema)
    check(job("age", passthrough=("id", "meta"), output_format="arrow"), model(1), schema)

    assert caught.value.message.startswith("the copied column 'meta' is of type ")
    assert caught.value.message.endswith("; leave it out of 'passthrough', or make 'output.format' arrow")
    assert "'id'" not in caught.value.message


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (job("age", passthrough=("*",)), "exclude it, or"),
        (job("age", key="meta"), "name another 'key', or"),
        (job("age", passthrough=("*",), key="meta"), "name another 'key', or"),
    ],
)
def test_what_to_do_about_it_goes_with_what_the_job_says(spec: JobSpec, said: str) -> None:
    """All columns, or the key."""
    schema = pa.schema([("age", pa.float64()), ("meta", pa.struct([]))])

    with pytest.raises(InvalidRequest, match=rf"'meta' is of type struct<>, which Parquet does not have; {said}"):
        check(spec, model(1), schema)


def test_names_that_differ_in_case_only_do_not_stop_a_job_of_a_former_release() -> None:
    """Its shards run on: what refuses new jobs is not asked there."""
    spec = job("age", passthrough=("name",), outputs={"label": "Name"})

    assert list(problems(spec, model(1), SCHEMA)) == []


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL"])
def test_elements_without_an_order_are_not_ranked(datatype: str) -> None:
    outputs = (TensorSpec(name="word", datatype=datatype, dims=(2,)),)

    with pytest.raises(InvalidRequest, match=f"names 'word', whose elements are {datatype} and have no order"):
        check(job("age", top_k={"word": 1}), replace(model(1), outputs=outputs), SCHEMA)


def test_rows_of_a_job_are_no_sequence() -> None:
    stateful = replace(model(1), sequences=SequenceSpec(strategy=DirectSpec(), slots=1, max_rows=1))

    with pytest.raises(InvalidRequest, match="model 'digits' has 'sequence_batching', and the rows of a job are no"):
        check(job("age"), stateful, SCHEMA)
