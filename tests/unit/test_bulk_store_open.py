"""Opening the stores of URLs: once, and each on its own."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from qinfer.bulk import store_open
from qinfer.bulk.store import ObjectStore
from qinfer.bulk.store_open import opened

LONG_S = 30.0


@pytest.fixture(autouse=True)
def nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_open, "_opened", {})


def with_adapter(monkeypatch: pytest.MonkeyPatch, kind: str, make: Any) -> None:
    monkeypatch.setattr(store_open, "_ADAPTERS", {**store_open._ADAPTERS, kind: make})


def test_a_driver_that_takes_long_does_not_delay_other_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's looks for credentials over the network."""
    begun, go_on = threading.Event(), threading.Event()

    def make(_: str) -> ObjectStore:
        begun.set()
        assert go_on.wait(LONG_S)
        return cast(ObjectStore, object())

    with_adapter(monkeypatch, "gcs", make)
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(opened, "gs://bucket/in")
        assert begun.wait(LONG_S)
        threads.submit(opened, "file:///data").result(LONG_S)
        assert not slow.done()
        go_on.set()
        assert slow.result(LONG_S) is opened("gs://other/in")


def test_threads_that_ask_at_once_get_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver keeps connections."""
    meet = threading.Barrier(4)
    made: list[str] = []

    def make(url: str) -> ObjectStore:
        made.append(url)
        return cast(ObjectStore, object())

    def ask(_: int) -> ObjectStore:
        meet.wait(LONG_S)
        return opened("memory://bucket/in")

    with_adapter(monkeypatch, "memory", make)
    with ThreadPoolExecutor(4) as threads:
        stores = set(threads.map(ask, range(4)))

    assert len(stores) == len(made) == 1
