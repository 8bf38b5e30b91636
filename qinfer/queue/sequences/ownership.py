"""Sequences in the queue: ownership, committed steps, and hand-over when an owner dies.

    submit ──▶ steps ──ticket──▶ own ──▶ take_steps ──▶ execute ──▶ commit ──▶ publish ──▶ finish
       │                          ▲          ▲
       └──▶ lane of the owner ────┼──────────┘                                   (ADR 0042, 0044)
                    │             └── hand_over (a leaving worker's sequences), reap (a dead worker's)
                    └──▶ closed lane ──▶ left_steps

A *sequence* is a tenant's correlation id at a model. The *life* of a sequence begins with START and ends with END, by
idle time, or by an error; a START while it runs begins the next life behind it. The guarantees, each with a test in
`tests/contract/`:

1. Steps execute in the order of `submit`. Until `finish` they stay where `submit` has put them: in the lane of the
   owner, also once it is closed, or, without one, in the sequence's own stream, of which *tickets* tell the owner.
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
9. A sequence changes its owner only after the lane is closed. The next owner executes what is left there, before later
   steps; if the life is over, a step gets the error that ended it, or its stored response.
"""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from qinfer.core.messages import Failure, InferRequest
from qinfer.core.settings import RedisSettings
from qinfer.errors import (
    BACKLOG_TIMED_OUT,
    BEGIN_AGAIN,
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    PayloadTooLarge,
    QinferError,
    SequenceEnded,
    SequenceLost,
)
from qinfer.queue import keys
from qinfer.queue.clients import Sentinels, parse_place
from qinfer.queue.connection import Argument, PairTemplate, packable
from qinfer.queue.doorbell import Doorbell, place_of
from qinfer.queue.durability import Durability
from qinfer.queue.entries import Entry, Lane, Lease
from qinfer.queue.readers import MAX_BLOCK_S, TicketReader
from qinfer.queue.router import Router, Script, ScriptArguments, load_script, run_each, ttl_ms
from qinfer.queue.sequences.closed import ClosedLanes
from qinfer.queue.sequences.records import (
    MAX_STATE_BYTES,
    NO_LIMITS,
    NOBODYS,
    NOT_KEPT,
    CommittedStep,
    DeliveredStep,
    DeliveredSteps,
    Delivery,
    OwnedLife,
    Renaming,
    Sender,
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
    step_gap,
    step_old,
    steps_full,
)
from qinfer.queue.values import StagedValue, Values
from qinfer.tensors import Bytes

AT_ONCE = 32
"""Steps or sequences per script: a few milliseconds, during which Redis serves no other client."""

_WAITING = ("seq.handed", "seq")
"""Lanes of sequences without an owner; handed-over sequences go first."""

_KEPT_S = 7 * 86400.0
"""Object stores keep states and responses longer than any step waits."""

_LANE_KNOWN_S = 10.0
_MOST_LANES = 65_536
_MOST_BYTES = 4 * 2**20
"""States and responses of one script, unless one alone is larger."""

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
_LEAVE = load_script("sequences/leave", *_SHARED)
_SIZES = load_script("sequences/sizes")
_BACKLOG = load_script("sequences/backlog", *_SHARED)

