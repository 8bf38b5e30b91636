"""Has a thread that waits for a socket look up, without waiting for its timeout."""

import selectors
import socket
from contextlib import suppress


class Waker:
    """Waits for one socket of another owner, or for `wake`.

    Args:
        watched: The socket.
    """

    def __init__(self, watched: socket.socket) -> None:
        self._watched = watched
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(watched, selectors.EVENT_READ)
        self._selector.register(self._ours, selectors.EVENT_READ)

    def wait(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` seconds; tells whether the socket has data."""
        pending = getattr(self._watched, "pending", None)
        if pending is not None and pending():  # TLS: it was read, and is not taken yet
            return True
        is_ready = False
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._ours:
                with suppress(BlockingIOError):
                    self._ours.recv(4096)
            else:
                is_ready = True
        return is_ready

    def wake(self) -> None:
        """Ends a `wait`, or the next one; for other threads, and after `close` too."""
        with suppress(OSError):  # full: it will wake up anyway; closed: nobody waits any more
            self._theirs.send(b"\0")

    def close(self) -> None:
        """Closes everything but the watched socket."""
        self._selector.close()
        self._ours.close()
        self._theirs.close()
