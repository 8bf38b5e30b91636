"""Where webhooks may go, how they are signed, and what a delivery does."""

import base64
import json
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import httpx
import pytest
import redis

from qinfer.core.settings import WebhookSettings
from qinfer.errors import DeadlineExceeded, InvalidRequest, SettingsError, Unreachable
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobRecord
from qinfer.queue import keys
from qinfer.queue.deliveries import WEBHOOKS, DeliveryItem, DeliveryKind
from qinfer.queue.entries import Acceptance, EntryAddress, Lane, RequestState, Settlement
from qinfer.queue.lanes import Queue
from qinfer_api.jobs.records import message_of
from qinfer_api.requests.records import failed_outcome
from qinfer_api.requests.webhooks import MAX_DELIVERIES, Targets, Webhooks, is_public, read_secret, sign, webhook_id
from qinfer_api.status import http_status, retry_after_s
from tests.support.servers.receiver import Receiver, receiving
from tests.support.servers.servers import Database

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ADDRESS = EntryAddress("digits", 0, "r1")
PUBLIC = "93.184.216.34"


def settings(*allow: str, **changes: Any) -> WebhookSettings:
    return WebhookSettings.model_validate({"allow": allow, "secret": SECRET, "timeout_s": 5.0, **changes})


def resolver(*answers: Sequence[str]) -> Any:
    """Looks nothing up: gives the first answer, then the next, the last one for ever."""
    left = list(answers)

    async def resolve(host: str, port: int) -> Sequence[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return resolve


# --- targets ---


@pytest.mark.parametrize(
    ("allow", "url"),
    [
        ("example.org", "https://example.org/hook"),
        ("example.org", "http://EXAMPLE.org:80/"),
        ("*.example.org", "https://a.b.example.org/"),
        ("example.org:8443", "https://example.org:8443/x?y=z"),
        ("*.example.org:8443", "https://a.example.org:8443/"),
        ("xn--bcher-kva.example", "https://xn--bcher-kva.example/"),
    ],
)
async def test_allowed_targets(allow: str, url: str) -> None:
    """The host as it is listed; without a port the scheme's own."""
    target = await Targets(settings(allow), resolver([PUBLIC])).check(url)

    assert target.address == PUBLIC


@pytest.mark.parametrize(
    ("allow", "url", "text"),
    [
        ("example.org", "https://example.org.evil.net/", "webhooks may not go to 'example.org.evil.net'"),
        ("example.org", "https://sub.example.org/", "QINFER_WEBHOOKS__ALLOW"),
        ("example.org", "https://example.org:8443/", "webhooks may not go to 'example.org:8443'"),
        ("example.org", "https://example.org./", "webhooks may not go to"),
        ("*.example.org", "https://example.org/", "webhooks may not go to"),
        ("*.example.org", "https://evilexample.org/", "webhooks may not go to"),
        ("example.org", "https://user:pass@example.org/", "no user name and no password"),
        ("example.org", "https://example.org/#part", "no fragment"),
        ("example.org", "ftp://example.org/", "begins with https:// or http://"),
        ("example.org", "example.org/hook", "begins with https:// or http://"),
        ("example.org", "https:///hook", "begins with https:// or http://"),
        ("example.org", "https://example.org:port/", "is not a URL"),
        ("example.org", "https://bücher.example/", "printable ASCII"),
        ("example.org", "https://example.org/" + "x" * 2100, "at most 2048"),
    ],
)
async def test_refused_targets(allow: str, url: str, text: str) -> None:
    """Said with the host and the setting; what may be secret is not repeated."""
    with pytest.raises(InvalidRequest) as caught:
        await Targets(settings(allow), resolver([PUBLIC])).check(url)

    assert text in caught.value.message
    assert "pass" not in caught.value.message.replace("password", "")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1"),
        *("::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "::ffff:169.254.169.254"),
    ],
)
async def test_private_addresses(address: str) -> None:
    """One among public ones is enough to refuse a host, unless private ones are allowed."""
    resolve = resolver([PUBLIC, address])

    with pytest.raises(InvalidRequest, match=r"'example\.org' leads into a private network; QINFER_WEBHOOKS__ALLOW_PR"):
        await Targets(settings("example.org"), resolve).check("https://example.org/")
    await Targets(settings("example.org", allow_private=True), resolve).check("https://example.org/")


def test_public_addresses() -> None:
    """Those of the internet, and IPv4 ones in IPv6's clothes."""
    assert all(map(is_public, (PUBLIC, "2606:4700::1111", f"::ffff:{PUBLIC}", "64:ff9b::5db8:d822")))


