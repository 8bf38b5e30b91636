"""Log lines."""

import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from qinfer.core.settings import LogSettings
from qinfer.observe import logs
from qinfer.observe.logs import Switches, configure

logger = logging.getLogger("qinfer.test")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    yield
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
    root.handlers[:], root.level = handlers, level
    for name in ("qinfer", "qinfer_api", "qinfer_workers"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.getLogger("httpx").setLevel(logging.NOTSET)
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


@pytest.mark.parametrize("value", [object(), {1, 2}, float("nan"), b"\xff", {object(): 1}, 2**80, "\udcff"])
def test_no_value_costs_the_line(stream: io.StringIO, value: object) -> None:
    """What can't be JSON is shown as text."""
    logger.info("e", extra={"value": value})

    assert lines(stream)[0]["event"] == "e"


def test_the_traceback_of_another_process_is_in_the_same_field(stream: io.StringIO) -> None:
    """As text it stands below its line, as one of this process does."""
    logger.error("failed", extra={logs.EXCEPTION: "Traceback\nValueError: bad\n", "model": "m"})
    (line,) = lines(stream)
    configure(LogSettings(format="text"), "worker", text := io.StringIO())
    logger.error("failed", extra={logs.EXCEPTION: "Traceback\nValueError: bad\n", "model": "m"})

    assert (line["event"], line["exception"]) == ("failed", "Traceback\nValueError: bad\n")
    assert text.getvalue().endswith("worker: failed model=m\nTraceback\nValueError: bad\n")


def test_what_a_client_sends_forges_no_line() -> None:
    """Line ends and control characters are written out."""
    configure(LogSettings(format="text"), "gateway", stream := io.StringIO())

    logger.info("request", extra={"id": "a\n00:00:00 ERROR\x1b[2Jé"})

    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"request id=a\n00:00:00 ERROR\x1b[2Jé")


def test_an_event_of_several_lines_is_one_line() -> None:
    """Libraries log such events: Celery says in a line of its own when it tries again."""
    configure(LogSettings(format="text"), "bulk", stream := io.StringIO())

    logger.error("can't connect\nTrying again in %s s\n", "2.00")

    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"bulk: can't connect\nTrying again in 2.00 s")


def test_extra_fields_replace_no_field_of_the_line(stream: io.StringIO) -> None:
    """A field named as one of the line's own is dropped."""
    logger.info("e", extra={"event": "other", "level": "x"})

    assert (lines(stream)[0]["event"], lines(stream)[0]["level"]) == ("e", "INFO")


def test_warnings_come_out_once(stream: io.StringIO) -> None:
    """In the same format."""
    configure(LogSettings(), "gateway", stream)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.warn("old", UserWarning, stacklevel=1)

    assert [line["logger"] for line in lines(stream)] == ["py.warnings"]


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


@pytest.mark.parametrize(
    ("switches", "logged"),
    [
        (Switches(), ["INFO", "WARNING", "ERROR", "CRITICAL"]),
        (Switches(info=False), ["WARNING", "ERROR", "CRITICAL"]),
        (Switches(warning=False), ["INFO", "ERROR", "CRITICAL"]),
        (Switches(error=False), ["INFO", "WARNING"]),
        (Switches(verbose_level=1), ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]),
    ],
)
@pytest.mark.parametrize("level", ["DEBUG", "ERROR"])
def test_levels_are_switched_each_by_itself(level: str, switches: Switches, logged: list[str]) -> None:
    """While the process runs, whatever level it was started with."""
    stream = io.StringIO()
    configure(LogSettings.model_validate({"level": level}), "gateway", stream)

    logs.apply(switches)
    for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        logger.log(number, "event")

    assert [line["level"] for line in lines(stream)] == logged


def test_other_libraries_do_not_become_verbose(stream: io.StringIO) -> None:
    """What they tell for debugging may hold what is secret."""
    logs.apply(Switches(verbose_level=1))

    logging.getLogger("botocore.auth").debug("CanonicalRequest: …")

    assert lines(stream) == []


def test_urls_are_not_logged_by_the_http_client(stream: io.StringIO) -> None:
    """Webhooks, and files of tasks, have secrets in theirs."""
    logging.getLogger("httpx").info("HTTP Request: GET https://files.example.org/a?signature=hidden")

    assert lines(stream) == []


