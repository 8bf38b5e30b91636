"""The last warnings and errors of a worker: which lines are kept, how much of them, and what is left out."""

import logging
from collections.abc import Iterator

import msgspec
import pytest

from qinfer.observe.logs import EXCEPTION, MODELS, MOST_BYTES, MOST_LINES, LogRing

logger = logging.getLogger("qinfer.test_log_ring")


@pytest.fixture
def ring() -> Iterator[LogRing]:
    ring = LogRing()
    loggers = (logger, logging.getLogger(MODELS))
    for each in loggers:
        each.addHandler(ring)
        each.setLevel(logging.DEBUG)
    yield ring
    for each in loggers:
        each.removeHandler(ring)
        each.setLevel(logging.NOTSET)


def test_warnings_and_errors_are_kept_with_their_data(ring: LogRing) -> None:
    logger.info("loaded")
    logger.warning("late", extra={"model": "digits", "seconds": 3.5})

    (line,) = ring.kept_lines().lines

    assert (line.level, line.event, line.logger) == ("WARNING", "late", logger.name)
    assert line.about == {"model": "digits", "seconds": "3.5"}
    assert line.at.endswith("Z")


def test_a_traceback_is_kept(ring: LogRing) -> None:
    """Of this process, or of a model's."""
    try:
        raise ValueError("no such row")
    except ValueError:
        logger.exception("load failed")
    logging.getLogger(MODELS).error("a request was left by an exception", extra={EXCEPTION: "Traceback: of a model"})

    theirs, ours = ring.kept_lines().lines

    assert "ValueError: no such row" in ours.exception
    assert theirs.exception == "Traceback: of a model"
    assert theirs.about == {}


def test_lines_that_a_model_prints_are_left_out(ring: LogRing) -> None:
    """They may show inputs."""
    logging.getLogger(MODELS).warning("[[0.5, 0.25]]")

    assert ring.kept_lines().lines == []


@pytest.mark.parametrize(
    "text",
    [
        "redis://:hunter2@queue:6379/0 is away",
        "https://user:hunter2@prometheus can't be read",
        "password=hunter2 is wrong",
        "{'api_key': 'hunter2'}",
        "authorization: Bearer hunter2",
        f"{'x' * 480} redis://user:{'hunter2' * 20}@queue",
    ],
)
def test_passwords_are_left_out(ring: LogRing, text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception(text, extra={"reason": text})

    (line,) = ring.kept_lines().lines

    assert b"hunter2" not in msgspec.json.encode(line)
    assert "…" in line.about["reason"]


def test_the_ring_is_bounded_in_lines_and_bytes(ring: LogRing) -> None:
    for number in range(3 * MOST_LINES):
        logger.warning("line %d", number)
    few = ring.kept_lines().lines
    for _ in range(MOST_LINES):
        logger.error("long", extra={EXCEPTION: "frame\n" * 100_000, "about": "y" * 100_000})
    long = ring.kept_lines().lines

    assert (len(few), few[0].event) == (MOST_LINES, f"line {3 * MOST_LINES - 1}")
    assert sum(len(msgspec.json.encode(line)) for line in long) <= MOST_BYTES
    assert len(long) > 1


class Wrong:
    """A value that can't be shown."""

    def __str__(self) -> str:
        raise RuntimeError


def test_a_line_that_can_not_be_shown_fails_no_work(ring: LogRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)

    logger.warning("odd", extra={"value": Wrong()})

    assert ring.kept_lines().lines == []
