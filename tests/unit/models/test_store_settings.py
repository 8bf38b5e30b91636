"""Settings that clients change, as the processes follow them."""

import asyncio
import io
import logging
from collections.abc import Iterator

import pytest

from qinfer.core.settings import LogSettings
from qinfer.errors import BrokerUnavailable
from qinfer.models import store as control_store
from qinfer.models.store import LOGGING, ControlStore, follow_log_settings, of_group, put_group, switches_of
from qinfer.observe import logs
from qinfer.observe.logs import Switches
from qinfer.testing import eventually
from tests.support.servers.servers import Database

logger = logging.getLogger("qinfer_workers.test")


class Store(ControlStore):
    """A store that can be away, and counts how often it was asked."""

    is_away = False
    asked = 0

    async def settings(self) -> dict[str, str]:
        self.asked += 1
        if self.is_away:
            raise BrokerUnavailable("away")
        return await super().settings()


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure(LogSettings(), "worker", stream)
    yield stream
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
    for name in ("qinfer", "qinfer_api", "qinfer_workers"):
        logging.getLogger(name).setLevel(logging.NOTSET)


async def test_groups_are_apart(store: ControlStore) -> None:
    """A model's settings are no others', and what was cleared is not there."""
    await put_group(store, "trace", {"trace_rate": "1", "trace_count": "2"})
    await put_group(store, "trace:m", {"trace_rate": "3", "trace_level": ["OFF"]})
    await put_group(store, "trace", {"trace_count": None})

    stored = await store.settings()
    assert of_group(stored, "trace") == {"trace_rate": "1"}
    assert of_group(stored, "trace:m") == {"trace_rate": "3", "trace_level": ["OFF"]}


def test_what_nobody_set_is_as_at_the_start() -> None:
    """One value by itself changes one switch."""
    first = Switches(info=False, verbose_level=2)

    assert switches_of({}, first) == first
    assert switches_of({"log_info": True, "log_format": "ISO8601"}, first) == Switches(verbose_level=2, iso8601=True)


async def test_a_process_follows(database: Database, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    """From the next look on; it goes on when the store was away."""
    monkeypatch.setattr(control_store, "FOLLOW_EVERY_S", 0.001)
    store = database.store(Store)
    following = asyncio.create_task(follow_log_settings(store, Switches()))

    async def looked() -> None:
        before = store.asked
        await eventually(lambda: store.asked >= before + 2, description="two looks")

    await looked()
    logger.info("one")
    await put_group(store, LOGGING, {"log_info": False})
    await looked()
    logger.info("two")
    store.is_away = True
    await looked()
    logger.info("three")
    store.is_away = False
    await put_group(store, LOGGING, {"log_info": True, "log_verbose_level": 1})
    await looked()
    logger.debug("four")
    following.cancel()

    assert [word for word in ("one", "two", "three", "four") if f'"{word}"' in stream.getvalue()] == ["one", "four"]
