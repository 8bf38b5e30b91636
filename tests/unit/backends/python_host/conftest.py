"""How the tests of this folder start the processes of models."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests.support.programs import forked_children

STARTS = ("test_process.py", "test_packed.py")
"""The files that test the start itself, and the end with the parent."""


@pytest.fixture(autouse=True, scope="module")
def _forked(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if request.path.name in STARTS else forked_children():
        yield
