"""The settings of the response cache, in the form of Triton's `--cache-config`: `local,size=…` or `redis,ttl=…`."""

from typing import Literal, NamedTuple

from pydantic import Field, field_validator

from qinfer.core.settings_section import Section

_OPTIONS = {"local": ("size",), "redis": ("size", "ttl")}
_SIZE_BYTES, _TTL_S = 256 * 2**20, 3600
"""The defaults in Redis."""


class CachePlan(NamedTuple):
    """`local`, in the memory of each process, or `redis`; `ttl_s` 0 = for ever."""

    kind: Literal["local", "redis"]
    size_bytes: int
    ttl_s: int = 0


class CacheSettings(Section):
    """The response cache, of models whose configuration enables it; gateways and workers need the same."""

    config: str = Field(
        "",
        description="`local,size=BYTES`: in the memory of each gateway, and of each worker for calls between models. "
        "`redis,ttl=SECONDS,size=BYTES`: in the queue's Redis, shared; by default 3600 s and 256 MiB. Empty = no cache "
        "(Triton's --cache-config).",
    )

    @field_validator("config")
    @classmethod
    def _check_config(cls, text: str) -> str:
        plan_of(text)
        return text

    @property
    def plan(self) -> CachePlan | None:
        """The cache, if any."""
        return plan_of(self.config)


def plan_of(text: str) -> CachePlan | None:
    """Parses the text of `--cache-config`."""
    if not text:
        return None
    name, *words = [word.strip() for word in text.split(",")]
    if name not in _OPTIONS:
        raise ValueError(f"unknown cache '{name[:40]}'; use local,size=BYTES or redis,ttl=SECONDS,size=BYTES")
    options: dict[str, int] = {}
    for word in words:
        key, _, value = word.partition("=")
        if key not in _OPTIONS[name]:
            known = " and ".join(_OPTIONS[name])
            raise ValueError(f"the {name} cache has no option '{key[:40]}'; it takes {known}")
        if not (value.isascii() and value.isdigit() and len(value) < 16 and int(value)):
            raise ValueError(f"the option '{key}' of the {name} cache must be an integer above 0, got '{value[:40]}'")
        options[key] = int(value)
    if name == "redis":
        return CachePlan("redis", options.get("size", _SIZE_BYTES), options.get("ttl", _TTL_S))
    if "size" not in options:
        raise ValueError("the local cache needs its size, such as local,size=104857600")
    return CachePlan("local", options["size"])
