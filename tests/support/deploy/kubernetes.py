"""Manifests for tests: rendered by the real Helm and the real kubectl, or as they lie in the repository.

A missing binary skips the tests that need it, with the reason; `scripts/tools` fetches Helm.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from scripts import generate_deployment as deployment
from scripts.generate_deployment import CHART, KUSTOMIZE

Object = dict[str, Any]

CASES = sorted((CHART / "ci").glob("*-values.yaml"))
"""The values files that the chart is tried with."""

OVERLAYS = sorted(path.parent for path in (KUSTOMIZE / "overlays").glob("*/kustomization.yaml"))


class Reference(NamedTuple):
    """A name that a pod needs to be there: its kind, and the key of it that it needs (empty = all)."""

    kind: str
    name: str
    key: str = ""


def helm() -> Path:
    return deployment.find_helm() or pytest.skip("no helm: run scripts/tools")


def kubectl() -> Path:
    return Path(shutil.which("kubectl") or pytest.skip("no kubectl 1.25 or newer on PATH"))


@lru_cache
def rendered(*values: Path, release: str = "prod", namespace: str = "serving") -> tuple[Object, ...]:
    """Renders the chart with values files."""
    return parse(deployment.template(helm(), *values, release=release, namespace=namespace))


def render(
    tmp_path: Path, values: Mapping[str, Any], base: Path = CHART / "ci" / "minimal-values.yaml"
) -> list[Object]:
    """Renders the chart with values over those of a file."""
    own = tmp_path / "values.yaml"
    own.write_text(json.dumps(values))
    return list(parse(deployment.template(helm(), base, own, release="prod", namespace="serving")))


def refusal(tmp_path: Path, values: Mapping[str, Any], base: Path = CHART / "ci" / "minimal-values.yaml") -> str:
    """Returns what Helm says against values."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render(tmp_path, values, base)
    return str(refused.value.stderr)


@lru_cache
def kustomized(folder: Path) -> tuple[Object, ...]:
    """Renders an overlay; what kustomize warns of, such as a field that will go, is an error."""
    done = subprocess.run([str(kubectl()), "kustomize", str(folder)], check=True, capture_output=True, text=True)
    assert done.stderr == ""
    return parse(done.stdout)


def base_files() -> tuple[Object, ...]:
    """Returns the objects of the kustomize base, for which nothing is needed."""
    named = yaml.safe_load((KUSTOMIZE / "base" / "kustomization.yaml").read_text())["resources"]
    return tuple(one for name in named for one in parse((KUSTOMIZE / "base" / name).read_text()))


def parse(text: str) -> tuple[Object, ...]:
    return tuple(one for one in yaml.load_all(text, yaml.CSafeLoader) if one)


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def named(objects: Sequence[Object], kind: str, ending: str) -> Object:
    """Returns the one object of a kind whose name ends so."""
    (found,) = [one for one in of_kind(objects, kind) if one["metadata"]["name"].endswith(ending)]
    return found


def pods(objects: Sequence[Object]) -> Iterator[tuple[Object, Object]]:
    """Yields each object that has pods, and the pods' template."""
    for one in of_kind(objects, "Deployment", "StatefulSet", "Job"):
        yield one, one["spec"]["template"]


def is_qinfer(container: Object) -> bool:
    """Tells containers of qinfer from those of others, such as Redis."""
    return "qinfer" in container["image"]


def containers(objects: Sequence[Object]) -> Iterator[tuple[Object, Object, Object]]:
    """Yields (object, pod's spec, container) of qinfer's containers."""
    for one, template in pods(objects):
        for container in template["spec"]["containers"]:
            if is_qinfer(container):
                yield one, template["spec"], container


def environment(objects: Sequence[Object], container: Object) -> dict[str, str]:
    """Returns the variables that a container sees; of Secrets, which are not here, a value that fits the name."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom", []):
        if "configMapRef" in source:
            (found,) = [
                one
                for one in of_kind(objects, "ConfigMap")
                if one["metadata"]["name"] == source["configMapRef"]["name"]
            ]
            variables |= found["data"]
    for entry in container["env"]:
        variables[entry["name"]] = entry["value"] if "value" in entry else _secret_value(entry["name"])
    return variables


def _secret_value(name: str) -> str:
    return "redis://redis:6379/0" if name.endswith("URL") else "secret"


def references(objects: Sequence[Object]) -> set[Reference]:
    """Returns the Secrets, ConfigMaps, accounts and claims that pods need."""
    found: set[Reference] = set()
    for _, template in pods(objects):
        spec = template["spec"]
        if "serviceAccountName" in spec:
            found.add(Reference("ServiceAccount", spec["serviceAccountName"]))
        for container in spec["containers"]:
            found |= {
                Reference(kind, source[word]["name"])
                for source in container.get("envFrom", [])
                for word, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret"))
                if word in source
            }
            found |= {
                Reference(
                    "Secret", entry["valueFrom"]["secretKeyRef"]["name"], entry["valueFrom"]["secretKeyRef"]["key"]
                )
                for entry in container.get("env", [])
                if "valueFrom" in entry
            }
        for volume in spec.get("volumes", []):
            if "secret" in volume:
                found.add(Reference("Secret", volume["secret"]["secretName"]))
            if "configMap" in volume:
                found.add(Reference("ConfigMap", volume["configMap"]["name"]))
            if "persistentVolumeClaim" in volume:
                found.add(Reference("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
    return found


def is_hook(one: Object) -> bool:
    return "helm.sh/hook" in one["metadata"].get("annotations", {})


def plain(one: Object) -> Object:
    """Returns an object without what Helm and kustomize add each in its way."""
    copy: Object = json.loads(json.dumps(one))
    metadata = copy["metadata"]
    metadata.pop("namespace", None)
    for label in ("app.kubernetes.io/managed-by", "helm.sh/chart"):
        metadata.get("labels", {}).pop(label, None)
    template = copy.get("spec", {}).get("template", {})
    template.get("metadata", {}).pop("annotations", None)  # the hash of the settings
    spec = template.get("spec", {})
    for owner in [spec, *spec.get("containers", [])]:
        for items in ("env", "volumes", "volumeMounts"):
            if items in owner:
                owner[items].sort(key=lambda item: str(item.get("mountPath", item["name"])))  # patches change the order
    return copy
