"""What tests of backends see of the log."""

from collections.abc import Callable

import pytest

from qinfer.backends.parameters import say_once


@pytest.fixture
def no_effects(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    """Returns the fields of `optimization` without effect that the log names, with the reasons."""
    say_once.cache_clear()

    def logged() -> list[tuple[str, str]]:
        records = [vars(record) for record in caplog.records if record.msg == "optimization has no effect"]
        return [(record["field"], record["reason"]) for record in records]

    return logged
