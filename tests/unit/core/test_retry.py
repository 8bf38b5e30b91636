"""Pauses between attempts, and what the log says of an outage."""

import logging
import math

import pytest

from qinfer.core.retry import Backoff, OutageLog, pause_s


def test_pauses_double_up_to_the_bound() -> None:
    assert [pause_s(failures, 0.5, 3.0) for failures in (-3, 0, 1, 2, 3, 4, 100_000)] == [
        0.0,
        0.0,
        0.5,
        1.0,
        2.0,
        3.0,
        3.0,
    ]
    assert pause_s(100_000, 0.5, math.inf) < math.inf


def test_a_backoff_grows_until_an_attempt_succeeds() -> None:
    backoff = Backoff(0.1, 0.3, factor=1.5)

    pauses = [backoff.next_s() for _ in range(5)]
    backoff.reset()

    assert pauses == pytest.approx([0.1, 0.15, 0.225, 0.3, 0.3])
    assert backoff.next_s() == 0.1


def test_jitter_leaves_out_a_part_of_each_pause() -> None:
    backoff = Backoff(1.0, 1.0, jitter=0.5)

    pauses = {backoff.next_s() for _ in range(100)}

    assert len(pauses) > 1
    assert min(pauses) >= 0.5
    assert max(pauses) <= 1.0


def test_an_outage_is_logged_once_for_each_reason_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage = OutageLog(logging.getLogger("test"), "fails", "works again", route="r")

    outage.over()
    for reason in ("a", "b", "a", "b"):
        outage.failed(reason)
    outage.over()
    outage.over()
    outage.failed("a")

    assert [record.message for record in caplog.records] == ["fails", "fails", "works again", "fails"]
    assert [vars(record).get("reason") for record in caplog.records] == ["a", "b", None, "a"]
    assert {vars(record)["route"] for record in caplog.records} == {"r"}


def test_an_outage_tells_how_long_it_lasts() -> None:
    outage = OutageLog(logging.getLogger("test"), "fails")
    before = outage.lasts_s
    outage.failed("away")
    first = outage.lasts_s
    outage.failed("away")
    later = outage.lasts_s
    outage.over()

    assert before == outage.lasts_s == 0.0
    assert 0.0 < first < later


def test_an_outage_that_goes_on_is_logged_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outage = OutageLog(logging.getLogger("test"), "fails", remind_s=0.0)

    outage.failed("a")
    outage.failed("a")
    outage.over()

    assert [record.message for record in caplog.records] == ["fails", "fails", "fails: over"]


def test_what_works_now_and_then_is_over_when_it_was_quiet(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now_s = 100.0
    monkeypatch.setattr("qinfer.core.retry.time.monotonic", lambda: now_s)
    outage = OutageLog(logging.getLogger("test"), "fails", quiet_s=5.0)

    for _ in range(10):
        outage.failed("full")
        now_s += 4.0
        outage.over()
    during = [record.message for record in caplog.records]
    now_s += 1.0
    outage.over()
    outage.failed("full")

    assert during == ["fails"]
    assert [record.message for record in caplog.records] == ["fails", "fails: over", "fails"]


def test_reasons_without_end_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog(logging.getLogger("test"), "fails")

    for number in range(1000):
        outage.failed(f"port {number}")

    assert 1 < len(caplog.records) < 100
