"""The bridge's own reader of Redis lists: nothing leaves a list without a place where it is kept until it is done."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection, Producer

from qinfer.errors import SettingsError
from qinfer.testing import wait_until
from qinfer_workers.bridge.config import SourceOptions
from qinfer_workers.bridge.kombu import delivered, find_missing_queues, open_source
from qinfer_workers.bridge.messages import MessageSource, Receipt, SourceMessage
from tests.support.servers.servers import RedisServer, SentinelSetup, redis_6_2, system_redis

LIST = "plain"
GUIDE = Path(__file__).resolve().parents[3] / "docs/how-to/bridge-a-queue.md"


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port, db=6, protocol=2) as one:
        one.flushdb()
        yield one


@pytest.fixture
def url(redis_server: RedisServer) -> str:
    return f"redis://127.0.0.1:{redis_server.port}/6"


@pytest.fixture
def opened() -> Iterator[list[MessageSource]]:
    """Sources that the test opens are closed at its end."""
    found: list[MessageSource] = []
    yield found
    for one in found:
        one.close()


@pytest.fixture
def source(url: str, opened: list[MessageSource]) -> Callable[..., MessageSource]:
    def made(max_bytes: int = 2**20, prefetch: int = 5, **options: Any) -> MessageSource:
        document = {"url": url, "queue": LIST, "prefetch": prefetch, "options": {"visibility_timeout": 30, **options}}
        opened.append(open_source(SourceOptions.model_validate(document), max_bytes, 1))
        return opened[-1]

    return made


def received(one: MessageSource, count: int) -> list[SourceMessage]:
    found: list[SourceMessage] = []

    def are_there() -> bool:
        found.extend(one.receive(0.05))
        return len(found) >= count

    wait_until(are_there, 20.0)
    return found


def test_a_plain_text_is_a_message(client: redis.Redis, source: Callable[..., MessageSource]) -> None:
    """Oldest first; confirming removes it from everywhere."""
    one = source()
    client.lpush(LIST, b'{"text": "a"}', b"\x00\xff")

    first, second = received(one, 2)
    assert (first.body, second.body) == (b'{"text": "a"}', b"\x00\xff")
    assert first.broker_id != second.broker_id
    assert (client.llen(LIST), client.hlen(f"{LIST}:taken"), client.zcard(f"{LIST}:leases")) == (0, 2, 2)

    one.acknowledge([first.receipt, second.receipt])
    assert client.keys() == []
    one.close()


def test_what_a_killed_bridge_had_is_taken_by_another(
    client: redis.Redis, source: Callable[..., MessageSource]
) -> None:
    """When its lease has ended; under the same id, by which it is recognised."""
    client.lpush(LIST, b"text")
    killed = source(visibility_timeout=0.2)
    (before,) = received(killed, 1)

    other = source()
    (after,) = received(other, 1)

    assert (after.broker_id, after.body) == (before.broker_id, before.body)
    other.acknowledge([after.receipt])
    assert client.keys() == []


def test_what_was_popped_on_the_way_is_taken_first(client: redis.Redis, source: Callable[..., MessageSource]) -> None:
    """A bridge was killed when its wait had ended, before it took the message."""
    client.lpush(LIST, b"second")
    client.lpush(f"{LIST}:arriving", b"first")

    assert [message.body for message in received(source(), 2)] == [b"first", b"second"]


def test_a_bridge_that_ends_gives_back_at_once(client: redis.Redis, source: Callable[..., MessageSource]) -> None:
    client.lpush(LIST, b"text")
    one = source()
    received(one, 1)
    one.close()

    assert [message.body for message in received(source(), 1)] == [b"text"]


def test_a_lease_is_renewed_while_its_message_is_in_hand(
    client: redis.Redis, source: Callable[..., MessageSource]
) -> None:
    """Nobody else gets it, however long it takes."""
    client.lpush(LIST, b"text")
    one, other = source(visibility_timeout=0.6), source()
    (message,) = received(one, 1)

    def ends_at_ms() -> float:
        return client.zscore(f"{LIST}:leases", message.broker_id) or 0.0

    first_ms = ends_at_ms()

    def is_renewed_twice() -> bool:
        assert one.receive(0.01) == []
        assert other.receive(0.01) == []
        return ends_at_ms() >= first_ms + 600

    wait_until(is_renewed_twice, 20.0)


def test_no_more_are_taken_than_the_prefetch(client: redis.Redis, source: Callable[..., MessageSource]) -> None:
    client.lpush(LIST, *(b"%d" % number for number in range(9)))
    one = source()
    first = received(one, 5)

    assert one.receive(0.01) == []
    one.acknowledge([message.receipt for message in first])
    assert len(received(one, 4)) == 4


def test_envelopes_of_kombu_are_read(client: redis.Redis, url: str, source: Callable[..., MessageSource]) -> None:
    """With their priorities, as kombu itself would read them."""
    with closing(Connection(url)) as connection:
        producer = Producer(connection)
        producer.publish(b"\x00low", routing_key=LIST, content_type="image/png", content_encoding="binary", priority=0)
        producer.publish("high", routing_key=LIST, message_id="m1", correlation_id="c1", reply_to="r", priority=9,
                         headers={"a": 1}, serializer="raw")  # fmt: skip
    messages = received(source(), 2)

    assert {message.body for message in messages} == {b"\x00low", b"high"}
    (named,) = [message for message in messages if message.message_id]
    assert (named.message_id, named.correlation_id, named.reply_to, named.headers["a"]) == (b"m1", b"c1", b"r", 1)
    assert all(message.broker_id for message in messages)
    (image,) = [message for message in messages if not message.message_id]
    assert image.content_type == "image/png"


def test_an_entry_that_is_too_large_stays_in_redis(client: redis.Redis, source: Callable[..., MessageSource]) -> None:
    """The bridge does not fetch it, and says where it is; also where another bridge takes it."""
    large = b"x" * (2**20 * 4 // 3 + 2**16 + 1)
    client.lpush(LIST, large, large[:-1])
    one = source()
    refused, taken = received(one, 2)
    one.close()
    (again, _) = sorted(received(source(), 2), key=lambda message: len(message.body))

    field = refused.broker_id.decode()
    assert (refused.body, len(taken.body), again.broken) == (b"", len(large) - 1, refused.broken)
    assert f"has {len(large)} bytes" in refused.broken
    assert f"hash '{LIST}:oversized' as field '{field}'" in refused.broken

    one.acknowledge([refused.receipt, taken.receipt])
    assert client.keys() == [f"{LIST}:oversized".encode()]
    assert client.hget(f"{LIST}:oversized", field) == large


def test_no_more_bytes_are_taken_than_fit(
    client: redis.Redis, source: Callable[..., MessageSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qinfer_workers.bridge.kombu.MAX_BYTES_IN_HAND", 10)
    monkeypatch.setattr("qinfer_workers.bridge.kombu._ENOUGH_BYTES", 10)
    client.lpush(LIST, b"123456", b"123456", b"123456")
    one = source()
    first = received(one, 2)

    assert one.receive(0.01) == []
    one.acknowledge([message.receipt for message in first])
    assert len(received(one, 1)) == 1


def test_a_call_whose_reply_was_lost_takes_nothing_twice(
    client: redis.Redis, source: Callable[..., MessageSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's library may send it again: an id that is used twice would cost the first message."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "nonce")
    client.lpush(LIST, b"one", b"two")
    lost, again = received(source(prefetch=1), 1), received(source(prefetch=1), 1)

    assert (
        [(message.broker_id, message.body) for message in again]
        == [(b"nonce-1", b"one")]
        == [(message.broker_id, message.body) for message in lost]
    )
    assert client.llen(LIST) == 1


@pytest.mark.parametrize("suffix", ["", ":arriving", ":taken", ":leases", ":oversized"])
def test_a_key_of_another_type_moves_nothing(
    client: redis.Redis, source: Callable[..., MessageSource], url: str, suffix: str
) -> None:
    """The reason names the key; when it is gone, the bridge goes on."""
    if suffix:
        client.lpush(LIST, b"text")
    client.set(f"{LIST}{suffix}", "something else")
    one = source()

    with pytest.raises(redis.ResponseError, match=f"'{LIST}{suffix}' is of type string, and the bridge needs a"):
        one.receive(0.01)
    assert client.llen(LIST) == 1 if suffix else True
    if not suffix:
        with pytest.raises(SettingsError, match=f"'{LIST}' is of type string"):
            find_missing_queues(url, {}, [LIST])

    client.delete(f"{LIST}{suffix}")
    client.lpush(LIST, b"text")
    assert received(one, 1)[0].body == b"text"


def test_a_time_that_is_none_is_told(url: str, source: Callable[..., MessageSource]) -> None:
    with pytest.raises(SettingsError, match="visibility_timeout is 'soon'; give seconds"):
        source(visibility_timeout="soon")
    with pytest.raises(SettingsError, match="visibility_timeout is 0; give seconds"):
        find_missing_queues(url, {"visibility_timeout": 0}, [LIST])
    assert find_missing_queues(url, {}, [LIST]) == []


def test_a_redis_that_is_emptied_takes_the_messages_along_and_no_more(
    client: redis.Redis, source: Callable[..., MessageSource]
) -> None:
    """What was in hand is confirmed to nobody; what comes after it is taken."""
    one = source()
    client.lpush(LIST, b"before")
    (before,) = received(one, 1)
    client.flushdb()
    client.script_flush()
    one.acknowledge([before.receipt])
    client.lpush(LIST, b"after")

    assert received(one, 1)[0].body == b"after"
    assert client.zcard(f"{LIST}:leases") == 1


def test_a_redis_that_is_killed_keeps_what_was_taken(tmp_path: Path, opened: list[MessageSource]) -> None:
    """The connection breaks; the next one gets the same messages under the same ids."""
    options = ("--appendonly", "yes", "--appendfsync", "always")
    with RedisServer(redis_6_2(), tmp_path, *options) as server:
        document = {"url": server.url, "queue": LIST, "options": {"visibility_timeout": 0.5}}
        parsed = SourceOptions.model_validate(document)
        opened.append(open_source(parsed, 2**20, 1))
        with server.client() as client:
            client.lpush(LIST, *(b"%d" % number for number in range(9)))
        before = received(opened[-1], 9)
        server.kill()
        with pytest.raises((redis.RedisError, OSError)):
            received(opened[-1], 1)
        server.start()
        opened.append(open_source(parsed, 2**20, 2))
        after = received(opened[-1], 9)

        assert {(one.broker_id, one.body) for one in after} == {(one.broker_id, one.body) for one in before}
        for one in opened:
            one.close()


def test_a_full_redis_can_be_emptied(tmp_path: Path, opened: list[MessageSource]) -> None:
    """It refuses writes that need memory, and to take a message is one."""
    with RedisServer(redis_6_2(), tmp_path) as server, server.client() as client:
        client.lpush(LIST, b"text")
        opened.append(open_source(SourceOptions.model_validate({"url": server.url, "queue": LIST}), 2**20, 1))
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.OutOfMemoryError):
            client.lpush(LIST, b"more")
        (message,) = received(opened[-1], 1)
        opened[-1].acknowledge([message.receipt])
        opened[-1].close()

        assert (message.body, client.keys()) == (b"text", [])


@pytest.mark.parametrize("denied", ["zadd", "hset", "rpop"])
def test_a_command_that_is_denied_costs_no_message(tmp_path: Path, opened: list[MessageSource], denied: str) -> None:
    """A user that may not do every step takes nothing, and leaves nothing behind but a lease of none."""
    with RedisServer(redis_6_2(), tmp_path) as server, server.client() as client:
        client.lpush(LIST, b"text")
        client.execute_command("ACL", "SETUSER", "default", f"-{denied}")
        opened.append(open_source(SourceOptions.model_validate({"url": server.url, "queue": LIST}), 2**20, 1))
        for _ in range(2):
            with pytest.raises(redis.RedisError, match=r"(?i)can't run this command|no permissions"):
                opened[-1].receive(0.01)
        opened[-1].close()

        assert (client.lrange(LIST, 0, -1), client.exists(f"{LIST}:taken")) == ([b"text"], 0)


def test_what_kombu_noted_comes_back_as_the_docs_say(
    client: redis.Redis, url: str, source: Callable[..., MessageSource]
) -> None:
    """Messages that another consumer, such as an earlier bridge, had when it was killed."""
    with closing(Connection(url)) as old:
        Producer(old).publish("text", routing_key=LIST, serializer="raw")
        channel = old.channel()
        assert channel.basic_get(LIST, no_ack=False) is not None
        channel.qos._delivered.clear()  # as if it were killed: it does not put it back
        assert client.hlen("unacked") == 1

    (block,) = re.findall(r"^```python\n(from kombu.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    exec(block.replace("redis://localhost:6379/0", url), {})

    assert received(source(), 1)[0].body == b"text"
    assert client.hlen("unacked") == 0


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[" * 10**5 + b'"delivery_tag"',
        b'{"delivery_tag"',
        b'{"delivery_tag": "x"}',
        b'["delivery_tag"]',
        b'{"body": 1, "properties": {}}',
    ],
)
def test_what_is_no_envelope_is_the_body(text: bytes) -> None:
    message = delivered(Receipt(1, "t"), b"t", text)

    assert (message.body, message.broker_id, message.broken) == (text, b"t", "")


def test_an_envelope_with_a_broken_body_says_so() -> None:
    text = b'{"body": "%%", "properties": {"delivery_tag": "x", "body_encoding": "base64"}}'

    assert "not base64" in delivered(Receipt(1, "t"), b"t", text).broken


@pytest.mark.matrix
def test_sentinels_lead_to_the_list(tmp_path: Path, opened: list[MessageSource]) -> None:
    """Here, too, an entry is kept until it is confirmed."""
    setup = SentinelSetup(system_redis(), tmp_path)
    try:
        urls = ";".join(f"sentinel://127.0.0.1:{port}" for port in setup.ports)
        document = {"url": urls, "queue": LIST, "options": {"master_name": setup.service}}
        opened.append(open_source(SourceOptions.model_validate(document), 2**20, 1))
        with setup.nodes[0].client() as client:
            client.lpush(LIST, b"text")
            (message,) = received(opened[-1], 1)
            assert (message.body, client.hlen(f"{LIST}:taken")) == (b"text", 1)
            opened[-1].acknowledge([message.receipt])
            assert client.keys() == []
        opened[-1].close()
    finally:
        setup.stop()
