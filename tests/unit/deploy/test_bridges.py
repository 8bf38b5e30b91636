"""Bridges of the chart, and routes that they can read."""

import json
from typing import Any

import pytest

from qinfer_workers.bridge.config import BridgeConfig
from scripts.generate_deployment import CHART
from tests.support.deploy import manifest_rules as rules
from tests.support.deploy.kubernetes import Object, environment, named, of_kind, refusal, render, rendered

BRIDGES = CHART / "ci" / "bridge-values.yaml"
PASSWORD = "amqp://qinfer:hunter2@rabbitmq//"


def container_of(objects: Any, ending: str) -> Object:
    (found,) = named(objects, "Deployment", ending)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def config(url: str = "amqp://qinfer:${PASSWORD}@rabbitmq//", **source: Any) -> dict[str, Any]:
    return {"routes": [{"name": "a", "model": "m", "source": {"url": url, "queue": "tasks", **source}}]}


def test_bridges_read_their_routes() -> None:
    """One from a ConfigMap that the chart makes, with a password of a Secret; one from a Secret with the file."""
    objects = rendered(BRIDGES)
    made, own = container_of(objects, "-bridge-orders"), container_of(objects, "-bridge-own-file")

    assert rules.bridge_problems(objects) == []
    assert (made["args"][2], own["args"][2]) == ("/etc/qinfer/bridge/routes.yaml", "/etc/qinfer/bridge/routes.toml")
    assert "BRIDGE_PASSWORD" in environment(objects, made)
    assert "BRIDGE_PASSWORD" not in environment(objects, own)
    assert named(objects, "Deployment", "-orders")["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"secretEnv": {}}, "the environment has no PASSWORD"),
        ({"config": config(queue="")}, "source.queue"),
        ({"config": config(prefetch=0)}, "source.prefetch"),
    ],
)
def test_faults_in_routes_are_found(tmp_path: Any, changed: dict[str, Any], what: str) -> None:
    """By the rules that all manifests are held against."""
    bridge = {"name": "a", "config": config(), "secretEnv": {"PASSWORD": {"name": "s", "key": "k"}}}

    assert rules.bridge_problems(render(tmp_path, {"bridges": [bridge]})) == []
    assert what in "\n".join(rules.bridge_problems(render(tmp_path, {"bridges": [bridge | changed]})))


@pytest.mark.parametrize(
    "given",
    [
        config(PASSWORD),
        config("amqp://qinfer:x${PASSWORD}@rabbitmq//"),
        config("amqp://one//;" + PASSWORD),
        config("redis://:hunter2@queue/0"),
        config("redis://queue/0", options={"sentinel_kwargs": {"password": "hunter2"}}),
        config(
            "sqs://", options={"predefined_queues": {"tasks": {"url": "https://q", "secret_access_key": "hunter2"}}}
        ),
        config("confluentkafka://queue", options={"sasl.password": "hunter2"}),
        config("redis://queue/0?password=hunter2&health_check_interval=10"),
    ],
)
def test_a_password_does_not_get_into_a_config_map(tmp_path: Any, given: dict[str, Any]) -> None:
    """Nor into the release; the message does not show it."""
    text = refusal(tmp_path, {"bridges": [{"name": "a", "config": given}]})

    assert "a ConfigMap is no place for one" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    "url",
    [
        "amqp://rabbitmq:5672//",
        "sqs://",
        "amqp://u:${A}@h//",
        "redis://:${A}@h:6379/0",
        "${URL}",
        "redis://h/0?password=${A}&timeout=3",
        "amqp://secrets-queue//?heartbeat=30",
    ],
)
def test_urls_without_a_password_pass(tmp_path: Any, url: str) -> None:
    assert of_kind(render(tmp_path, {"bridges": [{"name": "a", "config": config(url)}]}), "ConfigMap")


def test_brokers_may_be_reached_and_nothing_else() -> None:
    """Beside what all programs may; only of that bridge."""
    objects = rendered(BRIDGES)
    orders, own = (named(objects, "NetworkPolicy", ending)["spec"] for ending in ("-orders", "-own-file"))

    assert [each["egress"][0]["ports"] for each in (orders, own)] == [
        [{"protocol": "TCP", "port": 5672}],
        [{"protocol": "TCP", "port": 6379}],
    ]
    assert ("to" in orders["egress"][0], "to" in own["egress"][0]) == (False, True)
    for spec, ending in ((orders, "-orders"), (own, "-own-file")):
        labels = named(objects, "Deployment", ending)["spec"]["template"]["metadata"]["labels"]
        assert spec["podSelector"]["matchLabels"].items() <= labels.items()
        assert spec["podSelector"]["matchLabels"]["qinfer.dev/bridge"] in ending


def test_no_policy_for_bridges_where_all_may_go_anywhere(tmp_path: Any) -> None:
    """One would close what `egress: []` leaves open."""
    values = {"networkPolicy": {"enabled": True}, "bridges": [{"name": "a", "existingSecret": {"name": "r"}}]}
    policies = of_kind(render(tmp_path, values), "NetworkPolicy")

    assert [each["spec"]["policyTypes"] for each in policies] == [["Ingress"], ["Ingress"]]


def test_the_schema_knows_the_fields_of_the_file() -> None:
    """A new one would be refused by Helm."""
    document = json.loads((CHART / "values.schema.json").read_text())

    assert set(document["definitions"]["bridgeConfig"]["properties"]) == set(BridgeConfig.model_fields)
