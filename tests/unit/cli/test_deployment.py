"""Decisions of `qinfer up` about bulk jobs and large tensors, and errors that cross the pipe of its preparation."""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qinfer import errors
from qinfer.cli.console import CommandFailed
from qinfer.cli.local.deployment import Ports, UpOptions, _Answer
from qinfer.cli.local.machine import RunFile, write_run
from qinfer.cli.local.preparation import (
    PAYLOAD_BYTES,
    Preparation,
    allowed_stores,
    completed,
    jobs_line,
    payload_store,
    why_no_bulk_worker,
)
from qinfer.cli.main import app
from qinfer.cli.overview import payload_limits, program_variables
from qinfer.core.settings import BulkSettings, RedisSettings, Settings, StoreSettings, load_settings
from qinfer.errors import SettingsError

REDIS = "redis://127.0.0.1/0"
ALLOWED = StoreSettings(allow=("file:///data",))
SECTIONS: dict[str, dict[str, Any]] = {
    "repository": {"path": "", "control_mode": "poll"},
    "stores": {"allow": ()},
    "rate_limit": {"resources": ()},
}


def test_directories_and_urls_are_allowed_beside_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is the one of this machine; what is allowed twice is there once."""
    monkeypatch.chdir(tmp_path)
    settings = Settings(stores=StoreSettings(allow=("s3://bucket/one", "s3://other")))

    allowed = allowed_stores(["data", "s3://bucket/one/"], settings)

    assert allowed == (f"file://{tmp_path}/data", "s3://bucket/one", "s3://other")


def test_what_is_neither_is_refused_with_the_option_named() -> None:
    """Before anything is started."""
    with pytest.raises(SettingsError, match=r"--allow-store: .*"):
        allowed_stores(["s3://user:secret@bucket"], Settings())


def test_the_worker_runs_unless_something_is_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is one that the user can act on."""
    assert why_no_bulk_worker(Settings(stores=ALLOWED), REDIS) == ""
    assert "--allow-store" in why_no_bulk_worker(Settings(), REDIS)
    off = Settings(stores=ALLOWED, bulk=BulkSettings(enabled=False))
    assert why_no_bulk_worker(off, REDIS) == "QINFER_BULK__ENABLED is false"
    cluster = Settings(stores=ALLOWED, redis=RedisSettings(cluster=True))
    assert "QINFER_BULK__BROKER_URL is not set" in why_no_bulk_worker(cluster, REDIS)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "celery" else name)
    assert (
        why_no_bulk_worker(Settings(stores=ALLOWED), REDIS) == "celery is not installed: pip install 'qinfer-ml[bulk]'"
    )


def options_of(data_dir: Path, redis_url: str = "") -> UpOptions:
    return UpOptions(
        settings={},
        allow_client_shm=False,
        data_dir=data_dir,
        redis_url=redis_url,
        redis_memory_bytes=0,
        workers=1,
        autoscale=None,
        ready_timeout_s=1.0,
    )


def test_large_tensors_are_files_of_the_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there is none, or the operator has said where they are."""
    data, url = tmp_path / "a b#", f"file://{tmp_path}/a b#/payloads"
    usual = {"payload_url": url, "payload_url_min_bytes": PAYLOAD_BYTES}

    assert payload_store(options_of(data), Settings()) == usual
    assert payload_store(options_of(data, REDIS), Settings()) == {}
    assert payload_store(options_of(tmp_path / "a::b"), Settings()) == {}
    monkeypatch.setenv("QINFER_LIMITS__PAYLOAD_URL_MIN_BYTES", "123")
    assert payload_store(options_of(data), load_settings()) == {**usual, "payload_url_min_bytes": 123}
    for given in ("s3://bucket/x", ""):
        monkeypatch.setenv("QINFER_LIMITS__PAYLOAD_URL", given)
        assert payload_store(options_of(data), load_settings()) == {}


def test_the_limits_of_dev_replace_those_of_up_and_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QINFER_LIMITS__EXECUTE_TIMEOUT_S", "5")
    dev = {"execute_timeout_s": 0.0, "default_timeout_s": 86400.0}
    options = replace(options_of(tmp_path), settings={**SECTIONS, "limits": dev})

    assert completed(options, load_settings())["limits"].items() >= dev.items()


def test_a_console_of_its_own_has_its_port_and_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the environment and of the option; without a port, the gateway is told none."""
    monkeypatch.setenv("QINFER_CONSOLE__HOST", "127.0.0.2")

    def preparation(**console: int) -> Preparation:
        sections = {"redis": {}, "http": {}, "grpc": {}, "metrics": {}, **SECTIONS, "console": console}
        found = Preparation(replace(options_of(tmp_path), settings=sections))
        found._ports, found._url = Ports(1, 2, 3, 4), "http://127.0.0.1:1"
        return found

    apart, shared = preparation(port=0), preparation()

    assert apart.console_url() == "http://127.0.0.2:4/console/"
    assert apart._variables(REDIS)["QINFER_CONSOLE__PORT"] == "4"
    assert shared.console_url() == "http://127.0.0.1:1/console/"
    assert "QINFER_CONSOLE__PORT" not in shared._variables(REDIS)


