"""Bulk jobs through the whole server on real object stores: complete, exact, in order, readable with common tools.

The same suite on a directory, moto's and LocalStack's S3, Azurite, and fake-gcs-server.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.dataset
import pytest

from qinfer.client import Client
from qinfer.client.job_flows import JobOptions
from qinfer.testing import wait_until
from tests.e2e.conftest import running
from tests.support.jobs.job_proof import MODEL, Place, check_documents, compare, parquet, rows_of, write_model
from tests.support.servers import object_stores, s3_server
from tests.support.servers.s3_server import S3Server
from tests.support.servers.servers import matrix

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(150),
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),  # aiohttp, of adlfs
]

KINDS = ["file", *matrix("s3", "s3-localstack", "azure", "gcs")]
BUCKET = "jobs"
ROWS = 1600
FILES = {"a": [137] * 7 + [41], "b": [1], "c": [1, 0, 333, 166], "d": [0], "e": [99]}
"""The sizes of the row groups of each file."""
WITHIN_S = 60.0


class Scene(NamedTuple):
    """A running server that may use a store."""

    client: Client
    place: Place
    inputs: pa.Table


@pytest.fixture(scope="module", params=KINDS)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("jobs")
    with ExitStack() as stack:
        place, environment = _store(request.param, folder, stack)
        write_model(folder / "models")
        environment["QINFER_STORES__ALLOW"] = f'["{place.url}"]'
        server = stack.enter_context(running(folder / "models", folder, **environment))
        client = stack.enter_context(Client(f"http://{server.address}"))
        yield Scene(client, place, _write_inputs(place))


def _store(kind: str, folder: Path, stack: ExitStack) -> tuple[Place, dict[str, str]]:
    """Starts a store; returns the place in it, and the variables by which it is found."""
    if kind == "file":
        return Place(f"file://{folder}/objects"), {}
    if kind == "azure":
        if not object_stores.AZURITE.exists():
            pytest.skip(object_stores.NO_AZURITE)
        azure = stack.enter_context(object_stores.azure(folder / "azure", BUCKET))
        return Place(azure.url, dict(azure.options)), dict(azure.environment)
    if kind == "gcs":
        google = stack.enter_context(object_stores.gcs(BUCKET))
        return Place(google.url, dict(google.options)), dict(google.environment)
    if kind == "s3":
        endpoint = stack.enter_context(S3Server()).endpoint
    else:
        if not s3_server.LOCALSTACK.exists():
            pytest.skip(s3_server.NO_LOCALSTACK)
        endpoint = stack.enter_context(s3_server.localstack(folder))
    bucket = f"{BUCKET}-{kind}"
    s3_server.make_bucket(endpoint, bucket)
    environment = dict(s3_server.environment(endpoint))
    options = {
        "endpoint_url": endpoint,
        "key": environment["AWS_ACCESS_KEY_ID"],
        "secret": environment["AWS_SECRET_ACCESS_KEY"],
    }
    return Place(f"s3://{bucket}", options | {"use_listings_cache": False}), environment


def _write_inputs(place: Place) -> pa.Table:
    """Writes the files; returns all their rows, with the place of each."""
    first, tables = 0, []
    for name, groups in FILES.items():
        table = rows_of(first, sum(groups), ROWS)
        place.put(f"in/{name}.parquet", parquet(table, groups))
        first += len(table)
        tables.append(table)
    assert first == ROWS
    return pa.concat_tables(tables)


def places(place: Place) -> list[tuple[str, int, int]]:
    """Returns file, row group and row number of each row."""
    found = []
    for name, groups in FILES.items():
        row = 0
        for group, count in enumerate(groups):
            found += [(f"{place.url}/in/{name}.parquet", group, row + i) for i in range(count)]
            row += count
    return found


def test_a_job_is_complete_and_exact(scene: Scene) -> None:
    """Each row once, in the inputs' order, by its key; rows without a value have an error; counts agree everywhere."""
    client, place, inputs = scene
    options: JobOptions = {"key": "id", "passthrough": ["name"], "rows_per_part": 200, "error_threshold": -1}
    job = client.submit_job(MODEL, f"{place.url}/in/*.parquet", f"{place.url}/scored", **options)

    status = job.wait(timeout_s=WITHIN_S)

    assert status.state == "completed", status.error
    output = place.table("scored")
    verdict = compare(inputs, output)
    assert verdict.is_exact, verdict
    assert verdict.errors == inputs["x"].null_count > 0
    assert (status.rows, status.rows_done, status.rows_failed) == verdict[:3]
    assert output["id"].to_pylist() == inputs["id"].to_pylist()
    assert output["name"].to_pylist() == inputs["name"].to_pylist()
    assert len(place.parts("scored")) == status.shards >= ROWS // 200
    check_documents(place, "scored", verdict)
    again = job.to_arrow(storage_options=place.options)
    assert again["id"].to_pylist() == inputs["id"].to_pylist()


