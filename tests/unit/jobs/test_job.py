"""A job's specification as users write it, and what is refused of it."""

import json
from typing import Any

import msgspec
import pytest

from qinfer.errors import InvalidRequest
from qinfer.jobs.job import decode_spec, encode_spec
from qinfer.tabular.spec import Columns, Csv

LEAST: dict[str, Any] = {"model": "digits", "inputs": ["s3://lake/in/*.parquet"], "output": {"url": "s3://lake/out"}}


def with_fields(**fields: Any) -> bytes:
    return json.dumps({**LEAST, **fields}).encode()


def test_the_least_specification_has_documented_defaults() -> None:
    """A model, inputs and an output are enough."""
    spec = decode_spec(with_fields())
    assert (spec.version, spec.input_format, spec.priority, spec.error_threshold) == (0, "", "normal", 0.0)
    assert (spec.output.format, spec.output.compression, spec.output.rows_per_part) == ("parquet", "snappy", 0)
    arrow = decode_spec(with_fields(output={"url": "s3://lake/out", "format": "arrow"}))
    assert arrow.output.compression == "zstd"
    assert spec.columns_of("x") == Columns(("x",))
    assert spec.column_of("y") == "y"


def test_columns_are_written_in_three_ways() -> None:
    """One column, several scalar ones, or both with a shape."""
    columns = {"a": "c", "b": ["c1", "c2"], "v": {"columns": ["list"], "shape": [2, 3]}}
    spec = decode_spec(with_fields(columns=columns))
    assert spec.columns_of("a") == Columns(("c",))
    assert spec.columns_of("b") == Columns(("c1", "c2"))
    assert spec.columns_of("v") == Columns(("list",), (2, 3))


def test_nulls_become_the_same_in_all_columns_or_by_column() -> None:
    of_all = decode_spec(with_fields(columns={"x": {"columns": ["a", "b"], "null": "nan"}})).columns_of("x")
    by_column = decode_spec(with_fields(columns={"x": {"columns": ["a", "b"], "null": {"b": 0.5}}})).columns_of("x")

    assert [of_all.null_of(column) for column in "ab"] == ["nan", "nan"]
    assert [by_column.null_of(column) for column in "ab"] == ["error", 0.5]
    assert Columns(("a",)).null_of("a") == "error"


def test_columns_that_use_no_newer_field_are_written_as_the_former_release_reads_them() -> None:
    spec = decode_spec(with_fields(columns={"v": {"columns": ["list"], "shape": [2, 3]}}))

    assert json.loads(encode_spec(spec))["columns"] == {"v": {"columns": ["list"], "shape": [2, 3]}}


def test_a_job_of_plain_files_is_written_as_the_former_release_reads_it() -> None:
    spec = decode_spec(with_fields(input_compression="", csv={"delimiter": ",", "header": True}))

    assert {"csv", "input_compression"}.isdisjoint(json.loads(encode_spec(spec)))
    assert spec.csv_form == Csv()


@pytest.mark.parametrize("encoding", ["latin-1", "Latin1", "ISO-8859-1"])
def test_an_encoding_has_several_names(encoding: str) -> None:
    spec = decode_spec(with_fields(csv={"encoding": encoding}))

    assert decode_spec(encode_spec(spec)) == spec
    assert spec.csv_form.encoding == "iso8859-1"


