"""Turns: servers that run side by side are loaded one at a time, and each turn is watched for what disturbs it.

The servers whose turn it is not are stopped by SIGSTOP: LitServe asks its queue in a loop and takes a whole core while
it is idle. qinfer alone goes on, for the heartbeats of its workers would grow stale; it takes 1 to 2 % of a core.
Some servers do not survive every stop; one that gives no answer in a turn is started again, and the turn repeated.
"""

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

import psutil

from benchmarks import processes
from benchmarks.load import LoadFailed, LoadResult
from benchmarks.results import CLEAN, CLIENT, Sample, Setting
from benchmarks.servers import Server

REPEATS = 2
"""How often a disturbed turn is repeated at once."""
EXTRA_ROUNDS = 3
"""Rounds after those of the plan, for settings that still lack clean turns."""
RESTARTS = 3
"""How often a server that gives no answer is started again in one turn."""
DISTURBED_SHARE = 0.25
"""Disturbed turns, as a share of all turns of the plan, after which a run is given up."""

T = TypeVar("T")


class TooNoisy(Exception):
    """Other programs, or the host, disturbed so many turns that the figures of this run mean nothing."""


class Step(Enum):
    """The step after a turn."""

    KEEP = auto()
    REPEAT = auto()
    DROP = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A server under a load, which takes turns with others.

    Attributes:
        setting: The server and its load.
        turns: Clean turns that it needs.
        generate: Makes the load of one turn.
        server: The server; None for a loop in a process of its own.
    """

    setting: Setting
    turns: int
    generate: Callable[[], LoadResult]
    server: Server | None = None


@dataclass(slots=True, kw_only=True)
class Tally:
    """The turns of a run.

    Attributes:
        planned: Turns of the plan.
        strict: Disturbed turns are repeated, and too many of them end the run.
        samples: All turns, disturbed ones too.
        restarts: Server → how often it was started again because it gave no answer in a turn.
    """

    planned: int = 0
    strict: bool = True
    samples: list[Sample] = field(default_factory=list)
    restarts: Counter[str] = field(default_factory=Counter)

    @property
    def disturbed(self) -> int:
        """The number of disturbed turns."""
        return sum(sample.lost > CLEAN for sample in self.samples)

    def add(self, sample: Sample) -> None:
        """Counts a turn.

        Raises:
            TooNoisy: Too many were disturbed.
        """
        self.samples.append(sample)
        if self.strict and is_too_noisy(self.disturbed, self.planned):
            raise TooNoisy(noise(self.disturbed, self.planned))


def next_step(lost: Sequence[float], repeats: int = REPEATS) -> Step:
    """Decides after the tries of one turn, given the share of all cores that each of them lost."""
    if lost[-1] <= CLEAN:
        return Step.KEEP
    return Step.REPEAT if len(lost) <= repeats else Step.DROP


def is_too_noisy(disturbed: int, planned: int) -> bool:
    """Tells whether so many disturbed turns make a run of so many planned ones worthless."""
    return disturbed > DISTURBED_SHARE * planned


def noise(disturbed: int, planned: int) -> str:
    """Says how many turns were disturbed."""
    return (
        f"{disturbed} turns lost more than {CLEAN:.0%} of the cores to the host or to other programs; "
        f"at most {DISTURBED_SHARE:.0%} of the {planned} planned ones may"
    )


def refusals(needed: Mapping[Setting, int], samples: Sequence[Sample], planned: int) -> list[str]:
    """Returns the reasons why the figures may not be published: rows without enough clean turns, noise."""
    clean = Counter(sample.setting for sample in samples if sample.lost <= CLEAN)
    reasons = [
        f"{setting.model} {setting.encoding} {setting.load}, {setting.server}: {clean[setting]} clean turns of {turns}"
        for setting, turns in needed.items()
        if clean[setting] < turns
    ]
    disturbed = sum(sample.lost > CLEAN for sample in samples)
    return [*reasons, noise(disturbed, planned)] if is_too_noisy(disturbed, planned) else reasons


def rotated(names: Sequence[T], by: int) -> list[T]:
    """Returns the elements, beginning `by` places later."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


def take_turns(
    contestants: Sequence[Contestant], tally: Tally, show: Callable[[Sample], None], idle: Iterable[Server] = ()
) -> None:
    """Loads contestants by turns, in rounds whose order rotates, until each has its clean turns.

    Args:
        contestants: The servers, each with its load.
        tally: Counts the turns, and those that were disturbed.
        show: Called with each turn.
        idle: Servers that run without a turn here, and are stopped meanwhile.

    Raises:
        LoadFailed: A load generator did not run.
        TooNoisy: Too many turns were disturbed.
    """
    clean: Counter[Setting] = Counter()
    servers = {id(one): one for one in (*idle, *(each.server for each in contestants)) if one is not None}
    with _paused([*servers.values()]):
        for number in range(1, max(one.turns for one in contestants) + EXTRA_ROUNDS + 1):
            due = [one for one in rotated(contestants, number - 1) if _is_due(one, contestants, clean, number, tally)]
            for contestant in due:
                clean[contestant.setting] += _turn(contestant, number, tally, show)


