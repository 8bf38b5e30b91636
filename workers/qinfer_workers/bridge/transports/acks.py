"""Which acknowledgements are due: pure. AMQP takes one for all messages up to a tag, which saves nearly all of them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Due(NamedTuple):
    """What to acknowledge.

    Attributes:
        up_to: All messages up to this tag; 0 = none.
        tags: And these.
    """

    up_to: int = 0
    tags: Sequence[int] = ()


class AckLine:
    """The messages of one AMQP channel, which numbers them from 1.

    What is done out of order waits for those before it, which mostly follow within moments; after `patience_s` seconds
    it is acknowledged singly, so that one message that can't be done keeps no others from the source.

    Args:
        patience_s: How long.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._done_to = 0  # every tag up to this one is done
        self._beyond: set[int] = set()  # done, and not acknowledged
        self._apart: set[int] = set()  # beyond too, and acknowledged singly
        self._waits_since_s: float | None = None

    def due(self, done: Iterable[int], now_s: float) -> Due:
        """Takes the tags of messages that are done, and returns what is to be acknowledged now.

        Args:
            done: Tags, each once.
            now_s: Monotonic time.
        """
        beyond, apart = self._beyond, self._apart
        beyond.update(done)
        up_to, following = 0, self._done_to + 1
        while True:
            if following in beyond:
                beyond.remove(following)
                up_to = following  # RabbitMQ refuses a tag that was acknowledged before, for many too
            elif following in apart:
                apart.remove(following)
            else:
                break
            following += 1
        self._done_to = following - 1
        if up_to or not beyond:
            self._waits_since_s = now_s if beyond else None
        elif self._waits_since_s is None:
            self._waits_since_s = now_s
        if self._waits_since_s is None or now_s - self._waits_since_s < self._patience_s:
            return Due(up_to)
        singly = sorted(beyond)
        apart.update(singly)
        beyond.clear()
        self._waits_since_s = None
        return Due(up_to, singly)

    @property
    def waits(self) -> bool:
        """Whether something is done and not acknowledged."""
        return bool(self._beyond)

    def left(self) -> list[int]:
        """Returns what is done and not acknowledged, for the last time."""
        return sorted(self._beyond)
