"""The load of an analysis: models with their shares of the requests, and how each is asked.

A decoupled model is asked by streams, a stateful one by sequences, any other by plain requests. Models with requests
are tuned, the steps of ensembles in place of the ensembles; and the models that others call, where the caller names
them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import typer

from qinfer.cli.client import GatewayClient, api_key, fill, random
from qinfer.cli.load import (
    Arrivals,
    Load,
    LoadConnection,
    LoadPart,
    LoadTarget,
    MakeConnection,
    MixConnection,
    OpenConnection,
    SequenceConnection,
    StepRequests,
    by_share,
)
from qinfer.cli.request_data import DataRequest, gaps_of, requests_of
from qinfer.client.model_flows import model_path
from qinfer.core.messages import Scalar
from qinfer.wire.kserve_client import encode_request

GENERATED = 64


class Loaded(NamedTuple):
    """A model that gets requests, sent in turn.

    Attributes:
        share: Its share of the requests, in any unit.
        config: Its configuration, in Triton's JSON.
    """

    model: str
    share: float
    config: Mapping[str, Any]
    requests: Sequence[DataRequest]

    @property
    def streams(self) -> bool:
        """Whether its answers are streams."""
        return bool((self.config.get("model_transaction_policy") or {}).get("decoupled"))

    @property
    def is_stateful(self) -> bool:
        """Whether its requests are steps of sequences."""
        return "sequence_batching" in self.config

    def ask_once(self, client: GatewayClient) -> None:
        """Sends the first request; raises its error."""
        first = self.requests[0]
        inputs = {tensor.name: tensor for tensor in first.tensors}
        if self.is_stateful:
            client.sequence(self.model).infer(inputs, end=True)
        elif self.streams:
            for _ in client.infer_stream(self.model, inputs, parameters=first.parameters):
                pass
        else:
            client.infer(self.model, inputs, parameters=first.parameters)


def read_shares(texts: Sequence[str]) -> dict[str, float]:
    """Reads models with shares such as `digits=3`; the share is 1 where none is given."""
    shares: dict[str, float] = {}
    for text in texts:
        name, has_share, share = text.rpartition("=")
        name, share = (name, share) if has_share else (text, "1")
        with suppress(ValueError):
            shares[name] = float(share)
        if not (name and 0 < shares.get(name, 0) < math.inf):
            raise typer.BadParameter(
                f"'{text}' is no model with a positive share, such as digits=3", param_hint="MODEL"
            )
    if len(shares) < len(texts):
        raise typer.BadParameter("a model is given twice", param_hint="MODEL")
    return shares


def loaded_models(
    client: GatewayClient, shares: Mapping[str, float], inputs: Sequence[str], data: Sequence[str]
) -> list[Loaded]:
    """Returns the models of a load with their requests.

    `inputs` are `--input` options of the only model; `data` is a file of requests, or `MODEL=FILE` for each model.

    Raises:
        InvalidRequest: As `requests_of`.
    """
    files = dict[str, Path]()
    for text in data:
        name, _, file = text.rpartition("=")
        files[name or next(iter(shares))] = Path(file)
    if (inputs or (data and "=" not in data[0])) and len(shares) > 1:
        raise typer.BadParameter("several models need MODEL=FILE for each", param_hint="--input, --data")
    if unknown := files.keys() - shares.keys():
        raise typer.BadParameter(f"'{min(unknown)}' is none of the models", param_hint="--data")
    found = [
        Loaded(name, share, client.config(name), requests_of(client, name, 0, inputs, files.get(name)))
        for name, share in shares.items()
    ]
    if len(found) > 1 and any(one.is_stateful for one in found):
        raise typer.BadParameter("a model with sequences is analysed alone", param_hint="MODEL")
    return found


def steps_of(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Returns the steps of an ensemble; any other model has no steps."""
    return (config.get("ensemble_scheduling") or {}).get("step") or ()


def models_of(client: GatewayClient, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the steps of an ensemble, also of ensembles in it; any other model yields itself."""
    if not steps_of(config):
        yield str(config["name"])
    for step in steps_of(config):
        yield from models_of(client, client.config(str(step["model_name"])))


def random_requests(client: GatewayClient, model: str) -> Sequence[DataRequest]:
    """Returns requests of random data, whose answers are compared where no others are given."""
    wanted = client.metadata(model).inputs
    return [DataRequest(fill(wanted, partial(random, seed=seed))) for seed in range(GENERATED)]


class LoadPlan(NamedTuple):
    """How a load is sent to a gateway; `parts` are the requests of each model.

    Attributes:
        digest: A digest of the requests and shares.
        gaps_s: Seconds between two arrivals; `None` = a request follows an answer.
    """

    target: LoadTarget
    make: MakeConnection
    parts: Sequence[LoadPart]
    digest: str
    gaps_s: Iterator[float] | None = None

    def load(self) -> Load:
        """Returns the load of a window."""
        if self.gaps_s is None:
            return Load(self.make)
        arrivals = Arrivals(self.gaps_s)
        return Load(partial(OpenConnection, self.parts[0].following, arrivals.free), arrivals)


def plan_of(url: str, loads: Sequence[Loaded], per_sequence: int, traced: Path | None = None) -> LoadPlan:
    """Encodes the requests of a load; sequences have `per_sequence` steps, and the gaps of a file `traced` are kept.

    Raises:
        InvalidRequest: The file has no gaps.
    """
    digest = sha256()
    parts, targets = [], list[LoadTarget]()
    for one in loads:
        encoded = [_encoded(url, one, request, {}) for request in one.requests]
        targets += encoded
        parts.append(LoadPart(cycle([target.request for target in encoded]).__next__, one.share, streams=one.streams))
        digest.update(f"{one.model} {one.share:g}".encode())
        for target in encoded:
            digest.update(target.request.partition(b"\r\n\r\n")[2])
    make: MakeConnection = partial(LoadConnection, parts[0].following)
    if loads[0].is_stateful:
        digest.update(f" {per_sequence}".encode())
        following = cycle(loads[0].requests)
        steps = StepRequests(lambda flags: _encoded(url, loads[0], next(following), flags).request, per_sequence)
        make = partial(SequenceConnection, steps)
    elif len(loads) > 1 or loads[0].streams:
        make = partial(MixConnection, by_share(parts))
    if traced is None:
        return LoadPlan(targets[0], make, parts, digest.hexdigest())
    if len(loads) > 1 or loads[0].streams or loads[0].is_stateful:
        raise typer.BadParameter("give one model that answers plain requests", param_hint="--arrivals")
    gaps_s = gaps_of(loads[0].requests, traced)
    digest.update(repr(gaps_s).encode())
    return LoadPlan(targets[0], make, parts, digest.hexdigest(), cycle(gaps_s))


def _encoded(url: str, one: Loaded, request: DataRequest, flags: Mapping[str, Scalar]) -> LoadTarget:
    api, call = ("v1", "infer_stream") if one.streams else ("v2", "infer")
    kept = {name: value for name, value in request.parameters.items() if not (flags and name.startswith("sequence_"))}
    parameters = {**kept, **flags}
    body, json_length = encode_request(request.tensors, parameters=parameters, binary=True)
    return LoadTarget.for_url(url, f"{model_path(one.model, 0, api)}/{call}", body, json_length, api_key())
