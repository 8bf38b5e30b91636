"""The settings of CORS: pages of other origins that may call the gateway's HTTP."""

import re
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from qinfer.core.settings_section import Section

ANY = "*"
"""Stands for all origins."""

_DEFAULT_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[!#$%&'+.^_`|~0-9A-Za-z-]+")  # RFC 9110 §5.6.2, but for `*`
_AUTHORITY = re.compile(r"[a-z0-9._~:\[\]-]+")


class CorsSettings(Section):
    """Pages of other origins that may call HTTP from a browser (CORS); a gateway's answers do not depend on it."""

    allow_origins: tuple[str, ...] = Field(
        (),
        description="Origins whose pages may call, as browsers write them: https://app.example.org, "
        "http://localhost:3000; `*` alone = all. Empty = CORS is off, and browsers let only pages of this server call.",
    )
    allow_methods: tuple[str, ...] = Field(
        ("GET", "POST", "PUT", "DELETE"), description="Methods that such pages may use."
    )
    allow_headers: tuple[str, ...] = Field(
        (
            "Accept",
            "Authorization",
            "Content-Encoding",
            "Content-Type",
            "Endpoint-Load-Metrics-Format",
            "Idempotency-Key",
            "Inference-Header-Content-Length",
            "Last-Event-ID",
            "Prefer",
            "Request-Id",
            "Request-Timeout",
            "Traceparent",
            "Tracestate",
            "Webhook-Url",
            "X-API-Key",
        ),
        description="Headers that such pages may send. Add the headers of `http.header_forward_pattern` and "
        "`http.restricted` that pages should send.",
    )
    expose_headers: tuple[str, ...] = Field(
        (
            "Endpoint-Load-Metrics",
            "Idempotent-Replayed",
            "Inference-Header-Content-Length",
            "Location",
            "Preference-Applied",
            "Qinfer-Cache",
            "Qinfer-Request-Id",
            "Qinfer-Request-State",
            "Qinfer-Target",
            "Retry-After",
        ),
        description="Headers of replies that such pages may read.",
    )
    allow_credentials: bool = Field(
        False,
        description="Browsers send cookies and client certificates along, for a proxy that asks for them; API keys do "
        "not need it. Not with the origin `*`.",
    )
    max_age_s: int = Field(
        600, ge=0, le=86400, description="Seconds that browsers remember what they may send; 0 = they ask each time."
    )

    @field_validator("allow_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        if ANY in origins and len(origins) > 1:
            raise ValueError("`*` stands for all origins, and stands alone; leave out the others, or leave out `*`")
        return tuple(origin if origin == ANY else origin_of(origin) for origin in origins)

    @field_validator("allow_methods", "allow_headers", "expose_headers")
    @classmethod
    def _check_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not _NAME.fullmatch(name):
                raise ValueError(f"'{name[:80]}' is no name of a method or header, such as X-Request-Id; list each one")
        return names

    @model_validator(mode="after")
    def _check_credentials(self) -> Self:
        if self.allow_credentials and ANY in self.allow_origins:
            raise ValueError(
                "QINFER_CORS__ALLOW_CREDENTIALS is not possible with the origin `*`: any page could act as its "
                "reader; name the origins in QINFER_CORS__ALLOW_ORIGINS"
            )
        return self


def origin_of(text: str) -> str:
    """Returns an origin as browsers send it: lower case, no default port."""
    scheme, _, rest = text.lower().partition("://")
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not (scheme and host and _AUTHORITY.fullmatch(rest)):
        shown = text.rpartition("@")[2]  # a password may precede it
        raise ValueError(
            f"'{shown[:80]}' is no origin; write scheme://host or scheme://host:port, without a path or `/` at the end"
        )
    name = f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}" + ("" if port in (None, _DEFAULT_PORTS.get(scheme)) else f":{port}")
