"""`AsyncClient` has the calls of `Client`, and its documentation refers to theirs; jobs and sequences likewise."""

import inspect
import re
from typing import Any

import pytest

import qinfer
from qinfer.client import AsyncJob, AsyncSequence, Job, Sequence

PAIRS = [(qinfer.Client, qinfer.AsyncClient), (Job, AsyncJob), (Sequence, AsyncSequence)]
NOT_AWAITED = {"generate_stream", "infer_stream", "job", "responses", "sequence", "stream"}
OWN_TYPES = {"transport", "sleep", "run"}
"""What the constructor takes of the kind of its client."""


def methods(kind: type) -> dict[str, Any]:
    return {name: method for name, method in inspect.getmembers(kind, callable) if not name.startswith("_")}


def calls() -> list[Any]:
    return [
        pytest.param(blocking, getattr(blocking, name), method, id=f"{awaited.__name__}.{name}")
        for blocking, awaited in PAIRS
        for name, method in methods(awaited).items()
    ]


def plain(annotation: object) -> str:
    """Returns an annotation without what is asynchronous in it."""
    text = re.sub(r"\bAsync(?=[A-Z])", "", inspect.formatannotation(annotation))
    return " | ".join(dict.fromkeys(text.split(" | ")))


def arguments(method: Any) -> dict[str, tuple[Any, ...]]:
    found = inspect.signature(method).parameters.values()
    return {each.name: (each.kind, each.default, plain(each.annotation)) for each in found}


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS)
def test_both_have_the_same_calls(blocking: type, awaited: type) -> None:
    assert methods(blocking).keys() == methods(awaited).keys()


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS)
def test_both_are_made_with_the_same_arguments(blocking: type, awaited: type) -> None:
    def comparable(kind: type) -> dict[str, tuple[Any, ...]]:
        return {name: argument[:1] if name in OWN_TYPES else argument for name, argument in arguments(kind).items()}

    assert comparable(blocking) == comparable(awaited)


@pytest.mark.parametrize(("owner", "blocking", "awaited"), calls())
def test_a_call_has_the_same_signature(owner: type, blocking: Any, awaited: Any) -> None:
    assert arguments(awaited) == arguments(blocking)
    assert plain(inspect.signature(awaited).return_annotation) == plain(inspect.signature(blocking).return_annotation)
    assert inspect.iscoroutinefunction(awaited) == (awaited.__name__ not in NOT_AWAITED)


@pytest.mark.parametrize(("owner", "blocking", "awaited"), calls())
def test_a_call_is_described_once(owner: type, blocking: Any, awaited: Any) -> None:
    """The blocking call describes each argument; the other refers to it."""
    described = inspect.getdoc(blocking) or ""
    names = [name for name in inspect.signature(blocking).parameters if name != "self"]

    assert f"see `{owner.__name__}.{blocking.__name__}`" in (inspect.getdoc(awaited) or "")
    assert "Args:" not in described or [name for name in names if f"    {name}: " not in described] == []
