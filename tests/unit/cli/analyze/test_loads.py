"""Loads of several models: shares, files, and the models that are tuned."""

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from qinfer.cli.analyze.loads import loaded_models, models_of, plan_of, read_shares
from qinfer.cli.load import LoadConnection, LoadPart, MixConnection, SequenceConnection, by_share
from qinfer.client import TensorMetadata

CONFIGS: dict[str, dict[str, Any]] = {
    "a": {"name": "a"},
    "b": {"name": "b"},
    "flow": {"name": "flow", "model_transaction_policy": {"decoupled": True}},
    "sums": {"name": "sums", "sequence_batching": {}},
    "inner": {"name": "inner", "ensemble_scheduling": {"step": [{"model_name": "b"}]}},
    "whole": {"name": "whole", "ensemble_scheduling": {"step": [{"model_name": "a"}, {"model_name": "inner"}]}},
}


class Client:
    """Knows configurations; all models have the input `x`."""

    def config(self, model: str) -> dict[str, Any]:
        return CONFIGS[model]

    def metadata(self, model: str, version: int = 0) -> Any:
        return SimpleNamespace(inputs=(TensorMetadata(name="x", datatype="FP32", shape=(-1, 2)),))


def plan(*texts: str) -> Any:
    loads = loaded_models(Client(), read_shares(texts), [], [])  # type: ignore[arg-type]
    return plan_of("http://127.0.0.1:1", loads, 20)


def made_by(of: Any) -> Any:
    return of.make.func


@pytest.mark.parametrize(
    ("texts", "expected"),
    [(["a"], {"a": 1.0}), (["a=3", "b=0.5"], {"a": 3.0, "b": 0.5}), (["a=b=2"], {"a=b": 2.0})],
)
def test_models_may_have_shares(texts: list[str], expected: dict[str, float]) -> None:
    assert read_shares(texts) == expected


@pytest.mark.parametrize("texts", [["a=x"], ["a=0"], ["a=-1"], ["a=inf"], ["=1"], ["a", "a=2"]])
def test_wrong_shares_are_refused(texts: list[str]) -> None:
    with pytest.raises(typer.BadParameter):
        read_shares(texts)


def test_requests_are_interleaved_by_their_shares() -> None:
    parts = [LoadPart(lambda name=name: name, share) for name, share in ((b"a", 3.0), (b"b", 1.0), (b"c", 2.0))]  # type: ignore[misc]

    sent = b"".join(part.following() for part in islice(by_share(parts), 60))

    assert [sent.count(name) for name in (b"a", b"b", b"c")] == [30, 10, 20]
    assert sent[:6].count(b"a") == 3


def test_an_ensemble_is_tuned_by_its_steps() -> None:
    found = models_of(Client(), CONFIGS["whole"])  # type: ignore[arg-type]

    assert list(found) == ["a", "b"]


def test_each_kind_of_model_is_asked_in_its_way() -> None:
    assert made_by(plan("a")) is LoadConnection
    assert made_by(plan("sums")) is SequenceConnection
    assert made_by(plan("flow")) is made_by(plan("a", "flow")) is MixConnection
    assert [part.streams for part in plan("a", "flow").parts] == [False, True]
    assert b"/v1/models/flow/infer_stream" in plan("flow").target.request
    with pytest.raises(typer.BadParameter, match="analysed alone"):
        plan("a", "sums")


def test_another_share_or_request_is_another_load() -> None:
    """Measurements of one never serve the other."""
    assert plan("a", "b").digest == plan("a", "b").digest
    assert len({plan("a", "b").digest, plan("a=2", "b").digest, plan("b", "a").digest, plan("a").digest}) == 4


def test_files_name_their_models() -> None:
    with pytest.raises(typer.BadParameter, match="MODEL=FILE"):
        loaded_models(Client(), {"a": 1.0, "b": 1.0}, [], ["x.jsonl"])  # type: ignore[arg-type]
    with pytest.raises(typer.BadParameter, match="'c' is none of the models"):
        loaded_models(Client(), {"a": 1.0, "b": 1.0}, [], ["c=x.jsonl"])  # type: ignore[arg-type]
