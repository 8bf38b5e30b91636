"""Settings that clients change: their rules, and that all gateways agree."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from qinfer.core.settings import LogSettings as LogStart
from qinfer.errors import InvalidRequest, MalformedJson, QinferError, UnsupportedFeature, ValueRefused
from qinfer.models.store import LOGGING, ControlStore, of_group
from qinfer_api.about import LogValues, SharedLogSettings, SharedTraceSettings, TraceValues
from qinfer_api.observe.trace_file import TraceFile
from tests.support.stub_catalog import stub_catalog

LOG_START = LogValues("", log_info=True, log_warning=True, log_error=True, log_verbose_level=0, log_format="default")
TRACE_START = TraceValues(["OFF"], "1000", "-1", "0", "trace.json", "triton")


@pytest.fixture
def log(store: ControlStore) -> SharedLogSettings:
    return SharedLogSettings(store, LogStart())


@pytest.fixture
async def trace(store: ControlStore, tmp_path: Path) -> SharedTraceSettings:
    catalog = await stub_catalog(store, {"simple": {1: True}})
    return SharedTraceSettings(store, catalog, TraceFile(tmp_path / "trace.json"))


@pytest.mark.parametrize(
    ("level", "different"),
    [
        ("DEBUG", {"log_verbose_level": 1}),
        ("INFO", {}),
        ("WARNING", {"log_info": False}),
        ("ERROR", {"log_info": False, "log_warning": False}),
    ],
)
async def test_log_settings_begin_with_the_level_of_the_start(
    store: ControlStore, level: str, different: dict[str, object]
) -> None:
    """What nobody has changed is as the process was started."""
    assert await SharedLogSettings(store, LogStart.model_validate({"level": level})).read() == replace(
        LOG_START, **different
    )


async def test_log_settings_change_and_all_gateways_agree(store: ControlStore, log: SharedLogSettings) -> None:
    """What is left out or null stays; unknown names are ignored (reference §1.17)."""
    changes = {"log_info": False, "log_verbose_level": 3, "log_format": "ISO8601", "log_error": None, "log_errors": 7}

    shown = await log.update(changes)

    assert shown == replace(LOG_START, log_info=False, log_verbose_level=3, log_format="ISO8601")
    assert await SharedLogSettings(store, LogStart()).read() == shown
    assert (await log.update({"log_format": "default"})).log_format == "default"


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"log_file": "x.log"}, UnsupportedFeature, "log file location can not be updated through network protocol"),
        ({"log_file": ""}, UnsupportedFeature, "log file location can not be updated through network protocol"),
        ({"log_info": 1}, MalformedJson, "attempt to access JSON non-boolean as boolean"),
        ({"log_error": "true"}, MalformedJson, "attempt to access JSON non-boolean as boolean"),
        ({"log_verbose_level": -1}, MalformedJson, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"log_verbose_level": True}, MalformedJson, "non-unsigned-integer"),
        ({"log_verbose_level": 1.5}, MalformedJson, "non-unsigned-integer"),
        ({"log_verbose_level": 2**32}, InvalidRequest, "must be within 0 and 4294967295"),
        ({"log_format": 8601}, MalformedJson, "attempt to access JSON non-string as string"),
        ({"log_format": "iso8601"}, ValueRefused, "invalid argument for log_format, got: iso8601"),
    ],
)
async def test_wrong_log_settings_change_nothing(
    store: ControlStore, log: SharedLogSettings, changes: dict[str, object], error: type[QinferError], text: str
) -> None:
    """Not even what is right beside them."""
    with pytest.raises(error, match=text):
        await log.update({"log_warning": False, **changes})

    assert await log.read() == LOG_START
    assert await store.settings() == {}


async def test_a_null_file_is_no_file(log: SharedLogSettings) -> None:
    """Null values are ignored, of `log_file` too."""
    assert await log.update({"log_file": None}) == LOG_START


async def test_a_document_that_nobody_can_read_hides_nothing_else(store: ControlStore, log: SharedLogSettings) -> None:
    """A newer qinfer may store what this one does not know."""
    await store.put_setting("logging/log_info", "{")
    await store.put_setting("logging/log_error", "false")

    assert of_group(await store.settings(), LOGGING) == {"log_error": False}
    assert (await log.read()).log_error is False


async def test_trace_settings_of_a_model_inherit(trace: SharedTraceSettings) -> None:
    """What a model does not override follows the server's; null is the value of the level above (reference §1.16)."""
    await trace.update({"trace_rate": "12", "log_frequency": "34"}, "simple")
    await trace.update({"trace_rate": "56", "trace_count": "78", "trace_level": ["TIMESTAMPS"]})

    server = await trace.read()
    assert server == replace(TRACE_START, trace_rate="56", trace_count="78", trace_level=["TIMESTAMPS"])
    assert await trace.read("simple") == replace(server, trace_rate="12", log_frequency="34")

    server = await trace.update({"trace_count": None, "trace_level": None})
    assert server == replace(TRACE_START, trace_rate="56")
    assert await trace.update({"trace_rate": None}, "simple") == replace(server, log_frequency="34")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"trace_file": "x"}, UnsupportedFeature, "trace file location can not be updated through network protocol"),
        ({"trace_mode": "opentelemetry"}, UnsupportedFeature, "trace mode can not be updated through network protocol"),
        ({"trace_level": ["OFF", "TENSORS"]}, InvalidRequest, "Expect only one trace level 'OFF' is specified"),
        ({"trace_level": ["MAX"]}, InvalidRequest, "unknown trace level 'MAX'"),
        ({"trace_level": "OFF"}, MalformedJson, "non-array as array"),
        ({"trace_level": [1]}, MalformedJson, "non-string as string"),
        ({"trace_rate": 5}, MalformedJson, "non-string as string"),
        ({"trace_rate": "often"}, InvalidRequest, "Unable to parse 'trace_rate', got: often"),
        ({"trace_rate": ""}, InvalidRequest, "Unable to parse 'trace_rate', got: "),
        ({"trace_rate": "-1"}, InvalidRequest, r"'trace_rate', value is out of range \[ 0, 4294967295 \], got: -1"),
        ({"trace_count": "-2"}, InvalidRequest, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        ({"trace_count": "99999999999"}, InvalidRequest, r"'trace_count', value is out of range \[ -1, 2147483647 \]"),
        ({"log_frequency": "1.5"}, InvalidRequest, "Unable to parse 'log_frequency', got: 1.5"),
        ({"log_frequency": "9" * 5000}, InvalidRequest, "Unable to parse 'log_frequency', got: 9{100}$"),
    ],
)
async def test_wrong_trace_settings_change_nothing(
    trace: SharedTraceSettings, changes: dict[str, object], error: type[QinferError], text: str
) -> None:
    """Triton's texts; of an update with one mistake nothing is stored."""
    with pytest.raises(error, match=text):
        await trace.update({"log_frequency": "5"} | changes)

    assert await trace.read() == TRACE_START


async def test_unknown_models_have_no_trace_settings(store: ControlStore, trace: SharedTraceSettings) -> None:
    """400 with Triton's text; nothing is stored under names that clients think up."""
    with pytest.raises(InvalidRequest, match=r"^Request for unknown model : nothing$"):
        await trace.read("nothing")
    with pytest.raises(InvalidRequest, match=r"^Request for unknown model : nothing$"):
        await trace.update({"trace_rate": "1"}, "nothing")

    assert await store.settings() == {}


async def test_traces_can_only_be_asked_for_where_they_are_written(store: ControlStore) -> None:
    """The error says what the server lacks; everything else of the settings can be changed."""
    trace = SharedTraceSettings(store, await stub_catalog(store, {"simple": {1: True}}))

    with pytest.raises(UnsupportedFeature, match="QINFER_TRACE__FILE"):
        await trace.update({"trace_level": ["TIMESTAMPS"]})

    shown = await trace.update({"trace_level": ["OFF"], "trace_rate": "7"})
    assert shown == replace(TRACE_START, trace_rate="7", trace_file="")
