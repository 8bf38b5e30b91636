"""Options of `qinfer up` and results of its preparation: plain values, sent between processes."""

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

    `settings` replace those of the environment; empty settings of the repository replace nothing. Without `redis_url` a
    private Redis runs, with at most `redis_memory_bytes` (0 = half of the memory).
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
class SupervisionPlan:
    """The settings that supervision needs."""

    addresses: Sequence[GatewayAddress]
    gateway_drain_s: float
    worker_drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The values with which the programs start.

    `variables` are settings, `pass_env` and `model_env` patterns of further variables for programs and model code.
    """

    url: str
    variables: Mapping[str, str]
    pass_env: Sequence[str]
    model_env: Sequence[str]
    no_bulk: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    """The state of a start; `pending` models are loading or unreported."""

    pending: int
    workers: int
    is_live: bool
