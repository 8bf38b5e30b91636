"""The blocking client is the asynchronous one without what is asynchronous."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import qinfer
from qinfer.client import AsyncJob, AsyncSequence, Job, Sequence
from scripts import generate_client

PAIRS = [(qinfer.Client, qinfer.AsyncClient), (Job, AsyncJob), (Sequence, AsyncSequence)]
NOT_AWAITED = {"model", "generate_stream", "infer_stream", "job", "record", "responses", "sequence", "stream"}


@pytest.fixture(scope="module")
def generated() -> dict[Path, str]:
    return generate_client.files()


def methods(kind: type) -> dict[str, Any]:
    return {name: method for name, method in inspect.getmembers(kind, callable) if not name.startswith("_")}


def test_the_blocking_client_is_current(generated: dict[Path, str]) -> None:
    """`.venv/bin/python -m scripts.generate_client` writes it."""
    written = {path: path.read_text() for path in (generate_client.CLIENT / "_sync").glob("*.py")}

    assert {path: text for path, text in written.items() if path.name != "__init__.py"} == generated


def test_the_blocking_client_has_no_word_of_the_asynchronous_one(generated: dict[Path, str]) -> None:
    words = re.compile(r"\b(?:async|await|aclos|aenter|aexit)\w{0,3}\b|Async|event loop|asyncio")

    assert [words.findall(text.partition("\n")[2]) for text in generated.values()] == [[] for _ in generated]


@pytest.mark.parametrize(("blocking", "awaited"), PAIRS)
def test_calls_are_awaited_in_the_asynchronous_client_alone(blocking: type, awaited: type) -> None:
    coroutines = {name: inspect.iscoroutinefunction(method) for name, method in methods(awaited).items()}

    assert coroutines == {name: name not in NOT_AWAITED for name in methods(blocking)}
    assert not any(inspect.iscoroutinefunction(method) for method in methods(blocking).values())


@pytest.mark.parametrize("kind", [kind for pair in PAIRS for kind in pair])
def test_a_call_with_arguments_describes_each(kind: type) -> None:
    for method in methods(kind).values():
        described = inspect.getdoc(method) or ""
        names = [name for name in inspect.signature(method).parameters if name != "self"]

        assert "Args:" not in described or [name for name in names if f"    {name}: " not in described] == []
