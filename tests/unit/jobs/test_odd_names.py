"""Files and folders whose names mean something elsewhere: they are read, and written, by the name that they have."""

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from qinfer.core.store_urls import UrlGrant
from qinfer.errors import InputMissing
from qinfer.jobs.columns import ERROR_COLUMNS
from qinfer.jobs.job import JobSpec, Output
from qinfer.jobs.parts import PartWriter, part_metadata
from qinfer.jobs.plan import JobPlan, UnplannedJob
from qinfer.jobs.planning import examine, make_plan
from qinfer.jobs.shard_rows import ShardReader
from qinfer.jobs.shards import ShardPace
from qinfer.storage.open import store_for, url_to_fs
from qinfer.storage.store import CommitOutcome
from qinfer.tabular.schemas import decode_schema
from qinfer.tabular.source import find_files
from tests.support.jobs.bulk_data import model_of, tensor
from tests.support.jobs.job_proof import parquet
from tests.support.servers.s3_server import S3Server

NAMES = {
    "x%2Fy": "x/y",
    "a%20b": "a b",
    "50%": "50",
    "50%25": "50%",
    "a#b": "a",
    "a?b": "axb",
    "?a=b": "a",
    "run[1]": "run1",
    "run[!1]": "run2",
    "[": "b",
    "a*b": "axb",
    "a**b": "a/b",
    "*": "x",
    "größe 100": "groesse",
    "a+b&c=d;e,f@g:h": "a b",
    "'a' \"b\"": "a",
    "{a}|^~`$!(b)": "a",
}
"""Name → another one that it could be taken for."""
MODEL = model_of([tensor("x", "FP64", 1)], [tensor("y", "FP64", 1)])


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=["file", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty folder."""
    if request.param == "file":
        return f"file://{tmp_path}"
    server: S3Server = request.getfixturevalue("server")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.make_bucket(f"odd-{random.randrange(10**12)}")


def put(url: str, number: int) -> None:
    store_for(url).write(parquet(pa.table({"id": [number], "x": [float(number)]})), url)


def planned(url: str, folder: str, output: str) -> JobPlan:
    grant = UrlGrant((folder,), (folder,))
    spec = examine(JobSpec(model="m", inputs=(url,), output=Output(output), key="id"), MODEL, grant).spec
    return make_plan(UnplannedJob("job-1", spec, MODEL, "hash", grant), ShardPace(0.0, 30.0, 1000, 1000))


def ids(plan: JobPlan) -> list[int]:
    found: list[int] = []
    for shard in plan.shards:
        with closing(ShardReader(shard, ("id", "x"), decode_schema(plan.schema), plan.spec)) as reader:
            while (batch := reader.read(100)) is not None:
                found += batch.record["id"].to_pylist()
    return found


@pytest.mark.parametrize(("name", "other"), NAMES.items())
def test_a_folder_is_read_by_its_name(folder: str, name: str, other: str) -> None:
    put(f"{folder}/in/{name}/a.parquet", 1)
    put(f"{folder}/in/{name}/sub/b.parquet", 2)
    put(f"{folder}/in/{name}/_hidden.parquet", 3)
    put(f"{folder}/in/{other}/a.parquet", 4)

    assert ids(planned(f"{folder}/in/{name}", folder, f"{folder}/out")) == [1, 2]


@pytest.mark.parametrize(("name", "other"), NAMES.items())
def test_a_file_is_read_by_its_name(folder: str, name: str, other: str) -> None:
    put(f"{folder}/in/{name}.parquet", 1)
    put(f"{folder}/in/{other}.parquet", 2)

    assert ids(planned(f"{folder}/in/{name}.parquet", folder, f"{folder}/out")) == [1]


@pytest.mark.parametrize("name", [name for name in NAMES if not {"*", "["} & set(name)])
def test_a_pattern_may_be_within_a_folder_of_such_a_name(folder: str, name: str) -> None:
    put(f"{folder}/in/{name}/a.parquet", 1)
    put(f"{folder}/in/{name}/sub/b.parquet", 2)

    assert ids(planned(f"{folder}/in/{name}/*.parquet", folder, f"{folder}/out")) == [1]
    assert ids(planned(f"{folder}/in/{name}/**/*.parquet", folder, f"{folder}/out")) == [1, 2]


@pytest.mark.parametrize("pattern", ["a*b", "run[1]", "*"])
def test_a_pattern_that_is_no_name_means_what_it_does(folder: str, pattern: str) -> None:
    for number, name in enumerate(("axb", "run1")):
        put(f"{folder}/in/{name}", number)

    expected = {"a*b": ["axb"], "run[1]": ["run1"], "*": ["axb", "run1"]}[pattern]
    assert [file.url for file in find_files([f"{folder}/in/{pattern}"])] == [f"{folder}/in/{name}" for name in expected]
    with pytest.raises(InputMissing):
        find_files([f"{folder}/in/b{pattern}"])


@pytest.mark.parametrize(("name", "other"), [pair for pair in NAMES.items() if pair[0] != "*"])
def test_an_output_is_written_to_the_folder_of_its_name(folder: str, tmp_path: Path, name: str, other: str) -> None:
    """Other folders keep what they have, also where pieces are deleted."""
    put(f"{folder}/in.parquet", 1)
    put(f"{folder}/{other}/kept.parquet", 2)
    plan = planned(f"{folder}/in.parquet", folder, f"{folder}/{name}")
    url, store = f"{plan.spec.output.url}/{plan.shards[0].part}", store_for(folder)
    record = pa.record_batch({"id": [1], "y": [2.0], **dict.fromkeys(ERROR_COLUMNS, pa.nulls(1, pa.string()))})
    spool = tmp_path / "spool"
    with PartWriter(spool, record.schema, plan.spec.output, part_metadata("job-1", plan.shards[0], "hash")) as writer:
        writer.write(record)

    assert store.commit_if_absent(spool, url) is CommitOutcome.CREATED
    store.write(b"x", f"{plan.spec.output.url}/_input/piece")
    store.delete_folder(f"{plan.spec.output.url}/_input")

    assert [file.url for file in store.scan(plan.spec.output.url)] == [url]
    assert store.stat(f"{folder}/{other}/kept.parquet") is not None
    files, path = url_to_fs(url, {})
    assert len(files.cat_file(path)) == store.stat(url).size_bytes  # type: ignore[union-attr]  # as clients read it


def test_a_folder_with_the_name_of_a_pattern_is_deleted_alone(folder: str) -> None:
    for name in ("out[1]", "out1", "o*", "out"):
        put(f"{folder}/{name}/a.parquet", 1)

    store_for(folder).delete_folder(f"{folder}/out[1]")
    store_for(folder).delete_folder(f"{folder}/o*")

    assert sorted(file.url for file in store_for(folder).scan(folder)) == [
        f"{folder}/out/a.parquet",
        f"{folder}/out1/a.parquet",
    ]
