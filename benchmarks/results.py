"""Samples (one turn each), rows (the medians of a setting's clean turns), and the file that keeps them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import msgspec

IN_PROCESS = "in_process"
BATCH = "batch"
"""The encoding of in-process samples: their `connections` is the batch size, their `rate` items per second."""
CLIENT = "client"
"""The role of the load generator in `cpu_us`."""
CLEAN = 0.03
"""The largest share of all cores that the host and foreign programs may take during a clean turn."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """A server under one load.

    Attributes:
        model: The model's name.
        encoding: `json`, `binary`, `grpc`, one of `proxied.ENCODINGS`, or `batch` for the in-process bound.
        connections: Concurrent connections, or the batch size in process.
        streams: Concurrent calls of each connection.
        fresh: Each request opens a connection of its own.
        server: The server's name.
    """

    model: str
    encoding: str
    connections: int
    streams: int = 1
    fresh: bool = False
    server: str

    @property
    def load(self) -> str:
        """The connections, with the concurrent calls of each where there are several."""
        if self.fresh:
            return f"{self.connections}, new for each request"
        return f"{self.connections:,}" if self.streams == 1 else f"{self.connections} x {self.streams}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One turn of a server.

    Attributes:
        setting: The server and its load.
        round: The round of the turn, from 1: turns of one round are neighbours.
        rate: Requests per second (in process: items per second).
        p50_us: Median latency.
        p99_us: 99th percentile.
        errors: Kind of error → count.
        cpu_us: Role → CPU microseconds per request; the load generator is under `CLIENT`.
        rss_bytes: Role → resident memory after.
        stolen: Share of all cores that the host gave to others, 0…1.
        foreign: Share of all cores that other programs of this machine used, 0…1.
    """

    setting: Setting
    round: int
    rate: float
    p50_us: float = 0.0
    p99_us: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    cpu_us: dict[str, float] = field(default_factory=dict)
    rss_bytes: dict[str, int] = field(default_factory=dict)
    stolen: float = 0.0
    foreign: float = 0.0

    @property
    def lost(self) -> float:
        """Share of all cores that the turn did not have."""
        return self.stolen + self.foreign


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of neighbouring turns' ratios, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The medians of one setting's turns; `errors` counts those of all turns, and any makes the row invalid."""

    setting: Setting
    rates: dict[int, float]
    p50_us: float
    p99_us: float
    errors: int
    cpu_us: dict[str, float]
    rss_bytes: dict[str, int]

    @property
    def rate(self) -> float:
        """The median rate."""
        return median(self.rates.values())

    @property
    def spread(self) -> tuple[float, float]:
        """The 95 % interval of the rate."""
        return interval([*self.rates.values()])

    def times(self, other: "Row") -> Ratio:
        """Returns how many times the rate of another row this one is: turns of one round are compared."""
        common = self.rates.keys() & other.rates.keys()
        return ratio([self.rates[n] for n in common], [other.rates[n] for n in common])

    @property
    def valid(self) -> bool:
        """Whether the row may be compared: no request failed, and some were answered."""
        return self.errors == 0 and self.rate > 0

    @property
    def server_cpu_us(self) -> float:
        """CPU microseconds per request of all the server's processes."""
        return sum(used for role, used in self.cpu_us.items() if role != CLIENT)


Rows = Mapping[Setting, Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A results file: the machine, the plan in words, every turn, and the reasons why it may not be published."""

    machine: dict[str, str]
    run: str
    refusals: list[str]
    samples: list[Sample]

    def write(self, path: Path) -> None:
        """Writes the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> "Document":
        """Reads the file."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def summarise(samples: Iterable[Sample], limit: float = CLEAN) -> dict[Setting, Row]:
    """Takes the medians of each setting's turns that lost at most `limit`, the last try of each round."""
    grouped: dict[Setting, dict[int, Sample]] = {}
    for sample in samples:
        if sample.lost <= limit:
            grouped.setdefault(sample.setting, {})[sample.round] = sample
    return {setting: _row(setting, [*turns.values()]) for setting, turns in sorted(grouped.items())}


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Compares values pair by pair; without a pair the ratio is not a number."""
    values = [one / other if other else float("inf") for one, other in zip(mine, theirs, strict=True)]
    if not values:
        return Ratio(value=float("nan"), low=float("nan"), high=float("nan"))
    low, high = interval(values)
    return Ratio(value=median(values), low=low, high=high)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of a median by the sign test, for any distribution; of five and fewer the range."""
    ordered, count = sorted(values), len(values)
    first = max(int((count - 1.96 * count**0.5) / 2), 0)
    return ordered[first], ordered[count - 1 - first]


def _row(setting: Setting, samples: list[Sample]) -> Row:
    roles = {role for sample in samples for role in sample.cpu_us}
    return Row(
        setting=setting,
        rates={s.round: s.rate for s in samples},
        p50_us=median(s.p50_us for s in samples),
        p99_us=median(s.p99_us for s in samples),
        errors=sum(sum(s.errors.values()) for s in samples),
        cpu_us={role: median(s.cpu_us.get(role, 0.0) for s in samples) for role in sorted(roles)},
        rss_bytes={role: max(s.rss_bytes.get(role, 0) for s in samples) for role in sorted(roles - {CLIENT})},
    )
