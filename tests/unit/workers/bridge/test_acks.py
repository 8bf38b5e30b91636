"""Which messages of an AMQP channel are acknowledged when."""

import random

from qinfer_workers.bridge.transports.acks import AckLine, Due

PATIENCE_S = 0.2


def line() -> AckLine:
    return AckLine(PATIENCE_S)


def test_one_acknowledgement_is_for_all_that_are_done() -> None:
    """However many come, and in whatever order."""
    acks = line()

    assert acks.due([1, 2, 3], 0.0) == Due(3)
    assert acks.due([6, 5, 4], 0.0) == Due(6)
    assert acks.due([], 9.0) == Due()


def test_what_is_done_out_of_order_waits_a_moment() -> None:
    """The one before it mostly follows."""
    acks = line()

    assert acks.due([2, 3], 0.0) == Due()
    assert acks.waits
    assert acks.due([1], 0.1) == Due(3)
    assert not acks.waits


def test_what_waits_too_long_is_acknowledged_singly() -> None:
    """The message before it keeps it no longer, and later ones go on as before."""
    acks = line()

    assert acks.due([2, 4], 0.0) == Due()
    assert acks.due([], PATIENCE_S) == Due(0, [2, 4])
    assert acks.due([3], 0.3) == Due()
    assert acks.due([], 0.3 + PATIENCE_S) == Due(0, [3])
    assert acks.due([1], 0.6) == Due(1)
    assert acks.due([5], 0.6) == Due(5)


def test_a_tag_that_was_acknowledged_is_never_named_again() -> None:
    """RabbitMQ closes a channel that does, for many too."""
    acks = line()
    assert acks.due([2, 3], 0.0) == Due()
    assert acks.due([], 1.0) == Due(0, [2, 3])

    assert acks.due([1], 1.0) == Due(1)
    assert acks.due([4], 1.0) == Due(4)


def test_what_is_left_is_told_at_the_end() -> None:
    acks = line()
    acks.due([1, 3, 4], 0.0)

    assert acks.left() == [3, 4]


def test_every_message_is_acknowledged_once_whatever_the_order() -> None:
    """A broker that is simulated: it refuses tags that it does not have."""
    for seed in range(50):
        rng = random.Random(seed)
        order = sorted(range(1, 101), key=lambda tag: tag + rng.uniform(0, 30))
        acks, outstanding, now_s = line(), set(range(1, 101)), 0.0
        while order or outstanding:
            count = rng.randint(0, 10)
            done, order = order[:count], order[count:]
            now_s += rng.uniform(0, 0.15)
            due = acks.due(done, now_s)
            if due.up_to:
                assert due.up_to in outstanding
                outstanding -= set(range(1, due.up_to + 1))
            for tag in due.tags:
                outstanding.remove(tag)
            assert now_s < 60