Appended = Callable[[SubmittedStep | QinferError | None], None]
"""Gets the outcome of `Sequences.append`."""

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
        self._closed = ClosedLanes(router, self._slot, model, partition)
        self._orphans = keys.sequence_owned(model, partition, "").encode()
        self._locks: WeakValueDictionary[SequenceId, asyncio.Lock] = WeakValueDictionary()
        self._gateway, self._sent = os.urandom(8).hex(), 0
        self._lanes: OrderedDict[SequenceId, OwnersLane] = OrderedDict()
        """The owners that read their sequences' steps from their lanes, in the order in which they are forgotten."""

    async def submit(self, sequence: SequenceId, step: StepRequest, limits: SubmitLimits = NO_LIMITS) -> SubmittedStep:
        """Appends a step, in the order of calls; a `BrokerUnavailable` leaves it unknown whether it did."""
        (outcome,) = await self.submit_together([(sequence, step)], limits)
        if isinstance(outcome, QinferError):
            raise outcome
        return outcome

    def check_up(self) -> None:
        """Raises `BrokerUnavailable` if the node is not connected; `submit` would wait."""
        self._router.check_up(self._slot)

    def owners_lane(self, sequence: SequenceId, limit: int, *, is_end: bool) -> "OwnersLane | None":
        """Returns the lane for the next step if it is known; a script says what is behind END, or behind a full lane.

        `limit` is that of waiting steps.
        """
        lane = self._lanes.get(sequence)
        if lane is None:
            return None
        is_over = 0 < limit <= lane.appended or time.monotonic() >= lane.until_s
        if is_over or is_end:
            del self._lanes[sequence]
        lane.limit = limit
        return None if is_over else lane

    def append(
        self,
        lane: "OwnersLane",
        frame: Bytes,
        appended: Appended,
        payload_id: str = "",
    ) -> None:
        """Appends a step without blocking, once the reply to the step before has come.

        `appended` is called once; `None` = the lane is closed, and the step has to go by script (`submit_together`).
        """
        lane.appended += 1
        self._sent += 1
        command = lane.usual
        if command is None or payload_id:
            command = lane.command(self._gateway, payload_id)
        done = partial(self._appended, lane, payload_id, appended)
        self._router.send(self._slot, command.pack(b"%d" % self._sent, frame), done)

    async def submit_together(
        self, steps: Items[tuple[SequenceId, StepRequest]], limits: SubmitLimits = NO_LIMITS
    ) -> list[SubmittedStep | QinferError]:
        """Appends steps of free sequences, in order; returns for each its place or error. A payload is stored first.

        A sequence is free again once its last step is appended.
        """
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
            for start in range(0, len(steps), AT_ONCE):
                end = start + AT_ONCE
                outcomes += await self._append(steps[start:end], limits)
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
        return await self._leave(worker_id, versions, is_kept=False)

    async def close_lanes(self, worker_id: str, versions: Items[int]) -> None:
        """Closes a worker's lanes, before it hands over its sequences: their next owners read steps there."""
        await self._leave(worker_id, versions, is_kept=True)

    async def _leave(self, worker_id: str, versions: Items[int], *, is_kept: bool) -> bool:
        owned = keys.sequence_owned(self._model, self._partition, worker_id).encode()
        lanes = [f"{version}:seq@{worker_id}" for version in versions]
        return bool(await self._run_script(_LEAVE, [self._owners, owned], worker_id, int(is_kept), *lanes))

    async def own(
        self, worker_id: str, version: int, count: int, *, told_bits: int | None = None
    ) -> list[OwnedLife] | None:
        """Gives a worker up to `count` waiting sequences, tenants with the fewest by weight first.

        Returns `None` if the worker's lease has ended. `told_bits` is the `bits` of `assign_id`; `None` = the model
        gets no ids. The worker finds later steps in its lane, and numbers them. After an error, it may own sequences
        unknowingly.
        """
        if count <= 0:
            return []
        names = [*self._waiting(version), self._own_lane(version, worker_id)]
        bits = "" if told_bits is None else told_bits
        is_alive, found, era, closed = await self._run_script(_OWN, names, worker_id, min(count, AT_ONCE), bits)
        if not is_alive:
            return None
        left = tuple(sorted(name.decode() for name in closed))
        await self._closed.take_up(left)
        return [_owned(each, era, left) for each in found]

    async def left_steps(self, worker_id: str, owned: OwnedLife) -> list[DeliveredStep]:
        """Returns the unfinished steps of a life, in order, if any are in lanes of former owners."""
        return await self._closed.left_steps(worker_id, owned, self._steps(owned.sequence))

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
        self, worker_id: str, version: int, after: str = "", count: int = 100, max_bytes: int = 2**20, needed: str = ""
    ) -> DeliveredSteps | None:
        """Returns new steps of a worker's sequences in order, and ended lives; `None` if its lease has ended.

        `after` is the previous `DeliveredSteps.ticket`, the same again if a reply was lost; `needed` is the first
        unfinished step in its lane.
        """
        lane = self._own_lane(version, worker_id)
        words = (worker_id, after, count, max_bytes, needed)
        is_alive, ticket, told, era = await self._run_script(_TAKE, [lane], *words)
        if not is_alive:
            return None
        of_worker = Lane(self._model, version, f"seq@{worker_id}", self._partition)
        return DeliveredSteps(ticket.decode(), [self._taken(of_worker, worker_id, each) for each in told], era)

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
        for part in _together([len(step.response) + len(step.state or b"") for step in steps]):
            write = partial(run_each, script=_COMMIT, requests=words[part])
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

    async def drop_answered(self, entries: Items[Entry]) -> None:
        """Removes answered steps of one owner's lane, of which nothing is stored; may be repeated."""
        ids = [entry.entry_id for entry in entries]
        await self._router.call(self._slot, b"XDEL", keys.lane(entries[0].lane), *ids)

    async def move(self, step: UnansweredStep, request: InferRequest, token: int) -> SubmittedStep | QinferError | None:
        """Submits a step of a lane anew, because the owner of that lane does not own its life; `None` = it is done.

        The step is still in the lane after an error, or if its response is stored. `token` is the one that came with
        it, or `NOBODYS` if the lane is closed or the life over: then the step may not go to another life.
        """
        flags, sequence, entry = request.sequence, step.place.sequence, step.entry
        assert flags is not None, "only steps are in the lanes of owners"
        timeout_s = request.timeout_s or _KEPT_S
        anew = StepRequest(frame=step.frame, timeout_s=timeout_s, end=flags.end, number=flags.step)
        of = (step.sender.gateway, step.sender.sent, keys.lane(entry.lane), entry.entry_id, step.place.life, token)
        async with self._locks.setdefault(sequence, asyncio.Lock()):
            words = self._submit_words(sequence, anew, NO_LIMITS, entry.payload_id, of)
            (reply,) = await run_each(partial(self._router.call, self._slot), _SUBMIT, [words])
        return None if reply[0] == b"moved" else self._outcome(sequence, anew, reply)

    async def cancel(self, place: StepPlace, entry: Entry, failure: Failure) -> None:
        """Tells the owner that the caller of a step in its lane no longer waits; the owner ends the life."""
        about = (b"s", place.sequence.name, b"l", place.life, b"t", NOBODYS, b"x", entry.entry_id, b"c", failure.code)
        await self._router.call(self._slot, b"XADD", keys.lane(entry.lane), b"NOMKSTREAM", b"*", *about)

    async def fail(self, place: StepPlace, failure: Failure, token: int | None = None) -> bool:
        """Ends a life with the failure of a step; returns whether it ends.

        A life that has not begun ends when it begins. The owner of a cancelled step's life is notified instead, because
        it knows which steps execute. `token` is the owner's; `None` lets any caller end the life, `NOBODYS` only if it
        has no owner.
        """
        return await self._fail(place, failure.code, failure.message, "" if token is None else token)

    async def end_idle(self, place: StepPlace, token: int, ticket: str = "") -> bool:
        """Ends a life that is idle for too long by Redis' clock.

        A life whose steps are in the owner's lane ends if its owner has read that lane, or if another life follows.
        """
        return await self._fail(place, "", "", token, ticket)

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
        lanes = keys.sequence_lanes(self._model, self._partition).encode()
        return await self._counted(_REAP, [self._owners, self._orphans, lanes], count)

    async def sweep(self, count: int = AT_ONCE) -> int:
        """Looks at `count` sequences without an owner, and ends the expired ones; returns how many."""
        return await self._counted(_SWEEP, [self._open], count)

    async def unanswered(self, count: int = AT_ONCE, max_bytes: int = 2**20) -> list[UnansweredStep]:
        """Returns steps of ended lives to be answered and finished; unfinished steps come again after 10 s."""
        of = self._model, self._partition
        names = [keys.sequence_endings(*of).encode(), keys.sequence_closed(*of).encode()]
        return [self._left(each) for each in await self._run_script(_UNANSWERED, names, count, max_bytes)]

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

    async def _append(
        self, steps: Items[tuple[SequenceId, StepRequest]], limits: SubmitLimits
    ) -> list[SubmittedStep | QinferError]:
        """Appends steps to owners' lanes, each after the reply to the one before of its sequence; others by script."""
        outcomes: list[SubmittedStep | QinferError | None] = [None] * len(steps)
        left = list(range(len(steps)))
        while left:
            heads: dict[SequenceId, int] = {}
            for position in left:
                if steps[position][0] in self._lanes:
                    heads.setdefault(steps[position][0], position)
            calls = [self._append_direct(*steps[position], limits) for position in heads.values()]
            for position, outcome in zip(heads.values(), await asyncio.gather(*calls), strict=True):
                outcomes[position] = outcome
            rest = [position for position in left if steps[position][0] not in heads]
            if rest:
                by_script = await self._append_by_script([steps[position] for position in rest], limits)
                for position, one in zip(rest, by_script, strict=True):
                    outcomes[position] = one
            left = [position for position in left if outcomes[position] is None]
        return [outcome for outcome in outcomes if outcome is not None]

    async def _append_by_script(
        self, steps: Items[tuple[SequenceId, StepRequest]], limits: SubmitLimits
    ) -> list[SubmittedStep | QinferError]:
        words = [self._submit_words(sequence, step, limits) for sequence, step in steps]
        try:
            replies = await run_each(partial(self._router.call, self._slot), _SUBMIT, words)
        except QinferError as error:
            return [error] * len(steps)
        for (_, step), reply in zip(steps, replies, strict=True):
            if step.payload is not None and reply[0] not in (b"new", b"direct"):
                with suppress(BrokerUnavailable):  # it expires
                    await self._values.remove(self._slot, self._payload_key(step.payload.request_id))
        return [self._outcome(*of, reply) for of, reply in zip(steps, replies, strict=True)]

    def _count(self) -> Sender:
        self._sent += 1
        return Sender(self._gateway, self._sent)

    async def _append_direct(
        self, sequence: SequenceId, step: StepRequest, limits: SubmitLimits
    ) -> SubmittedStep | QinferError | None:
        """Returns `None`, and forgets the owner, if the step has to go by script."""
        if step.start is not None:
            self._lanes.pop(sequence, None)
            return None
        lane = self.owners_lane(sequence, limits.steps, is_end=step.end)
        if lane is None:
            return None
        done: asyncio.Future[SubmittedStep | QinferError | None] = asyncio.get_running_loop().create_future()
        try:
            payload_id = step.payload.request_id if step.payload else ""
            self.append(lane, step.frame, partial(_set_outcome, done), payload_id)
        except QinferError as error:
            return error
        return await done

    def _appended(
        self,
        lane: "OwnersLane",
        payload_id: str,
        appended: Appended,
        reply: Any,
    ) -> None:
        if type(reply) is bytes:
            appended(SubmittedStep(lane.place, Entry(lane.lane, reply.decode(), "", payload_id)))
            return
        if reply is None and self._lanes.get(lane.place.sequence) is lane:
            del self._lanes[lane.place.sequence]
        appended(reply)

    def _submit_words(
        self,
        sequence: SequenceId,
        step: StepRequest,
        limits: SubmitLimits,
        payload_id: str = "",
        moved: Items[Argument] = (),
    ) -> ScriptArguments:
        pin = step.start
        about = ""
        if pin is not None:
            kind = "explicit" if pin.is_explicit else "implicit"
            about = f"{pin.version} {pin.generation} {kind} {ttl_ms(pin.idle_s)}"
        flags = ("S" if pin else "") + ("E" if step.end else "")
        numbers = (ttl_ms(step.timeout_s), limits.steps, limits.open, step.weight)
        payload_id = step.payload.request_id if step.payload else payload_id
        of = (sequence.name, flags, step.number, step.digest, packable(step.frame), payload_id)
        return ScriptArguments(
            (self._record(sequence),), (*self._begin, *of, *numbers, about, *(moved or self._count()))
        )

    def _outcome(self, sequence: SequenceId, step: StepRequest, reply: Items[Any]) -> SubmittedStep | QinferError:
        what = reply[0]
        if what not in (b"new", b"stored", b"direct"):
            return self._refusal(sequence, step, what, reply[1:])
        payload_id = step.payload.request_id if step.payload else ""
        if what == b"direct":
            _, life, entry_id, version, owner, token = reply
            lane = Lane(self._model, int(version), f"seq@{owner.decode()}", self._partition)
            place = StepPlace(sequence, life, 0)
            self._learn(sequence, step, OwnersLane(lane, place, token, time.monotonic() + _LANE_KNOWN_S))
            return SubmittedStep(place, Entry(lane, entry_id.decode(), "", payload_id))
        place = StepPlace(sequence, reply[1], reply[2])
        is_new = what == b"new"
        return SubmittedStep(place, Entry(self._steps(sequence), reply[3].decode(), "", payload_id) if is_new else None)

    def _learn(self, sequence: SequenceId, step: StepRequest, lane: "OwnersLane") -> None:
        if step.end or step.start is not None:  # the script has to see the first step behind a START
            return
        for _ in range(2):  # more than come, as sequences may be left without END
            oldest = next(iter(self._lanes.values()), lane)
            if len(self._lanes) < _MOST_LANES and time.monotonic() < oldest.until_s:
                break
            self._lanes.pop(oldest.place.sequence, None)
        self._lanes[sequence] = lane
        self._lanes.move_to_end(sequence)

    def _refusal(self, sequence: SequenceId, step: StepRequest, what: bytes, about: Items[Any]) -> QinferError:
        """A missing START has Triton's text (reference §3.4)."""
        place = StepPlace(sequence, 0, step.number)
        if what == b"full":
            return steps_full(self._model)
        if what == b"lost":
            return SequenceLost(f"the worker to which this step was sent no longer has the sequence; {BEGIN_AGAIN}")
        if what == b"gap":
            return step_gap(self._model, place, about[0])
        if what == b"old":
            return step_old(self._model, place, about[0])
        if what == b"ended":
            return self._ended_error(sequence, *about)
        return start_missing(self._model, sequence.correlation_id)

    async def _fail(self, place: StepPlace, code: str, text: str, token: int | str, ticket: str = "") -> bool:
        about = (place.sequence.name, token, place.life, place.number, code, text, ticket)
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
        flags = ("E" if step.ends else "") + ("K" if step.keeps_previous else "")
        words = (*self._begin, *about, *values, flags, step.entry_id)
        return ScriptArguments((self._record(place.sequence),), words)

    def _finish_words(self, place: StepPlace, entry: Entry) -> ScriptArguments:
        payload = self._payload_key(entry.payload_id) if entry.payload_id else ""
        about = (place.sequence.name, place.life, place.number, entry.entry_id, payload)
        names = (self._record(place.sequence), keys.lane(entry.lane))
        return ScriptArguments(names, (*self._begin, *about))

    def _taken(self, lane: Lane, worker_id: str, told: Items[Any]) -> DeliveredStep:
        name, life, number, token, entry_id, fields, deliveries, what = told
        place = StepPlace(SequenceId.parse(name.decode(errors="replace")), life, number)
        delivery = Delivery(what.decode())
        if delivery is Delivery.CANCEL:
            code = fields[1].decode(errors="replace")
            return DeliveredStep(place, token, None, delivery, entry_id=entry_id.decode(errors="replace"), code=code)
        if not fields:
            return DeliveredStep(place, token, None, delivery)
        is_step = delivery is Delivery.STEP
        entry, frame = _parse_entry(lane if is_step else self._steps(place.sequence), entry_id, fields)
        limit = int(fields[5]) if is_step and fields[5].isdigit() else 0
        sender = Sender(fields[7].decode(), int(fields[9])) if is_step and fields[9].isdigit() else Sender()
        lease = Lease(entry, worker_id, frame, deliveries, suspect=deliveries > 1)
        return DeliveredStep(place, token, lease, delivery, limit, sender=sender)

    def _left(self, told: Items[Any]) -> UnansweredStep:
        name, life, number, entry_id, fields, is_stored, code, text, failed, closed = told
        place = StepPlace(SequenceId.parse(name.decode(errors="replace")), life, number)
        if closed:
            lane = Lane(self._model, 0, closed.decode().removeprefix("0:"), self._partition)
            return UnansweredStep(place, *_parse_entry(lane, entry_id, fields), None)
        entry, frame = _parse_entry(self._steps(place.sequence), entry_id, fields)
        failure = None
        if not is_stored and not code:
            failure = Failure.from_error(SequenceEnded(NOT_KEPT))
        elif not is_stored:
            of_life = Failure(code.decode(errors="replace"), text.decode(errors="replace"))
            failure = self._failure_of(place, of_life, failed)
        return UnansweredStep(place, entry, frame, failure)

    def failed(self, step: UnansweredStep, of_life: Failure, failed: int) -> UnansweredStep:
        """Returns a step with its failure, of a life that step `failed` has ended by `of_life`."""
        return UnansweredStep(step.place, step.entry, step.frame, self._failure_of(step.place, of_life, failed))

    def _failure_of(self, place: StepPlace, of_life: Failure, failed: int) -> Failure:
        if place.number == failed and of_life.code != SequenceLost.code:
            return of_life
        if of_life.message == BACKLOG_TIMED_OUT:
            return Failure.from_error(DeadlineExceeded(BACKLOG_TIMED_OUT))
        ended = self._ended_error(place.sequence, of_life.code.encode(), of_life.message.encode(), failed)
        # In Triton, cancelling one step cancels all waiting steps.
        return Failure.from_error(Cancelled(ended.message) if of_life.code == Cancelled.code else ended)

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


