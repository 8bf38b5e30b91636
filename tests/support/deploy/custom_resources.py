"""The rules of the custom resources that the deployments use, for they are not in Kubernetes' own schemas.

Written by hand, of the fields that are used; what else a CRD may have is refused here.

- KEDA: `keda/templates/crds/crd-scaledobjects.yaml` of github.com/kedacore/charts at cf0b402 and
  `config/crd/bases/keda.sh_triggerauthentications.yaml` of github.com/kedacore/keda at 059610c, with the newer
  `fallback.behavior`; what triggers know: `pkg/scalers/metrics_api_scaler.go`, `prometheus_scaler.go` and
  `redis_streams_scaler.go` of kedacore/keda, and its package `authentication`.
- Prometheus operator: `example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml` (0.76.0) and
  `monitoring.coreos.com_servicemonitors.yaml` of github.com/prometheus-operator/prometheus-operator at c5bfb15.
"""

import re
from typing import Any

import jsonschema

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_DURATION: Schema = {"type": "string", "pattern": r"^(0|(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$"}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": {name.rstrip("_"): schema for name, schema in properties.items()},
    }


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _resource(version: str, kind: str, spec: Schema) -> Schema:
    metadata = _object(("name",), name=_TEXT, namespace=_TEXT, labels=_TEXTS, annotations=_TEXTS)
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


_POLICY = _object(
    ("periodSeconds", "type", "value"),
    periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
    type={"enum": ["Pods", "Percent"]},
    value={"type": "integer", "minimum": 1},
)
_RULES = _object(
    policies=_list(_POLICY),
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
)
_TRIGGER = _object(
    ("metadata", "type"),
    type=_TEXT,
    name=_TEXT,
    metadata=_TEXTS,
    metricType={"enum": ["Value", "AverageValue", "Utilization"]},
    useCachedMetrics={"type": "boolean"},
    authenticationRef=_object(("name",), name=_TEXT, kind=_TEXT),
)
_SCALED_OBJECT = _object(
    ("scaleTargetRef", "triggers"),
    scaleTargetRef=_object(("name",), apiVersion=_TEXT, kind=_TEXT, name=_TEXT, envSourceContainerName=_TEXT),
    pollingInterval=_COUNT,
    cooldownPeriod=_COUNT,
    initialCooldownPeriod=_COUNT,
    idleReplicaCount=_COUNT,
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    fallback=_object(
        ("failureThreshold", "replicas"),
        failureThreshold=_COUNT,
        replicas=_COUNT,
        behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
    ),
    advanced=_object(
        restoreToOriginalReplicaCount={"type": "boolean"},
        scalingModifiers=_object(
            formula=_TEXT, target=_TEXT, activationTarget=_TEXT, metricType={"enum": ["Value", "AverageValue"]}
        ),
        horizontalPodAutoscalerConfig=_object(name=_TEXT, behavior=_object(scaleUp=_RULES, scaleDown=_RULES)),
    ),
    triggers=_list(_TRIGGER) | {"minItems": 1},
)
_REFERENCE = _object(("parameter", "name", "key"), parameter=_TEXT, name=_TEXT, key=_TEXT)
_RELABELING = _object(
    action={"enum": ["replace", "keep", "drop", "labeldrop", "labelkeep", "labelmap", "hashmod"]},
    sourceLabels=_list(_TEXT),
    separator=_TEXT,
    targetLabel=_TEXT,
    regex=_TEXT,
    replacement=_TEXT,
)
_ENDPOINT = _object(
    port=_TEXT,
    path=_TEXT,
    scheme={"enum": ["http", "https"]},
    params={"type": "object", "additionalProperties": _list(_TEXT)},
    interval=_DURATION,
    scrapeTimeout=_DURATION,
    honorLabels={"type": "boolean"},
    relabelings=_list(_RELABELING),
    metricRelabelings=_list(_RELABELING),
)
_RULE = _object(
    ("expr",),
    alert=_TEXT,
    record=_TEXT,
    expr={"type": ["string", "integer"]},
    for_=_DURATION,
    keep_firing_for=_DURATION,
    labels=_TEXTS,
    annotations=_TEXTS,
)

SCHEMAS: dict[str, Schema] = {
    "ScaledObject": _resource("keda.sh/v1alpha1", "ScaledObject", _SCALED_OBJECT),
    "TriggerAuthentication": _resource(
        "keda.sh/v1alpha1", "TriggerAuthentication", _object(("secretTargetRef",), secretTargetRef=_list(_REFERENCE))
    ),
    "ServiceMonitor": _resource(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        _object(("selector", "endpoints"), selector=_object(matchLabels=_TEXTS), endpoints=_list(_ENDPOINT)),
    ),
    "PrometheusRule": _resource(
        "monitoring.coreos.com/v1",
        "PrometheusRule",
        _object(
            ("groups",),
            groups=_list(
                _object(("name", "rules"), name=_TEXT, interval=_DURATION, rules=_list(_RULE) | {"minItems": 1})
            )
            | {"minItems": 1},
        ),
    ),
}

_REDIS = {"address", "addresses", "stream", "streamLength", "databaseIndex", "enableTLS"}
TRIGGERS: dict[str, tuple[set[str], set[str]]] = {
    "metrics-api": (
        {"url", "valueLocation", "targetValue"},
        {"activationTargetValue", "authMode", "unsafeSsl", "format"},
    ),
    "prometheus": (
        {"serverAddress", "query", "threshold", "ignoreNullValues"},
        {"activationThreshold", "authModes", "unsafeSsl"},
    ),
    "redis-streams": ({"address", "stream", "streamLength"}, _REDIS),
    "redis-cluster-streams": ({"addresses", "stream", "streamLength"}, _REDIS - {"databaseIndex"}),
    "redis-sentinel-streams": ({"addresses", "stream", "streamLength", "sentinelMaster"}, _REDIS),
}
"""Of each trigger, what it must have here, and what it may have. `consumerGroup` and `lagCount` are in none: with them
KEDA counts what waits only, or nothing at all, and takes workers away from what they execute."""

_NAME = re.compile(r"^[A-Za-z_]\w*$")


def problems(one: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a custom resource."""
    validator = jsonschema.Draft7Validator(SCHEMAS[one["kind"]])
    found = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(one)]
    return found or (_scaling_problems(one["spec"]) if one["kind"] == "ScaledObject" else [])


def _scaling_problems(spec: dict[str, Any]) -> list[str]:
    found = []
    for trigger in spec["triggers"]:
        needed, known = TRIGGERS.get(trigger["type"], (set(), set()))
        given = set(trigger["metadata"])
        found += [f"{trigger['type']} lacks {name}" for name in sorted(needed - given)]
        found += [f"{trigger['type']} has {name}" for name in sorted(given - needed - known)]
        if trigger["metadata"].get("ignoreNullValues", "false") != "false":
            found.append("an empty answer of Prometheus would count as no work")
        if trigger.get("metricType") != "AverageValue":
            found.append("a fallback needs AverageValue")  # KEDA: "only supports scalers whose target is AverageValue"
    names = [trigger.get("name", "") for trigger in spec["triggers"]]
    if len(set(names)) != len(names) or not all(map(_NAME.match, names)):
        found.append(f"names of triggers must differ and be identifiers: {names}")
    modifiers = spec.get("advanced", {}).get("scalingModifiers")
    if modifiers and set(re.findall(r"[A-Za-z_]\w*", modifiers["formula"])) != set(names):
        found.append(f"the formula {modifiers['formula']} is not of the triggers {names}")
    if modifiers and not modifiers.get("target"):
        found.append("a formula needs a target")
    if spec["minReplicaCount"] > spec["maxReplicaCount"]:
        found.append("the minimum is above the maximum")
    return found
