"""The keys of docs/builders/redis-keys.md, and the meaning of Redis's error replies."""

import pytest
from hiredis import ReplyError

from qinfer.errors import BrokerUnavailable, QinferError, QueueFull, SettingsError
from qinfer.queue import keys
from qinfer.queue.connection import CommandRefused, mapped
from qinfer.queue.entries import Entry, Lane


def test_the_keys_are_spelled_as_the_design_says() -> None:
    """Other programs (autoscalers, dashboards) read them."""
    assert keys.lane(Lane("bert", 3, "p2", 1)) == b"qinfer:{bert#1}:3:p2"
    assert keys.dead_letters("bert") == "qinfer:{bert#0}:dlq"
    assert keys.stats("bert", 3) == "qinfer:{bert#0}:stats:3"
    assert keys.payload("bert", 1, "id") == "qinfer:{bert#1}:payload:id"
    assert keys.reply("reply:g1") == "qinfer:reply:g1"
    assert keys.worker("w1") == "qinfer:worker:w1"


@pytest.mark.parametrize("model", ["bert", "with space", "brace}", "{tag}", "ümlaut"])
def test_all_keys_of_a_partition_share_a_slot(model: str) -> None:
    """Whatever the model is called."""
    names = [
        keys.dead_letters(model),
        keys.payload(model, 0, "id"),
        keys.result(model, 0, "id"),
        keys.request(model, 0, "id"),
        keys.idempotency(model, 0, "tenant", "hash"),
        keys.due(model),
        keys.deliveries(model, 0, "webhooks"),
        keys.config(model),
        keys.stats(model, 1),
        keys.sequence(model, 0, "acme:n7"),
        keys.sequence_state(model, 0, "acme:t}{"),
        keys.sequence_answer(model, 0, "acme:n7", "1.1"),
        keys.sequences(model, 0),
        keys.sequence_endings(model, 0),
        keys.sequence_owners(model, 0),
        keys.sequence_owned(model, 0, "w1"),
        keys.sequence_counts(model, 0),
        keys.sequences_of(model, 0, "acme"),
        keys.sequence_turn(model, 0, "acme"),
        keys.sequence_numbers(model, 0),
        keys.sequence_told(model, 0, "acme:n7"),
        keys.sequence_number(model, 0, 2**31 - 2),
    ]

    assert {keys.slot(name) for name in names} == {keys.lane_slot(Lane(model, 1))}


def test_an_entry_id_begins_with_its_time() -> None:
    """In milliseconds of the broker's clock."""
    assert Entry(Lane("m", 1), "1700000000123-4").enqueued_s == 1_700_000_000.123


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("LOADING Redis is loading the dataset in memory", BrokerUnavailable),
        ("READONLY You can't write against a read only replica.", BrokerUnavailable),
        ("MASTERDOWN Link with MASTER is down", BrokerUnavailable),
        ("OOM command not allowed when used memory > 'maxmemory'.", QueueFull),
        ("NOAUTH Authentication required.", SettingsError),
        (
            "ERR Error running script (call to f_0a): @user_script:5: @user_script: 5: -OOM command not allowed",
            QueueFull,
        ),
    ],
)
def test_error_replies_about_the_server_are_qinfer_errors(text: str, meaning: type[QinferError]) -> None:
    """Also when a script met them."""
    assert type(mapped(ReplyError(text))) is meaning


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("MOVED 3999 127.0.0.1:6381", "MOVED"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", "WRONGTYPE"),
        ("NOGROUP No such key 'k' or consumer group 'g' script: 1, on @user_script:10.", "NOGROUP"),
        ("ERR Error running script (call to f_0341): @user_script:10: NOGROUP No such key 'k'", "NOGROUP"),
    ],
)
def test_other_error_replies_keep_their_kind(text: str, kind: str) -> None:
    """Of 6.2, which wraps what a script met, and of 7.0, which does not."""
    error = mapped(ReplyError(text))

    assert isinstance(error, CommandRefused)
    assert (error.kind, error.message) == (kind, text)
