"""The options of `qinfer up`, and what its preparation makes of them; plain values, which cross between processes."""

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

    Attributes:
        settings: Values in place of the environment's; a port 0 is any free one. Of the repository those that are
            empty are the environment's.
        allow_client_shm: Clients on this host may pass tensors in system shared memory.
        data_dir: The directory of the private Redis' data.
        redis_url: The Redis to use; empty = a private one.
        redis_memory_bytes: The memory of the private Redis above which it takes no writes; 0 = half of what there is.
        workers: The number of workers.
        autoscale: The minimum and maximum number of workers, in place of `workers`.
        ready_timeout_s: Seconds to wait until the models are loaded.
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
    """The part of the settings that supervision needs.

    Attributes:
        addresses: The gateway's addresses.
        gateway_drain_s: The gateway's own drain limit in seconds.
        worker_drain_s: A worker's own drain limit in seconds.
    """

    addresses: Sequence[GatewayAddress]
    gateway_drain_s: float
    worker_drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The values with which the programs start.

    Attributes:
        url: The gateway's URL.
        variables: The programs' settings, as variables of the environment.
        pass_env: Further variables for all programs, by name or pattern.
        model_env: Further variables for workers and the code of models.
        no_bulk: The reason why there is no bulk worker; empty = there is one.
    """

    url: str
    variables: Mapping[str, str]
    pass_env: Sequence[str]
    model_env: Sequence[str]
    no_bulk: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a start.

    Attributes:
        pending: Model versions that are loading, or of which no worker has reported.
        workers: Live workers.
        is_live: The gateway answers.
    """

    pending: int
    workers: int
    is_live: bool
