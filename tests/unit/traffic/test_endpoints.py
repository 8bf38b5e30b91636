"""Declarations of endpoints: what is read, and what is wrong with others."""

import time
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from qinfer.core.messages import OutgoingRequest
from qinfer.errors import BrokerUnavailable, InvalidRequest
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.traffic.endpoints import Endpoint, Role, misfit, read_endpoint, read_sticky
from qinfer.traffic.routing import Endpoints
from qinfer.traffic.store import DEAF_AFTER_S, DeclaredEndpoints
from qinfer.wire.versions import decode_document, encode_document

STABLE = {"model": "m", "version": 3, "role": "stable"}


def spec_of(name: str, datatype: str = "FP32", max_batch_size: int = 8, **fields: Any) -> ModelSpec:
    tensors = [(TensorSpec(name=one, datatype=datatype, dims=(4,)),) for one in "xy"]
    fields = {"inputs": tensors[0], "outputs": tensors[1], "max_batch_size": max_batch_size, **fields}
    return ModelSpec(name=name, backend="stub", **fields)


def target(version: Any = 4, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "version": version, **fields}


def test_the_stable_target_gets_the_rest() -> None:
    endpoint = read_endpoint({"targets": [STABLE, target(weight=0.1), target("latest", weight=0.2)]}, "e")

    assert [endpoint.weight_of(each) for each in endpoint.targets] == [0.7, 0.1, 0.2]
    assert (endpoint.name, endpoint.stable.label, endpoint.targets[2].label) == ("e", "m:3", "m:latest")


def test_a_shadow_takes_nothing_from_the_others() -> None:
    endpoint = read_endpoint({"name": "e", "targets": [STABLE, target(weight=1, role="shadow")]})

    assert [endpoint.weight_of(each) for each in endpoint.targets] == [1, 1]
    assert endpoint.targets[1].role is Role.SHADOW


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"targets": []}, "one target must have the role stable, not 0"),
        ({"targets": [STABLE, STABLE | {"version": 4}]}, "one target must have the role stable, not 2"),
        ({"targets": [STABLE, target(), target()]}, "a target appears twice; add up the weights"),
        ({"targets": [STABLE | {"version": "latest"}]}, "only a canary may be the latest version"),
        ({"targets": [STABLE, target("latest", role="shadow")]}, "only a canary may be the latest version"),
        ({"targets": [STABLE | {"version": 0}]}, "a version is a number above 0, or latest"),
        ({"targets": [STABLE | {"version": "3"}]}, "`targets[0].version` is '3'; it may be a number or latest"),
        ({"targets": [STABLE | {"role": "primary"}]}, "`targets[0].role` is 'primary'; it may be stable or canary or"),
        ({"targets": [STABLE | {"weight": "10%"}]}, "`targets[0].weight` is '10%'; expected `float | null`, got `str`"),
        (
            {"targets": [STABLE | {"rol": 1}]},
            "a target of an endpoint has no 'rol'; it has model, version, role, weight, when",
        ),
        ({"targets": [STABLE], "compare": {"y": {"agree": "close"}}}, "'close'; it may be argmax or equal or within"),
        ({"targets": [STABLE, target(weight=-0.1)]}, "weight -0.1 is not a share from 0 to 1"),
        ({"targets": [STABLE, target(weight=0.7), target(5, weight=0.7)]}, "the weights of the canaries add up to 1.4"),
        ({"targets": [STABLE | {"weight": 0.5}, target(weight=0.1)]}, "the stable target gets the rest, 0.9, not 0.5"),
        ({"targets": [STABLE | {"when": [{"tenant": "a"}]}]}, "only a canary may have `when`"),
        ({"targets": [STABLE, target(when=[{}])]}, "`when` takes 1 to 64 conditions"),
        ({"targets": [STABLE, target(when=[{"header": "x"}])]}, "a condition of an endpoint has no 'header'"),
        ({"targets": [STABLE | {"wieght": 1}]}, "a target of an endpoint has no 'wieght'"),
        ({"targets": [STABLE], "sticky": "cookie"}, "write tenant, header:<name> or parameter:<name>"),
        ({"targets": [STABLE], "name": "other"}, "the declaration names 'other', but it is for 'e'"),
        ({"targets": [{**STABLE, "model": "a{b}"}]}, "'a{b}' can't be the name of a model"),
        ([], "no declaration of an endpoint: Expected `object`, got `array`"),
    ],
)
def test_what_is_wrong_is_said(document: Any, text: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_endpoint(document, "e")

    assert text in raised.value.message


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "x" * 129])
def test_a_name_is_one_that_models_have(name: str) -> None:
    with pytest.raises(InvalidRequest, match="its name must have the form of a model's name"):
        read_endpoint({"name": name, "targets": [STABLE]})


