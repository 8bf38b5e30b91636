"""The scripts of sequences on a real server, driven through the moves of the protocol's model, and compared with it."""

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.queue import keys
from qinfer.queue.entries import Entry
from qinfer.queue.sequences.records import CommittedStep, SequenceId, StepPlace
from tests.support.sequence_protocol import NOBODY, Move, Rules, Sequence, State, Work, first_state, moves
from tests.support.sequences import first, later, sequences_of
from tests.support.servers.servers import Database

IDS = (SequenceId("acme", 1), SequenceId("acme", "two"))
NAMES = ("w0", "w1")
STEPS = 3


class Server:
    """The real server, and what workers and caller need besides the model: entries, and the last tickets."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.entries: dict[StepPlace, Entry] = {}

    async def open(self) -> "Server":
        """Connects, and has both workers join."""
        self.sequences = sequences_of(await self.database.delivery())
        for name in NAMES:
            await self.sequences.join(name, [1], 600.0)
        return self

    async def make(self, state: State, move: Move, after: State) -> Move:
        """Makes a move; returns which one it was: the server says which sequence a worker gets."""
        if move.name == "own":
            return await self.own(move)
        if move.name in {"die", "stall"}:
            owners = keys.sequence_owners("sum", 0)
            await self.sequences._router.call(self.sequences._slot, b"ZADD", owners, b"XX", 0, NAMES[move.worker])
        elif move.name == "hand over":
            await self.sequences.reap()
            for worker in state.lapsed:
                await self.sequences.join(NAMES[worker], [1], 600.0)
        elif move.name == "submit":
            await self.submit(move.sequence, after.sequences[move.sequence].submitted)
        else:
            before, behind = state.held[move.worker][move.sequence], after.held[move.worker][move.sequence]
            assert before is not None
            await self.work(move, before, behind)
        return move

    async def work(self, move: Move, before: Work, after: Work | None) -> None:
        """Makes a move of a worker with a sequence that it holds; what it publishes is compared after each move."""
        if move.name == "execute":
            # A step that is finished comes again until it is confirmed, which this worker never does.
            assert next(step for step in await self.told(move, before) if step > before.done) == before.done + 1
        elif move.name == "find":
            assert (await self.told(move, before))[0] <= before.done
        elif move.name == "commit":
            # Once more, as its reply may be lost, it changes nothing.
            assert [await self.commit(move, before) for _ in range(2)] == [True, True]
        elif move.name == "drop" and before.is_executed:
            assert not await self.commit(move, before)
        elif move.name == "finish":
            (step,) = {each for each, _ in before.answering} - {each for each, _ in (after or before).answering}
            place = StepPlace(IDS[move.sequence], 1, step)
            await self.sequences.finish([(place, self.entries[place])])

    async def submit(self, number: int, step: int) -> None:
        """Submits a step whose content is its number."""
        sent = await self.sequences.submit(IDS[number], first(step) if step == 1 else later(step))
        assert sent.entry is not None
        assert sent.place == StepPlace(IDS[number], 1, step)
        self.entries[sent.place] = sent.entry

    async def own(self, move: Move) -> Move:
        """Has a worker take one sequence, whichever it gets."""
        owned = await self.sequences.own(NAMES[move.worker], 1, 1)
        assert owned is not None
        return move._replace(sequence=IDS.index(owned[0].sequence))

    async def told(self, move: Move, work: Work) -> list[int]:
        """Returns the steps of a sequence that its owner is told and does not know."""
        news = await self.sequences.take_steps(NAMES[move.worker], 1)
        known = {step for step, _ in work.answering}
        steps = [
            taken.place.number
            for taken in (news.taken if news else ())
            if taken.place.sequence == IDS[move.sequence] and taken.token == work.token and taken.lease is not None
        ]
        return [step for step in dict.fromkeys(steps) if step not in known]

    async def commit(self, move: Move, work: Work) -> bool:
        """Commits the step that a worker has executed; returns whether the server took it."""
        place = StepPlace(IDS[move.sequence], 1, work.done)
        response, state = b"=%d" % work.state, b"%d" % work.state
        step = CommittedStep(place=place, token=work.token, response=response, state=state)
        (is_committed,) = await self.sequences.commit([step])
        return is_committed

    async def snapshot(self, number: int) -> Sequence:
        """Reads a sequence, in the terms of the model."""
        call, slot, of = self.sequences._router.call, self.sequences._slot, IDS[number]
        packed = await call(slot, b"HGET", keys.sequence("sum", 0, of.name), b"of")
        record = msgspec.msgpack.decode(packed) if packed else {}
        owner = record.get("owner", "")
        entries = await call(slot, b"XRANGE", keys.lane(self.sequences._steps(of)), b"-", b"+")
        found = [(step, await self.sequences.response(StepPlace(of, 1, step))) for step in range(1, STEPS + 1)]
        return Sequence(
            submitted=record.get("accepted", 0),
            entries=tuple(int(dict(zip(each[::2], each[1::2], strict=True))[b"n"]) for _, each in entries),
            owner=NAMES.index(owner) if owner else NOBODY,
            token=record.get("token", 0),
            committed=record.get("committed", 0),
            state=int(await self.sequences.state(of) or 0),
            responses=tuple((step, int(response[1:])) for step, response in found if response is not None),
        )


async def drive(choices: list[int]) -> State:
    """Makes the chosen moves on model and server, comparing them after each; returns the model's last state."""
    state = first_state(len(IDS), deaths=1, stalls=4)
    async with Database() as database:
        server = await Server(database).open()
        for choice in choices:
            possible = {move: after for move, after in moves(state, STEPS, Rules()) if _is_real(state, move)}
            if not possible:
                break
            move = _chosen(state, list(possible), choice)
            made = await server.make(state, move, possible[move])
            state = possible[made]
            if made.name == "hand over":  # the server hands over those of all workers whose lease has ended
                for worker in state.lapsed:
                    state = dict(moves(state, STEPS, Rules()))[Move("hand over", worker=worker)]
            for number in range(len(IDS)) if made.sequence < 0 else [made.sequence]:
                assert await server.snapshot(number) == state.sequences[number]._replace(seen=(), by=0)
    return state


def _chosen(state: State, possible: list[Move], choice: int) -> Move:
    """Chooses a move. A lease mostly ends in the middle of a step: else most workers would die with nothing to do."""
    busy = [
        n for n, held in enumerate(state.held) if any(work and (work.is_executed or work.answering) for work in held)
    ]
    is_fatal = choice % 4 == 0
    fates = [move for move in possible if move.name in {"die", "stall"} and move.worker in busy]
    if is_fatal and fates:
        return fates[choice // 4 % len(fates)]
    others = [move for move in possible if move.name not in {"die", "stall"}] or possible
    return others[choice // 4 % len(others)]


def _is_real(state: State, move: Move) -> bool:
    """Leaves out what the server does not tell to a worker whose lease has ended, or to one that has yet to drop it."""
    if move.name == "own":
        waiting = [number for number, each in enumerate(state.sequences) if each.owner == NOBODY and each.submitted]
        return all(state.held[move.worker][number] is None for number in waiting)
    return move.worker not in state.lapsed or move.name not in {"execute", "find"}


@pytest.mark.slow
@given(choices=st.lists(st.integers(0, 2**16), min_size=20, max_size=60))
@settings(max_examples=25)
def test_the_scripts_do_as_the_model(choices: list[int]) -> None:
    state = asyncio.run(drive(choices))

    assert not any(each.broken for each in state.sequences)
