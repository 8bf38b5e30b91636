"""Opening the stores of URLs: once, and each on its own."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]  # it has no types

from qinfer.client.job_output import open_folder
from qinfer.storage import open as opening
from qinfer.storage.open import driver_options, store_for, url_to_fs
from qinfer.storage.store import Store

LONG_S = 30.0


@pytest.fixture(autouse=True)
def nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_opened", {})


@pytest.mark.parametrize("url", ["gs://bucket/out", "gcs://bucket/out"])
def test_output_on_google_is_read_by_the_driver_that_wrote_it(url: str) -> None:
    """The choice of fsspec asks a second API about the bucket first."""
    for files, path in (open_folder(url, {"token": "anon"}), url_to_fs(url, {"token": "anon"})):
        assert type(files) is GCSFileSystem
        assert path == "bucket/out"


def test_a_driver_that_takes_long_does_not_delay_other_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's looks for credentials over the network."""
    begun, go_on = threading.Event(), threading.Event()

    def make(url: str) -> tuple[Store, str]:
        if url.startswith("gs"):
            begun.set()
            assert go_on.wait(LONG_S)
        return cast(Store, object()), url

    monkeypatch.setattr(opening, "open_store", make)
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(store_for, "gs://bucket/in")
        assert begun.wait(LONG_S)
        threads.submit(store_for, "file:///data").result(LONG_S)
        assert not slow.done()
        go_on.set()
        assert slow.result(LONG_S) is store_for("gs://other/in")


def test_threads_that_ask_at_once_get_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver keeps connections."""
    meet = threading.Barrier(4)
    made: list[str] = []

    def make(url: str) -> tuple[Store, str]:
        made.append(url)
        return cast(Store, object()), url

    def ask(_: int) -> Store:
        meet.wait(LONG_S)
        return store_for("memory://bucket/in")

    monkeypatch.setattr(opening, "open_store", make)
    with ThreadPoolExecutor(4) as threads:
        stores = set(threads.map(ask, range(4)))

    assert len(stores) == len(made) == 1


@pytest.mark.parametrize(
    ("scheme", "option"),
    [("s3", "config_kwargs"), ("gs", "requests_timeout"), ("az", "connection_timeout"), ("abfss", "read_timeout")],
)
def test_drivers_are_opened_with_timeouts_and_without_caches(scheme: str, option: str) -> None:
    options = driver_options(scheme)

    assert option in options
    assert (options["use_listings_cache"], options["skip_instance_cache"]) == (False, True)
