"""How many cores a runtime may use: those of the process, or what the limit of its container allows."""

import os
from pathlib import Path

import pytest

from qinfer.backends.parameters import usable_cores

CORES = 8
V1_QUOTA, V1_PERIOD = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({}, CORES, id="no cgroup"),
        pytest.param({"cpu.max": "max 100000\n"}, CORES, id="no limit"),
        pytest.param({"cpu.max": "200000 100000\n"}, 2, id="two"),
        pytest.param({"cpu.max": "250000 100000\n"}, 3, id="rounded up"),
        pytest.param({"cpu.max": "10000 100000\n"}, 1, id="a tenth"),
        pytest.param({"cpu.max": "6400000 100000\n"}, CORES, id="more than there are"),
        pytest.param({"cpu.max": "?"}, CORES, id="unknown words"),
        pytest.param({V1_QUOTA: "150000\n", V1_PERIOD: "50000\n"}, 3, id="v1"),
        pytest.param({V1_QUOTA: "-1\n", V1_PERIOD: "100000\n"}, CORES, id="v1 without a limit"),
    ],
)
def test_a_containers_limit_counts(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with two CPUs of eight starts two threads, not eight that wait for one another."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(CORES)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert usable_cores(tmp_path) == cores
