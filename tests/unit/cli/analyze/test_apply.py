"""A winner beside the model that callers use."""

from types import SimpleNamespace
from typing import Any

import pytest
import typer

from qinfer.cli.analyze.apply import as_own, begin_trial, beside, check_callers, copies_apart
from qinfer.cli.console import CommandFailed
from qinfer.errors import EndpointNotFound
from qinfer.traffic.endpoints import read_endpoint


def test_a_configuration_beside_a_model_uses_its_files() -> None:
    found = beside({"name": "m", "parameters": {"mine": {"string_value": "x"}}}, "m", "m-tuned")

    assert found["name"] == "m-tuned"
    assert found["parameters"] == {"mine": {"string_value": "x"}, "qinfer.files_of": {"string_value": "m"}}
    assert beside(found, "m-tuned", "other")["parameters"]["qinfer.files_of"] == {"string_value": "m"}


CHAIN: dict[str, Any] = {
    "name": "chain",
    "platform": "ensemble",
    "ensemble_scheduling": {"step": [{"model_name": "m", "model_version": -1}, {"model_name": "inner"}], "more": 1},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "m": {"name": "m", "max_batch_size": 8},
    "borrowed": {"name": "borrowed", "parameters": {"qinfer.files_of": {"string_value": "m"}}},
    "inner": {"name": "inner", "ensemble_scheduling": {"step": [{"model_name": "borrowed"}]}},
    "chain": CHAIN,
}


def copies(model: str) -> dict[str, dict[str, Any]]:
    return copies_apart(SimpleNamespace(config=CONFIGS.__getitem__), model)  # type: ignore[arg-type]


def test_a_copy_of_an_ensemble_refers_to_copies_of_its_steps() -> None:
    """Steps come first, so that each is loaded before the ensemble; the ensemble's files are its own versions."""
    found = copies("chain")

    assert list(found) == ["~m", "~borrowed", "~inner", "~chain"]
    assert found["~chain"] == {
        "name": "~chain",
        "platform": "ensemble",
        "ensemble_scheduling": {
            "step": [{"model_name": "~m", "model_version": -1}, {"model_name": "~inner"}],
            "more": 1,
        },
        "parameters": {"qinfer.files_of": {"string_value": "chain"}},
    }
    assert found["~inner"]["ensemble_scheduling"]["step"] == [{"model_name": "~borrowed"}]
    assert CHAIN["ensemble_scheduling"]["step"][0]["model_name"] == "m"


@pytest.mark.parametrize("model", ["m", "borrowed"])
def test_the_configuration_of_a_copy_becomes_the_models_own(model: str) -> None:
    """A model that borrows files goes on with it."""
    assert as_own(copies(model)[f"~{model}"]) == {"parameters": {}, **CONFIGS[model]}
    assert as_own(CONFIGS[model]) == {"parameters": {}, **CONFIGS[model]}


@pytest.mark.parametrize(
    ("models", "called", "endpoint", "why"),
    [
        (["chain"], [], "", "past any endpoint; give load"),
        (["m"], ["borrowed"], "", "past any endpoint; give load"),
        (["m", "borrowed"], [], "e", "several models have an endpoint each"),
    ],
)
def test_a_canary_that_no_callers_would_reach_is_refused_before_the_search(
    models: list[str], called: list[str], endpoint: str, why: str
) -> None:
    client: Any = SimpleNamespace(config=CONFIGS.__getitem__)
    check_callers(client, ["m", "borrowed"], [], "")
    check_callers(client, ["m"], [], "e")

    with pytest.raises(typer.BadParameter, match=why):
        check_callers(client, models, called, endpoint)


class Gateway:
    """Has perhaps an endpoint."""

    def __init__(self, *endpoints: str) -> None:
        self.endpoints, self.loaded, self.declared = set(endpoints), dict[str, Any](), dict[str, Any]()

    def endpoint(self, name: str) -> dict[str, Any]:
        if name not in self.endpoints:
            raise EndpointNotFound(name)
        return {}

    def metadata(self, model: str) -> Any:
        return type("Metadata", (), {"versions": ("2", "10")})

    def load(self, model: str, config: dict[str, Any]) -> None:
        self.loaded[model] = config

    def put_endpoint(self, name: str, declaration: dict[str, Any]) -> None:
        self.declared[name] = read_endpoint(declaration, name)


@pytest.mark.parametrize("endpoint", ["m", "reader"])
def test_the_trial_is_between_todays_configuration_and_the_winner(endpoint: str) -> None:
    """An endpoint of the model's name stands in front of the model."""
    gateway = Gateway()

    begin_trial(gateway, "m", {"name": "m"}, endpoint)  # type: ignore[arg-type]

    declared = gateway.declared[endpoint]
    assert [(one.model, one.version, one.role.value) for one in declared.targets] == [
        ("m", 10, "stable"),
        ("m-tuned", 10, "canary"),
    ]
    assert declared.hides_model is (endpoint == "m")
    assert gateway.loaded["m-tuned"]["name"] == "m-tuned"
    assert [step.weight for step in declared.canary.steps] == [0.05, 0.25, 0.5]


def test_an_endpoint_that_is_there_is_left_alone() -> None:
    gateway = Gateway("m")

    with pytest.raises(CommandFailed, match="there is an endpoint 'm'; give --endpoint another name"):
        begin_trial(gateway, "m", {"name": "m"}, "m")  # type: ignore[arg-type]
    assert not gateway.loaded
