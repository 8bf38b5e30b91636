"""Sequences in the queue: ownership, committed steps, and hand-over when an owner dies.

    submit ──▶ steps ──ticket──▶ own ──▶ take_steps ──▶ execute ──▶ commit ──▶ publish ──▶ finish
                                  ▲
                                  └── hand_over (a draining worker's sequences), reap (a dead worker's)

A *sequence* is a tenant's correlation id at a model. The *life* of a sequence begins with START and ends with END, by
idle time, or by an error; a START while it runs begins the next life behind it. The guarantees, each with a test in
`tests/contract/`:

1. Steps execute in the order of `submit`, in one stream until `finish`. Only *tickets* move from lane to lane, so that
   a hand-over moves no tensors.
2. An open sequence has at most one owner. Each new owner has a higher *token*; `commit` with an old one does nothing.
3. `commit` stores state, response and number of a step together, as durably as the settings ask. A committed step is
   never executed again: the next owner of its entry publishes the stored response.
4. When a worker's lease ends, its sequences go on elsewhere from the last committed state; `explicit` sequences, whose
   state was in its memory, end with a retryable error.
5. An error that ends a life answers all its steps (`unanswered`), and later steps for five minutes.
6. A numbered step is accepted once: `submit` returns the stored response of the last committed step, lets a repeated
   one wait for its first, and refuses a gap.
7. Where Redis may lose confirmed writes, a sequence does not survive its restart or failover.
8. A sequence without an owner ends at its steps' deadline, or after a minute without waiting steps.
"""

import asyncio
from collections.abc import Awaitable, Iterable
from collections.abc import Sequence as Items
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from qinfer.core.messages import Failure
from qinfer.core.settings import RedisSettings
from qinfer.errors import (
    BACKLOG_TIMED_OUT,
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    PayloadTooLarge,
    QinferError,
    QueueFull,
    SequenceEnded,
    SequenceLost,
)
from qinfer.queue import keys
from qinfer.queue.clients import Sentinels, parse_place
from qinfer.queue.connection import packable
from qinfer.queue.doorbell import Doorbell, place_of
from qinfer.queue.durability import Durability
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.queue.readers import MAX_BLOCK_S, TicketReader
from qinfer.queue.router import Router, Script, ScriptArguments, load_script, run_each, ttl_ms
from qinfer.queue.sequences.records import (
    MAX_STATE_BYTES,
    NO_LIMITS,
    NOT_KEPT,
    CommittedStep,
    DeliveredStep,
    DeliveredSteps,
    OwnedLife,
    Renaming,
    SequenceCounts,
    SequenceId,
    SlotShare,
    StepPlace,
    StepRequest,
    SubmitLimits,
    SubmittedStep,
    UnansweredStep,
    ended_text,
    read_tenant,
    spell_tenant,
    start_missing,
)
from qinfer.queue.values import StagedValue, Values

AT_ONCE = 32
"""Steps or sequences per script: a few milliseconds, during which Redis serves no other client."""

_WAITING = ("seq.handed", "seq")
"""Lanes of sequences without an owner; handed-over sequences go first."""

_KEPT_S = 7 * 86400.0
"""Object stores keep states and responses longer than any step waits."""

_STAGED_LATE = "the state or the response of a step did not arrive in time; try again"

_SHARED = ("now_ms", "drop", "sequences/record")
_SUBMIT = load_script("each", *_SHARED, "sequences/submit")
_OWN = load_script("sequences/own", *_SHARED, "sequences/numbers", "sequences/tenants")
_SHARES = load_script("sequences/waiting", *_SHARED, "sequences/tenants")
_TELL = load_script("sequences/tell", *_SHARED, "sequences/numbers")
_TAKE = load_script("sequences/take", *_SHARED)
_COMMIT = load_script("each", *_SHARED, "sequences/commit")
_FINISH = load_script("each", *_SHARED, "sequences/finish")
_FAIL = load_script("sequences/fail", *_SHARED)
_GIVE_BACK = load_script("sequences/give_back", *_SHARED)
_REAP = load_script("sequences/reap", *_SHARED)
_SWEEP = load_script("sequences/sweep", *_SHARED)
_UNANSWERED = load_script("sequences/unanswered", *_SHARED)
_LEAVE = load_script("sequences/leave")
_SIZES = load_script("sequences/sizes")
_BACKLOG = load_script("sequences/backlog", *_SHARED)