def test_rows_without_a_key_have_their_place(scene: Scene) -> None:
    """File, row group and row; as Arrow files, whose rows are in the same order."""
    client, place, inputs = scene
    options: JobOptions = {"format": "arrow", "rows_per_part": 400, "error_threshold": -1, "columns": {"x": "x"}}
    job = client.submit_job(MODEL, f"{place.url}/in/*.parquet", f"{place.url}/placed", **options)

    status = job.wait(timeout_s=WITHIN_S)

    assert status.state == "completed", status.error
    output = place.table("placed")
    found = [output[name].to_pylist() for name in ("_file", "_row_group", "_row")]
    assert list(zip(*found, strict=True)) == places(place)
    expected = [None if x is None else [2 * value for value in x] for x in inputs["x"].to_pylist()]
    assert output["y"].to_pylist() == expected
    names = output.column_names
    assert names == ["y", "_file", "_row_group", "_row", "error_code", "error_message"]


def test_every_reader_sees_the_same(scene: Scene) -> None:
    """duckdb, pandas, polars and pyarrow, in the store itself, where they read a folder or a pattern."""
    import pandas as pd
    import polars as pl

    client, place, inputs = scene
    out = f"{place.url}/read"
    job = client.submit_job(MODEL, f"{place.url}/in/*.parquet", out, key="id", rows_per_part=500, error_threshold=-1)
    status = job.wait(timeout_s=WITHIN_S)
    assert status.state == "completed", status.error
    ids, files = inputs["id"].to_pylist(), place.files

    by_pyarrow = pyarrow.dataset.dataset(place.path("read"), filesystem=files, format="parquet").to_table()
    by_pandas = pd.read_parquet(place.path("read"), filesystem=files)
    parts = [f"read/{name}" for name in place.parts("read")]
    by_polars = pl.concat([pl.read_parquet(place.read(part)) for part in parts])
    with duckdb.connect() as db:
        if not place.url.startswith("file:"):
            db.register_filesystem(files)
        urls = [files.unstrip_protocol(place.path(part)).removeprefix("file://") for part in parts]
        by_duckdb = db.sql("SELECT id, y FROM read_parquet(?)", params=[urls]).to_arrow_table()

    assert by_pyarrow["id"].to_pylist() == by_pandas["id"].tolist() == by_polars["id"].to_list() == ids
    assert by_duckdb["id"].to_pylist() == ids
    y = by_pyarrow["y"].to_pylist()
    assert by_polars["y"].to_list() == by_duckdb["y"].to_pylist() == y
    assert [value if value is None else value.tolist() for value in by_pandas["y"]] == y


def test_a_cancelled_job_is_resumed_where_it_was(scene: Scene) -> None:
    """What was written stays readable, and is not made again; the rest is."""
    client, place, inputs = scene
    out = f"{place.url}/resumed"
    options: JobOptions = {"key": "id", "rows_per_part": 40, "error_threshold": -1, "max_parallel": 1}
    job = client.submit_job(MODEL, f"{place.url}/in/*.parquet", out, **options)
    wait_until(lambda: job.status().shards_done > 0, WITHIN_S, "the first part")
    job.cancel()
    cancelled = job.wait(timeout_s=WITHIN_S)
    assert cancelled.state == "cancelled", cancelled
    partial = job.to_arrow(partial=True, storage_options=place.options)
    before = place.marks("resumed")
    assert 0 < len(before) < cancelled.shards
    assert set(partial["id"].to_pylist()) <= set(inputs["id"].to_pylist())
    assert partial.num_rows > 0
    assert "_SUCCESS" not in place.names("resumed")

    job.resume()
    status = job.wait(timeout_s=WITHIN_S)

    assert status.state == "completed", status.error
    verdict = compare(inputs, place.table("resumed"))
    assert verdict.is_exact, verdict
    assert place.marks("resumed").items() >= before.items()
    check_documents(place, "resumed", verdict)
    assert "_manifest.partial.json" not in place.names("resumed")
