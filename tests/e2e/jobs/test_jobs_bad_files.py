"""Input folders with files that can't be read, through the whole server: all are named, or skipped and listed.

The rows of the other files are scored exactly once, by anti-joins of the keys.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from qinfer.jobs.plan import decode_manifest
from tests.e2e.conftest import clean_environment
from tests.e2e.job_scene import WITHIN_S, Scene, Server, serving
from tests.support.jobs.job_proof import MODEL, compare, parquet, rows_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]

FILES = 1000
ROWS = 5
"""Rows of each file."""
EMPTY, CUT_OFF, OTHER, DAMAGED = 7, 300, 555, 800
"""The numbers of the files that are not as they should be: the last is so only within."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("jobs")) as one:
        yield one


@pytest.fixture
def scene(server: Server) -> Scene:
    return server.scene()


def whole(number: int) -> bytes:
    return parquet(rows_of(number * ROWS, ROWS, FILES * ROWS, nulls=False))


def damaged_within(content: bytes) -> bytes:
    """Returns a Parquet file whose footer is fine, and whose pages are not."""
    end = len(content) - int.from_bytes(content[-8:-4], "little") - 8
    return content[:4] + b"\xff" * (end - 4) + content[end:]


def write_files(scene: Scene) -> None:
    folder = Path(scene.place.path("in"))
    folder.mkdir(parents=True)
    for number in range(FILES):
        (folder / f"{number:04d}.parquet").write_bytes(whole(number))
    (folder / f"{EMPTY:04d}.parquet").write_bytes(b"")
    (folder / f"{CUT_OFF:04d}.parquet").write_bytes(whole(CUT_OFF)[:-100])
    (folder / f"{OTHER:04d}.parquet").write_bytes(b"id,x\n1,2\n")
    (folder / f"{DAMAGED:04d}.parquet").write_bytes(damaged_within(whole(DAMAGED)))


def qinfer(scene: Scene, *arguments: str) -> str:
    """Runs a command against the scene's server; returns what it prints."""
    command = [sys.executable, "-m", "qinfer.cli.main", *arguments, "--url", f"http://{scene.stack.address}"]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True).stdout


def test_a_thousand_files_of_which_three_are_broken(scene: Scene) -> None:
    """A job names its broken files and fails; with `--bad-files skip` every other row has its answer, once."""
    write_files(scene)
    broken = [f"{number:04d}.parquet" for number in (CUT_OFF, OTHER)]

    error = scene.failure(out="none")
    assert error.startswith("2 of 1000 input files can't be read; ")
    assert [name for name in broken if f"'{name}' can't be read as parquet" in error] == broken

    inputs, output = f"{scene.place.url}/in/*.parquet", f"{scene.place.url}/out"
    options = ("--key", "id", "--id", "skips", "--bad-files", "skip", "--error-threshold", "0.01", "--wait")
    said = qinfer(scene, "submit", MODEL, inputs, output, *options)

    assert "completed" in said
    assert "2 files skipped" in said
    kept = [number for number in range(FILES) if number not in (EMPTY, CUT_OFF, OTHER, DAMAGED)]
    table = scene.place.table("out")
    lost = pc.equal(table["error_code"], "bad_file").fill_null(False)
    verdict = compare(
        pa.concat_tables([rows_of(number * ROWS, ROWS, FILES * ROWS, nulls=False) for number in kept]),
        table.filter(pc.invert(lost)),
    )
    assert verdict.line == f"rows={len(kept) * ROWS} ok={len(kept) * ROWS} error=0 missing=0 duplicates=0"
    assert verdict.is_exact
    messages = table.filter(lost)["error_message"].to_pylist()
    assert len(messages) == ROWS
    assert scene.short(messages[0]).startswith(f"rows 0 to 4: '{DAMAGED:04d}.parquet' can't be read; is it damaged?")


def test_skipped_files_are_listed_wherever_one_looks(scene: Scene) -> None:
    """In the status, the log, the plan and the manifest, with their reasons."""
    scene.place.put("in/a.parquet", whole(0)[:-50])
    scene.place.put("in/b.parquet", whole(1))
    scene.place.put("in/c.parquet", damaged_within(whole(2)))

    job = scene.submit(bad_files="skip", passthrough=["name"])
    status = job.wait(timeout_s=WITHIN_S)

    assert (status.state, status.skipped_files, status.rows, status.rows_failed) == ("completed", 1, 10, 5)
    reason = "can't be read as parquet; is it damaged or cut off?"
    manifest = decode_manifest(scene.place.read("out/_manifest.json"))
    plan = json.loads(scene.place.read("out/_plan.json"))
    listed = [status.fields["skipped_files"]["first"], plan["skipped"], msgspec.to_builtins(manifest.skipped)]
    for first, *others in listed:
        assert scene.short(first["url"]) == "a.parquet"
        assert first["reason"].startswith(reason)
        assert not others
    log = [scene.short(line.text) for line in job.log()]
    assert any(line.startswith(f"skipped: 'a.parquet' {reason}") for line in log)
    assert any(line.startswith("can't be read: rows 0 to 4: 'c.parquet' can't be read; ") for line in log)
    assert "completed: 10 rows, 5 of them failed; 1 files were skipped" in log
    shown = json.loads(qinfer(scene, "jobs", "show", job.id, "--json"))
    assert shown["skipped_files"] == status.fields["skipped_files"]
