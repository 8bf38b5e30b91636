"""Which rows of a shard are run next, given what became of the ones before."""

from dataclasses import dataclass, field

import msgspec
import pytest

from qinfer.jobs.plan import Shard
from qinfer.jobs.resumption import (
    MOST_DEADLY_ROWS,
    MOST_IDLE_DEATHS,
    KeptPiece,
    PieceFile,
    Resumption,
    RowSpan,
    rows_of,
)
from qinfer.tabular.spec import Range

FILE = PieceFile("_resume/part/a", "00")


def piece(step: RowSpan) -> KeptPiece:
    return KeptPiece(step.stop - step.first, int(step.is_deadly), FILE)


@dataclass
class Workers:
    """Workers, one after the other, of a shard of which some rows end them."""

    rows: int
    deadly: frozenset[int]
    deaths: int = 0
    failed: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)

    def run(self) -> Resumption:
        """Has workers take the shard until it is settled."""
        known = Resumption(bound="b")
        while True:
            known = Resumption.decoded(known.taken(self.rows, is_suspect=self.deaths > 0).encoded())
            while known.done < self.rows and not known.is_hopeless:
                step = known.step(self.rows)
                if self.deaths:
                    known = known.begins(step, f"w{self.deaths}")
                run = range(step.first, step.stop)
                if not step.is_deadly and self.deadly.intersection(run):
                    self.deaths += 1
                    break
                (self.failed if step.is_deadly else self.scored).extend(run)
                known = known.with_piece(step, piece(step))
            else:
                return known


@pytest.mark.parametrize("deadly", [(0,), (9_999,), (4711,), (7, 8, 9_000), ()], ids=str)
def test_rows_that_end_workers_fail_and_all_others_are_scored_once(deadly: tuple[int, ...]) -> None:
    work = Workers(10_000, frozenset(deadly))

    known = work.run()

    assert not known.is_hopeless
    assert work.failed == sorted(deadly)
    assert work.scored == [row for row in range(10_000) if row not in deadly]


def test_few_workers_die_until_a_row_is_found() -> None:
    work = Workers(10_000, frozenset({4711}))

    work.run()

    assert work.deaths <= 8


def test_a_shard_whose_rows_all_end_workers_is_given_up() -> None:
    work = Workers(1000, frozenset(range(1000)))

    known = work.run()

    assert known.is_hopeless
    assert known.deadly == MOST_DEADLY_ROWS


def test_deaths_outside_the_rows_do_not_go_on_for_ever() -> None:
    known = Resumption(bound="b")
    for _ in range(MOST_IDLE_DEATHS + 1):
        assert not known.is_hopeless
        known = known.taken(100, is_suspect=True)

    assert known.is_hopeless


def test_one_worker_that_loses_its_shard_twice_fails_no_row() -> None:
    """It was not two workers that died."""
    known = Resumption(bound="b", size=1, until=1)
    for _ in range(2):
        known = known.begins(known.step(10), "w").taken(10, is_suspect=True)

    assert known.step(10) == RowSpan(0, 1)


def test_a_shard_that_was_released_goes_on_behind_what_is_kept() -> None:
    known = Resumption(bound="b").broken_off(RowSpan(0, 100), piece(RowSpan(0, 30)), has_scored=True)

    known = known.taken(100, is_suspect=False)

    assert (known.step(100), known.begun) == (RowSpan(30, 100), None)


def test_a_release_without_a_row_has_less_run_next() -> None:
    known = Resumption(bound="b").broken_off(RowSpan(0, 80), None, has_scored=True)

    assert known.step(80) == RowSpan(0, 10)


def test_a_release_before_anything_is_scored_changes_nothing() -> None:
    known = Resumption(bound="b")

    assert known.broken_off(RowSpan(0, 80), None, has_scored=False) is known


def test_a_release_is_no_death() -> None:
    known = Resumption(bound="b", size=1, until=1)
    known = known.begins(known.step(10), "w")

    known = known.broken_off(RowSpan(0, 1), None, has_scored=False).taken(10, is_suspect=True)

    assert not known.alone


def test_ranges_grow_again_behind_the_place_of_a_death() -> None:
    known = Resumption(bound="b", size=1, until=2)
    sizes = []
    for _ in range(5):
        step = known.step(1000)
        sizes.append(step.stop - step.first)
        known = known.with_piece(step, piece(step))

    assert sizes == [1, 1, 8, 64, 512]


def test_rows_of_a_shard_are_those_of_its_ranges() -> None:
    ranges = (Range("a", "e", 0, 10, 5, 0), Range("a", "e", 1, 15, 4, 0), Range("b", "f", -1, 3, 6, 2, begin=77))
    shard = Shard(3, "part", 15, ranges)

    some = rows_of(shard, 3, 12)

    assert some == Shard(3, "part", 9, (
        Range("a", "e", 0, 13, 2, 3), Range("a", "e", 1, 15, 4, 0), Range("b", "f", -1, 3, 3, 2, begin=77)
    ))  # fmt: skip
    assert rows_of(shard, 0, 15) is shard
    assert rows_of(shard, 14, 15).ranges == (msgspec.structs.replace(ranges[2], first_row=8, rows=1, first_in_group=7),)
