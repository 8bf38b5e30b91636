"""The garbage collector keeps off what collection makes.

8,000 tests and their modules are over a million objects that stay until the end. To look through all of them takes a
second, and it was done again and again while they were made, and whenever a test asked for it.
"""

import gc

import pytest

_SELDOM = 1000
"""Collections of the middle generation before one of the oldest: with a million objects Python itself waits as long.

Sooner, what one test has left open would fail whichever test runs then."""


def pytest_configure() -> None:
    """Nothing is garbage while tests are collected."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """From here on, what was made before is not looked at."""
    gc.collect()
    gc.freeze()
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(youngest, middle, _SELDOM)
    gc.enable()


def pytest_unconfigure() -> None:
    """The interpreter ends as it always does."""
    gc.unfreeze()
    gc.enable()
