"""A job on a model that nobody has asked before, through the whole server: all workers score from the start."""

from pathlib import Path

import httpx
import pytest

from qinfer.client.job_flows import JobStatus
from qinfer.testing import wait_until
from tests.e2e.job_scene import WITHIN_S, serving
from tests.support import python_models
from tests.support.jobs.job_proof import parquet, rows_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]

ROWS = 8_000
TWICE = """
with open({trace!r}, "a") as trace:
    for request in requests:
        trace.write(f"{{os.getpid()}} {{len(x(request))}}\\n")
for request in requests:
    time.sleep(2e-3 * len(x(request)))
return [reply(2 * x(request)) for request in requests]
"""
"""Two milliseconds a row; it notes which process executes how many rows."""


def test_all_workers_score_from_the_start_and_progress_moves(tmp_path: Path) -> None:
    """One row group, of which no shard is so large that a worker waits for another; the rows that are scored count."""
    trace = tmp_path / "trace"
    code = python_models.execute(TWICE.strip().format(trace=str(trace)))
    python_models.write_model(tmp_path / "models", code, "sleepy", dims=2)
    table = rows_of(0, ROWS, ROWS, nulls=False)
    seen: list[JobStatus] = []
    with serving(tmp_path, 2) as server:
        scene = server.scene()
        scene.place.put("in/a.parquet", parquet(table))
        trace.write_text("")  # what it did to warm up
        job = scene.submit(model="sleepy")
        status = job.wait(timeout_s=WITHIN_S, on_status=seen.append)
        stats = f"http://{server.stack.address}/v2/models/sleepy/stats"

        def executed() -> int:
            (found,) = httpx.get(stats).json()["model_stats"]
            return int(found["inference_count"])

        wait_until(lambda: executed() == ROWS, WITHIN_S, "the job's executions in the statistics")
    noted = [(process, int(rows)) for process, rows in map(str.split, trace.read_text().splitlines())]

    scene.check(status, table)
    assert status.rows_processed == ROWS
    assert sum(rows for _, rows in noted) == ROWS
    behind = 0
    first: dict[str, int] = {}
    for process, rows in noted:
        first.setdefault(process, behind)
        behind += rows
    assert len(first) == 2
    assert max(first.values()) < ROWS / 2
    assert any(one.rows_scored for one in seen)
    assert all(one.eta_s is None or one.eta_s > 0 for one in seen if one.state == "running")
