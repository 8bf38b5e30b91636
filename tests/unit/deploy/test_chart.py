"""The chart, rendered by Helm with several values files: valid for Kubernetes, true to the code, and as asked."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from qinfer.core.settings import unknown_variables
from scripts import generate_deployment as deployment
from scripts.generate_deployment import CHART
from tests.support.deploy import manifest_rules as rules
from tests.support.deploy.kubernetes import (
    CASES,
    containers,
    environment,
    helm,
    is_hook,
    named,
    of_kind,
    pods,
    references,
    refusal,
    render,
    rendered,
)

EVERYTHING = CHART / "ci" / "everything-values.yaml"
KEDA = CHART / "ci" / "keda-values.yaml"


@pytest.fixture(params=CASES, ids=lambda path: path.name.removesuffix("-values.yaml"))
def case(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_everything_holds(case: Path) -> None:
    assert rules.all_problems(rendered(case)) == []


def test_names_of_one_kind_differ(case: Path) -> None:
    found = [(one["kind"], one["metadata"]["name"]) for one in rendered(case)]

    assert len(set(found)) == len(found)


def test_what_pods_need_is_there_or_the_operators(case: Path) -> None:
    """Each Secret, ConfigMap, account and claim is of the chart, or named in the values."""
    objects = rendered(case)
    values = case.read_text()
    made = {(one["kind"], one["metadata"]["name"]) for one in objects}

    assert [one for one in references(objects) if one[:2] not in made and one.name not in values] == []


def test_keys_of_own_secrets_are_there(case: Path) -> None:
    objects = rendered(case)
    own = {one["metadata"]["name"]: one["stringData"] for one in of_kind(objects, "Secret")}
    needed = [one for one in references(objects) if one.kind == "Secret" and one.name in own]

    assert [one for one in needed if one.key not in own[one.name]] == []


def test_the_hook_needs_nothing_of_the_release(case: Path) -> None:
    """Before an install none of it is there yet."""
    objects = rendered(case)
    hooks = [one for one in objects if is_hook(one)]
    others = {(one["kind"], one["metadata"]["name"]) for one in objects if not is_hook(one)}

    assert of_kind(hooks, "Job")
    assert [one for one in references(hooks) if one[:2] in others] == []


def test_hooks_can_run_again(case: Path) -> None:
    """What an earlier run left is deleted first, and what the Job needs comes before it."""
    hooks = [one["metadata"] for one in rendered(case) if is_hook(one)]
    weights = {one["name"]: int(one["annotations"]["helm.sh/hook-weight"]) for one in hooks}
    (job,) = [one["metadata"]["name"] for one in of_kind(rendered(case), "Job")]

    assert all("before-hook-creation" in one["annotations"]["helm.sh/hook-delete-policy"] for one in hooks)
    assert all(one["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade" for one in hooks)
    assert len([weight for weight in weights.values() if weight >= weights[job]]) == 1


def test_rendering_depends_on_the_values_alone() -> None:
    """Not on the cluster, the time, chance, or whether it is an upgrade."""
    templates = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    command = [str(helm()), "template", "prod", str(CHART), "--namespace", "serving", "--values", str(EVERYTHING)]
    texts = {
        subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout
        for more in (
            ["--kube-version", "1.25.0"],
            ["--kube-version", "1.34.0", "--is-upgrade", "--api-versions", "keda.sh/v1alpha1"],
        )
    }

    assert len(texts) == 1
    assert not re.search(r"\b(lookup|Capabilities|rand\w+|now|gen\w+Cert|genCA|uuidv4)\b", templates)


def test_helm_lints(case: Path) -> None:
    command = [str(helm()), "lint", str(CHART), "--strict", "--values", str(case)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout


def test_services_give_no_variables_to_pods() -> None:
    """Kubernetes tells pods of Services in variables, which begin with QINFER_ here: programs refuse those."""
    objects = rendered(CHART / "ci" / "minimal-values.yaml", release="qinfer")
    names = [one["metadata"]["name"].upper().replace("-", "_") for one in of_kind(objects, "Service")]

    assert all(unknown_variables([f"{name}_SERVICE_HOST"]) for name in names)
    assert not any(template["spec"]["enableServiceLinks"] for _, template in pods(objects))


def test_all_templates_are_tried() -> None:
    """`everything` renders something of each file of the chart."""
    text = deployment.template(helm(), EVERYTHING)
    parts = {path.name for path in (CHART / "templates").glob("*.yaml")}

    assert parts == set(re.findall(r"^# Source: qinfer/templates/(\S+)", text, re.MULTILINE))


def test_workers_load_the_models_of_their_group() -> None:
    objects = rendered(CHART / "ci" / "gpu-values.yaml")
    models = {
        one["metadata"]["name"]: rules.settings_of(objects, container).worker.models
        for one, _, container in containers(objects)
        if container["name"] == "worker"
    }

    assert models == {"prod-qinfer-worker-cpu": ("bert-*", "digits"), "prod-qinfer-worker-gpu": ("resnet50",)}


def test_gpus() -> None:
    objects = rendered(CHART / "ci" / "gpu-values.yaml")
    spec = named(objects, "Deployment", "-worker-gpu")["spec"]["template"]["spec"]
    cpu = named(objects, "Deployment", "-worker-cpu")["spec"]["template"]["spec"]
    (container,) = spec["containers"]

    assert container["resources"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": 1}
    assert container["image"] == "qinfer-worker:0.1.0-cuda"
    assert (spec["runtimeClassName"], spec["tolerations"][-1]["key"]) == ("nvidia", "nvidia.com/gpu")
    assert spec["terminationGracePeriodSeconds"] == 150
    assert "runtimeClassName" not in cpu
    assert "tolerations" not in cpu


def test_settings_are_what_programs_read() -> None:
    objects = rendered(EVERYTHING)
    settings = rules.settings_of(
        objects, named(objects, "Deployment", "-bulk")["spec"]["template"]["spec"]["containers"][0]
    )

    assert settings.limits.lane_capacity == 20000
    assert settings.redis.max_buffered_bytes == 268435456
    assert settings.webhooks.allow == ("*.example.org",)
    assert settings.repository.poll_s == 2.5
    assert not settings.allow_client_shm
    assert settings.stores.allow == ("s3://data",)


def test_false_and_zero_override_defaults(tmp_path: Path) -> None:
    """Helm's own merge would take the default for each."""
    values = {
        "workerDefaults": {
            "autoscaling": {"enabled": True, "minReplicas": 3, "models": ["a"], "behavior": {}},
            "drainS": 5,
        },
        "workerGroups": [
            {"name": "off", "autoscaling": {"enabled": False}, "replicas": 0},
            {"name": "zero", "autoscaling": {"minReplicas": 0}, "drainS": 0},
        ],
    }
    objects = render(tmp_path, values)
    (scaled,) = of_kind(objects, "ScaledObject")

    assert named(objects, "Deployment", "-off")["spec"]["replicas"] == 0
    assert (scaled["metadata"]["name"], scaled["spec"]["minReplicaCount"]) == ("prod-qinfer-worker-zero", 0)
    assert named(objects, "Deployment", "-zero")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 30


