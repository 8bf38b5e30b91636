"""What the chart tells KEDA and Prometheus: whom to ask, for what, and what to do when there is no answer."""

import re

import pytest
import yaml

from qinfer.queue import keys
from qinfer.queue.entries import Lane
from qinfer_api.scaling import Backlog
from scripts import generate_deployment as deployment
from scripts.generate_deployment import CHART, ROOT
from tests.support.deploy.kubernetes import Object, named, of_kind, rendered

EVERYTHING = CHART / "ci" / "everything-values.yaml"
KEDA = CHART / "ci" / "keda-values.yaml"


def scaled(name: str) -> Object:
    spec: Object = named(rendered(KEDA), "ScaledObject", f"-worker-{name}")["spec"]
    return spec


def test_keda_asks_the_backlog() -> None:
    """By a name that also finds gateways that are not ready, with a key, for a number that the answer has."""
    (trigger,) = scaled("one")["triggers"]
    internal = named(rendered(KEDA), "Service", "-internal")

    assert trigger["metadata"]["url"] == "http://prod-qinfer-internal.serving.svc:8000/v1/models/resnet50/backlog"
    assert trigger["metadata"]["valueLocation"] in Backlog.__struct_fields__
    assert trigger["metadata"]["authMode"] == "bearer"
    assert internal["spec"]["publishNotReadyAddresses"]
    assert named(rendered(KEDA), "TriggerAuthentication", "-worker-one-backlog")["spec"] == {
        "secretTargetRef": [{"parameter": "token", "name": "qinfer-scaler", "key": "key"}]
    }


def test_keda_adds_up_the_models_of_a_group() -> None:
    modifiers = scaled("several")["advanced"]["scalingModifiers"]

    assert [trigger["name"] for trigger in scaled("several")["triggers"]] == ["m0", "m1"]
    assert (modifiers["formula"], modifiers["target"], modifiers["activationTarget"]) == ("m0 + m1", "10", "0")
    assert "scalingModifiers" not in scaled("one")["advanced"]


def test_keda_asks_prometheus_by_pattern() -> None:
    (trigger,) = scaled("metrics")["triggers"]
    query = trigger["metadata"]["query"]

    assert 'model=~"clip-.|whisper[.].*",namespace="serving"' in query
    assert trigger["metadata"]["ignoreNullValues"] == "false"
    for name in re.findall(r"qinfer_\w+", query):
        assert f"`{name}`" in (ROOT / "docs" / "reference" / "metrics.md").read_text()


def test_keda_reads_the_streams_of_the_lanes() -> None:
    streams = [trigger["metadata"]["stream"] for trigger in scaled("pinned")["triggers"]]

    assert streams == [
        keys.lane(Lane("digits", 1, "p1", 0)).decode(),
        keys.lane(Lane("digits", 1, "p2", 1)).decode(),
    ]


@pytest.mark.parametrize("name", ["one", "several", "metrics", "pinned"])
def test_keda_keeps_workers_while_it_knows_nothing(name: str) -> None:
    spec = scaled(name)

    assert spec["fallback"] == {"failureThreshold": 3, "replicas": 1, "behavior": "currentReplicasIfHigher"}
    assert spec["cooldownPeriod"] > spec["pollingInterval"]
    assert (
        spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300
    )


def test_prometheus_reads_each_series_once() -> None:
    """Each gateway's own of each; those of the installation from one target, whichever gateways there are."""
    objects = rendered(EVERYTHING)
    (process,) = named(objects, "ServiceMonitor", "-gateway")["spec"]["endpoints"]
    (cluster,) = named(objects, "ServiceMonitor", "-cluster")["spec"]["endpoints"]
    internal = named(objects, "Service", "-internal")
    changed = {one["targetLabel"]: one["replacement"] for one in cluster["relabelings"] if "targetLabel" in one}

    assert (process["params"], cluster["params"]) == ({"scope": ["process"]}, {"scope": ["cluster"]})
    assert process["port"] in {port["name"] for port in internal["spec"]["ports"]}
    assert changed["__address__"] == f"{internal['metadata']['name']}.serving.svc:8002"
    for monitor in of_kind(objects, "ServiceMonitor"):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= internal["metadata"]["labels"].items()


def test_jobs_of_prometheus_are_those_of_the_alerts() -> None:
    jobs = {
        one["replacement"]
        for monitor in of_kind(rendered(EVERYTHING), "ServiceMonitor")
        for one in monitor["spec"]["endpoints"][0]["relabelings"]
        if one.get("targetLabel") == "job"
    }
    configured = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]

    assert jobs <= {one["job_name"] for one in configured}


def test_alerts_are_those_of_deploy_prometheus() -> None:
    """With Prometheus' own braces untouched."""
    (rule,) = of_kind(rendered(EVERYTHING), "PrometheusRule")
    written = [
        group for path in sorted(deployment.RULES.glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]
    ]

    assert rule["spec"]["groups"] == written
