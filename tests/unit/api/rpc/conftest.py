"""The connection that tests of frames begin with."""

import pytest

from tests.support.http2 import Wire


@pytest.fixture
async def wire() -> Wire:
    """A connection that has exchanged its settings."""
    return Wire().greet()
