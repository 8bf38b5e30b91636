"""Jobs that overwrite an earlier output, through the whole server: what readers take for whole has the rows of one."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from qinfer.client import Job
from qinfer.errors import Conflict, InvalidRequest, ResultNotFound
from qinfer.testing import wait_until
from tests.e2e.job_scene import WITHIN_S, Scene, Server, serving
from tests.support.jobs.job_proof import parquet, rows_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]

ROWS = 20_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("jobs"), 2) as one:
        yield one


@pytest.fixture
def scene(server: Server) -> Scene:
    """Returns a scene with an output of the first file's rows, in 20 parts."""
    scene = server.scene()
    scene.place.put("in/a.parquet", parquet(rows_of(0, ROWS, 2 * ROWS)))
    scene.check(scene.done(rows_per_part=ROWS // 20), rows_of(0, ROWS, 2 * ROWS))
    scene.place.put("in/b.parquet", parquet(rows_of(ROWS, ROWS, 2 * ROWS)))
    return scene


def test_an_output_is_written_anew(scene: Scene) -> None:
    """Of fewer parts than before; what is no job's stays, and the earlier job's readers are told."""
    scene.place.put("out/notes.txt", b"mine")
    (earlier,) = scene.client.jobs(limit=1)

    assert "--overwrite" in scene.refusal()
    status = scene.done(rows_per_part=ROWS, overwrite=True)

    scene.check(status, rows_of(0, ROWS, 2 * ROWS), rows_of(ROWS, ROWS, 2 * ROWS))
    parts = {f"part-{number:05d}.parquet" for number in range(2)}
    assert set(scene.place.names("out")) == {"notes.txt", "_SUCCESS", "_manifest.json", "_plan.json", *parts}
    with pytest.raises(ResultNotFound, match=f"overwritten by job '{status.id}'"):
        scene.client.job(earlier.id).to_arrow()


def test_the_same_command_clears_and_runs_again(scene: Scene) -> None:
    """A scheduler's job has the same id each time."""
    again = {"id": f"daily-{Path(scene.place.path('')).name}", "resume": True, "overwrite": True}

    first = scene.done("a.parquet", **again)
    second = scene.done("*.parquet", **again)

    assert (first.rows, second.rows) == (ROWS, 2 * ROWS)
    scene.check(second, rows_of(0, ROWS, 2 * ROWS), rows_of(ROWS, ROWS, 2 * ROWS))


def test_a_bulk_worker_that_is_killed_at_any_time_leaves_no_mix(scene: Scene) -> None:
    """Once a file of the earlier output is gone it dies, and again when the new plan is there."""
    out = Path(scene.place.path("out"))
    job = scene.submit(rows_per_part=ROWS // 20, overwrite=True)
    for name in ("_SUCCESS", "part-00019.parquet"):
        _wait_without(out / name, job)
        _kill(scene, "qinfer_workers.jobs")
    status = job.wait(timeout_s=WITHIN_S)

    scene.check(status, rows_of(0, ROWS, 2 * ROWS), rows_of(ROWS, ROWS, 2 * ROWS))


def test_two_jobs_do_not_share_a_folder_that_one_overwrites(scene: Scene) -> None:
    with scene.without_workers():
        job = scene.submit(overwrite=True)
        with pytest.raises(Conflict, match=job.id):
            scene.submit(overwrite=True)
        with pytest.raises((Conflict, InvalidRequest)):
            scene.submit()
    scene.check(job.wait(timeout_s=WITHIN_S), rows_of(0, ROWS, 2 * ROWS), rows_of(ROWS, ROWS, 2 * ROWS))


def _wait_without(file: Path, job: Job) -> None:
    wait_until(lambda: not file.exists() or job.status().has_ended, WITHIN_S, f"an output without {file.name}")


def _kill(scene: Scene, program: str) -> None:
    for child in psutil.Process(scene.stack.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # or one that has ended
            if program in child.cmdline():
                child.kill()
