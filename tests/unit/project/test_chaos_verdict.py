"""The verdict of the chaos runs, and their plans: a judge that can't find anyone guilty proves nothing."""

from collections import Counter
from unittest.mock import Mock

import pytest

from qinfer.segments.link import _HEAD as HEAD
from qinfer.segments.link import MessageKind
from tests.chaos import faults, tensor_load
from tests.chaos.machines import WIRE_FAULTS, Chunks
from tests.chaos.member import Role
from tests.chaos.verdict import Call, Key, Ledger, Sighting, Wish, expected, judge, leftovers


def call(number: int = 1, *states: str, wish: Wish = Wish.ANSWER, value: float | None = None) -> Call:
    """Returns an accepted request that was seen in these states, at 10 s, 11 s and so on."""
    one = Call(number=number, wish=wish, link=f"/v1/requests/{number}", accepted_s=9.0)
    for at, state in enumerate(states):
        right = expected(number) if state == "succeeded" else None
        one.sightings.append(Sighting(10.0 + at, state, right if value is None or at else value))
    return one


def problems(*calls: Call, dead_letters: int = 0, broker_kills: tuple[float, ...] = ()) -> list[str]:
    return judge(Ledger(list(calls)), kills=1, dead_letters=dead_letters, broker_kills=broker_kills).problems


def test_the_line_counts_both_ways() -> None:
    """What was answered over HTTP counts as accepted, like what was accepted by its id."""
    ledger = Ledger([call(1, "succeeded", "succeeded"), call(2, "expired", "expired", wish=Wish.EXPIRE)], answered=3)

    verdict = judge(ledger, kills=7, dead_letters=0)

    counts = "accepted=5 succeeded=4 failed=0 expired=1 cancelled=0 lost=0 duplicates=0 kills=7"
    assert (verdict.line, verdict.problems) == (counts, [])


@pytest.mark.parametrize("states", [("unknown", "unknown"), ("running", "queued"), ()])
def test_without_a_terminal_state_it_is_lost(states: tuple[str, ...]) -> None:
    """Unknown, for ever queued, or never seen again."""
    verdict = judge(Ledger([call(1, *states)]), kills=0, dead_letters=0)

    assert "lost=1" in verdict.line
    assert verdict.problems[0] == "1 lost"


@pytest.mark.parametrize("second", ["cancelled", "unknown", "running"])
def test_a_state_that_changes_is_a_duplicate(second: str) -> None:
    """Also one that goes away."""
    verdict = judge(Ledger([call(1, "succeeded", second)]), kills=0, dead_letters=0)

    assert "duplicates=1" in verdict.line
    assert verdict.problems[0] == "1 duplicates"


def test_an_answer_that_changes_is_a_duplicate() -> None:
    """Each read must give what the first one gave."""
    assert "1 duplicates" in problems(call(1, "succeeded", "succeeded", value=99.0))


def test_what_is_wrong_is_named() -> None:
    """Neither lost nor seen twice, and wrong all the same."""
    wrong = call(1, "succeeded", "succeeded")
    wrong.sightings = [Sighting(10.0, "succeeded", 4.0)] * 2
    assert "has the answers [4.0] and not 3.0" in problems(wrong)[0]
    assert "read only once" in problems(call(1, "succeeded"))[0]
    assert "never accepted" in problems(Call(number=1, wish=Wish.ANSWER))[0]
    assert "nobody wished" in problems(call(1, "cancelled", "cancelled"))[0]
    assert "nobody wished" in problems(call(1, "expired", "expired", wish=Wish.CANCEL))[0]


def test_only_dead_letters_may_fail() -> None:
    """An entry that was alone at too many crashes fails, and can be found; nothing else may."""
    failed = call(1, "failed", "failed")

    assert problems(failed, dead_letters=1) == []
    assert "1 failed and only 0 are dead letters" in problems(failed)[0]


