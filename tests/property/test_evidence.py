"""The promise of the evidence against a canary: it grows without a reason only by chance, and rarely."""

import math
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from qinfer.traffic.evidence import Counts, Evidence, EvidenceBlock

counts = st.integers(1, 40)
odds = st.floats(1.0, 3.0)


def chances(stable: int, canary: int, bad: int, odds_ratio: float) -> Iterator[tuple[int, float]]:
    """Yields how many of the bad requests are the canary's, and how likely that is (Fisher's distribution)."""
    found = range(max(0, bad - stable), min(bad, canary) + 1)
    weights = [math.comb(canary, n) * math.comb(stable, bad - n) * odds_ratio**n for n in found]
    yield from zip(found, (weight / sum(weights) for weight in weights), strict=True)


@settings(max_examples=200)
@given(counts, counts, st.floats(0, 1), odds, st.floats(0, 1))
def test_the_evidence_of_any_block_is_1_in_the_mean_at_most(
    stable: int, canary: int, share: float, tolerated: float, true_part: float
) -> None:
    """Whatever the common share of bad requests, and for each odds ratio that is tolerated."""
    bad = round(share * (stable + canary))
    begun = Evidence().begun(0.5)
    true = 1 + true_part * (tolerated - 1)

    mean = sum(
        chance * begun.against_stable({"": EvidenceBlock(Counts(stable, bad - n), Counts(canary, n))}, tolerated).value
        for n, chance in chances(stable, canary, bad, true)
    )

    assert mean <= 1 + 1e-9


@settings(max_examples=200)
@given(counts, st.floats(0, 1), st.floats(0, 1))
def test_the_evidence_against_a_share_is_1_in_the_mean_at_most(canary: int, allowed: float, part: float) -> None:
    begun, true = Evidence().begun(1.0), allowed * part

    mean = sum(
        math.comb(canary, n) * true**n * (1 - true) ** (canary - n)
        * begun.against_share({"": EvidenceBlock(Counts(), Counts(canary, n))}, allowed).value
        for n in range(canary + 1)
    )  # fmt: skip

    assert mean <= 1 + 1e-9


@settings(max_examples=100)
@given(st.lists(st.tuples(counts, counts, st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5))
def test_blocks_of_one_target_wait_for_the_others_requests(drawn: list[tuple[int, int, float, float]]) -> None:
    """What counts is the same as if the requests had come in one block."""
    apart, together = Evidence().begun(1.0), Evidence().begun(1.0)

    for stables, canaries, *shares in drawn:
        stable, canary = Counts(stables, int(shares[0] * stables)), Counts(canaries, int(shares[1] * canaries))
        apart = apart.against_stable({"": EvidenceBlock(stable, Counts())}).against_stable(
            {"": EvidenceBlock(Counts(), canary)}
        )
        together = together.against_stable({"": EvidenceBlock(stable, canary)})

    assert apart == together


@settings(max_examples=100)
@given(st.integers(1, 8), counts, st.data())
def test_parts_that_begin_later_begin_with_what_was_kept(steps: int, canary: int, data: st.DataObject) -> None:
    """Without requests the evidence is 1, however many parts have begun; afterwards none is left to begin."""
    evidence = Evidence()
    for _ in range(steps):
        evidence = evidence.begun(1 / steps)
        assert math.isclose(evidence.value, 1.0)

    worse = evidence.against_stable(
        {"": EvidenceBlock(Counts(canary, 0), Counts(canary, data.draw(st.integers(1, canary))))}
    )

    assert evidence.kept == 0.0
    assert worse.begun(1 / steps).logs == worse.logs
