"""Chains of calls between models: who waits for whom, and which call would wait for itself."""

from qinfer.core.call_chain import depth_of, endless, extended, names_of
from qinfer.core.messages import ResourceHolder


def chain(*models: str) -> tuple[ResourceHolder, ...]:
    """Returns the holders of a call of the last model; a name is that of the execution, too."""
    holders: tuple[ResourceHolder, ...] = ()
    for number, model in enumerate(models):
        holders = extended([holders], ResourceHolder(f"{model}{number}", model, {}, 1))
    return holders


def test_a_call_has_those_who_wait_for_it() -> None:
    """The caller last, and the place of each."""
    holders = chain("a", "b")

    assert [(holder.token, holder.model, holder.version, holder.depth) for holder in holders] == [
        ("a0", "a", 1, 1),
        ("b1", "b", 1, 2),
    ]
    assert (depth_of(()), depth_of(holders)) == (0, 2)
    assert names_of(holders, "c") == "a -> b -> c"


def test_all_callers_of_a_batch_wait_for_its_call() -> None:
    """Each once; the longest chain is the one that is told."""
    shared = chain("a")
    longer = extended([shared], ResourceHolder("b", "b", {}, 1))

    merged = extended([(), shared, longer, chain("z"), longer], ResourceHolder("c", "c", {}, 2))

    assert sorted(holder.token for holder in merged) == ["a0", "b", "c", "z0"]
    assert merged[-1] == ResourceHolder("c", "c", {}, 2, 3)
    assert names_of(merged, "d") == "a -> b -> c -> d"


def test_a_call_waits_for_itself_where_every_instance_waits_for_it() -> None:
    """It does not if there is one more, if another version is called, or if what waits holds no instance."""
    holders = chain("a", "b", "a")

    assert endless(holders, "a", 1, 3) == ""
    assert endless(holders, "a", 2, 1) == ""
    assert endless(holders, "c", 1, 0) == ""
    assert endless(extended([()], ResourceHolder("", "a", {}, 1)), "a", 1, 1) == ""
    assert endless(holders, "a", 1, 2) == (
        "model 'a' can't be called by model 'a': all 2 instances of 'a' would wait for this call (a -> b -> a -> a); "
        "give 'a' more instances than its calls to itself are deep"
    )
    assert endless(chain("a", "b"), "a", 1, 1) == (
        "model 'a' can't be called by model 'b': the only instance of 'a' would wait for this call (a -> b -> a); "
        "give 'a' more instances than its calls to itself are deep"
    )


def test_ensembles_are_in_the_chain_and_hold_nothing() -> None:
    """Two of them in two chains stay apart."""
    one, other = (
        extended([chain("a")], ResourceHolder("", "e", {}, 1)),
        extended([chain("b")], ResourceHolder("", "f", {}, 1)),
    )

    merged = extended([one, other], ResourceHolder("c", "c", {}, 1))

    assert names_of(merged, "a") == "a -> e -> c -> a"
    assert [holder.model for holder in merged] == ["a", "e", "b", "f", "c"]
    assert endless(merged, "a", 1, 1)
    assert not endless(merged, "e", 1, 1)
