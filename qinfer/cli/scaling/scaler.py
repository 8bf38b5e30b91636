"""What `qinfer autoscale` does, and `qinfer up --autoscale`: looks at the queue, decides, starts and drains workers.

    QueueWatch (thread): Redis ──▶ Reading ──▶ decide_share (pure) ──▶ Fleet: worker processes, under the supervisor

Autoscalers of the same models share the work: each knows the others by their records, decides for all, and does its
share. While the queue can't be read nothing is decided: what runs is kept. A decision is a line of the log with its
numbers; the latest is in Redis too, and how many there were.
"""

import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence

import msgspec

from qinfer.cli.local.machine import usable_cpus
from qinfer.cli.local.supervisor import Process
from qinfer.cli.scaling.pool import Fleet
from qinfer.cli.scaling.queue_watch import Away, QueueWatch, Reading
from qinfer.cli.scaling.scaling_file import ScalingFile
from qinfer.core.clock import Clock, SystemClock
from qinfer.core.settings import AutoscaleSettings
from qinfer.errors import QinferError
from qinfer.models.state import KILLED, RESTARTED, SCALED_DOWN, SCALED_UP, ScalerRecord
from qinfer.scaling.policy import Observation, ScalingPolicy, ScalingState, Throughput
from qinfer.scaling.shares import Peers, SharedDecision, decide_share, policy_of_all

logger = logging.getLogger(__name__)


def policy_of(settings: AutoscaleSettings) -> ScalingPolicy:
    """Returns the policy of the settings; the most workers, if not set, is as many as there are cores.

    Raises:
        SettingsError: The numbers make no sense together.
    """
    return ScalingPolicy(
        min_workers=settings.min_workers,
        max_workers=settings.max_workers or max(len(usable_cpus()), settings.min_workers, 1),
        target_s=settings.target_s,
        up_after_s=settings.up_after_s,
        down_after_s=settings.down_after_s,
        idle_s=settings.idle_s,
        cooldown_s=settings.cooldown_s,
    )


def crowded(policy: ScalingPolicy) -> str:
    """Says so when there may be more workers than cores; empty = all is well."""
    cores = len(usable_cpus())
    if not cores or policy.max_workers <= cores:
        return ""
    return f"up to {policy.max_workers} workers will share {cores} core{'s' * (cores != 1)}"