@pytest.mark.parametrize("error", [OSError("no such name"), TimeoutError()])
async def test_a_host_that_does_not_resolve(error: Exception) -> None:
    """It is refused when it is named, not found out hours later; the names' server may be away: try again."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        raise error

    with pytest.raises(Unreachable, match=r"webhook host 'example\.org' can't be resolved now") as caught:
        await Targets(settings("example.org"), resolve).check("https://example.org/")
    assert (http_status(caught.value.code), retry_after_s(caught.value.code)) == (503, 1)


async def test_a_host_that_is_no_name() -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        raise UnicodeError("label too long")

    with pytest.raises(InvalidRequest, match=r"webhook host 'example\.org' is not a valid host name"):
        await Targets(settings("example.org"), resolve).check("https://example.org/")


@pytest.mark.parametrize("host", ["93.184.216.34", "[2606:4700::1111]", "[2606:4700::1111]:443"])
async def test_a_literal_address_is_not_looked_up(host: str) -> None:
    async def resolve(host: str, port: int) -> Sequence[str]:
        raise AssertionError(f"{host} was looked up")

    target = await Targets(settings(host), resolve).check(f"https://{host}/")

    assert target.address == host.removesuffix(":443").strip("[]")


@pytest.mark.parametrize("entry", ["", "https://example.org", "a@b", "*", "ex*mple.org", "example.org:70000"])
def test_a_wrong_entry_of_the_list_is_named(entry: str) -> None:
    """At the start."""
    with pytest.raises(SettingsError, match="QINFER_WEBHOOKS__ALLOW"):
        Targets(settings(entry))


# --- signatures ---


def test_a_signature_is_the_standards() -> None:
    """The example of the Standard Webhooks specification."""
    signature = sign(read_secret(settings("h")), "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')

    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_secrets() -> None:
    """Base64 behind `whsec_`, or any text; none is an error where webhooks are allowed."""
    encoded = "whsec_" + base64.b64encode(b"key").decode()

    assert read_secret(settings("h", secret=encoded)) == read_secret(settings("h", secret="key")) == b"key"
    assert read_secret(settings(secret="")) == b""
    with pytest.raises(SettingsError, match="QINFER_WEBHOOKS__SECRET is not set"):
        read_secret(settings("h", secret=""))
    with pytest.raises(SettingsError, match="is not base64") as caught:
        read_secret(settings("h", secret="whsec_?hidden?"))
    assert "hidden" not in caught.value.message


def test_ids_differ_between_models() -> None:
    """An item's id is unique in its partition only."""
    ids = {webhook_id(DeliveryItem(model, 0, "1-0", "request:r1")) for model in ("a", "b")}

    assert len(ids) == 2
    assert not any("." in one for one in ids)


# --- deliveries ---


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


async def expired(delivery: Queue, webhook: str) -> DeliveryItem:
    """Accepts and expires a request; returns its webhook."""
    acceptance = Acceptance(address=ADDRESS, lane=Lane("digits", 1), frame=b"f", timeout_s=60.0, webhook=webhook)
    await delivery.requests.accept(acceptance)
    outcome = failed_outcome(ADDRESS, RequestState.EXPIRED, DeadlineExceeded("too late"))
    await delivery.requests.settle([Settlement(address=ADDRESS, outcome=outcome)])
    (item,) = await taken(delivery)
    return item


async def taken(delivery: Queue) -> list[DeliveryItem]:
    """Takes the webhooks that there are, which are due again at once."""
    return await delivery.deliveries.take_due("digits", 0, DeliveryKind(WEBHOOKS, 0.0, 0.0), 10)


async def sent(
    delivery: Queue, item: DeliveryItem, options: WebhookSettings, resolve: Any = None
) -> tuple[str, list[DeliveryItem]]:
    """Delivers a webhook; returns its state, and what there still is to be delivered."""
    webhooks = Webhooks(options, delivery, Targets(options, resolve), partial(message_of, Jobs(delivery)))
    async with webhooks:
        await webhooks.deliver(item)
    assert webhooks.free == (MAX_DELIVERIES if options.allow else 0)
    record = await delivery.requests.record(ADDRESS)
    return record.webhook_state if record else "", await taken(delivery)


async def test_a_delivery(delivery: Queue, receiver: Receiver) -> None:
    """Signed JSON that says what ended and where the result is; the reply's body is not waited for."""
    options = settings(f"127.0.0.1:{receiver.port}", allow_private=True)

    state, left = await sent(delivery, await expired(delivery, receiver.url()), options)

    ((path, headers, body),) = receiver.received
    about = json.loads(body)
    assert (state, left, path) == ("delivered", [], "/hook?token=hidden")
    assert (about["type"], about["data"]["id"], about["data"]["state"]) == ("request.expired", "r1", "expired")
    assert about["data"]["error"] == {"code": "deadline_exceeded", "message": "too late"}
    assert about["data"]["result_url"].endswith("/result")
    assert about["timestamp"] == about["data"]["finished_at"]
    assert headers["content-type"] == "application/json"
    signature = sign(read_secret(options), headers["webhook-id"], int(headers["webhook-timestamp"]), body)
    assert headers["webhook-signature"] == signature


async def test_the_connection_goes_to_the_address_that_was_checked(delivery: Queue, receiver: Receiver) -> None:
    """No second look-up: the name here leads nowhere but in the check."""
    options = settings(f"hooks.invalid:{receiver.port}", allow_private=True)
    item = await expired(delivery, receiver.url("hooks.invalid"))

    state, _ = await sent(delivery, item, options, resolver(["127.0.0.1"]))

    assert state == "delivered"
    assert receiver.received[0].headers["host"] == f"hooks.invalid:{receiver.port}"


