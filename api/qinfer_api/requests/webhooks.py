"""Webhooks: signed notifications about ended requests and bulk jobs, and canary events (standardwebhooks.com).

    POST <the request's Webhook-Url>        {"type": "request.succeeded", "timestamp": …, "data": {the record}}
    POST <the job's webhook>                {"type": "job.completed", "timestamp": …, "data": {the job}}
    POST <the endpoint's webhook>           {"type": "canary.promote", "timestamp": …, "data": {the event}}
    webhook-id · webhook-timestamp · webhook-signature: v1,<base64 of HMAC-SHA256(secret, "id.timestamp.body")>

Unless a 2xx reply confirms it, a webhook is repeated with the same `webhook-id`, up to `max_attempts`. Its target must
be a listed host, and a private address only if a setting allows it. It is checked when a request names it and again at
each delivery, because names can change; connections go to the checked address.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, NamedTuple

import msgspec

import qinfer
from qinfer.core.settings import WebhookSettings
from qinfer.errors import InvalidRequest, SettingsError, Unreachable
from qinfer.queue import keys
from qinfer.queue.deliveries import WEBHOOKS, DeliveryItem, DeliveryKind
from qinfer.queue.entries import EntryAddress, RequestRecord
from qinfer.queue.lanes import Queue
from qinfer.traffic.store import WebhookNotice
from qinfer_api.requests.records import instant, path_of, shown_record

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

MAX_DELIVERIES = 16

_ENCODED = "whsec_"
_SECRET = "QINFER_WEBHOOKS__SECRET"  # noqa: S105 - the name of the setting
_LONGEST_PAUSE_S = 900.0
_MARGIN_S = 1.0
_JOB, _ENDPOINT = "job:", "endpoint:"

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_URL_CHARACTERS = 2048

_PORTS = {"https": 443, "http": 80}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_RESOLVE_TIMEOUT_S = 5.0
_resolver = ThreadPoolExecutor(4, "webhook-names")  # a look-up may hang


class TargetTexts(NamedTuple):
    """Terms of error texts: the target, its refusal, and the settings that would allow it."""

    name: str
    refused: str
    allow: str
    private: str


OF_WEBHOOKS = TargetTexts(
    "webhook", "webhooks may not go to", "QINFER_WEBHOOKS__ALLOW", "QINFER_WEBHOOKS__ALLOW_PRIVATE"
)


class WebhookTarget(NamedTuple):
    """A checked URL, and its IP address."""

    url: "httpx.URL"
    host: str
    address: str

    def stream(
        self,
        client: "httpx.AsyncClient",
        method: str,
        headers: Mapping[str, str] = MappingProxyType({}),
        content: bytes | None = None,
    ) -> "AbstractAsyncContextManager[httpx.Response]":
        """Sends a request to the checked address."""
        named = {**headers, "host": self.url.netloc.decode("ascii")}
        at, sni = self.url.copy_with(host=self.address), {"sni_hostname": self.host}
        return client.stream(method, at, content=content, headers=named, extensions=sni)


def open_client(timeout_s: float, headers: Mapping[str, str]) -> "httpx.AsyncClient":
    """Returns a client for `WebhookTarget.stream`, which resolves no name and follows no redirect."""
    import httpx

    return httpx.AsyncClient(
        timeout=timeout_s,
        trust_env=False,  # a proxy would resolve again
        follow_redirects=False,
        limits=httpx.Limits(max_keepalive_connections=0),  # hosts at one address must not share connections
        headers={"user-agent": f"qinfer/{qinfer.__version__}", **headers},
    )


class _AllowedHost(NamedTuple):
    """An entry of the allow-list; port 0 = the scheme's default."""

    host: str
    port: int

    def matches(self, url: "httpx.URL", host: str) -> bool:
        port = url.port or _PORTS[url.scheme]
        if port != (self.port or _PORTS[url.scheme]):
            return False
        if self.host.startswith("*."):
            return host.endswith(self.host[1:]) and len(host) > len(self.host) - 1
        return host == self.host


