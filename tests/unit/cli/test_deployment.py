"""What `qinfer up` decides about bulk jobs."""

import importlib.util
from pathlib import Path

import pytest

from qinfer.cli.local.preparation import allowed_stores, jobs_line, why_no_bulk_worker
from qinfer.core.settings import BulkSettings, RedisSettings, Settings, StoreSettings
from qinfer.errors import SettingsError

REDIS = "redis://127.0.0.1/0"
ALLOWED = StoreSettings(allow=("file:///data",))


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


def test_the_summary_says_where_jobs_may_read_and_write() -> None:
    """Or what to do."""
    allowed = Settings(stores=ALLOWED)

    assert jobs_line(allowed, "") == "within file:///data"
    assert jobs_line(allowed, "celery is not installed") == "off; celery is not installed"
