"""Models with environments of their own, in real worker processes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qinfer.backends.python import complete_config
from qinfer.models.config.config import parse
from qinfer.models.repository.cache import FilesCache
from qinfer.models.repository.files import LocalFiles
from qinfer.models.state import State
from qinfer.tensors import to_numpy
from qinfer.testing import eventually
from tests.support.packed import PACKAGE, make_environment, pack
from tests.support.python_models import execute, write_model
from tests.support.worker_processes import WorkerProcesses, worker_processes

INNER = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }'

VERSION = execute(f"import {PACKAGE}\nreturn [reply(x(r) + float({PACKAGE}.VERSION)) for r in requests]")


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerProcesses]:
    """Two models whose environments differ in a package."""
    for name, version in (("one", "100"), ("two", "200")):
        place = tmp_path / name
        place.mkdir()
        directory = write_model(tmp_path / "repository", VERSION, name, dims="1", more=INNER)
        pack(make_environment(place, version), directory.parent / "env.tar.gz")
    async with worker_processes(tmp_path) as one:
        yield one


async def test_models_of_a_worker_have_different_packages(pool: WorkerProcesses, tmp_path: Path) -> None:
    """Two workers share what is unpacked."""
    cache = tmp_path / "cache"
    await pool.worker(QINFER_REPOSITORY__CACHE_DIR=str(cache))
    await pool.worker(QINFER_REPOSITORY__CACHE_DIR=str(cache))

    answers = await pool.answered(pool.submit(1.0, "one"), pool.submit(2.0, "two"))

    assert [float(to_numpy(answer.outputs[0]).item()) for answer in answers] == [101.0, 202.0]
    assert len(list((cache / "environments").glob("*/ready"))) == 2


async def test_an_environment_beyond_the_settings_fails_the_load(pool: WorkerProcesses, tmp_path: Path) -> None:
    pool.start(QINFER_REPOSITORY__CACHE_DIR=str(tmp_path / "cache"), QINFER_WORKER__MAX_ENVIRONMENT_FILES="5")

    reasons: set[str] = set()

    async def have_failed() -> bool:
        states = [versions[1] for record in await pool.store.workers() for versions in record.models.values()]
        reasons.update(state.reason for state in states)
        return [state.state for state in states] == 2 * [State.UNAVAILABLE]

    await eventually(have_failed, 30.0, "the failure of both models")
    text = "the archive of its environment has more than 5 members (QINFER_WORKER__MAX_ENVIRONMENT_FILES)"
    assert {f"model '{name}' failed to load: {text}" for name in ("one", "two")} <= reasons


def test_a_copy_of_a_remote_model_has_its_environment(tmp_path: Path) -> None:
    """It lies beside the versions, and is fetched with each."""
    code = f"""
import {PACKAGE}

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(int({PACKAGE}.VERSION))
        return config
"""
    directory = write_model(tmp_path / "store", code)
    pack(make_environment(tmp_path, "7"), directory.parent / "env.tar.gz")
    copy = FilesCache(tmp_path / "cache").version_dir(LocalFiles(tmp_path / "store"), "s3://bucket", "m", 1)

    assert complete_config(parse(INNER), copy).max_batch_size == 7