def test_a_specification_survives_its_json() -> None:
    """The record of a job holds it so."""
    spec = decode_spec(
        with_fields(columns={"a": ["b", "c"]}, passthrough=["*"], exclude=["z"], metadata={"who": "me"}, key="id")
    )
    assert decode_spec(encode_spec(spec)) == spec


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": ""}, r"field 'model' is empty; name a model"),
        ({"model": 3}, r"field 'model': Expected str, got int"),
        ({"modle": "x"}, r"no field 'modle'; did you mean 'model'\?"),
        ({"zzz": 1}, r"no field 'zzz'; there are model, inputs"),
        ({"version": -1}, r"field 'version' is -1"),
        ({"inputs": []}, r"field 'inputs' is empty"),
        ({"inputs": ["x"] * 1001}, r"field 'inputs' has 1001 entries; at most 1000: use patterns"),
        ({"inputs": ["s3://a/b", 3]}, r"field 'inputs\[1\]': Expected str, got int"),
        ({"input_format": "orc"}, r"field 'input_format': Invalid enum value 'orc'; expected nothing, parquet, arrow"),
        ({"input_compression": "xz"}, r"field 'input_compression': Invalid enum value 'xz'; expected nothing, gzip"),
        ({"csv": {"delimiter": ";;"}}, r"field 'csv.delimiter' is ';;'; one ASCII character"),
        ({"csv": {"delimiter": "\n"}}, r"field 'csv.delimiter' is '\?'; one ASCII character"),
        ({"csv": {"delimiter": ""}}, r"field 'csv.delimiter' is ''; one ASCII character"),
        ({"csv": {"quote": "«"}}, r"field 'csv.quote' is '«'; one ASCII character"),
        (
            {"csv": {"decimal_point": ","}},
            r"fields 'csv.delimiter', 'csv.quote' and 'csv.decimal_point' have to differ",
        ),
        ({"csv": {"encoding": "punycode"}}, r"field 'csv.encoding' is 'punycode', which can't be read; convert such"),
        ({"csv": {"encoding": "UTF-16"}}, r"'UTF-16', which can't be read; convert such files to UTF-8, as by iconv"),
        ({"csv": {"encoding": "utf-32-le"}}, r"'utf-32-le', which can't be read; convert such files to UTF-8"),
        ({"csv": {"encoding": "\0"}}, r"field 'csv.encoding' is '\?', which can't be read"),
        ({"csv": {"column_names": ["a"]}}, r"field 'csv.column_names' is for \"header\": false only"),
        ({"csv": {"header": False, "column_names": ["a", "a"]}}, r"field 'csv.column_names' names 'a' twice"),
        ({"csv": {"separator": ";"}}, r"no field 'csv.separator'"),
        ({"output": {}}, r"field 'output.url' is missing"),
        ({"output": {"url": ""}}, r"field 'output.url' is empty"),
        ({"output": {"url": "s3://a/*"}}, r"field 'output.url' is a pattern"),
        ({"output": {"url": "s3://a", "formt": "x"}}, r"no field 'output.formt'; did you mean 'output.format'\?"),
        (
            {"output": {"url": "s3://a", "format": "orc"}},
            r"'output.format': .*'orc'; expected parquet, arrow, csv, jsonl",
        ),
        (
            {"output": {"url": "s3://a", "format": "csv", "compression": "zstd", "compression_level": 1}},
            r"'output.compression_level' is 1; zstd of csv has no levels",
        ),
        ({"output": {"url": "s3://a", "compression": "lzma"}}, r"'output.compression' is 'lzma'; parquet has snappy"),
        (
            {"output": {"url": "s3://a", "format": "arrow", "compression": "snappy"}},
            r"'output.compression' is 'snappy'; arrow has zstd, lz4, none",
        ),
        ({"output": {"url": "s3://a", "rows_per_part": -5}}, r"'output.rows_per_part' is -5"),
        ({"output": {"url": "s3://a", "columns": {"y": ""}}}, r"'output.columns' has an empty name"),
        ({"output": {"url": "s3://a", "tensors": ["y", "y"]}}, r"'output.tensors' names 'y' twice"),
        ({"output": {"url": "s3://a", "top_k": {"y": 0}}}, r"'output.top_k.y' is 0; 1 or more"),
        (
            {"output": {"url": "s3://a", "compression_level": 1}},
            r"'output.compression_level' is 1; snappy of parquet has no levels",
        ),
        (
            {"output": {"url": "s3://a", "compression": "zstd", "compression_level": 20}},
            r"'output.compression_level' is 20; zstd of parquet has 1 to 19, or 0",
        ),
        ({"columns": {"good": "a", "bad": 3}}, r"field 'columns.bad': Expected str"),
        ({"columns": {"x": {"columns": "y"}}}, r"field 'columns.x.columns': Expected array, got str"),
        ({"columns": {"x": {"columns": ["y"], "shap": [1]}}}, r"no field 'columns.x.shap'; did you mean .*shape'"),
        ({"columns": {"x": []}}, r"field 'columns.x' is empty; name at least one column"),
        ({"columns": {"x": {"columns": ["y"], "shape": [0]}}}, r"field 'columns.x.shape' is \[0\]"),
        ({"columns": {"x": {"columns": ["y"], "null": [0]}}}, r"field 'columns.x.null': Expected .*, got array"),
        (
            {"columns": {"x": {"columns": ["y"], "null": {"y": []}}}},
            r"field 'columns.x.null.*': Expected .*, got array",
        ),
        (
            {"columns": {"x": {"columns": ["y"], "null": {"z": 0}}}},
            r"field 'columns.x.null' names 'z', which is not one",
        ),
        ({"columns": {"x": {"columns": ["y"], "null": "0" * 1025}}}, r"'columns.x.null' is too long; at most 1024"),
        ({"columns": []}, r"field 'columns': Expected object, got array"),
        ({"passthrough": ["a", "a"]}, r"field 'passthrough' names 'a' twice"),
        ({"passthrough": ["*", "a"]}, r"field 'passthrough' has '\*' and other columns"),
        ({"exclude": ["a"]}, r"field 'exclude' is for \"passthrough\": \[\"\*\"\] only"),
        ({"passthrough": ["*"], "exclude": ["id"], "key": "id"}, r"'exclude' names 'id', which is the job's key"),
        ({"priority": "urgent"}, r"field 'priority': .*'urgent'; expected high, normal, low"),
        ({"on_version_change": "stop"}, r"field 'on_version_change': .*'stop'; expected wait, fail"),
        ({"error_threshold": 1.5}, r"field 'error_threshold' is 1.5"),
        ({"error_threshold": -2}, r"field 'error_threshold' is -2"),
        ({"max_parallel": -1}, r"field 'max_parallel' is -1; 1 to 10000, or 0"),
        ({"deadline_s": -1}, r"field 'deadline_s' is -1"),
        ({"deadline_s": 1e12}, r"at most 31536000 seconds"),
        ({"metadata": {"a": 1}}, r"field 'metadata': Expected str, got int"),
        ({"metadata": {"a": "x" * 2000}}, r"field 'metadata' is too large"),
    ],
)
def test_what_can_not_be_is_refused_with_its_field(fields: dict[str, Any], said: str) -> None:
    """The message has the field, the value and what to write instead."""
    with pytest.raises(InvalidRequest, match=said):
        decode_spec(with_fields(**fields))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"\xff", b'{"model": "m"}', b'{"columns": {"x": 1}}', b'{"columns": 3, ']
)
def test_what_is_no_job_is_refused(body: bytes) -> None:
    """Whatever the bytes are, they are the caller's mistake."""
    with pytest.raises(InvalidRequest):
        decode_spec(body)


@pytest.mark.parametrize(
    ("threshold", "rows", "allowed"),
    [
        (0, 100, 0),
        (7, 100, 7),
        (0.05, 100, 5),
        (0.05, 10, 0),
        (0.29, 100, 29),
        (0.57, 1_000_000, 570_000),
        (1e-6, 2_999_999, 2),
        (-1, 100, -1),
    ],
)
def test_a_threshold_is_a_number_a_fraction_or_none(threshold: float, rows: int, allowed: int) -> None:
    """A fraction is one of the job's rows, in the decimals that it was written with."""
    spec = msgspec.structs.replace(decode_spec(with_fields()), error_threshold=threshold)
    assert spec.max_errors(rows) == allowed
