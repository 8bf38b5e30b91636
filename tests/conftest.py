"""The garbage collector keeps off what collection makes.

8,000 tests and their modules are over a million objects that stay until the end. To look through all of them takes a
second, and it was done again and again while they were made and while the tests ran.
"""

import gc

import pytest


def pytest_configure() -> None:
    """Nothing is garbage while tests are collected."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """From here on, what was made before is not looked at."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """The interpreter ends as it always does."""
    gc.unfreeze()
    gc.enable()