async def test_a_name_that_leads_inside_by_now_is_refused(delivery: Queue, receiver: Receiver) -> None:
    """DNS rebinding: it was public when the request named it."""
    options = settings(f"hooks.invalid:{receiver.port}")
    resolve = resolver([PUBLIC], ["127.0.0.1"])
    await Targets(options, resolve).check(receiver.url("hooks.invalid"))

    state, left = await sent(delivery, await expired(delivery, receiver.url("hooks.invalid")), options, resolve)

    assert (state, len(left), receiver.received) == ("pending", 1, [])


@pytest.mark.parametrize("status", [301, 302, 307, 400, 410, 500])
async def test_anything_but_2xx_comes_again(delivery: Queue, receiver: Receiver, status: int) -> None:
    """Redirects are not followed; the id stays, so that receivers can drop repetitions."""
    receiver.statuses = [status, 200]
    options = settings(f"127.0.0.1:{receiver.port}", allow_private=True)

    state, (item,) = await sent(delivery, await expired(delivery, receiver.url()), options)
    assert (state, item.attempts) == ("pending", 2)
    assert (await sent(delivery, item, options))[0] == "delivered"
    assert len({received.headers["webhook-id"] for received in receiver.received}) == 1


async def test_it_is_given_up_after_so_many(
    delivery: Queue, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, without the URL, which may hold a secret."""
    receiver.statuses = [500]
    options = settings(f"127.0.0.1:{receiver.port}", allow_private=True, max_attempts=2)
    with caplog.at_level(logging.WARNING, "qinfer_api.requests.webhooks"):
        _, (item,) = await sent(delivery, await expired(delivery, receiver.url()), options)
        state, left = await sent(delivery, item, options)

    assert (state, left) == ("failed", [])
    assert [record.message for record in caplog.records] == ["webhook given up"]
    assert "hidden" not in str([vars(record) for record in caplog.records])


async def test_nobody_there(delivery: Queue, unused_tcp_port: int) -> None:
    """A refused connection is one try."""
    options = settings(f"127.0.0.1:{unused_tcp_port}", allow_private=True)
    item = await expired(delivery, f"http://127.0.0.1:{unused_tcp_port}/")

    assert (await sent(delivery, item, options))[0] == "pending"


async def test_an_unforeseen_error_is_one_try(delivery: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """It does not come out: it would end the gateway, and again with each repetition."""

    async def broken(host: str, port: int) -> list[str]:
        raise RuntimeError("a defect")

    item = await expired(delivery, "http://hooks.invalid/?token=hidden")

    assert (await sent(delivery, item, settings("hooks.invalid"), broken))[0] == "pending"
    assert "hidden" not in caplog.text


async def test_webhooks_that_are_no_longer_allowed_are_given_up(delivery: Queue, receiver: Receiver) -> None:
    """Without an HTTP client."""
    options = settings(max_attempts=1)

    assert (await sent(delivery, await expired(delivery, receiver.url()), options))[0] == "failed"
    assert receiver.received == []


async def test_the_end_of_a_job_is_told(delivery: Queue, receiver: Receiver) -> None:
    """With the job as its page shows it; what became of the webhook is in its record. One that goes on is not told."""
    options = settings(f"127.0.0.1:{receiver.port}", allow_private=True)
    spec = b'{"model":"digits","inputs":["file:///in/*.parquet"],"output":{"url":"file:///out"}}'
    job = JobRecord(
        id="j1", model="digits", version=1, tenant="acme", state="running", spec=spec, webhook=receiver.url()
    )
    await Jobs(delivery).create(job)
    webhooks = Webhooks(options, delivery, Targets(options), partial(message_of, Jobs(delivery)))

    async with webhooks:
        for state in ("failed", "expired"):
            await Jobs(delivery).stop("j1", state, error="no more")
            (item,) = await taken(delivery)
            if state == "expired":
                await Jobs(delivery).move("j1", {"expired"}, "planning")
            await webhooks.deliver(item)
            await Jobs(delivery).move("j1", {"failed"}, "planning")

    ((_, _, body),) = receiver.received
    about = json.loads(body)
    assert (about["type"], about["data"]["id"], about["data"]["state"]) == ("job.failed", "j1", "failed")
    assert (about["data"]["error"], about["timestamp"]) == ("no more", about["data"]["ended_at"])
    assert about["tenant"] == "acme"
    found = await Jobs(delivery).get("j1")
    assert found is not None
    assert found.webhook_state == "failed"
    assert await taken(delivery) == []


async def test_the_webhook_of_a_request_that_is_gone_is_removed(delivery: Queue, database: Database) -> None:
    item = await expired(delivery, "http://h/")
    with redis.Redis.from_url(database.settings.url.get_secret_value()) as client:
        client.delete(keys.request("digits", 0, "r1"))

    assert await sent(delivery, item, settings()) == ("", [])


def test_httpx_reads_hosts_as_the_check_does() -> None:
    """A host that `urllib` and others read differently: the library that connects is the one that checks."""
    assert httpx.URL("https://example.org\\@evil.net/").raw_host != b"example.org"
