"""uvicorn's server without its signal handling, which belongs to the program."""

import contextlib
from collections.abc import Iterator

import uvicorn


class QuietServer(uvicorn.Server):
    """Captures no signals: uvicorn would raise them again at the end, and the exit code would be the signal's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield
