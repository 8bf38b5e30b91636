"""The chart's values: the schema knows each of them, refuses wrong ones, and names the settings that there are."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from qinfer.core.settings import WorkerSettings, variable_names
from scripts import generate_deployment as deployment
from scripts.generate_deployment import CHART, MANAGED, SCHEMA
from tests.support.deploy.kubernetes import CASES

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
DOCUMENT: dict[str, Any] = json.loads(SCHEMA.read_text())
VALIDATOR = jsonschema.Draft7Validator(DOCUMENT)


def errors(values: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(values)]


def properties(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the properties of an object's schema, through a reference."""
    if "$ref" in schema:
        schema = DOCUMENT["definitions"][schema["$ref"].rpartition("/")[2]]
    found: dict[str, Any] = schema.get("properties", {})
    return found


def differences(schema: dict[str, Any], values: Any, path: str = "") -> list[str]:
    """Returns what the schema knows and values.yaml does not show, or the reverse."""
    known = {} if schema.get("$ref") == "#/definitions/behavior" else properties(schema)  # Kubernetes' own, in part
    if not known or not isinstance(values, dict) or not values:
        return []
    found = [f"{path}.{name}" for name in set(known) ^ set(values)]
    for name in set(known) & set(values):
        found += differences(known[name], values[name], f"{path}.{name}")
    return found


def test_the_schema_is_one() -> None:
    jsonschema.Draft7Validator.check_schema(DOCUMENT)


def test_copies_are_up_to_date() -> None:
    """`python -m scripts.generate_deployment` was run after the last change of a setting or an alert."""
    stale = [str(path) for path, text in deployment.copies().items() if not path.exists() or path.read_text() != text]

    assert stale == [], "run .venv/bin/python -m scripts.generate_deployment"


def test_no_rules_are_left_over() -> None:
    assert {path.name for path in (CHART / "rules").iterdir()} == {path.name for path in deployment.RULES.glob("*.yml")}


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert f'version = "{chart["appVersion"]}"' in (deployment.ROOT / "pyproject.toml").read_text()


def test_values_show_all_that_can_be_set() -> None:
    """Each name of the schema has a default in values.yaml, and the reverse."""
    assert set(differences(DOCUMENT, VALUES)) - {".global"} == set()  # that of charts above this one


def test_defaults_and_cases_are_accepted() -> None:
    assert {"values.yaml": errors(VALUES)} | {
        path.name: errors(yaml.safe_load(path.read_text())) for path in CASES
    } == {name: [] for name in ["values.yaml", *(path.name for path in CASES)]}


def test_managed_settings_exist() -> None:
    assert set(variable_names()) >= MANAGED


@pytest.mark.parametrize(
    "values",
    [
        {"gatway": {}},
        {"gateway": {"replica": 2}},
        {"gateway": {"replicas": 0}},
        {"gateway": {"replicas": "2"}},
        {"image": {"digest": "sha256:abc"}},
        {"image": {"pullPolicy": "Sometimes"}},
        {"redis": {"url": "redis-host:6379"}},
        {"redis": {"existingSecret": "qinfer-redis"}},
        {"repository": {"controlMode": "auto"}},
        {"auth": {"mode": "basic"}},
        {"settings": {"QINFER_LIMITS__LANE_CAPACTIY": 1}},
        {"settings": {"QINFER_REDIS__URL": "redis://queue:6379/0"}},
        {"settings": {"QINFER_WEBHOOKS__SECRET": "in the open"}},
        {"settings": {"QINFER_LIMITS__LANE_CAPACITY": {"value": 1}}},
        {"secretSettings": {"QINFER_LIMITS__LANE_CAPACITY": {"name": "a", "key": "b"}}},
        {"secretSettings": {"QINFER_WEBHOOKS__SECRET": {"name": "a"}}},
        {"extraEnv": [{"name": "QINFER_LOG__LEVEL", "value": "DEBUG"}]},
        {"workerGroups": [{"models": ["*"]}]},
        {"workerGroups": [{"name": "GPU"}]},
        {"workerGroups": [{"name": "far-too-long-a-name"}]},
        {"workerGroups": [{"name": "a", "models": []}]},
        {"workerGroups": [{"name": "a", "models": "*"}]},
        {"workerGroups": [{"name": "a", "gpus": 1}]},
        {"workerGroups": [{"name": "a", "gpu": {"count": -1}}]},
        {"workerGroups": [{"name": "a", "resources": {"limits": {"memory": "4 GB"}}}]},
        {"workerGroups": [{"name": "a", "autoscaling": {"signal": "lagCount"}}]},
        {"workerGroups": [{"name": "a", "autoscaling": {"targetS": 0}}]},
        {"workerGroups": [{"name": "a", "autoscaling": {"maxReplicas": 0}}]},
        {"workerGroups": [{"name": "a", "autoscaling": {"fallback": {"behavior": "none"}}}]},
        {"workerGroups": [{"name": "a", "autoscaling": {"redisStreams": {"lanes": [{"model": "digits"}]}}}]},
        {"workerGroups": [{"name": "a", "autoscaling": {"redisStreams": {"lagCount": 5}}}]},
        {"bulk": {"broker": {"url": "amqp://queue"}}},
        {"bulk": {"allow": ["bucket/folder"]}},
        {"bulk": {"beat": {}}},
        {"bulk": {"settings": {"QINFER_BULK__BEAT": True}}},
        {"bridges": [{"existingSecret": {"name": "routes"}}]},
        {"bridges": [{"name": "Orders"}]},
        {"bridges": [{"name": "a", "existingSecret": {"name": "r", "key": "routes.json"}}]},
        {"bridges": [{"name": "a", "config": {"routes": []}}]},
        {"bridges": [{"name": "a", "config": {"metrics": 9102}}]},
        {"bridges": [{"name": "a", "config": {"routes": [{"name": "a b", "model": "m", "source": {}}]}}]},
        {"bridges": [{"name": "a", "secretEnv": {"PASSWORD": "in the open"}}]},
        {"bridges": [{"name": "a", "secretEnv": {"QINFER_REDIS__URL": {"name": "a", "key": "b"}}}]},
        {"bridges": [{"name": "a", "egress": {"ports": ["amqp"]}}]},
        {"bridges": [{"name": "a", "egress": {"ports": []}}]},
        {"ingress": {"hosts": [{"path": "/"}]}},
        {"serviceMonitor": {"interval": "15"}},
        {"podSecurity": {"runAsUser": 0}},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    assert errors(values)


def test_values_of_the_how_to_are_accepted() -> None:
    text = (deployment.ROOT / "docs" / "how-to" / "run-on-kubernetes.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
    whole = [{"workerGroups": [{"name": "a", **block}]} if "autoscaling" in block else block for block in blocks]

    assert len(whole) > 5
    assert [found for block in whole if (found := errors(block))] == []


def test_the_defaults_of_workers_are_those_of_the_settings() -> None:
    assert tuple(VALUES["workerDefaults"]["models"]) == WorkerSettings().models


def test_a_user_of_the_images_owns_the_pods() -> None:
    """The images' user is the one that the pods run as, or files of the images could not be read."""
    dockerfile = Path(deployment.ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    user = VALUES["podSecurity"]["runAsUser"], VALUES["podSecurity"]["runAsGroup"]

    assert f"USER {user[0]}:{user[1]}" in dockerfile
