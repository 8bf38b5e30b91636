"""The winner at a gateway: loaded, or as a canary, an endpoint whose trial decides between today's and the winner."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from qinfer.cli.analyze.loads import steps_of
from qinfer.cli.analyze.report import Facts
from qinfer.cli.client import GatewayClient
from qinfer.cli.console import CommandFailed, gateway_client
from qinfer.errors import EndpointNotFound
from qinfer.models.config.to_spec import FILES_OF
from qinfer.models.readiness import APART

TUNED = "-tuned"
STEPS = ({"weight": 0.05}, {"weight": 0.25}, {"weight": 0.5})


def check_callers(client: GatewayClient, models: Sequence[str], called: Sequence[str], endpoint: str) -> None:
    """Raises `BadParameter` if no endpoint could stand between the tuned models and their callers."""
    if called or any(steps_of(client.config(model)) for model in models):
        raise typer.BadParameter(
            "canary: ensembles and models call the tuned ones by their own names, past any endpoint; give load",
            param_hint="--apply",
        )
    if endpoint and len(models) > 1:
        raise typer.BadParameter("several models have an endpoint each, of their own names", param_hint="--endpoint")


def hand_over(found: Sequence[Facts], url: str, endpoint: str, *, as_canary: bool) -> None:
    """Gives winners to a gateway; `endpoint` is the canary's, or empty for one of the model's name."""
    with gateway_client(url) as client:
        for one in found:
            if one.is_same:
                print(f"{one.model}: the present configuration stays", file=sys.stderr)
            elif as_canary:
                name = begin_trial(client, one.model, one.winner, endpoint or one.model)
                print(f"{url} tries the winner: qinfer endpoints show {name}", file=sys.stderr)
            else:
                client.load(one.model, config=one.winner)
                print(f"{url} has loaded {one.model} with the winner's configuration", file=sys.stderr)


def beside(config: Mapping[str, Any], model: str, name: str) -> dict[str, Any]:
    """Returns a configuration for a model of its own name over another model's files."""
    parameters = config.get("parameters") or {}
    files_of = parameters.get(FILES_OF) or {"string_value": model}
    return {**config, "name": name, "parameters": {**parameters, FILES_OF: files_of}}


def copies_apart(client: GatewayClient, model: str) -> dict[str, dict[str, Any]]:
    """Returns a copy of a model, by a name that only workers of its own load.

    An ensemble's copy comes after those of its steps, to which it refers.
    """
    name, config, copies = f"{APART}{model}", client.config(model), dict[str, dict[str, Any]]()
    copy = beside(config, model, name)
    for step in steps_of(config):
        copies |= copies_apart(client, str(step["model_name"]))
    if copies:
        steps = [{**step, "model_name": f"{APART}{step['model_name']}"} for step in steps_of(config)]
        copy["ensemble_scheduling"] = {**config["ensemble_scheduling"], "step": steps}
    return {**copies, name: copy}


def as_own(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a copy of `copies_apart` as that of the model; any other as it is."""
    name = str(config["name"]).removeprefix(APART)
    given: Mapping[str, Any] = config.get("parameters") or {}
    parameters = {key: value for key, value in given.items() if (key, value) != (FILES_OF, {"string_value": name})}
    return {**config, "name": name, "parameters": parameters}


def begin_trial(client: GatewayClient, model: str, config: Mapping[str, Any], endpoint: str) -> str:
    """Loads the winner beside the model, and declares an endpoint that tries it; returns the endpoint's name.

    An endpoint of the model's name takes the requests of its callers, who notice nothing.

    Raises:
        CommandFailed: There is an endpoint of that name.
        QinferError: The gateway refuses the configuration or the endpoint.
    """
    try:
        client.endpoint(endpoint)
    except EndpointNotFound:
        pass
    else:
        raise CommandFailed(f"there is an endpoint '{endpoint}'; give --endpoint another name, or delete it")
    version = max(int(version) for version in client.metadata(model).versions)
    name = f"{model}{TUNED}"
    client.load(name, config=beside(config, model, name))
    targets = [{"model": model, "version": version, "role": "stable"}, {"model": name, "version": version}]
    declaration = {"name": endpoint, "targets": targets, "canary": {"steps": STEPS}}
    client.put_endpoint(endpoint, declaration | ({"hides_model": True} if endpoint == model else {}))
    return endpoint
