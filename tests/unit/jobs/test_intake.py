"""What is looked at before a job is taken: URLs, inputs, their columns and the output; on disk and in S3."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qinfer.core.store_urls import UrlGrant
from qinfer.errors import Forbidden, InputMissing, InvalidRequest
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.planning import examine
from qinfer.storage.open import store_for
from qinfer.tabular.spec import InputFormat
from qinfer.testing import stub_spec
from tests.support.servers.s3_server import S3Server

TABLE = pa.table({"x": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32())), "id": [1, 2]})
MODEL = stub_spec()


def job(*inputs: str, output: str, input_format: InputFormat = "") -> JobSpec:
    return JobSpec(model="stub", inputs=inputs, output=Output(output), input_format=input_format)


def parquet(table: pa.Table = TABLE) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


@pytest.fixture
def lake(tmp_path: Path) -> str:
    for name in ("b.parquet", "a.parquet"):
        (tmp_path / name).write_bytes(parquet())
    return f"file://{tmp_path}"


def test_a_job_is_examined_as_it_will_run(lake: str) -> None:
    """Its files in order, the columns of the first, and its URLs as they are to be kept."""
    spec = job(f"{lake}/*.parquet", f"{lake}/a.parquet", output=f"{lake.replace('file:', 'local:')}/out/")
    examined = examine(spec, MODEL, UrlGrant((lake,), (lake,)))
    assert [file.url for file in examined.files] == [f"{lake}/a.parquet", f"{lake}/b.parquet"]
    assert examined.schema.names == ["x", "id"]
    assert examined.format == "parquet"
    assert examined.spec.output.url == f"{lake}/out"


def test_inputs_and_output_must_be_allowed(lake: str) -> None:
    """Each for itself: who may read a folder may not write beside it."""
    with pytest.raises(Forbidden, match=f"'{lake}-2/out'"):
        examine(job(f"{lake}/*.parquet", output=f"{lake}-2/out"), MODEL, UrlGrant((lake,), (lake,)))
    with pytest.raises(Forbidden, match=r"'file:///etc/\*'"):
        examine(job("file:///etc/*", output=f"{lake}/out"), MODEL, UrlGrant((lake,), (lake,)))
    with pytest.raises(InvalidRequest, match=r"may not hold '\.\.'"):
        examine(job(f"{lake}/../x/*", output=f"{lake}/out"), MODEL, UrlGrant((lake,), (lake,)))


def test_columns_that_do_not_fit_are_named_with_their_file(lake: str) -> None:
    """Where a pattern means several files: which one was looked at."""
    Path(f"{lake.removeprefix('file://')}/0.parquet").write_bytes(parquet(TABLE.select(["id"])))

    with pytest.raises(InvalidRequest, match=f"no column 'x' of field .*\\(columns of '{lake}/0.parquet'\\)"):
        examine(job(f"{lake}/*.parquet", output=f"{lake}/out"), MODEL, UrlGrant((lake,), (lake,)))


def test_an_output_with_anything_in_it_is_refused(lake: str) -> None:
    """Whatever it is, and however deep; an empty folder is fine."""
    folder = Path(lake.removeprefix("file://")) / "out"
    (folder / "deep").mkdir(parents=True)
    examine(job(f"{lake}/*.parquet", output=f"{lake}/out"), MODEL, UrlGrant((lake,), (lake,)))
    (folder / "deep" / "_note").write_text("x")
    with pytest.raises(
        InvalidRequest, match=f"output '{lake}/out' is not empty, it has 'deep/_note'; name a new folder"
    ):
        examine(job(f"{lake}/*.parquet", output=f"{lake}/out"), MODEL, UrlGrant((lake,), (lake,)))


def test_an_output_that_is_a_file_is_refused(lake: str) -> None:
    """Nothing can be made below it."""
    with pytest.raises(InvalidRequest, match=f"output '{lake}/a.parquet' is a file; name a folder"):
        examine(job(f"{lake}/b.parquet", output=f"{lake}/a.parquet"), MODEL, UrlGrant((lake,), (lake,)))


def test_an_output_beneath_a_file_is_refused_with_the_file(lake: str) -> None:
    """However deep: planning could not make the folders."""
    said = f"output '{lake}/a.parquet/deep/out' would be beneath '{lake}/a.parquet', which is a file; name a folder"
    with pytest.raises(InvalidRequest, match=said):
        examine(job(f"{lake}/b.parquet", output=f"{lake}/a.parquet/deep/out"), MODEL, UrlGrant((lake,), (lake,)))


def test_inputs_of_several_formats_are_refused_with_one_of_each(lake: str) -> None:
    """Unless the job says what they are, as files without an extension need."""
    folder = Path(lake.removeprefix("file://"))
    (folder / "c.csv").write_text("x,id\n1,2\n")
    (folder / "part-0").write_bytes(parquet())
    with pytest.raises(InvalidRequest, match=f"several formats, such as '{lake}/a.parquet' and '{lake}/c.csv'"):
        examine(job(f"{lake}/[a-c].*", output=f"{lake}/out"), MODEL, UrlGrant((lake,), (lake,)))
    with pytest.raises(InvalidRequest, match=f"'{lake}/part-0' names no format; set 'input_format'"):
        examine(job(f"{lake}/part-0", output=f"{lake}/out"), MODEL, UrlGrant((lake,), (lake,)))
    examine(job(f"{lake}/part-0", output=f"{lake}/out", input_format="parquet"), MODEL, UrlGrant((lake,), (lake,)))


def test_columns_are_those_of_the_first_file_that_has_any(lake: str) -> None:
    """Empty files before it are passed over; nothing but empty ones is refused."""
    folder = Path(lake.removeprefix("file://"))
    (folder / "0.jsonl").touch()
    with pytest.raises(InvalidRequest, match=r"input '.*/0.jsonl' and those after it are empty"):
        examine(job(f"{lake}/*.jsonl", output=f"{lake}/out"), MODEL, UrlGrant((lake,), (lake,)))
    (folder / "1.jsonl").write_text('{"x": [1.5, 2.5]}\n')
    assert examine(job(f"{lake}/*.jsonl", output=f"{lake}/out"), MODEL, UrlGrant((lake,), (lake,))).schema.names == [
        "x"
    ]


def test_a_first_file_that_does_not_fit_is_refused(lake: str) -> None:
    """With the column that is missing."""
    folder = Path(lake.removeprefix("file://"))
    (folder / "0.csv").write_text("y\n1\n")
    with pytest.raises(InvalidRequest, match=r"the inputs have no column 'x' of field 'columns.x'; there are y"):
        examine(job(f"{lake}/*.csv", output=f"{lake}/out"), MODEL, UrlGrant((lake,), (lake,)))


def test_jobs_are_examined_in_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same there; etags are the store's own, and a missing bucket is named."""
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        bucket = server.make_bucket("lake-of-intake")
        store = store_for(bucket)
        for name in ("in/b.parquet", "in/a.parquet", "in/_SUCCESS", "in/deep/c.parquet", "index/d.parquet"):
            store.put_if_absent(parquet(), f"{bucket}/{name}")
        allow = (bucket, "s3://no-such-bucket")
        examined = examine(job(f"{bucket}/in/*.parquet", output=f"{bucket}/out"), MODEL, UrlGrant(allow, allow))
        assert [file.url for file in examined.files] == [f"{bucket}/in/a.parquet", f"{bucket}/in/b.parquet"]
        assert examined.files[0] == store.stat(f"{bucket}/in/a.parquet")
        assert examined.files[0].etag
        monkeypatch.setattr("qinfer.storage.fsspec._PAGE", 2)
        deep = examine(job(f"{bucket}/in*/**/*.parquet", output=f"{bucket}/out"), MODEL, UrlGrant(allow, allow))
        assert [file.url.removeprefix(f"{bucket}/") for file in deep.files] == [
            "in/a.parquet",
            "in/b.parquet",
            "in/deep/c.parquet",
            "index/d.parquet",
        ]
        with pytest.raises(InvalidRequest, match=f"output '{bucket}/in' is not empty"):
            examine(job(f"{bucket}/in/*.parquet", output=f"{bucket}/in"), MODEL, UrlGrant(allow, allow))
        folder = examine(job(f"{bucket}/in/", output=f"{bucket}/out"), MODEL, UrlGrant(allow, allow))
        assert [file.url for file in folder.files] == [
            f"{bucket}/in/{name}" for name in ("a.parquet", "b.parquet", "deep/c.parquet")
        ]
        with pytest.raises(InputMissing, match="no-such-bucket"):
            examine(job("s3://no-such-bucket/*.parquet", output=f"{bucket}/out"), MODEL, UrlGrant(allow, allow))
