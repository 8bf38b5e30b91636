"""The choice of a target: what goes before what, and where requests without a key go."""

from typing import Any

import pytest

from qinfer.core.messages import SequenceFlags
from qinfer.traffic.endpoints import read_endpoint
from qinfer.traffic.routing import ChoiceInput, TargetSplit, by_chance

STABLE = {"model": "m", "version": 1, "role": "stable"}


def split_of(*targets: dict[str, Any], chance: float = 0.5, **fields: Any) -> TargetSplit:
    return TargetSplit(read_endpoint({"name": "e", "targets": [STABLE, *targets], **fields}), lambda: chance)


def canary(version: int = 2, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "version": version, **fields}


def asked(tenant: str = "", **headers: str) -> ChoiceInput:
    return ChoiceInput(tenant, {name.replace("_", "-"): value for name, value in headers.items()}.get)


def version(split: TargetSplit, of: ChoiceInput) -> Any:
    return split.choose(of).version


def test_without_shares_and_conditions_all_is_stable() -> None:
    split = split_of(canary(), canary(3, role="shadow", weight=1), sticky="tenant", chance=0.999)

    assert version(split, asked("a")) == 1


@pytest.mark.parametrize(
    ("of", "is_steered"),
    [(asked(), False), (asked("a"), False), (asked(x_beta="1"), True), (ChoiceInput(parameters={"n": 3}), True)],
    ids=["nothing", "tenant", "header", "parameter"],
)
def test_a_caller_steers_by_headers_and_parameters(of: ChoiceInput, *, is_steered: bool) -> None:
    when = [{"tenant": "a"}, {"headers": {"X-Beta": "1"}}, {"parameters": {"n": 3}}]

    assert split_of(canary(when=when)).is_steered(of) is is_steered


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 1), (0.699, 1), (0.7, 2), (0.899, 2), (0.9, 3), (0.9999, 3)])
def test_chance_is_a_place_on_a_line_of_weights(chance: float, expected: int) -> None:
    assert version(split_of(canary(weight=0.2), canary(3, weight=0.1), chance=chance), asked()) == expected


def test_rounding_leaves_no_gap_at_the_end() -> None:
    """The sum of weights may be a bit less than 1; the last target that gets anything gets that, too."""
    targets = read_endpoint({"name": "e", "targets": [STABLE, canary(), canary(3)]}).targets
    weights = tuple(zip(targets, (0.1, 0.8999999999, 0.0), strict=True))

    assert by_chance(weights, 0.99999999999).version == 2


def test_the_first_condition_that_is_met_decides() -> None:
    split = split_of(
        canary(when=[{"tenant": "a", "headers": {"X-Beta": "1"}}, {"parameters": {"n": 3}}]),
        canary(3, weight=0.9, when=[{"tenant": "a"}]),
        chance=0.0,
    )

    assert version(split, asked("a", x_beta="1")) == 2
    assert version(split, asked("a", x_beta="2")) == 3
    assert version(split, asked("b", x_beta="1")) == 1
    assert version(split, ChoiceInput("a", parameters={"n": 3})) == 2
    assert version(split, ChoiceInput("b", parameters={"n": "3"})) == 1


@pytest.mark.parametrize(
    ("sticky", "keyed", "keyless"),
    [
        ("tenant", asked("a"), asked()),
        ("header:X-User", asked("a", x_user="u"), asked("a")),
        ("parameter:user", ChoiceInput(parameters={"user": 7}), ChoiceInput(parameters={"other": 7})),
    ],
)
def test_a_key_goes_before_chance(sticky: str, keyed: ChoiceInput, keyless: ChoiceInput) -> None:
    def chosen(of: ChoiceInput) -> set[int]:
        return {version(split_of(canary(weight=0.5), sticky=sticky, chance=c), of) for c in (0.0, 0.9)}

    assert len(chosen(keyed)) == 1
    assert chosen(keyless) == {1, 2}


def test_a_sequence_is_a_key_whatever_is_sticky() -> None:
    """Its correlation id is, with its tenant; the numbers 1 and '1' are two sequences."""
    split = split_of(canary(weight=0.5), sticky="header:x-user")

    for tenant in ("a", "b"):
        for id_ in (*range(20), "1"):
            steps = {
                version(split, asked(tenant, x_user=str(user))._replace(sequence=SequenceFlags(id_)))
                for user in range(5)
            }
            assert len(steps) == 1
    kinds = {version(split, ChoiceInput(sequence=SequenceFlags(id_))) for id_ in range(40)}
    assert kinds == {1, 2}


def test_endpoints_share_the_same_keys_out_anew() -> None:
    """Whoever is in the canary of one is not therefore in that of all."""
    document = {"targets": [STABLE, canary(weight=0.5)], "sticky": "tenant"}
    one, other = TargetSplit(read_endpoint(document, "one")), TargetSplit(read_endpoint(document, "other"))

    assert any(version(one, asked(str(n))) != version(other, asked(str(n))) for n in range(40))