def test_workers_without_room_for_one_more_are_replaced(tmp_path: Path) -> None:
    """The default's rollingUpdate does not stay beside Recreate, which Kubernetes would refuse."""
    objects = render(tmp_path, {"workerGroups": [{"name": "a", "strategy": {"type": "Recreate"}}]})

    assert named(objects, "Deployment", "-a")["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("name", ["sentinel", "cluster", "minimal"])
def test_redis_urls_reach_the_programs(name: str) -> None:
    """Through a Secret, own or given; a URL of Sentinels or of a cluster is one that qinfer reads."""
    objects = rendered(CHART / "ci" / f"{name}-values.yaml")
    deployed = named(objects, "Deployment", "-gateway")["spec"]["template"]["spec"]["containers"][0]
    variables = {entry["name"]: entry.get("valueFrom") for entry in deployed["env"]}
    settings = environment(objects, deployed)

    assert variables["QINFER_REDIS__URL"]["secretKeyRef"]["key"] == "url"
    assert settings["QINFER_REDIS__CLUSTER"] == str(name == "cluster").lower()
    assert ("QINFER_REDIS__SENTINEL_PASSWORD" in variables) == (name == "sentinel")
    assert ("QINFER_BULK__BROKER_URL" in variables) == (name == "cluster")


def test_programs_get_the_secrets_that_they_use(tmp_path: Path) -> None:
    """Workers run models' code: the webhooks' secret and Celery's broker are not theirs."""
    more = tmp_path / "broker.yaml"
    more.write_text("bulk: {broker: {existingSecret: {name: tasks}}}")
    objects = rendered(EVERYTHING, more)
    got: dict[str, set[str]] = {"QINFER_WEBHOOKS__SECRET": set(), "QINFER_BULK__BROKER_URL": set()}
    for one, _, container in containers(objects):
        for name in got.keys() & environment(objects, container).keys():
            got[name].add(one["metadata"]["labels"]["app.kubernetes.io/component"])

    assert got == {"QINFER_WEBHOOKS__SECRET": {"gateway"}, "QINFER_BULK__BROKER_URL": {"gateway", "bulk"}}


def test_no_secret_is_in_anything_but_secrets() -> None:
    for name in ("sentinel", "cluster"):
        objects = rendered(CHART / "ci" / f"{name}-values.yaml")
        text = json.dumps([one for one in objects if one["kind"] != "Secret"])

        assert ":secret@" not in text
        assert '"other"' not in text


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"redis": {"existingSecret": {"name": ""}}}, "set redis.existingSecret.name"),
        ({"redis": {"url": "redis://queue:6379/0"}}, "both set"),
        ({"repository": {"path": ""}}, "set repository.path"),
        ({"auth": {"mode": ""}}, "set auth.mode"),
        ({"auth": {"mode": "keys"}}, "auth.existingSecret.name"),
        ({"redis": {"cluster": True}, "bulk": {"enabled": True}}, "Celery can't use one"),
        ({"gateway": {"terminationGracePeriodSeconds": 20}}, "at least 50"),
        ({"workerGroups": [{"name": "a", "drainS": 300, "terminationGracePeriodSeconds": 60}]}, "at least 330"),
        ({"workerGroups": [{"name": "a"}, {"name": "a"}]}, "two groups"),
        ({"workerGroups": [{"name": "a", "autoscaling": {"enabled": True}}]}, "is a pattern"),
        ({"workerGroups": [{"name": "a", "autoscaling": {"enabled": True, "signal": "prometheus"}}]}, "serverAddress"),
        (
            {"workerGroups": [{"name": "a", "autoscaling": {"enabled": True, "signal": "redis-streams"}}]},
            "name the lanes",
        ),
        (
            {"workerGroups": [{"name": "a", "models": ["m"], "autoscaling": {"enabled": True, "minReplicas": 5}}]},
            "minReplicas is above",
        ),
        (
            {
                "auth": {"mode": "keys", "existingSecret": {"name": "k"}},
                "workerGroups": [{"name": "a", "models": ["m"], "autoscaling": {"enabled": True}}],
            },
            "an API key for the backlog",
        ),
        ({"bridges": [{"name": "a", "existingSecret": {"name": "r"}}] * 2}, "two have the name"),
        ({"bridges": [{"name": "a"}]}, "has no routes"),
        ({"bridges": [{"name": "a", "existingSecret": {"name": "r"}, "config": {"retry_s": 5}}]}, "keep one"),
        (
            {"bridges": [{"name": "a", "existingSecret": {"name": "r"}, "terminationGracePeriodSeconds": 9}]},
            "at least 60",
        ),
        ({"gatway": {}}, "Additional property gatway is not allowed"),
        ({"settings": {"QINFER_LIMITS__LANE_CAPACTIY": 1}}, "QINFER_LIMITS__LANE_CAPACTIY"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_work_is_refused(tmp_path: Path, values: dict[str, Any], what: str) -> None:
    assert what in refusal(tmp_path, values)


def test_nobody_but_gateways_is_called() -> None:
    objects = rendered(EVERYTHING)
    policy = named(objects, "NetworkPolicy", "-workers")["spec"]
    components = {template["metadata"]["labels"]["app.kubernetes.io/component"] for _, template in pods(objects)}

    assert policy["ingress"] == []
    assert {"gateway", *policy["podSelector"]["matchExpressions"][0]["values"]} == components


def test_mode_explicit_has_no_sync(tmp_path: Path) -> None:
    """It would load every model."""
    assert of_kind(render(tmp_path, {"repository": {"controlMode": "explicit", "loadModels": ["a"]}}), "Job") == []


def test_notes_tell_what_zero_needs() -> None:
    """Not a part of `helm template`; the text is there, and names a parameter that models have."""
    notes = (CHART / "templates" / "NOTES.txt").read_text()

    assert "qinfer.min_workers" in notes
    assert rules.is_command(["qinfer", "status"])
