"""Log lines."""

import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from qinfer.observability.logs import configure
from qinfer.settings import LogSettings

logger = logging.getLogger("qinfer.test")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


@pytest.fixture
def stream() -> io.StringIO:
    stream = io.StringIO()
    configure(LogSettings(), "gateway", stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object(stream: io.StringIO) -> None:
    """Event, data, who and where; an event of several lines stays one."""
    logger.info("model\nready", extra={"model": "m", "version": 1})

    (line,) = lines(stream)

    assert line.pop("at")
    assert line == {
        "level": "INFO",
        "logger": "qinfer.test",
        "event": "model\nready",
        "process": "gateway",
        "model": "m",
        "version": 1,
    }


def test_the_time_is_the_records_own(stream: io.StringIO) -> None:
    """In UTC, ISO 8601, with milliseconds: not the time of formatting."""
    record = logger.makeRecord("qinfer.test", logging.INFO, "f", 1, "e", (), None)
    record.created = 1_700_000_000.1239

    logger.handle(record)

    assert lines(stream)[0]["at"] == "2023-11-14T22:13:20.123Z"


def test_an_exception_is_one_field(stream: io.StringIO) -> None:
    """The traceback is inside the object."""
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("failed")

    (line,) = lines(stream)

    assert str(line["exception"]).endswith("ValueError: bad")


@pytest.mark.parametrize("value", [object(), {1, 2}, float("nan"), b"\xff", {object(): 1}, 2**80])
def test_no_value_costs_the_line(stream: io.StringIO, value: object) -> None:
    """What can't be JSON is shown as text."""
    logger.info("e", extra={"value": value})

    assert lines(stream)[0]["event"] == "e"


def test_extra_fields_replace_no_field_of_the_line(stream: io.StringIO) -> None:
    """A field named as one of the line's own is dropped."""
    logger.info("e", extra={"event": "other", "level": "x"})

    assert (lines(stream)[0]["event"], lines(stream)[0]["level"]) == ("e", "INFO")


def test_warnings_and_uvicorn_come_out_once(stream: io.StringIO) -> None:
    """In the same format, whatever handlers uvicorn had set."""
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler(stream))
    configure(LogSettings(), "gateway", stream)

    logging.getLogger("uvicorn.error").info("started")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn("old", UserWarning, stacklevel=1)

    assert [line["logger"] for line in lines(stream)] == ["uvicorn.error", "py.warnings"]


def test_the_level_is_kept() -> None:
    """What is less severe is not written."""
    stream = io.StringIO()
    configure(LogSettings(level="WARNING"), "worker", stream)

    logger.info("quiet")
    logger.warning("loud")

    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_text_is_for_people() -> None:
    """Time, level, process, event and data on one line."""
    stream = io.StringIO()
    configure(LogSettings(format="text"), "worker", stream)

    logger.info("model ready", extra={"model": "m"})

    assert stream.getvalue().endswith(" INFO    worker: model ready model=m\n")
