"""What must hold of every set of manifests, however it was made: Kubernetes' schemas, and the code that they start."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import PurePosixPath
from unittest.mock import patch
from urllib.parse import urlsplit

import kubernetes_validate
import yaml
from kubernetes_validate import utils as kubernetes_validate_files

from qinfer.core.settings import Settings, load_settings
from qinfer.errors import SettingsError
from qinfer_workers.bridge.config import parse_config
from scripts.reference_http import document
from tests.support.deploy import custom_resources
from tests.support.deploy.deployments import COMMANDS, is_look_at_health, is_program
from tests.support.deploy.kubernetes import Object, containers, environment, of_kind, pods

VERSIONS = ("1.27", "1.34")
"""The versions of Kubernetes whose schemas the manifests are held against."""

kubernetes_validate_files.schema_contents = lru_cache(kubernetes_validate_files.schema_contents)  # 1 MB, each time

_HOLES = re.compile(r"\{[^}]*\}")


def schema_problems(objects: Sequence[Object]) -> list[str]:
    """Returns what the schemas of Kubernetes and of the custom resources refuse."""
    return [f"{one['kind']}/{one['metadata']['name']}: {text}" for one in objects for text in _schema_problems(one)]


def _schema_problems(one: Object) -> Iterator[str]:
    if one["kind"] in custom_resources.SCHEMAS:
        yield from custom_resources.problems(one)
        return
    text = json.dumps(one)
    for version in VERSIONS:
        if problem := _version_problem(text, version):
            yield f"{version}: {problem}"


@lru_cache(maxsize=4096)  # sets of manifests have much in common
def _version_problem(text: str, version: str) -> str:
    try:
        kubernetes_validate.validate(json.loads(text), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return error.message
    return ""


def command_problems(objects: Sequence[Object]) -> list[str]:
    """Returns the commands of containers and probes that the code does not have."""
    found = []
    for one, _, container in containers(objects):
        probes = [container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in container]
        commands = [container["args"], *(probe["exec"]["command"] for probe in probes if "exec" in probe)]
        found += [f"{one['metadata']['name']}: {shlex.join(words)}" for words in commands if not is_command(words)]
        found += [
            f"{one['metadata']['name']}: no route {probe['httpGet']['path']}"
            for probe in probes
            if "httpGet" in probe and probe["httpGet"]["path"] not in routes()
        ]
    return found


def is_command(words: Sequence[str]) -> bool:
    """Tells whether the code has a program: `python -m module`, or `qinfer command … --option`; or a look at files."""
    if words[0] == "sh":
        return is_look_at_health(words)
    if list(words[:2]) == ["python", "-m"]:
        return len(words) == 3 and is_program(words[2])
    command = COMMANDS
    rest = list(words)
    if rest.pop(0) != "qinfer":
        return False
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    given = [word for word in rest if not word.startswith("-")]
    taken = sum(parameter.param_type_name == "argument" for parameter in command.params)
    runs = not hasattr(command, "commands") or command.invoke_without_command
    return runs and set(rest) - set(given) <= options and len(given) <= taken


@lru_cache
def routes() -> frozenset[str]:
    """Returns the paths that a gateway serves, as `/v1/models/{}/backlog`."""
    return frozenset(_HOLES.sub("{}", path) for path in document()["paths"])


def settings_of(objects: Sequence[Object], container: Object) -> Settings:
    """Returns what a container makes of its environment.

    Raises:
        SettingsError: It would end at once.
    """
    return _settings(tuple(sorted(environment(objects, container).items())))


@lru_cache
def _settings(variables: tuple[tuple[str, str], ...]) -> Settings:
    with patch.dict(os.environ, dict(variables), clear=True):
        return load_settings()


def grace_problems(objects: Sequence[Object]) -> list[str]:
    """Returns the pods that would be killed while they drain."""
    found = []
    for one, spec, container in containers(objects):
        settings = settings_of(objects, container)
        needed_s = {"gateway": settings.http.drain_s + 1, "worker": settings.worker.drain_s}.get(container["name"], 0.0)
        waits = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        given_s = spec.get("terminationGracePeriodSeconds", 30)
        if given_s < needed_s + float(waits[1]) + 5:
            found.append(f"{one['metadata']['name']}: {given_s} s for {needed_s} s")
    return found


def security_problems(objects: Sequence[Object]) -> list[str]:
    """Returns the pods that may do more than they need."""
    found = []
    for one, template in pods(objects):
        name, spec = one["metadata"]["name"], template["spec"]
        pod = spec["securityContext"]
        if not pod["runAsNonRoot"] or pod["runAsUser"] == 0 or pod["seccompProfile"] != {"type": "RuntimeDefault"}:
            found.append(f"{name}: {pod}")
        if spec["automountServiceAccountToken"] or spec["enableServiceLinks"]:
            found.append(f"{name}: a token, or variables of Services")
        for container in spec["containers"]:
            security = container["securityContext"]
            wanted = {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            if {key: security.get(key) for key in wanted} != wanted:
                found.append(f"{name}: {security}")
            if "memory" not in container["resources"]["limits"] or not container["resources"]["requests"]:
                found.append(f"{name}: {container['resources']}")
    return found


def path_problems(objects: Sequence[Object]) -> list[str]:
    """Returns the paths that a program reads or writes and no volume has."""
    found = []
    for one, spec, container in containers(objects):
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        found += [
            f"{one['metadata']['name']}: no volume {mount['name']}"
            for mount in mounts.values()
            if mount["name"] not in volumes
        ]
        found += [
            f"{one['metadata']['name']}: {name} is not mounted"
            for name in volumes.keys() - {m["name"] for m in mounts.values()}
        ]
        settings = settings_of(objects, container)
        written = ["/tmp"]
        written += [settings.repository.cache_dir, settings.bulk.spool_dir] if container["name"] == "worker" else []
        written += [settings.bulk.spool_dir] if container["name"] == "bulk" else []
        for path in written:
            if path not in mounts or mounts[path].get("readOnly"):
                found.append(f"{one['metadata']['name']}: can't write {path!r}")
        read = [settings.auth.keys_file, settings.http.tls_certfile, settings.grpc.tls_keyfile]
        if settings.repository.path.startswith("/"):
            read.append(settings.repository.path)
        if container["name"] not in ("bulk", "bridge"):
            found += [
                f"{one['metadata']['name']}: no volume at {path}"
                for path in read
                if path and not any(path == mount or path.startswith(f"{mount}/") for mount in mounts)
            ]
    return found


def bridge_problems(objects: Sequence[Object]) -> list[str]:
    """Returns the bridges that could not read their routes: the file, and the variables in it."""
    found = []
    for one, spec, container in containers(objects):
        if container["name"] != "bridge":
            continue
        name, path = one["metadata"]["name"], PurePosixPath(container["args"][2])
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        source = volumes.get(mounts.get(str(path.parent), ""), {})
        if "secret" in source:  # whose file is not here
            found += [f"{name}: {path}"] * ([item["path"] for item in source["secret"]["items"]] != [path.name])
            continue
        made = {each["metadata"]["name"]: each["data"] for each in of_kind(objects, "ConfigMap")}
        text = made.get(source.get("configMap", {}).get("name", ""), {}).get(path.name)
        try:
            parse_config(None if text is None else yaml.safe_load(text), environment(objects, container))
        except SettingsError as error:
            found.append(f"{name}: {path}: {error.message}")
    return found


def port_problems(objects: Sequence[Object]) -> list[str]:
    """Returns the ports that nobody listens on, of containers, Services, probes, Ingresses and policies."""
    found = []
    listening: dict[str, int] = {}
    for _, _, container in containers(objects):
        if container["name"] == "gateway":
            settings = settings_of(objects, container)
            listening = {"http": settings.http.port, "grpc": settings.grpc.port, "metrics": settings.metrics.port}
            given = {port["name"]: port["containerPort"] for port in container["ports"]}
            if given != listening or settings.http.host != "0.0.0.0":
                found.append(f"the gateway listens on {listening}, and its container says {given}")
    for one in of_kind(objects, "Service"):
        if "qinfer" not in one["metadata"].get("labels", {}).get("app.kubernetes.io/name", ""):
            continue
        if not any(_selects(one["spec"]["selector"], template) for _, template in pods(objects)):
            found.append(f"{one['metadata']['name']} selects no pod")
        found += [
            f"{one['metadata']['name']}: {port}"
            for port in one["spec"]["ports"]
            if listening.get(port["targetPort"]) != port["port"]
        ]
    named = re.findall(r'"port": \{"name": "(\w+)"\}', json.dumps(of_kind(objects, "Ingress")))
    named += re.findall(r'"port": "(\w+)"', json.dumps(of_kind(objects, "NetworkPolicy")))
    return found + [f"no port is called {name}" for name in named if name not in listening]


def _selects(selector: dict[str, str], template: Object) -> bool:
    labels: dict[str, str] = template["metadata"]["labels"]
    return selector.items() <= labels.items()


def scaling_problems(objects: Sequence[Object], namespace: str) -> list[str]:
    """Returns what ScaledObjects name that is not there: Deployments, Services, ports, routes, authentications."""
    found = []
    deployments = {one["metadata"]["name"]: one for one in of_kind(objects, "Deployment")}
    authentications = {one["metadata"]["name"] for one in of_kind(objects, "TriggerAuthentication")}
    services = {
        f"{one['metadata']['name']}.{namespace}.svc": {port["port"] for port in one["spec"]["ports"]}
        for one in of_kind(objects, "Service")
    }
    for one in of_kind(objects, "ScaledObject", "HorizontalPodAutoscaler"):
        target = deployments.get(one["spec"]["scaleTargetRef"]["name"])
        if target is None or "replicas" in target["spec"]:
            found.append(f"{one['metadata']['name']}: no Deployment, or one that sets its replicas itself")
    for one in of_kind(objects, "ScaledObject"):
        for trigger in one["spec"]["triggers"]:
            reference = trigger.get("authenticationRef", {}).get("name")
            if reference is not None and reference not in authentications:
                found.append(f"no TriggerAuthentication {reference}")
            if trigger["type"] == "metrics-api":
                url = urlsplit(trigger["metadata"]["url"])
                path = re.sub(r"^/v1/models/[^/]+/", "/v1/models/{}/", url.path)
                if url.port not in services.get(url.hostname or "", set()) or path not in routes():
                    found.append(f"nobody answers {trigger['metadata']['url']}")
    return found


def all_problems(objects: Sequence[Object], namespace: str = "serving") -> list[str]:
    """Returns all that is wrong with a set of manifests."""
    return [
        *schema_problems(objects),
        *command_problems(objects),
        *grace_problems(objects),
        *security_problems(objects),
        *path_problems(objects),
        *bridge_problems(objects),
        *port_problems(objects),
        *scaling_problems(objects, namespace),
    ]