class Targets:
    """Checks URLs; `words` adapts the error texts."""

    def __init__(
        self, settings: WebhookSettings, resolve: Resolve | None = None, words: TargetTexts = OF_WEBHOOKS
    ) -> None:
        self._words = words
        self._allowed = [_parse(entry, words) for entry in settings.allow]
        self._allow_private = settings.allow_private
        self._resolve = resolve or _resolve

    async def check(self, url: str) -> WebhookTarget:
        """Checks a URL and resolves its host."""
        words = self._words
        parsed = _parsed(url, words.name)
        host = parsed.raw_host.decode("ascii").lower()
        if not any(entry.matches(parsed, host) for entry in self._allowed):
            raise InvalidRequest(
                f"{words.refused} '{parsed.netloc.decode('ascii')}'; {words.allow} lists the allowed hosts"
            )
        addresses = await self._addresses(host, parsed.port or _PORTS[parsed.scheme])
        for address in addresses:
            if not (self._allow_private or is_public(address)):
                raise InvalidRequest(
                    f"{words.name} host '{host}' leads into a private network; {words.private} allows such hosts"
                )
        return WebhookTarget(parsed, host, addresses[0])

    async def _addresses(self, host: str, port: int) -> Sequence[str]:
        with suppress(ValueError):
            return [str(ipaddress.ip_address(host))]
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                addresses = await self._resolve(host, port)
        except UnicodeError:
            raise InvalidRequest(f"{self._words.name} host '{host}' is not a valid host name; check it") from None
        except (OSError, TimeoutError):
            addresses = []
        if not addresses:
            raise Unreachable(f"{self._words.name} host '{host}' can't be resolved now; check its name, or try again")
        return addresses


def is_public(address: str) -> bool:
    """Returns whether an address, or its inner IPv4 one, is public."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def _parsed(url: str, name: str) -> "httpx.URL":
    """Parses a URL; errors do not repeat it, because it may hold a secret."""
    if len(url) > MAX_URL_CHARACTERS or not (url.isascii() and url.isprintable()):
        raise InvalidRequest(f"a {name} URL has at most {MAX_URL_CHARACTERS} printable ASCII characters")
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"the {name} URL is not a URL: {error}") from None
    if parsed.scheme not in _PORTS or not parsed.raw_host:
        raise InvalidRequest(f"a {name} URL begins with https:// or http:// and names a host")
    if parsed.userinfo:
        raise InvalidRequest(f"a {name} URL must have no user name and no password; leave them out")
    if parsed.fragment:
        raise InvalidRequest(f"a {name} URL has no fragment (#…); leave it out")
    return parsed


def _parse(entry: str, words: TargetTexts) -> _AllowedHost:
    """Parses `example.org`, `*.example.org`, `host:port` or `[::1]:port`."""
    host, port = entry.strip().lower(), "0"
    name, colon, digits = host.rpartition(":")
    if colon and digits.isdecimal() and (":" not in name or name.endswith("]")):
        host, port = name, digits
    host = host.removeprefix("[").removesuffix("]")
    wrong = not host or any(c in host for c in "/@ ") or "*" in host.removeprefix("*.") or int(port) > 65535
    if wrong:
        raise SettingsError(f"{words.allow}: '{entry}' is not a host; write example.org, *.example.org or host:port")
    return _AllowedHost(host, int(port))


async def _resolve(host: str, port: int) -> Sequence[str]:
    lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_resolver, lookup)
    return [str(entry[4][0]) for entry in found]


class WebhookMessage(NamedTuple):
    """A webhook's URL, and its body at an instant."""

    url: str
    body_at: Callable[[float], bytes]


MessageOfJob = Callable[[str], Awaitable[WebhookMessage | None]]