def test_names_of_sticky_headers_are_read_in_lower_case() -> None:
    assert read_sticky("header: X-User") == ("header", "x-user")
    assert read_sticky("parameter:User") == ("parameter", "User")


def test_a_stored_declaration_may_have_what_a_newer_server_writes() -> None:
    """An older gateway goes on with what it knows of it."""
    endpoint = read_endpoint({"name": "e", "targets": [STABLE], "revision": 7})
    document = msgspec.json.decode(encode_document(endpoint)) | {"steps": [1, 2]}

    assert decode_document(msgspec.json.encode(document), Endpoint) == endpoint


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (spec_of("b"), ""),
        (spec_of("b", max_batch_size=0), "one has a batch dimension, the other none"),
        (spec_of("b", decoupled=True), "one gives a single response, the other a stream"),
        (spec_of("b", datatype="INT32"), "they differ in input x; all targets need the same inputs and outputs"),
    ],
    ids=["alike", "batched", "decoupled", "datatype"],
)
def test_models_fit_that_have_the_same_inputs_and_outputs(other: ModelSpec, why: str) -> None:
    assert misfit(spec_of("a"), other) == why
    assert misfit(other, other) == ""


@pytest.mark.parametrize(
    ("weight", "version", "moves_by"), [(1, 0, "e"), (0, 0, ""), (1, 4, "")], ids=["canary", "stable", "by version"]
)
def test_what_a_canary_was_chosen_for_may_be_moved(weight: float, version: int, moves_by: str) -> None:
    """Not what stable gets anyway, and not what names the version whose answer it wants."""
    view = Endpoints(Mock(find=Mock(return_value=Mock()), ready_versions=Mock(return_value=(3, 4))))
    view.show(DeclaredEndpoints({"e": read_endpoint({"name": "e", "targets": [STABLE, target(weight=weight)]})}, 1))
    request = OutgoingRequest(id="r", model="e", inputs=(), version=version)

    assert view.choose(request, "")

    assert request.moves_by == moves_by


@pytest.mark.parametrize(
    ("version", "parameters", "assigned"),
    [(0, {}, True), (3, {}, False), (4, {}, False), (0, {"n": 3}, False)],
    ids=["drawn", "names stable", "names the canary", "steered"],
)
def test_a_request_is_assigned_if_its_target_was_drawn(
    version: int, parameters: dict[str, Any], *, assigned: bool
) -> None:
    view = Endpoints(Mock(find=Mock(return_value=Mock()), ready_versions=Mock(return_value=(3, 4))))
    tried = target(weight=0.5, when=[{"parameters": {"n": 3}}])
    view.show(DeclaredEndpoints({"e": read_endpoint({"name": "e", "targets": [STABLE, tried]})}, 1))
    request = OutgoingRequest(model="e", inputs=(), version=version, parameters=parameters)

    view.choose(request, "")

    assert request.assigned is assigned


def test_a_process_that_was_stopped_asks_no_canary() -> None:
    """It has missed what was changed meanwhile, and reads requests before it hears of that."""
    catalog = Mock(find=Mock(return_value=Mock()), ready_versions=Mock(return_value=(3, 4)))
    view = Endpoints(catalog)
    view.show(DeclaredEndpoints({"e": read_endpoint({"name": "e", "targets": [STABLE, target(weight=1)]})}, 1))
    view.heard_s = time.monotonic()
    request = OutgoingRequest(id="r", model="e", inputs=())
    assert view.choose(request, "")
    assert request.version == 4

    view.heard_s -= DEAF_AFTER_S
    request = OutgoingRequest(id="r", model="e", inputs=())
    assert view.choose(request, "")
    assert (request.version, view.unheard) == (3, 1)
    with pytest.raises(BrokerUnavailable, match="answers only by its stable target, m:3"):
        view.choose(OutgoingRequest(id="r", model="e", inputs=(), version=4), "")
