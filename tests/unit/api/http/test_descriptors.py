"""A server whose process has no file descriptors left says so."""

import logging
import resource
import socket
from collections.abc import Iterator

import pytest

from qinfer.core.retry import OutageLog
from qinfer.observe.host import read_use
from qinfer_api.http.server import note_descriptors


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as one:
        yield one


@pytest.fixture
def limited(listener: socket.socket) -> Iterator[None]:
    assert listener.fileno() >= 0
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("limited")
def test_used_up_descriptors_are_logged_once(listener: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog(logging.getLogger("test"), "file descriptors used up")

    note_descriptors(outage, listener)
    note_descriptors(outage, listener)

    assert [record.message for record in caplog.records] == ["file descriptors used up"]


@pytest.mark.usefixtures("limited")
def test_the_metric_has_the_limit_when_nothing_can_be_opened() -> None:
    use = read_use()

    assert use is None or use.open_fds == use.max_fds == 3


def test_open_descriptors_are_counted(listener: socket.socket) -> None:
    use = read_use()

    assert use is not None
    assert listener.fileno() >= 0
    assert 0 < use.open_fds <= use.max_fds
