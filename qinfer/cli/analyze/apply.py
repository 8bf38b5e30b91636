"""The winner at a gateway: loaded, or as a canary, an endpoint whose trial decides between today's and the winner."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from qinfer.cli.analyze.session import Tuned
from qinfer.cli.analyze.space import configured
from qinfer.cli.client import GatewayClient
from qinfer.cli.console import CommandFailed, gateway_client
from qinfer.errors import EndpointNotFound

FILES_OF = "qinfer.files_of"
TUNED = "-tuned"
STEPS = ({"weight": 0.05}, {"weight": 0.25}, {"weight": 0.5})


def hand_over(tuned: Sequence[Tuned], url: str, endpoint: str, *, as_canary: bool) -> None:
    """Gives winners to a gateway; `endpoint` is the canary's, or empty for one of the model's name."""
    with gateway_client(url) as client:
        for one, config in tuned:
            if one.outcome.winner.candidate == one.outcome.today.candidate:
                print(f"{one.model}: the present configuration stays", file=sys.stderr)
                continue
            winner = configured(config, one.outcome.winner.candidate)
            if as_canary:
                name = begin_trial(client, one.model, winner, endpoint or one.model)
                print(f"{url} tries the winner: qinfer endpoints show {name}", file=sys.stderr)
            else:
                client.load(one.model, config=winner)
                print(f"{url} has loaded {one.model} with the winner's configuration", file=sys.stderr)


def beside(config: Mapping[str, Any], model: str, name: str) -> dict[str, Any]:
    """Returns a configuration for a model of its own name over another model's files."""
    parameters = config.get("parameters") or {}
    files_of = parameters.get(FILES_OF) or {"string_value": model}
    return {**config, "name": name, "parameters": {**parameters, FILES_OF: files_of}}


def without_files_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of `beside` as the model's own."""
    parameters = dict(config.get("parameters") or {})
    own = parameters.pop(FILES_OF, {"string_value": config["name"]})
    return {**config, "name": own["string_value"], "parameters": parameters}


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