class OwnersLane(msgspec.Struct, eq=False):
    """An owner's lane for a sequence's steps.

    After `until_s` (monotonic), or as many steps as may wait, a script reads record and lane again: it may be full.
    """

    lane: Lane
    place: StepPlace
    token: int
    until_s: float
    appended: int = 0
    limit: int = 0
    usual: PairTemplate | None = None

    def command(self, gateway: str, payload_id: str) -> PairTemplate:
        """Returns the command that appends a step; its variable words are the gateway's count and the frame."""
        payload = (b"p", payload_id) if payload_id else ()
        about = (b"s", self.place.sequence.name, b"l", self.place.life, b"t", self.token, b"m", self.limit)
        words = (b"XADD", keys.lane(self.lane), b"NOMKSTREAM", b"*", *about, *payload, b"g", gateway, b"k")
        command = PairTemplate(*words, between=(b"f",))
        if not payload_id:
            self.usual = command
        return command


def _set_outcome(
    done: "asyncio.Future[SubmittedStep | QinferError | None]", outcome: SubmittedStep | QinferError | None
) -> None:
    if not done.done():
        done.set_result(outcome)


def _parse_entry(lane: Lane, entry_id: bytes, fields: Items[bytes]) -> tuple[Entry, bytes]:
    of = dict(zip(fields[::2], fields[1::2], strict=True))
    return Entry(lane, entry_id.decode(), payload_id=of.get(b"p", b"").decode(errors="replace")), of[b"f"]