def test_access_and_audit_are_logged_at_any_level() -> None:
    """Who asks for them asks by settings of their own; switches of clients don't turn them off either."""
    stream = io.StringIO()
    configure(LogSettings(level="ERROR"), "gateway", stream)
    logs.apply(Switches(info=False, warning=False))

    for name in (logs.ACCESS, logs.AUDIT, "qinfer.other"):
        logging.getLogger(name).info("line")

    assert [line["logger"] for line in lines(stream)] == [logs.ACCESS, logs.AUDIT]


@pytest.mark.parametrize(("shows", "seen"), [(True, ["said", "complained"]), (False, ["complained"])])
def test_the_output_of_models_may_be_logged_at_any_level(*, shows: bool, seen: list[str]) -> None:
    stream = io.StringIO()
    configure(LogSettings(level="WARNING", model_output=shows), "worker", stream)

    logging.getLogger(logs.MODELS).info("said")
    logging.getLogger("qinfer.backends").info("loaded")
    logging.getLogger(logs.MODELS).warning("complained")

    assert [line["event"] for line in lines(stream)] == seen


def test_what_nobody_catches_is_a_line(stream: io.StringIO) -> None:
    """With its traceback, in threads too."""

    def fail() -> None:
        raise ValueError("a defect")

    thread = threading.Thread(target=fail, name="loader")
    thread.start()
    thread.join()
    try:
        fail()
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)

    class Broken:
        def __del__(self) -> None:
            fail()

    del (broken := [Broken()])[:]
    assert broken == []

    in_thread, outside, in_cleanup = lines(stream)
    assert (in_cleanup["event"], "__del__" in str(in_cleanup["within"])) == ("exception ignored", True)
    assert (in_thread["event"], in_thread["level"], in_thread["in_thread"]) == (
        "uncaught exception",
        "CRITICAL",
        "loader",
    )
    for line in (in_thread, outside, in_cleanup):
        assert "ValueError: a defect" in str(line["exception"])
        assert "in fail" in str(line["exception"])


@pytest.mark.parametrize("format_", ["json", "", "text"])
def test_why_a_program_can_not_start(format_: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON where the environment says so, though the settings can't be read."""
    logs.cannot_start({"QINFER_LOG__FORMAT": format_}, "qinfer_api", "QINFER_HTTP__PORT: a number")

    told = capsys.readouterr().err
    if format_ == "json":
        assert json.loads(told)["error"] == "QINFER_HTTP__PORT: a number"
    else:
        assert told == "qinfer_api: QINFER_HTTP__PORT: a number\n"


def test_text_lines_may_have_the_date() -> None:
    """Triton's log format ISO8601, and back."""
    stream = io.StringIO()
    configure(LogSettings(format="text"), "gateway", stream)

    for iso8601 in (True, False):
        logs.apply(Switches(iso8601=iso8601))
        logger.info("event")
    first, second = stream.getvalue().splitlines()

    assert first.partition(" ")[0].endswith("Z")
    assert "T" in first.partition(" ")[0]
    assert second[2] == ":"


def test_logging_that_is_somebody_elses_stays_as_it_is() -> None:
    """A notebook that uses the library has its own."""
    before = logging.getLogger("qinfer").level

    logs.apply(Switches(verbose_level=1))

    assert logging.getLogger("qinfer").level == before


def test_what_a_process_starts_with() -> None:
    """The switches of each level."""
    started = {
        level: Switches.from_settings(LogSettings.model_validate({"level": level}))
        for level in ("DEBUG", "INFO", "ERROR")
    }

    assert started == {
        "DEBUG": Switches(verbose_level=1),
        "INFO": Switches(),
        "ERROR": Switches(info=False, warning=False),
    }


def test_unknown_settings_are_warnings() -> None:
    stream = io.StringIO()
    configure(LogSettings(), "gateway", stream, unknown=["unknown setting QINFER_NEWER"])

    (line,) = lines(stream)

    assert (line["level"], line["reason"]) == ("WARNING", "unknown setting QINFER_NEWER")
