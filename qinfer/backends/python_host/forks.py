"""Calls of forked processes, such as those of a `multiprocessing.Pool`: each fork makes a channel to this process."""

import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from qinfer.backends.python_host.channel import Channel
from qinfer.backends.python_host.messages import CancelledAnswer, HostCall, IsCancelled

if TYPE_CHECKING:
    from qinfer.backends.python_host.host import ModelHost


def serve_forks(host: "ModelHost") -> None:
    """Serves the calls of forked processes."""
    here = threading.local()

    def before() -> None:
        here.pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def in_parent() -> None:
        mine, theirs = here.pair
        theirs.close()
        threading.Thread(target=_serve_fork, args=(host, Channel(mine)), name="fork", daemon=True).start()

    def in_child() -> None:
        mine, theirs = here.pair
        mine.close()
        host.forked(Channel(theirs))

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def _serve_fork(host: "ModelHost", channel: Channel) -> None:
    with suppress(OSError, EOFError):
        while True:
            message, buffers = channel.receive()
            if isinstance(message, HostCall):
                answer, data = host.call_for(message, buffers)
                channel.send(answer, [each.data for each in data])
            elif isinstance(message, IsCancelled):
                channel.send(CancelledAnswer(message.number, host.is_cancelled(message.batch, message.item)))