def test_an_app_is_served_without_a_repository_that_nobody_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`models` may have been built of it, and has the same models then."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    options = replace(options_of(tmp_path / "data"), settings=SECTIONS, apps=("app.py",))

    def places(path: str = "") -> list[str]:
        asked = {**SECTIONS, "repository": {**SECTIONS["repository"], "path": path}}
        found: str = completed(replace(options, settings=asked), load_settings())["repository"]["path"]
        return found.split(",")

    assert places() == [str(options.functions)]
    assert places("models") == [str(tmp_path / "models"), str(options.functions)]
    monkeypatch.setenv("QINFER_REPOSITORY__PATH", "models")
    assert places() == [str(tmp_path / "models"), str(options.functions)]


def test_other_programs_find_the_payload_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the run file, where they find Redis; a URL or a setting names another."""
    run = RunFile(os.getpid(), "http://127.0.0.1:1", "unix:///redis.sock", "file:///data/payloads", 7)
    write_run(tmp_path, run)

    found = program_variables("", tmp_path)
    assert found == {
        "QINFER_REDIS__URL": "unix:///redis.sock",
        "QINFER_LIMITS__PAYLOAD_URL": "file:///data/payloads",
        "QINFER_LIMITS__PAYLOAD_URL_MIN_BYTES": "7",
    }
    assert payload_limits(REDIS, tmp_path).payload_url == ""
    monkeypatch.setenv("QINFER_LIMITS__PAYLOAD_URL", "s3://bucket/x")
    assert payload_limits("", tmp_path).payload_url == "s3://bucket/x"


def test_the_summary_says_where_jobs_may_read_and_write() -> None:
    """Or what to do."""
    allowed = Settings(stores=ALLOWED)

    assert jobs_line(allowed, "") == "within file:///data"
    assert jobs_line(allowed, "celery is not installed") == "off; celery is not installed"


@pytest.mark.parametrize(
    "error",
    [
        errors.SettingsError("QINFER_HTTP__PORT=70000: too large"),
        errors.Overloaded("too many"),
        ModuleNotFoundError("No module named 'redis'", name="redis"),
        ImportError("no such name"),
        FileNotFoundError(2, "No such file or directory", "/nowhere"),
        PermissionError(13, "Permission denied"),
    ],
)
def test_errors_arrive_as_they_were(error: Exception) -> None:
    """The class decides the exit code, the text and the module are shown."""
    raised = _Answer.from_error(error).raised()

    assert (type(raised), str(raised)) == (type(error), str(error))
    assert getattr(raised, "name", None) == getattr(error, "name", None)


def test_an_error_of_another_module_arrives_as_the_nearest_that_is_known() -> None:
    raised = _Answer.from_error(CommandFailed("it failed")).raised()

    assert (type(raised), str(raised)) == (errors.QinferError, "it failed")


@pytest.mark.parametrize(("given", "redis_mb"), [((), 64), (("--redis-memory", "8"), 8)])
def test_a_small_device_has_one_core_and_no_bulk_worker(
    given: tuple[str, ...], redis_mb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed: list[UpOptions] = []
    pinned: list[list[int]] = []
    monkeypatch.setattr("qinfer.cli.local.deployment.run_deployment", deployed.append)
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cpus: pinned.append(cpus))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")

    result = CliRunner().invoke(app, ["up", "--edge", *given])

    assert (result.exit_code, [len(cpus) for cpus in pinned]) == (0, [1])
    (options,) = deployed
    assert options.redis_memory_bytes == redis_mb * 2**20
    assert not completed(options, load_settings())["bulk"]["enabled"]
