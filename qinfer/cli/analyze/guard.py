"""A guard on the latency of a model that callers use, while another one is measured beside it.

Probes ask the model in turn with and without load. A probe is bad beyond a limit: the p99 before the search, and 10 %
more. The e-process of canaries (`qinfer.traffic.evidence`) compares the shares of bad probes after each window: a
search stops once the difference is beyond chance, however often it is looked at.
"""

import math
import time
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import NamedTuple, Self

from qinfer.cli.load import percentile
from qinfer.traffic.evidence import Counts, Evidence, EvidenceBlock

WORSE = 1.1
TRIPS_AT = 100.0
"""Evidence that chance reaches in at most one of 100 searches."""
PROBE_EVERY_S = 0.02


class GuardState(NamedTuple):
    """The latency beyond which a probe is bad, and the evidence so far that load makes more probes bad."""

    limit_ms: float
    evidence: Evidence

    @classmethod
    def begun(cls, before_ms: Sequence[float]) -> Self:
        """Returns the state of a search that begins, by latencies without load; at least one."""
        return cls(WORSE * percentile(before_ms, 99), Evidence().begun(1.0))

    def with_probes(self, calm_ms: Sequence[float], loaded_ms: Sequence[float]) -> Self:
        """Adds the latencies of probes; infinite = a failure."""
        block = EvidenceBlock(self._counts(calm_ms), self._counts(loaded_ms))
        return self._replace(evidence=self.evidence.against_stable({"": block}))

    @property
    def is_tripped(self) -> bool:
        """Whether the search must stop."""
        return self.evidence.value >= TRIPS_AT

    def reason(self) -> str:
        """Returns why the search stops."""
        seen = self.evidence.seen
        return (
            f"{seen.canary.bad} of {seen.canary.requests} requests were slower than {self.limit_ms:.1f} ms under load, "
            f"and {seen.stable.bad} of {seen.stable.requests} without"
        )

    def _counts(self, latencies_ms: Sequence[float]) -> Counts:
        return Counts(len(latencies_ms), sum(one > self.limit_ms for one in latencies_ms))


class Probes:
    """Asks a model again and again in a thread, until closed."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self._latencies_ms: list[float] = []
        self._closing = Event()
        self._thread = Thread(target=self._ask_until_closed, name="probes", daemon=True)
        self._thread.start()

    def during(self, seconds: float) -> list[float]:
        """Returns the latencies of some seconds from now on."""
        self.taken()
        self._closing.wait(seconds)
        return self.taken()

    def taken(self) -> list[float]:
        """Returns the latencies since the last call."""
        count = len(self._latencies_ms)
        found, self._latencies_ms[:count] = self._latencies_ms[:count], []
        return found

    def close(self) -> None:
        """Ends the probes."""
        self._closing.set()
        self._thread.join()

    def _ask_until_closed(self) -> None:
        while not self._closing.wait(PROBE_EVERY_S):
            began_s = time.perf_counter()
            try:
                self._ask()
            except Exception:  # noqa: BLE001  any failure of the model is bad
                self._latencies_ms.append(math.inf)
            else:
                self._latencies_ms.append((time.perf_counter() - began_s) * 1000)
