"""The options of `qinfer up` and the results of its preparation: plain values, which cross between processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qinfer.cli.local.machine import GatewayAddress

Sections = Mapping[str, Mapping[str, Any]]
"""Section of the settings → field → value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The options of `qinfer up`.

    `settings` replace the environment's, except empty ones of the repository; port 0 is any free one. Without
    `redis_url` a private Redis runs, which takes no writes above `redis_memory_bytes` (0 = half of the memory).
    `autoscale` is the minimum and maximum number of workers, in place of `workers`.
    """

    settings: Sections
    allow_client_shm: bool
    data_dir: Path
    redis_url: str
    redis_memory_bytes: int
    workers: int
    autoscale: tuple[int, int] | None
    ready_timeout_s: float


class Ports(NamedTuple):
    """The gateway's ports; 0 = off."""

    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings that supervision needs."""

    addresses: Sequence[GatewayAddress]
    gateway_drain_s: float
    worker_drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The values with which the programs start.

    `variables` are the programs' settings, as environment variables; `pass_env` further variables for all programs, by
    name or pattern; `model_env` those for workers and model code. `no_bulk` is the reason for not having a bulk worker.
    """

    url: str
    variables: Mapping[str, str]
    pass_env: Sequence[str]
    model_env: Sequence[str]
    no_bulk: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a start.

    `pending` counts model versions that are loading, or not reported by any worker; `is_live` = the gateway answers.
    """

    pending: int
    workers: int
    is_live: bool