class Webhooks:
    """Delivers webhooks; owns its HTTP client."""

    def __init__(
        self, settings: WebhookSettings, delivery: Queue, targets: Targets, message_of_job: MessageOfJob
    ) -> None:
        self._settings = settings
        self._secret = read_secret(settings)
        self._delivery = delivery
        self.kind = DeliveryKind(WEBHOOKS, settings.timeout_s + _MARGIN_S, _LONGEST_PAUSE_S)
        self._targets = targets
        self._message_of_job = message_of_job
        self._under_way = 0
        self._http: httpx.AsyncClient | None = None

    @property
    def free(self) -> int:
        """Number of webhooks that `deliver` can take now."""
        return MAX_DELIVERIES - self._under_way if self._settings.allow else 0

    async def __aenter__(self) -> "Webhooks":
        """Opens the HTTP client, if webhooks are allowed."""
        if self._settings.allow:
            self._http = open_client(self._settings.timeout_s, {"content-type": "application/json"})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the HTTP client."""
        if self._http is not None:
            await self._http.aclose()

    async def deliver(self, item: DeliveryItem) -> None:
        """Delivers a webhook once; removes it after success or the last attempt."""
        self._under_way += 1
        try:
            await self._deliver(item)
        finally:
            self._under_way -= 1

    async def _deliver(self, item: DeliveryItem) -> None:
        import httpx

        message = await self._message(item)
        if message is None:
            await self._done(item, delivered=False)  # gone, requeued, or continues
            return
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                target = await self._targets.check(message.url)
                status = await self._post(target, item, message)
            problem = "" if 200 <= status < 300 else f"status {status}"
        except (InvalidRequest, Unreachable) as error:
            problem = error.message
        except (httpx.HTTPError, OSError, TimeoutError) as error:
            problem = type(error).__name__  # its text may hold a secret
        except Exception as error:  # noqa: BLE001 - the boundary: no receiver may end the janitor, at each try again
            problem = type(error).__name__
            logger.error("webhook failed", extra={"request_id": _about(item).id, "reason": problem})
        if not problem:
            await self._done(item, delivered=True)
            return
        extra = {"request_id": _about(item).id, "reason": problem, "attempt": item.attempts}
        if item.attempts >= self._settings.max_attempts:
            logger.warning("webhook given up", extra=extra)
            await self._done(item, delivered=False)
        else:
            logger.info("webhook not delivered", extra=extra)

    async def _message(self, item: DeliveryItem) -> WebhookMessage | None:
        if item.text.startswith(_ENDPOINT):
            return message_of_canary(item.notes)
        if item.text.startswith(_JOB):
            return await self._message_of_job(_about(item).id)
        record = await self._delivery.requests.record(_about(item))
        is_due = record is not None and record.webhook and record.state.is_terminal
        return WebhookMessage(record.webhook, partial(body_of, record)) if record is not None and is_due else None

    async def _post(self, target: WebhookTarget, item: DeliveryItem, message: WebhookMessage) -> int:
        assert self._http is not None
        now_s = self._delivery.clock.now_s()
        body, own_id, timestamp = message.body_at(now_s), webhook_id(item), int(now_s)
        headers = {
            "webhook-id": own_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(self._secret, own_id, timestamp, body),
        }
        async with target.stream(self._http, "POST", headers, body) as reply:
            return reply.status_code

    async def _done(self, item: DeliveryItem, *, delivered: bool) -> None:
        done = partial(self._delivery.deliveries.done, item.model, item.partition, self.kind, [item.id])
        if item.text.startswith(_ENDPOINT):
            await done()
            return
        spell = keys.job if item.text.startswith(_JOB) else keys.request
        record = spell(item.model, item.partition, _about(item).id).encode()
        note = (record, "webhook_state", "delivered" if delivered else "failed")
        await done(note=note)


def read_secret(settings: WebhookSettings) -> bytes:
    """Decodes `whsec_<base64>`, or takes the text itself."""
    secret = settings.secret.get_secret_value()
    if settings.allow and not secret:
        raise SettingsError(f"{_SECRET} is not set; webhooks, which QINFER_WEBHOOKS__ALLOW allows, are signed with it")
    if not secret.startswith(_ENCODED):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(_ENCODED), validate=True)
    except binascii.Error:
        raise SettingsError(f"{_SECRET}: the text after '{_ENCODED}' is not base64") from None


def sign(secret: bytes, own_id: str, timestamp: int, body: bytes) -> str:
    """Returns the `webhook-signature` of a body."""
    content = b"%b.%d.%b" % (own_id.encode(), timestamp, body)
    return "v1," + base64.b64encode(hmac.digest(secret, content, hashlib.sha256)).decode()


def webhook_id(item: DeliveryItem) -> str:
    """Returns an id for recognising repetitions, unique over all models."""
    whole = f"{item.model}#{item.partition}:{item.id}"
    return f"msg_{hashlib.sha256(whole.encode()).hexdigest()[:32]}"


def _about(item: DeliveryItem) -> EntryAddress:
    return EntryAddress(item.model, item.partition, item.text.partition(":")[2])


def body_of(record: RequestRecord, now_s: float) -> bytes:
    """Returns the body for a request's end."""
    data = msgspec.to_builtins(shown_record(record, now_s)) | {"result_url": f"{path_of(record.address)}/result"}
    return envelope(f"request.{record.state.value}", instant(record.finished_at), record.tenant, data)


def message_of_canary(notes: bytes) -> WebhookMessage:
    """Returns the webhook for a canary's event."""
    told = msgspec.json.decode(notes, type=WebhookNotice)
    event = told.event.event.replace(" ", "_")
    data = {"endpoint": told.endpoint, **msgspec.to_builtins(told.event)}
    return WebhookMessage(told.url, lambda _: envelope(f"canary.{event}", instant(told.event.at_s), "", data))


def envelope(event: str, at: str | None, tenant: str, data: object) -> bytes:
    """Returns a webhook's body; shared receivers look at `tenant`."""
    return msgspec.json.encode({"type": event, "timestamp": at, **({"tenant": tenant} if tenant else {}), "data": data})
