"""The inbox of a host process reads its channel for all threads."""

import threading
from collections import deque
from collections.abc import Callable

from qinfer.backends.python_host.channel import Buffer, Channel
from qinfer.backends.python_host.messages import (
    CallerLeft,
    CallReturned,
    CancelledAnswer,
    ManageReply,
    Message,
    TakenAnswer,
)

Received = tuple[Message, list[Buffer]]


class ChannelInbox:
    """One of the waiting threads reads for all threads."""

    def __init__(self, channel: Channel, unwanted: Callable[[CallerLeft], None]) -> None:
        self._channel = channel
        self._unwanted = unwanted
        self._changed = threading.Condition()
        self._is_read = False
        self._commands: deque[Received] = deque()
        self._answers: dict[int, Received | None] = {}
        self._count = 0

    def expect(self) -> int:
        """Returns a new number for a question."""
        with self._changed:
            self._count += 1
            self._answers[self._count] = None
            return self._count

    def command(self) -> Received:
        """Waits for the next command."""
        with self._changed:
            while not self._commands:
                self._step()
            return self._commands.popleft()

    def wait_answer(self, number: int) -> Received:
        """Waits for the answer to a question."""
        with self._changed:
            while (received := self._answers[number]) is None:
                self._step()
            del self._answers[number]
            return received

    def poll(self) -> None:
        """Reads messages, unless another thread does."""
        with self._changed:
            while not self._is_read and self._channel.has_message():
                self._step()

    def drop_question(self, number: int) -> None:
        """Drops a question; takes no lock, because the garbage collector may call it."""
        self._answers.pop(number, None)

    def _step(self) -> None:
        if self._is_read:
            self._changed.wait()
            return
        self._is_read = True
        self._changed.release()
        received = None
        try:
            received = self._channel.receive()
        finally:
            self._changed.acquire()
            self._is_read = False
            if received is not None:
                self._sort(received)
            self._changed.notify_all()

    def _sort(self, received: Received) -> None:
        message, _ = received
        if isinstance(message, CallerLeft):
            self._unwanted(message)
        elif not isinstance(message, CallReturned | CancelledAnswer | TakenAnswer | ManageReply):
            self._commands.append(received)
        elif message.number in self._answers:
            self._answers[message.number] = received