def _together(sizes: Items[int]) -> Iterator[slice]:
    """Divides steps into those that are committed together."""
    begin = nbytes = 0
    for at, size in enumerate(sizes):
        if at - begin == AT_ONCE or (at > begin and nbytes + size > _MOST_BYTES):
            yield slice(begin, at)
            begin, nbytes = at, 0
        nbytes += size
    yield slice(begin, len(sizes))


def _words(value: StagedValue) -> Items[Any]:
    return (value.place, value.staged if value.place == b"staged" else packable(value.data))


def _given(step: CommittedStep) -> Items[Any]:
    return (b"given" if step.state else b"none", packable(step.state or b""), b"given", packable(step.response))


def _owned(found: Items[Any], era: bytes, closed: tuple[str, ...]) -> OwnedLife:
    name, life, token, committed, generation, kind, idle_ms, is_other, number, deaths, done = found
    return OwnedLife(
        sequence=SequenceId.parse(name.decode(errors="replace")),
        life=life,
        token=token,
        committed=committed,
        generation=int(generation),
        is_explicit=kind == b"explicit",
        idle_s=int(idle_ms) / 1000,
        told=Renaming(bool(is_other), number),
        era=era,
        deaths=deaths,
        done={entry.decode(): of for entry, of in zip(done[::2], done[1::2], strict=True)},
        closed=closed,
    )
