"""The kustomize base is the chart's, and each overlay what the chart makes of the values beside it."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import generate_deployment as deployment
from scripts.generate_deployment import KUSTOMIZE
from tests.support.deploy import manifest_rules as rules
from tests.support.deploy.kubernetes import (
    OVERLAYS,
    Object,
    base_files,
    helm,
    kustomized,
    named,
    of_kind,
    parse,
    plain,
    references,
)

BASE = KUSTOMIZE / "base"

EXTRAS = {
    "dev": {
        ("Secret", "qinfer-redis"),
        ("Service", "qinfer-redis"),
        ("StatefulSet", "qinfer-redis"),
        ("PersistentVolumeClaim", "qinfer-models"),
    }
}
"""What overlays have beyond the chart."""

YOURS = {("Secret", "qinfer-redis"), ("Secret", "qinfer-keys"), ("PersistentVolumeClaim", "qinfer-models")}
"""What whoever applies them makes first."""


def by_name(objects: tuple[Object, ...]) -> dict[tuple[str, str], Object]:
    return {(one["kind"], one["metadata"]["name"]): plain(one) for one in objects}


@pytest.fixture(params=OVERLAYS, ids=lambda path: path.name)
def overlay(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_the_base_holds() -> None:
    assert rules.all_problems(base_files(), "qinfer") == []


def test_the_base_needs_what_the_how_to_says() -> None:
    made = {(one["kind"], one["metadata"]["name"]) for one in base_files()}

    assert {one[:2] for one in references(base_files())} - made == YOURS


Change = Callable[[Object, Object], object]
CHANGES: dict[str, Change] = {
    "'bogus' was unexpected": lambda spec, _: spec.update(bogus=1),
    "python -m qinfer_api.nothing": lambda _, container: container.update(args=["python", "-m", "qinfer_api.nothing"]),
    "no route /v2/health/fine": lambda _, container: container["readinessProbe"]["httpGet"].update(
        path="/v2/health/fine"
    ),
    "the gateway listens on": lambda _, container: container["ports"][0].update(containerPort=9000),
    "20 s for 31.0 s": lambda spec, _: spec.update(terminationGracePeriodSeconds=20),
    "can't write '/tmp'": lambda _, container: container["volumeMounts"].pop(0),
    "a token, or variables": lambda spec, _: spec.update(enableServiceLinks=True),
    "'readOnlyRootFilesystem': False": lambda _, container: container["securityContext"].update(
        readOnlyRootFilesystem=False
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_rules_find_faults(what: str) -> None:
    """What holds above could fail: each of these faults is found."""
    objects = copy.deepcopy(base_files())
    spec = named(objects, "Deployment", "-gateway")["spec"]["template"]["spec"]
    CHANGES[what](spec, spec["containers"][0])

    assert what in "\n".join(rules.all_problems(objects, "qinfer"))


def test_files_are_those_of_the_chart() -> None:
    made = deployment.kustomize(helm())
    stale = [str(path) for path, text in made.items() if not path.exists() or path.read_text() != text]

    assert stale == [], "run .venv/bin/python -m scripts.generate_deployment"
    assert {path.name for path in BASE.glob("*.yaml")} - {path.name for path in made if path.parent == BASE} == {
        "kustomization.yaml",
        "values.yaml",
    }


def test_overlays_are_what_the_chart_makes(overlay: Path) -> None:
    chart = parse(deployment.template(helm(), BASE / "values.yaml", overlay / "values.yaml"))
    wanted = by_name(tuple(one for one in chart if "helm.sh/hook" not in one["metadata"].get("annotations", {})))
    extras = EXTRAS.get(overlay.name, set())

    made = by_name(kustomized(overlay))

    assert made.keys() - wanted.keys() == extras
    assert {name: one for name, one in made.items() if name not in extras} == wanted


def test_overlays_hold(overlay: Path) -> None:
    objects = kustomized(overlay)

    assert rules.all_problems(objects, "qinfer") == []
    assert len({one["metadata"]["namespace"] for one in objects}) == 1


def test_the_base_is_rendered_as_it_lies() -> None:
    assert by_name(kustomized(BASE)) == by_name(base_files())


def test_the_how_to_makes_the_namespace_of_dev_first() -> None:
    """No overlay brings its namespace, and nothing can be applied without it."""
    text = (deployment.ROOT / "docs" / "how-to" / "run-on-kubernetes.md").read_text()
    (namespace,) = {one["metadata"]["namespace"] for one in kustomized(KUSTOMIZE / "overlays" / "dev")}

    made, applied = f"kubectl create namespace {namespace}\n", "kubectl apply -k deploy/kustomize/overlays/dev "
    assert -1 < text.find(made) < text.find(applied)


def test_models_may_come_later_in_dev() -> None:
    """Its claim is empty when it starts: gateways must look again."""
    (settings,) = of_kind(kustomized(KUSTOMIZE / "overlays" / "dev"), "ConfigMap")

    assert settings["data"]["QINFER_REPOSITORY__CONTROL_MODE"] == "poll"


def test_redis_of_dev_keeps_what_is_queued() -> None:
    (redis,) = of_kind(kustomized(KUSTOMIZE / "overlays" / "dev"), "StatefulSet")
    words = redis["spec"]["template"]["spec"]["containers"][0]["args"]

    assert (
        dict(zip(words[1::2], words[2::2], strict=True)).items()
        >= {
            "--appendonly": "yes",
            "--maxmemory-policy": "noeviction",
        }.items()
    )