def test_the_window_of_everysec() -> None:
    """What was accepted just before Redis was killed may be gone, and what was read then may be undone."""
    gone = call(1, "unknown", "unknown")

    assert problems(gone, broker_kills=(9.5,)) == []
    assert problems(gone, broker_kills=(8.9, 30.0)) != []
    assert problems(call(1, "cancelled", "succeeded", "succeeded"), broker_kills=(10.5,)) == []


def test_a_webhook_is_told() -> None:
    """Once at least, and of the state that all others see."""
    told = call(1, "succeeded", "succeeded")
    told.webhook = "http://127.0.0.1:1/1"
    assert "never told" in problems(told)[0]

    told.told = 1
    assert problems(told) == []

    told.sightings.append(Sighting(13.0, "cancelled"))
    assert "1 duplicates" in problems(told)


def test_leftovers() -> None:
    """Lanes, deadlines and notices are empty; only what is known to be permanent has no time to live."""
    lane = Key("qinfer:{m#0}:1:p1", "stream", -1)
    fine = [lane, lane._replace(name="qinfer:{m#0}:dlq", length=3), Key("qinfer:{m#0}:request:r", "hash", 5000)]
    fine += [Key(f"qinfer:{name}", "hash", -1) for name in ("desired", "control", "workers", "{m#0}:config")]

    assert leftovers(fine) == []
    for wrong in (
        lane._replace(length=1),
        lane._replace(pending=1),
        Key("qinfer:{m#0}:due", "zset", -1, length=1),
        Key("qinfer:{m#0}:request:r", "hash", -1),
        Key("qinfer:reply:gateway-1", "stream", -1),
    ):
        assert len(leftovers([*fine, wrong])) == 1


def test_a_plan_is_its_seed() -> None:
    """So many kills, in order, within the time; the same ones for the same seed."""
    one = faults.plan(7, 60.0, 40)

    assert one == faults.plan(7, 60.0, 40) != faults.plan(8, 60.0, 40)
    assert sum(fault.kind is faults.Kind.KILL for fault in one) == 40
    assert [fault.at_s for fault in one] == sorted(fault.at_s for fault in one if 0 <= fault.at_s <= 60.0)
    assert {fault.role for fault in one if fault.kind is faults.Kind.KILL} == {Role.WORKER, Role.GATEWAY, Role.BROKER}
    assert {fault.kind for fault in one} == set(faults.Kind)


def test_a_plan_has_faults_of_its_own() -> None:
    """A plan has about as many faults of wires as of each other kind."""
    found = Counter((fault.kind, fault.role) for fault in faults.plan(7, 60.0, 44, also=WIRE_FAULTS))

    assert [found[one] for one in set(WIRE_FAULTS)] == [4, 4]


@pytest.mark.parametrize("step", [1, 24, 1000])
def test_tensors_between_machines_are_counted_whole(step: int) -> None:
    """Neither small messages nor the parts of one, however they are cut."""
    sent = [(MessageKind.CHUNK, 1, 3, 5), (MessageKind.GONE, 2, 9, 0), (MessageKind.CHUNK, 3, 4, 4)]
    sent += [(MessageKind.CHUNK, 1, 2, 5), (MessageKind.CHUNK, 4, 1, 2)]
    data = b"".join([HEAD.pack(nbytes, whole, number, kind) + bytes(nbytes) for kind, number, nbytes, whole in sent])
    came = Mock()
    chunks = Chunks(came)

    for begin in range(0, len(data), step):
        chunks.add(data[begin : begin + step])

    assert came.call_count == 2


def test_tensors_that_went_one_way_only_prove_nothing() -> None:
    clients = Mock(problems=["5 has the answer [1] and not 2"], right=Counter(digest=3))
    ways, far = Counter(memory=4), Counter(fetched=4, replied=0)

    found = tensor_load.judge(clients, ways=ways, of_workers=Counter(), held=[0.0, 8.0], far=far)

    assert "right=3 wrong=1 memory=4+0" in found.line
    assert [problem.partition(" ")[0] for problem in found.problems] == ["5", "no", "no", "no", "a"]
