"""Priorities of bulk jobs, through the whole server: a later job of a higher one waits for the shards in hand only."""

import json
from functools import partial
from pathlib import Path

import pytest

from qinfer.client import Job
from qinfer.client.job_flows import JobStatus
from qinfer.testing import wait_until
from tests.e2e.job_scene import WITHIN_S, serving
from tests.support.jobs.job_proof import parquet, rows_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(150)]

SHARDS = 60
IN_HAND = 2
"""One worker scores a shard while it commits the one before."""
MOST_PASSED = IN_HAND + IN_HAND - 1
"""Those in hand when a job of a higher priority comes; and the one beside its last shard, which may be faster."""


def finished(log: Path) -> list[tuple[str, int]]:
    """Returns which shards of which jobs the worker has finished, in order."""
    lines = [line for line in log.read_text().splitlines() if '"event":"shard finished"' in line]
    found = [json.loads(line) for line in lines]
    return [(line["job"], line["shard"]) for line in found]


def test_a_job_of_a_higher_priority_goes_first(tmp_path: Path) -> None:
    """No shard of a lower one is finished before its last but those in hand; each job's are run in their order."""
    rows = SHARDS * 20
    with serving(tmp_path, QINFER_LOG__LEVEL="INFO", QINFER_LOG__FORMAT="json") as server:
        scene = server.scene()
        scene.place.put("in/a.parquet", parquet(rows_of(0, rows, rows)))
        jobs: dict[str, Job] = {"low": scene.submit(out="low", priority="low", rows_per_part=20)}
        wait_until(lambda: jobs["low"].status().shards_done > 0, WITHIN_S, "a shard of the low job")
        with scene.without_workers():
            for priority in ("normal", "high"):
                jobs[priority] = scene.submit(out=priority, priority=priority, rows_per_part=300)
                wait_until(partial(_is_waiting, jobs[priority]), WITHIN_S, "shards in the lane")
            before = jobs["low"].status()
        ends: dict[str, JobStatus] = {name: job.wait(timeout_s=WITHIN_S) for name, job in jobs.items()}
    order = finished(tmp_path / "log")

    assert {name: (end.state, end.shards) for name, end in ends.items()} == {
        "low": ("completed", SHARDS),
        "normal": ("completed", rows // 300),
        "high": ("completed", rows // 300),
    }
    names = {job.id: name for name, job in jobs.items()}
    seen = [names[job] for job, _ in order]
    assert 0 < before.shards_done < SHARDS - IN_HAND
    assert passed(seen, before.shards_done, "high") <= MOST_PASSED
    assert passed([name for name in seen if name != "high"], before.shards_done, "normal") <= MOST_PASSED
    for name in names.values():
        shards = [shard for job, shard in order if names[job] == name]
        assert all(abs(shard - turn) < IN_HAND for turn, shard in enumerate(shards)), shards


def passed(seen: list[str], start: int, name: str) -> int:
    """Returns how many shards of other jobs were finished, from a moment on, before the last one of a job."""
    last = len(seen) - seen[::-1].index(name)
    return sum(other != name for other in seen[start:last])


def _is_waiting(job: Job) -> bool:
    return bool(job.status().fields["shards"]["active"])