def _is_due(
    one: Contestant, contestants: Sequence[Contestant], clean: Mapping[Setting, int], number: int, tally: Tally
) -> bool:
    """Tells whether a contestant takes part in a round; those with equally many turns have extra rounds together."""
    if number <= one.turns:
        return True
    equals = [other for other in contestants if other.turns == one.turns]
    lacks = any(clean[other.setting] < other.turns for other in equals)
    return tally.strict and lacks and number <= one.turns + EXTRA_ROUNDS


def _turn(contestant: Contestant, number: int, tally: Tally, show: Callable[[Sample], None]) -> bool:
    """Makes one turn, again if it was disturbed; tells whether it was clean in the end."""
    lost: list[float] = []
    step = Step.REPEAT
    while step is Step.REPEAT:
        sample = _answered(contestant, number, tally)
        show(sample)
        tally.add(sample)
        lost.append(sample.lost)
        step = next_step(lost, REPEATS if tally.strict else 0)
    return step is Step.KEEP


def _answered(one: Contestant, number: int, tally: Tally) -> Sample:
    """Measures a turn; a server that was stopped before it and gives no answer is started again."""
    server = one.server
    with _awake(server):
        for _ in range(RESTARTS if server is not None and server.kind.can_pause else 0):
            with suppress(LoadFailed):
                if (sample := measure(one.setting, number, one.generate, server)).rate:
                    return sample
            assert server is not None
            tally.restarts[server.kind.name] += 1
            server.stop()
            server.start()
            one.generate()  # it is warm again
        return measure(one.setting, number, one.generate, server)


@contextmanager
def _paused(servers: Sequence[Server]) -> Iterator[None]:
    """Stops servers, of those that can be stopped, and lets them go on at the end."""
    able = [server for server in servers if server.kind.can_pause]
    for server in able:
        processes.pause(server.roots)
    try:
        yield
    finally:
        for server in able:
            processes.resume(server.roots)


@contextmanager
def _awake(server: Server | None) -> Iterator[None]:
    """Lets a server go on for its turn."""
    with nullcontext() if server is None or not server.kind.can_pause else _resumed(server):
        yield


@contextmanager
def _resumed(server: Server) -> Iterator[None]:
    processes.resume(server.roots)
    try:
        yield
    finally:
        processes.pause(server.roots)


def measure(setting: Setting, number: int, generate: Callable[[], LoadResult], server: Server | None = None) -> Sample:
    """Makes a load once, and takes what the server's processes, and others, used meanwhile.

    Args:
        setting: The server and its load.
        number: The round.
        generate: Makes the load.
        server: The server; None where all work is that of the load generator.
    """
    usage = server.usage if server is not None else processes.Usage
    begin_s, before, own_s, used = time.monotonic(), psutil.cpu_times(), _own_cpu_s(), usage()
    loaded = generate()
    now = usage()
    own_s, after, whole_s = _own_cpu_s() - own_s, psutil.cpu_times(), time.monotonic() - begin_s
    cpu_s = now.cpu_since(used)
    stolen, foreign = losses(before, after, own_s + sum(cpu_s.values()), whole_s * (psutil.cpu_count() or 1))
    each = 1e6 / max(1, loaded.requests + loaded.late)
    return Sample(
        setting=setting,
        round=number,
        rate=loaded.rate,
        p50_us=loaded.p50_us,
        p99_us=loaded.p99_us,
        errors=loaded.errors,
        cpu_us={**{role: s * each for role, s in cpu_s.items()}, CLIENT: loaded.client_cpu_s * each},
        rss_bytes=now.rss_bytes,
        stolen=stolen,
        foreign=foreign,
    )


def losses(before: object, after: object, known_s: float, available_s: float) -> tuple[float, float]:
    """Returns the shares of all cores that the host took, and that foreign programs used.

    Args:
        before: `psutil.cpu_times()` before the turn.
        after: The same after it.
        known_s: CPU time of the server, the load generator and this program.
        available_s: Seconds that all cores had together.
    """

    def passed_s(*fields: str) -> float:
        return float(sum(getattr(after, name, 0.0) - getattr(before, name, 0.0) for name in fields))

    # Without CONFIG_IRQ_TIME_ACCOUNTING a process's time contains interrupts, so that they count as busy here, too.
    busy_s = passed_s("user", "nice", "system", "irq", "softirq")
    return max(0.0, passed_s("steal")) / available_s, max(0.0, busy_s - known_s) / available_s


def _own_cpu_s() -> float:
    """CPU time of this process, and of its children that ended: between two calls only the load generator does."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
