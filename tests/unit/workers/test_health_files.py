"""The files whose ages probes look at."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from qinfer.errors import SettingsError
from qinfer.models.state import State, VersionState, WorkerRecord
from qinfer.testing import eventually
from qinfer_workers.liveness import HealthFiles


def record(state: State) -> WorkerRecord:
    return WorkerRecord(id="w", started_at=0.0, models={"m": {1: VersionState(state, 1)}})


async def test_a_worker_that_runs_is_live(tmp_path: Path) -> None:
    files = HealthFiles(tmp_path / "health", strict=True)
    os.utime(tmp_path / "health" / "live", (0, 0))
    running = asyncio.create_task(files.run())

    await eventually(lambda: (tmp_path / "health" / "live").stat().st_mtime > time.time() - 60)
    running.cancel()

    assert not (tmp_path / "health" / "ready").exists()


@pytest.mark.parametrize(
    ("state", "strict", "is_ready"),
    [
        (State.READY, True, True),
        (State.LOADING, False, False),
        (State.UNAVAILABLE, True, False),
        (State.UNAVAILABLE, False, True),
    ],
)
def test_a_worker_is_ready_with_its_models(tmp_path: Path, state: State, *, strict: bool, is_ready: bool) -> None:
    files = HealthFiles(tmp_path, strict=strict)
    files.beaten(record(State.READY))

    files.beaten(record(state))

    assert (tmp_path / "ready").exists() == is_ready


def test_a_new_worker_is_not_ready_by_the_file_of_another(tmp_path: Path) -> None:
    (tmp_path / "ready").touch()

    HealthFiles(tmp_path, strict=True)

    assert not (tmp_path / "ready").exists()


def test_a_directory_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SettingsError, match="QINFER_WORKER__HEALTH_DIR"):
        HealthFiles(tmp_path / "file" / "below", strict=True)
