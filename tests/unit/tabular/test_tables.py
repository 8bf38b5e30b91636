"""Folders of Delta, Iceberg and Hudi tables are refused by name; files that are named one by one are not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from qinfer.errors import Forbidden, InvalidRequest
from qinfer.tabular.source import find_files
from tests.support.servers import object_stores

HUDI = "b3c8b2a4-0d3f-4c55-9c2e-0a4d2f8d7a11-0_0-22-25_20260131120000123.parquet"
TABLES = {
    "Delta": ("_delta_log/00000000000000000000.json", "part-0.parquet", "day=1/part-1.parquet"),
    "Iceberg": ("metadata/00000-1a.metadata.json", "data/0.parquet", "data/day=1/1.parquet"),
    "Hudi": (".hoodie/hoodie.properties", HUDI, f"day=1/{HUDI}"),
}


@pytest.fixture(params=TABLES)
def table(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, Path]:
    for name in TABLES[request.param]:
        path = tmp_path / "lake" / "t" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (tmp_path / "lake" / "loose.parquet").write_text("x")
    return request.param, tmp_path / "lake"


def inner_of(kind: str) -> str:
    return "t/data/day=1" if kind == "Iceberg" else "t/day=1"


@pytest.mark.parametrize(
    "pattern", ["t", "", "**/*.parquet", "t/**", "t/*/*.parquet", "t/*/*/*.parquet", "inner", "inner/*"]
)
def test_a_folder_of_a_table_is_refused(table: tuple[str, Path], pattern: str) -> None:
    kind, lake = table
    if "*/*" in pattern and not list(lake.glob(pattern)):
        pytest.skip("the pattern names none of its files")
    url = f"file://{lake}/{pattern.replace('inner', inner_of(kind))}".rstrip("/")

    with pytest.raises(InvalidRequest, match=f"lake/t.*' is a table of {kind}"):
        find_files([url])


def test_files_beside_a_table_are_read(table: tuple[str, Path]) -> None:
    _, lake = table

    assert len(find_files([f"file://{lake}/*.parquet"])) == 1


def test_files_that_are_named_one_by_one_are_read(table: tuple[str, Path]) -> None:
    kind, lake = table

    assert len(find_files([f"file://{lake}/t/{TABLES[kind][1]}"])) == 1


def test_a_folder_called_metadata_makes_no_table(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "about.json").touch()
    (tmp_path / "a.parquet").touch()

    assert len(find_files([f"file://{tmp_path}/*.parquet"])) == 1


def test_folders_above_that_may_not_be_read_are_not_looked_at(table: tuple[str, Path]) -> None:
    kind, lake = table
    inner = f"file://{lake}/{inner_of(kind)}"

    def check(url: str) -> None:
        if not url.startswith(inner):
            raise Forbidden("no")

    if kind == "Hudi":
        pytest.skip("the names of its files tell")
    assert len(find_files([inner], check)) == 1


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[object_stores.ObjectStore]:
    with object_stores.s3("bulk-tables") as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        yield store


def test_a_table_in_a_bucket_is_refused(s3: object_stores.ObjectStore, table: tuple[str, Path]) -> None:
    kind, lake = table
    url = s3.upload(lake, to="lake")

    for folder in (url, f"{url}/t", f"{url}/{inner_of(kind)}"):
        with pytest.raises(InvalidRequest, match=f"is a table of {kind}"):
            find_files([folder])