class Autoscaler:
    """Keeps as many workers as the work asks for.

    Args:
        policy: The operator's will.
        fleet: The workers.
        watch: Reads the queue.
        places: Globs of the models that the workers load.
        say: Called with a line for people about each decision that changes something, and all that is odd. Without it
            what is odd is logged, as decisions are anyway.
        clock: Tells the time.
        record: Gets what is seen and decided; `None` = nobody wants it.
    """

    def __init__(
        self,
        policy: ScalingPolicy,
        fleet: Fleet,
        watch: QueueWatch,
        places: Sequence[str],
        say: Callable[[str], None] | None = None,
        clock: Clock | None = None,
        *,
        record: ScalingFile | None = None,
    ) -> None:
        self._policy = policy
        self._fleet = fleet
        self._watch = watch
        self._places = tuple(places)
        self._say = say
        self._clock = clock or SystemClock()
        self._record = record
        self._host = socket.gethostname()
        self._id = f"{self._host}-{secrets.token_hex(4)}"
        self._throughput = Throughput()
        self._peers = Peers(self._id, places)
        self._state = ScalingState.begin(self._clock.monotonic_s(), policy.min_workers)
        self._share = policy.min_workers
        self._away = False
        self._wanting: frozenset[str] = frozenset()
        self._told = {RESTARTED: 0, KILLED: 0}

    @property
    def processes(self) -> list[Process]:
        """All workers that may run."""
        return self._fleet.processes

    @property
    def least(self) -> int:
        """Minimum number of workers."""
        return self._policy.min_workers

    @property
    def about(self) -> str:
        """How many there will be, in words."""
        limits = f"{self._policy.min_workers} to {self._policy.max_workers}"
        asked = f"{limits}, one for each {self._policy.target_s:g} s of work"
        if self._policy.min_workers:
            return asked
        return f"{asked}; the models are ready without one"

    def start(self) -> None:
        """Starts the fewest workers, and begins to look."""
        self._fleet.resize(self._share)
        self._watch.say(self._about_us(), {})
        self._watch.start()

    def close(self) -> None:
        """Looks no more; the workers are the supervisor's to stop."""
        self._watch.close()

    def step(self) -> None:
        """Acts on what was read since the last step, if anything was."""
        reading = self._watch.take()
        if reading is None:
            return
        if isinstance(reading, Away):
            self._blind(reading.reason)
            return
        if self._away:
            self._away = False
            self._state = self._state.blind(reading.at_s)
            self._note("queue read again", "the queue can be read again", {})
        self._fleet.note(reading.workers)
        self._peers.see(reading.at_s, reading.scalers)
        self._tell_floors(reading)
        seen = self._observation(reading)
        others, share = self._peers.others, self._share
        decided = decide_share(self._policy, self._state, seen, self._about_us(), others, is_left=self._peers.is_left)
        self._state, self._share = decided.state, decided.share
        self._tell(decided, seen, share)
        self._write(reading, decided, seen)
        try:
            self._fleet.resize(self._share)
        except (QinferError, OSError) as error:
            self._note("worker not started", f"a worker could not be started: {error}", {"reason": str(error)})
        self._publish(decided, seen, share)

    def _observation(self, reading: Reading) -> Observation:
        """Returns what is seen of all workers: one's own, and those of the others."""
        speeds = {(one.model, one.version): one.rows_per_s for one in reading.work}
        work_s = sum(one.work_s for one in reading.work)
        live = self._fleet.live + sum(one.live for one in self._peers.others)
        used = self._throughput.observe(reading.at_s, reading.rows, speeds, live, work_s)
        return Observation(
            now_s=reading.at_s,
            work_s=work_s,
            entries=sum((one.requests + one.bulk_rows) or int(one.rows > 0) for one in reading.work),
            executed=self._throughput.executed,
            used=used,
            live=live,
            starting=self._fleet.starting + sum(one.starting for one in self._peers.others),
            load_s=max(reading.load_s, self._fleet.start_s),
            floor=max(reading.floors.values(), default=0),
        )

    def _blind(self, reason: str) -> None:
        if not self._away:
            self._away = True
            self._peers.doubt()
            numbers = {"reason": reason, "kept": self._fleet.size}
            self._note("queue not read", f"the queue can't be read, the workers are kept: {reason}", numbers)

    def _tell_floors(self, reading: Reading) -> None:
        """Says once which models keep workers alive above the fewest."""
        least = policy_of_all(self._policy, self._peers.others).min_workers
        wanting = frozenset(name for name, count in reading.floors.items() if count > least)
        if wanting - self._wanting:
            names = ", ".join(sorted(wanting))
            remedy = "QINFER_REPOSITORY__MIN_WORKERS=0 for all gateways, or qinfer.min_workers of the models"
            text = f"a live worker is kept for {names}; {remedy}, lets their requests wait for one"
            self._note("models want live workers", text, {"models": sorted(wanting), "remedy": remedy})
        self._wanting = wanting

    def _tell(self, decided: SharedDecision, seen: Observation, before: int) -> None:
        share, total = decided.share, decided.total
        numbers = {
            "from": before,
            "to": share,
            "reason": total.reason,
            "wanted": total.wanted,
            "work_s": round(seen.work_s, 3),
            "entries": seen.entries,
            "used": round(seen.used, 2),
            "live": seen.live,
            "starting": seen.starting,
            "draining": self._draining,
            "load_s": round(seen.load_s, 3),
        }
        with_others = ""
        if self._peers.others:
            numbers |= {"total": total.target, "autoscalers": len(self._peers.others) + 1}
            with_others = f", {total.target} with those of other autoscalers"
        if share == before:
            logger.debug("workers kept", extra=numbers)
            return
        logger.info("workers scaled", extra=numbers)
        if self._say is not None:
            self._say(f"{share} worker{'s' * (share != 1)} instead of {before}{with_others}: {total.reason}")

    def _write(self, reading: Reading, decided: SharedDecision, seen: Observation) -> None:
        if self._record is None:
            return
        problem = self._record.add(
            seen, decided.total, before=decided.before, draining=self._draining, work=reading.work, rows=reading.rows
        )
        if problem:
            self._note("record not written", f"the record can't be written: {problem}", {"reason": problem})

    @property
    def _draining(self) -> int:
        return self._fleet.draining + sum(one.draining for one in self._peers.others)

    def _note(self, event: str, text: str, about: Mapping[str, object]) -> None:
        if self._say is not None:
            self._say(text)
        else:
            logger.warning(event, extra=dict(about))

    def _publish(self, decided: SharedDecision, seen: Observation, before: int) -> None:
        totals = {RESTARTED: self._fleet.restarts, KILLED: self._fleet.kills}
        counts = {name: total - self._told[name] for name, total in totals.items() if total > self._told[name]}
        self._told = totals
        if self._share != before:
            counts[SCALED_UP if self._share > before else SCALED_DOWN] = 1
        seen_of = {"reason": decided.total.reason, "work_s": round(seen.work_s, 3), "entries": seen.entries}
        self._watch.say(msgspec.structs.replace(self._about_us(), **seen_of), counts)

    def _about_us(self) -> ScalerRecord:
        return ScalerRecord(
            id=self._id,
            host=self._host,
            places=self._places,
            min_workers=self._policy.min_workers,
            max_workers=self._policy.max_workers,
            target=self._share,
            live=self._fleet.live,
            starting=self._fleet.starting,
            draining=self._fleet.draining,
        )