RENEW_OWNER = load_script("sequences/renew", "now_ms")
"""The script that renews a worker's lease on its sequences; the worker's renewer runs its text."""


class Sequences:
    """The sequences of one partition of a model; `is_fragile` = Redis may lose confirmed writes."""

    def __init__(
        self,
        router: Router,
        values: Values,
        durability: Durability,
        model: str,
        partition: int = 0,
        *,
        is_fragile: bool,
    ) -> None:
        self._router = router
        self._values = values
        self._durability = durability
        self._model = model
        self._partition = partition
        self._begin = (keys.prefix(model, partition), int(is_fragile))
        self._records = keys.sequence(model, partition, "").encode()
        self._open = keys.sequences(model, partition).encode()
        self._slot = keys.slot(keys.sequences(model, partition))
        self._owners = keys.sequence_owners(model, partition).encode()
        self._orphans = keys.sequence_owned(model, partition, "").encode()
        self._locks: WeakValueDictionary[SequenceId, asyncio.Lock] = WeakValueDictionary()

    async def submit(self, sequence: SequenceId, step: StepRequest, limits: SubmitLimits = NO_LIMITS) -> SubmittedStep:
        """Appends a step, in the order of calls; a `BrokerUnavailable` leaves it unknown whether it did."""
        (outcome,) = await self.submit_together([(sequence, step)], limits)
        if isinstance(outcome, QinferError):
            raise outcome
        return outcome

    def check_up(self) -> None:
        """Raises `BrokerUnavailable` if the node is not connected; `submit` would wait."""
        self._router.check_up(self._slot)

    def is_free(self, sequence: SequenceId) -> bool:
        """Tells whether no step is being appended."""
        return sequence not in self._locks

    async def submit_together(
        self, steps: Items[tuple[SequenceId, StepRequest]], limits: SubmitLimits = NO_LIMITS
    ) -> list[SubmittedStep | QinferError]:
        """Appends steps of free sequences, in order; returns for each its place or error. A payload is stored first.

        A sequence is free again once its last step is appended.
        """
        call = partial(self._router.call, self._slot)
        words = [self._submit_words(sequence, step, limits) for sequence, step in steps]
        last = {sequence: position for position, (sequence, _) in enumerate(steps)}
        outcomes: list[SubmittedStep | QinferError] = []
        held: dict[SequenceId, asyncio.Lock] = {}
        try:
            for sequence in last:
                lock = self._locks.setdefault(sequence, asyncio.Lock())
                await lock.acquire()
                held[sequence] = lock
            for sequence, step in steps:
                if step.payload is not None:
                    key, payload = self._payload_key(step.payload.request_id), step.payload
                    await self._values.set(self._slot, key, payload.data, payload.ttl_s, tenant=sequence.tenant)
            for start in range(0, len(words), AT_ONCE):
                end = start + AT_ONCE
                replies = await run_each(call, _SUBMIT, words[start:end])
                for (_, step), reply in zip(steps[start:end], replies, strict=True):
                    if step.payload is not None and reply[0] != b"new":
                        with suppress(BrokerUnavailable):  # it expires
                            await self._values.remove(self._slot, self._payload_key(step.payload.request_id))
                outcomes += [self._outcome(*of, reply) for of, reply in zip(steps[start:end], replies, strict=True)]
                for sequence, _ in steps[start:end]:
                    if sequence in held and last[sequence] < end:
                        held.pop(sequence).release()
        finally:
            for lock in held.values():
                lock.release()
        return outcomes

    async def join(self, worker_id: str, versions: Items[int], lease_s: float) -> None:
        """Begins a worker's lease; sequences of an earlier worker of that id are handed over."""
        while not await self.renew(worker_id, versions, lease_s, is_new=True):
            await self.reap()

    async def renew(self, worker_id: str, versions: Items[int], lease_s: float, *, is_new: bool = False) -> bool:
        """Renews a worker's lease; if it has ended (False), the worker drops its sequences and joins again."""
        names = self.lease_keys(worker_id, versions)
        return bool(await self._router.run(self._slot, RENEW_OWNER, names, worker_id, ttl_ms(lease_s), int(is_new)))

    def lease_keys(self, worker_id: str, versions: Items[int]) -> list[bytes]:
        """Returns the KEYS of `RENEW_OWNER`."""
        return [self._owners, self._orphans, *(self._own_lane(version, worker_id) for version in versions)]

    async def end_lease(self, worker_id: str, versions: Items[int]) -> bool:
        """Ends the lease of a worker; returns false if the worker owns sequences."""
        owned = keys.sequence_owned(self._model, self._partition, worker_id).encode()
        names = [self._owners, owned, *(self._own_lane(version, worker_id) for version in versions)]
        return bool(await self._router.run(self._slot, _LEAVE, names, worker_id))

    async def own(
        self, worker_id: str, version: int, count: int, *, told_bits: int | None = None
    ) -> list[OwnedLife] | None:
        """Gives a worker up to `count` waiting sequences, tenants with the fewest by weight first.

        Returns `None` if the worker's lease has ended. `told_bits` is the `bits` of `assign_id`; `None` = the model
        gets no ids.
        """
        if count <= 0:
            return []
        names = [*self._waiting(version), self._own_lane(version, worker_id)]
        bits = "" if told_bits is None else told_bits
        is_alive, found = await self._run_script(_OWN, names, worker_id, min(count, AT_ONCE), bits)
        return list(map(_owned, found)) if is_alive else None

    async def shares(self, version: int) -> list[SlotShare]:
        """Returns a version's tenants with open or waiting sequences."""
        found = await self._run_script(_SHARES, self._waiting(version))
        return [
            SlotShare(read_tenant(tenant.decode(errors="replace")), weight, held, waited_ms / 1000)
            for tenant, weight, held, waited_ms in found
        ]

    async def claim(self, tenant: str, turn_s: float) -> bool:
        """Claims the turn to give up a slot for a tenant; returns false if another worker did within `turn_s`."""
        key = keys.sequence_turn(self._model, self._partition, spell_tenant(tenant))
        words = (b"SET", key.encode(), b"1", b"NX", b"PX", ttl_ms(turn_s))
        return await self._router.call(self._slot, *words) is not None

    async def assign_id(self, sequence: SequenceId, bits: int) -> Renaming:
        """Chooses the id that a model without sequences sees: 32 or 64 `bits`, or text (0)."""
        key = keys.sequence_told(self._model, self._partition, sequence.name).encode()
        is_other, number = await self._run_script(_TELL, [key], sequence.name, bits)
        return Renaming(bool(is_other), number)

    async def take_steps(
        self, worker_id: str, version: int, after: str = "", count: int = 100, max_bytes: int = 2**20
    ) -> DeliveredSteps | None:
        """Returns new steps of a worker's sequences in order, and ended lives; `None` if its lease has ended.

        `after` is the previous `DeliveredSteps.ticket`. After a reconnect a step may come again.
        """
        names = [self._own_lane(version, worker_id)]
        is_alive, ticket, told = await self._run_script(_TAKE, names, worker_id, after, count, max_bytes)
        if not is_alive:
            return None
        return DeliveredSteps(ticket.decode(), [self._taken(worker_id, each) for each in told])

    def reader(self, worker_id: str, version: int, bell: Doorbell) -> TicketReader:
        """Returns a reader that waits until `take_steps` or `own` would return something; close it."""
        link = self._router.blocking(self._slot, "qinfer-sequences", MAX_BLOCK_S)
        place = place_of(Lane(self._model, version, _WAITING[0], self._partition))
        return TicketReader(link, bell, self._own_lane(version, worker_id), self._waiting(version), place)

    async def commit(self, steps: Items[CommittedStep]) -> list[bool]:
        """Commits steps of different sequences, as durably as the settings ask.

        Returns false for a step whose sequence another worker owns. After `BrokerUnavailable` repeat the call.
        """
        for step in steps:
            if step.state is not None and len(step.state) > MAX_STATE_BYTES:
                size = len(step.state)
                raise PayloadTooLarge(f"the state of a sequence has {size} bytes, more than {MAX_STATE_BYTES}")
        is_any_large = any(self._values.is_apart(len(step.response) + len(step.state or b"")) for step in steps)
        values = await asyncio.gather(*map(self._stage, steps)) if is_any_large else map(_given, steps)
        words = [self._commit_words(step, of) for step, of in zip(steps, values, strict=True)]
        replies: list[Any] = []
        for start in range(0, len(words), AT_ONCE):
            write = partial(run_each, script=_COMMIT, requests=words[start : start + AT_ONCE])
            replies += await self._durability.write(self._model, self._partition, write)
        for _, gone in replies:
            self._values.delete_objects(gone)
        if any(what == b"gone" for what, _ in replies):
            raise BrokerUnavailable(_STAGED_LATE)
        return [what != b"lost" for what, _ in replies]

    async def state(self, sequence: SequenceId) -> bytes | None:
        """Returns the last committed state."""
        name = keys.sequence_state(self._model, self._partition, sequence.name)
        return await self._fetch_value(sequence, b"state", name)

    async def response(self, place: StepPlace) -> bytes | None:
        """Returns the stored response to a committed step, if it is kept."""
        return await self._fetch_value(
            place.sequence, b"answer:%d.%d" % (place.life, place.number), self._answer_key(place)
        )

    async def finish(self, answered: Iterable[tuple[StepPlace, Entry]]) -> None:
        """Removes steps whose response was published; may be repeated."""
        words = [self._finish_words(place, entry) for place, entry in answered]
        call = partial(self._router.call, self._slot)
        for start in range(0, len(words), AT_ONCE):
            for gone in await run_each(call, _FINISH, words[start : start + AT_ONCE]):
                self._values.delete_objects(gone)

    async def fail(self, place: StepPlace, failure: Failure, token: int | None = None) -> bool:
        """Ends a life with the failure of a step; returns whether it ends.

        A life that has not begun ends when it begins. The owner of a cancelled step's life is notified instead, because
        it knows which steps execute. `token` is the owner's; `None` lets any caller end the life, `NOBODYS` only if it
        has no owner.
        """
        return await self._fail(place, failure.code, failure.message, "" if token is None else token)

    async def end_idle(self, place: StepPlace, token: int) -> bool:
        """Ends a life that is idle for too long by Redis' clock."""
        return await self._fail(place, "", "", token)

    async def hand_over(self, worker_id: str, sequences: Iterable[SequenceId]) -> int:
        """Hands over a draining worker's sequences without an executing step; `explicit` sequences are lost."""
        names = [sequence.name for sequence in sequences]
        owned = keys.sequence_owned(self._model, self._partition, worker_id).encode()
        given = 0
        for start in range(0, len(names), AT_ONCE):
            count, gone = await self._run_script(_GIVE_BACK, [owned], worker_id, *names[start : start + AT_ONCE])
            self._values.delete_objects(gone)
            given += count
        return given

    async def reap(self, count: int = AT_ONCE) -> int:
        """Hands over up to `count` sequences of dead workers; returns how many it handed over."""
        return await self._counted(_REAP, [self._owners, self._orphans], count)

    async def sweep(self, count: int = AT_ONCE) -> int:
        """Looks at `count` sequences without an owner, and ends the expired ones; returns how many."""
        return await self._counted(_SWEEP, [self._open], count)

    async def unanswered(self, count: int = AT_ONCE, max_bytes: int = 2**20) -> list[UnansweredStep]:
        """Returns steps of ended lives to be answered and finished; unfinished steps come again after 10 s."""
        name = keys.sequence_endings(self._model, self._partition).encode()
        return [self._left(each) for each in await self._run_script(_UNANSWERED, [name], count, max_bytes)]

    async def sizes(self, versions: Items[int]) -> SequenceCounts:
        """Counts the sequences, and those of these versions without an owner."""
        counts = keys.sequence_counts(self._model, self._partition).encode()
        lanes = [lane for version in versions for lane in self._waiting(version)]
        return SequenceCounts(*await self._router.run(self._slot, _SIZES, [self._open, counts, *lanes]))

    async def backlog(self, version: int) -> int:
        """Counts the steps of a version's sequences without an owner."""
        return int(await self._run_script(_BACKLOG, [self._open, *self._waiting(version)]))

    async def _fetch_value(self, sequence: SequenceId, field: bytes, name: str) -> bytes | None:
        kept = await self._router.call(self._slot, b"HGET", self._record(sequence), field)
        return kept if isinstance(kept, bytes) else await self._values.get(self._slot, name, sequence.tenant)

    def _submit_words(self, sequence: SequenceId, step: StepRequest, limits: SubmitLimits) -> ScriptArguments:
        pin = step.start
        about = ""
        if pin is not None:
            kind = "explicit" if pin.is_explicit else "implicit"
            about = f"{pin.version} {pin.generation} {kind} {ttl_ms(pin.idle_s)}"
        flags = ("S" if pin else "") + ("E" if step.end else "")
        numbers = (ttl_ms(step.timeout_s), limits.steps, limits.open, step.weight)
        payload_id = step.payload.request_id if step.payload else ""
        of = (sequence.name, flags, step.number, step.digest, packable(step.frame), payload_id)
        return ScriptArguments((self._record(sequence),), (*self._begin, *of, *numbers, about))

    def _outcome(self, sequence: SequenceId, step: StepRequest, reply: Items[Any]) -> SubmittedStep | QinferError:
        what = reply[0]
        if what not in (b"new", b"stored"):
            return self._refusal(sequence, step, what, reply[1:])
        place = StepPlace(sequence, reply[1], reply[2])
        payload_id = step.payload.request_id if step.payload else ""
        is_new = what == b"new"
        return SubmittedStep(place, Entry(self._steps(sequence), reply[3].decode(), "", payload_id) if is_new else None)

    def _refusal(self, sequence: SequenceId, step: StepRequest, what: bytes, about: Items[Any]) -> QinferError:
        """A missing START has Triton's text (reference §3.4)."""
        of = f"sequence {sequence.correlation_id} to model '{self._model}'"
        if what == b"full":
            return QueueFull(f"too many steps or sequences wait at model '{self._model}'; try again later")
        if what == b"gap":
            return InvalidRequest(f"step {step.number} of {of} leaves a gap: send step {about[0]} first")
        if what == b"old":
            return InvalidRequest(
                f"the response to step {step.number} of {of} is no longer kept: step {about[0]} is committed"
            )
        if what == b"ended":
            return self._ended_error(sequence, *about)
        return start_missing(self._model, sequence.correlation_id)

    async def _fail(self, place: StepPlace, code: str, text: str, token: int | str) -> bool:
        about = (place.sequence.name, token, place.life, place.number, code, text)
        return bool(await self._counted(_FAIL, [self._record(place.sequence)], *about))

    async def _counted(self, script: Script, names: Items[bytes], *arguments: Any) -> int:
        count, gone = await self._run_script(script, names, *arguments)
        self._values.delete_objects(gone)
        return int(count)

    def _run_script(self, script: Script, names: Items[bytes], *arguments: Any) -> Awaitable[Any]:
        return self._router.run(self._slot, script, names, *self._begin, *arguments)

    async def _stage(self, step: CommittedStep) -> Items[Any]:
        sequence = step.place.sequence
        name = keys.sequence_state(self._model, self._partition, sequence.name)
        state = await self._values.stage(name, step.state or b"", step.idle_s + _KEPT_S, sequence.tenant)
        response = await self._values.stage(self._answer_key(step.place), step.response, _KEPT_S, sequence.tenant)
        return [*_words(state), *_words(response)]

    def _commit_words(self, step: CommittedStep, values: Items[Any]) -> ScriptArguments:
        place = step.place
        about = (place.sequence.name, step.token, place.life, place.number)
        return ScriptArguments((self._record(place.sequence),), (*self._begin, *about, *values))

    def _finish_words(self, place: StepPlace, entry: Entry) -> ScriptArguments:
        payload = self._payload_key(entry.payload_id) if entry.payload_id else ""
        about = (place.sequence.name, place.life, place.number, entry.entry_id, payload)
        return ScriptArguments((self._record(place.sequence),), (*self._begin, *about))

    def _taken(self, worker_id: str, told: Items[Any]) -> DeliveredStep:
        name, life, number, token, entry_id, fields, deliveries = told
        place = StepPlace(SequenceId.parse(name.decode(errors="replace")), life, number)
        if not fields:
            return DeliveredStep(place, token, None, is_cancelled=number > 0)
        entry, frame = self._parse_entry(place.sequence, entry_id, fields)
        return DeliveredStep(place, token, Lease(entry, worker_id, frame, deliveries, suspect=deliveries > 1))

    def _left(self, told: Items[Any]) -> UnansweredStep:
        name, life, number, entry_id, fields, is_stored, code, text, failed = told
        place = StepPlace(SequenceId.parse(name.decode(errors="replace")), life, number)
        entry, frame = self._parse_entry(place.sequence, entry_id, fields)
        failure = None
        if not is_stored and not code:
            failure = Failure.from_error(SequenceEnded(NOT_KEPT))
        elif not is_stored and number == failed and code != SequenceLost.code.encode():
            failure = Failure(code.decode(errors="replace"), text.decode(errors="replace"))
        elif not is_stored and text == BACKLOG_TIMED_OUT.encode():
            failure = Failure.from_error(DeadlineExceeded(BACKLOG_TIMED_OUT))
        elif not is_stored:
            ended = self._ended_error(place.sequence, code, text, failed)
            # In Triton, cancelling one step cancels all waiting steps.
            failure = Failure.from_error(Cancelled(ended.message) if code == Cancelled.code.encode() else ended)
        return UnansweredStep(place, entry, frame, failure)

    def _parse_entry(self, sequence: SequenceId, entry_id: bytes, fields: Items[bytes]) -> tuple[Entry, bytes]:
        of = dict(zip(fields[::2], fields[1::2], strict=True))
        return Entry(
            self._steps(sequence), entry_id.decode(), payload_id=of.get(b"p", b"").decode(errors="replace")
        ), of[b"f"]

    def _ended_error(self, sequence: SequenceId, code: bytes, text: bytes, number: int) -> SequenceEnded:
        error = SequenceLost if code == SequenceLost.code.encode() else SequenceEnded
        return error(ended_text(self._model, sequence.correlation_id, number, text.decode(errors="replace")))

    def _steps(self, sequence: SequenceId) -> Lane:
        return Lane(self._model, 0, f"steps:{sequence.name}", self._partition)

    def _record(self, sequence: SequenceId) -> bytes:
        return self._records + sequence.name.encode()

    def _payload_key(self, request_id: str) -> str:
        return keys.payload(self._model, self._partition, request_id)

    def _answer_key(self, place: StepPlace) -> str:
        step = f"{place.life}.{place.number}"
        return keys.sequence_answer(self._model, self._partition, place.sequence.name, step)

    def _own_lane(self, version: int, worker_id: str) -> bytes:
        return keys.lane(Lane(self._model, version, f"seq@{worker_id}", self._partition))

    def _waiting(self, version: int) -> list[bytes]:
        return [keys.lane(Lane(self._model, version, name, self._partition)) for name in _WAITING]


def may_lose(settings: RedisSettings) -> bool:
    """Tells whether Redis syncs later, or fails over without replicas."""
    fails_over = settings.cluster or isinstance(parse_place(settings.url.get_secret_value()), Sentinels)
    return settings.durability != "always" or (fails_over and not settings.min_replicas)


def _words(value: StagedValue) -> Items[Any]:
    return (value.place, value.staged if value.place == b"staged" else packable(value.data))


def _given(step: CommittedStep) -> Items[Any]:
    return (b"given" if step.state else b"none", packable(step.state or b""), b"given", packable(step.response))


def _owned(found: Items[Any]) -> OwnedLife:
    name, life, token, committed, generation, kind, idle_ms, is_other, number = found
    return OwnedLife(
        sequence=SequenceId.parse(name.decode(errors="replace")),
        life=life,
        token=token,
        committed=committed,
        generation=int(generation),
        is_explicit=kind == b"explicit",
        idle_s=int(idle_ms) / 1000,
        told=Renaming(bool(is_other), number),
    )
