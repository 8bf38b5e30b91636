"""Samples (one measurement each) and rows (the medians of a setting's rounds)."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

IN_PROCESS = "in_process"
BATCH = "batch"
"""The encoding of in-process samples: their `connections` is the batch size, their `rate` items per second."""
CLIENT = "client"
"""The role of the load generator in `cpu_us`."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """What was measured.

    Attributes:
        model: The model's name.
        encoding: `json`, `binary`, `grpc`, one of `proxied.ENCODINGS`, or `batch` for the in-process bound.
        connections: Concurrent connections, or the batch size in process.
        streams: Concurrent calls of each connection.
        server: The server's name.
    """

    model: str
    encoding: str
    connections: int
    streams: int = 1
    server: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement.

    Attributes:
        setting: What was measured.
        round: Its round, from 1.
        rate: Requests per second (in process: items per second).
        p50_us: Median latency.
        p99_us: 99th percentile.
        errors: Kind of error → count.
        cpu_us: Role → CPU microseconds per request; the load generator is under `CLIENT`.
        rss_before_bytes: Role → resident memory before.
        rss_bytes: Role → resident memory after.
        stolen: Share of the interval in which the host gave our cores to others, 0…1.
    """

    setting: Setting
    round: int
    rate: float
    p50_us: float = 0.0
    p99_us: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    cpu_us: dict[str, float] = field(default_factory=dict)
    rss_before_bytes: dict[str, int] = field(default_factory=dict)
    rss_bytes: dict[str, int] = field(default_factory=dict)
    stolen: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The medians of one setting's rounds; `errors` counts those of all rounds, and any makes the row invalid."""

    setting: Setting
    rates: tuple[float, ...]
    rate: float
    slowest: float
    fastest: float
    p50_us: float
    p99_us: float
    errors: int
    cpu_us: dict[str, float]
    rss_bytes: dict[str, int]

    def times(self, other: "Row") -> float:
        """Returns how many times the rate of another row this one is.

        It is the median of the ratios of measurements that were made one after the other: between rounds the machine's
        speed changes more than the ratio does.
        """
        is_paired = len(self.rates) == len(other.rates)
        pairs = zip(self.rates, other.rates, strict=True) if is_paired else [(self.rate, other.rate)]
        return median(mine / theirs if theirs else float("inf") for mine, theirs in pairs)

    @property
    def valid(self) -> bool:
        """Whether the row may be compared: no request failed."""
        return self.errors == 0

    @property
    def server_cpu_us(self) -> float:
        """CPU microseconds per request of all the server's processes."""
        return sum(used for role, used in self.cpu_us.items() if role != CLIENT)


def summarise(samples: Iterable[Sample]) -> dict[Setting, Row]:
    """Takes the medians over the rounds of each setting."""
    grouped: defaultdict[Setting, list[Sample]] = defaultdict(list)
    for sample in samples:
        grouped[sample.setting].append(sample)
    return {setting: _row(setting, rounds) for setting, rounds in sorted(grouped.items())}


def _row(setting: Setting, samples: list[Sample]) -> Row:
    roles = {role for sample in samples for role in sample.cpu_us}
    return Row(
        setting=setting,
        rates=tuple(s.rate for s in samples),
        rate=median(s.rate for s in samples),
        slowest=min(s.rate for s in samples),
        fastest=max(s.rate for s in samples),
        p50_us=median(s.p50_us for s in samples),
        p99_us=median(s.p99_us for s in samples),
        errors=sum(sum(s.errors.values()) for s in samples),
        cpu_us={role: median(s.cpu_us.get(role, 0.0) for s in samples) for role in sorted(roles)},
        rss_bytes={role: max(s.rss_bytes.get(role, 0) for s in samples) for role in sorted(roles - {CLIENT})},
    )
