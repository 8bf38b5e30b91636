"""A winner beside the model that callers use."""

from typing import Any

import pytest

from qinfer.cli.analyze.apply import begin_trial, beside
from qinfer.cli.console import CommandFailed
from qinfer.errors import EndpointNotFound
from qinfer.traffic.endpoints import read_endpoint


def test_a_configuration_beside_a_model_uses_its_files() -> None:
    found = beside({"name": "m", "parameters": {"mine": {"string_value": "x"}}}, "m", "m-tuned")

    assert found["name"] == "m-tuned"
    assert found["parameters"] == {"mine": {"string_value": "x"}, "qinfer.files_of": {"string_value": "m"}}
    assert beside(found, "m-tuned", "other")["parameters"]["qinfer.files_of"] == {"string_value": "m"}


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
