"""Writes what the deployments copy from elsewhere, so that it can't drift: a test compares.

    .venv/bin/python -m scripts.generate_deployment

- the names of settings that the chart's `values.schema.json` accepts: from the settings;
- the rules of the chart's PrometheusRule: from `deploy/prometheus/rules`;
- the kustomize base, and the parts of overlays that the chart has: from the chart, which takes Helm (`scripts/tools`).
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from qinfer.core.settings import Settings, variable_names

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "qinfer"
SCHEMA = CHART / "values.schema.json"
KUSTOMIZE = ROOT / "deploy" / "kustomize"
RULES = ROOT / "deploy" / "prometheus" / "rules"
FETCHED = ROOT / ".venv" / "tools" / "helm" / "node_modules" / ".bin" / "helm"

KUBERNETES = "1.27.0"
"""What Helm is told to render for; nothing of the chart depends on it."""

MANAGED = frozenset(
    f"QINFER_{name}"
    for name in (
        "REDIS__URL",
        "REDIS__SENTINEL_PASSWORD",
        "REDIS__CLUSTER",
        "HTTP__HOST",
        "HTTP__PORT",
        "HTTP__DRAIN_S",
        "HTTP__TLS_CERTFILE",
        "HTTP__TLS_KEYFILE",
        "GRPC__HOST",
        "GRPC__PORT",
        "GRPC__TLS_CERTFILE",
        "GRPC__TLS_KEYFILE",
        "METRICS__HOST",
        "METRICS__PORT",
        "AUTH__MODE",
        "AUTH__KEYS_FILE",
        "STORES__ALLOW",
        "BULK__ENABLED",
        "BULK__BROKER_URL",
        "BULK__SPOOL_DIR",
        "WORKER__MODELS",
        "WORKER__DRAIN_S",
        "REPOSITORY__PATH",
        "REPOSITORY__CONTROL_MODE",
        "REPOSITORY__LOAD_MODELS",
        "REPOSITORY__STRICT_READINESS",
        "REPOSITORY__CACHE_DIR",
    )
)
"""Settings that values of their own set: as `settings` they would contradict these."""

ADDED = {
    "bridge": ("bridge.yaml",),
    "bulk": ("bulk.yaml",),
    "keda": ("keda.yaml",),
    "monitoring": ("monitoring.yaml",),
}
"""The files of the chart that overlays add to the base."""

NOTICE = (
    "# Made by scripts/generate_deployment.py from deploy/helm/qinfer; change the chart, or patch this in an overlay.\n"
)
_HELMS_OWN = re.compile(r"^ +(?:app\.kubernetes\.io/managed-by|helm\.sh/chart): .*\n", re.MULTILINE)
_SOURCE = re.compile(r"^# Source: qinfer/templates/(\S+)\n", re.MULTILINE)
_WIDTH = 120


def find_helm() -> Path | None:
    """Returns Helm's binary: the fetched one, or that of PATH; `None` where there is none."""
    found = shutil.which("helm")
    return FETCHED if FETCHED.exists() else Path(found) if found else None


def secret_names() -> set[str]:
    """Returns the variables of the settings that are secret."""
    return {
        f"QINFER_{section}__{name}".upper()
        for section, field in Settings.model_fields.items()
        for name, inner in getattr(field.annotation, "model_fields", {}).items()
        if inner.annotation is SecretStr
    }


def schema() -> str:
    """Returns `values.schema.json` with the settings that there are now."""
    document: dict[str, Any] = json.loads(SCHEMA.read_text())
    secret = secret_names()
    plain = sorted(set(variable_names()) - MANAGED - secret)
    document["definitions"]["settings"]["propertyNames"]["enum"] = plain
    document["definitions"]["secretSettings"]["propertyNames"]["enum"] = sorted(secret - MANAGED)
    return compact(document) + "\n"


def compact(value: Any, indent: int = 0, before: int = 0) -> str:
    """Returns JSON that has on one line what fits there.

    Args:
        value: What to write.
        indent: Characters that its lines begin with.
        before: Characters of its first line that come before it.
    """
    line = json.dumps(value, ensure_ascii=False)
    if indent + before + len(line) < _WIDTH or not isinstance(value, dict | list) or not value:
        return line
    inner, end = "\n" + " " * (indent + 2), "\n" + " " * indent
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {compact(item, indent + 2, len(key) + 4)}" for key, item in value.items()]
        return "{" + inner + f",{inner}".join(parts) + end + "}"
    if all(isinstance(item, str) for item in value):
        return "[\n" + _wrapped([json.dumps(item) for item in value], " " * (indent + 2)) + end + "]"
    return "[" + inner + f",{inner}".join(compact(item, indent + 2) for item in value) + end + "]"


def _wrapped(items: list[str], indent: str) -> str:
    lines = [indent]
    for number, item in enumerate(items):
        text = item + ("," if number + 1 < len(items) else "")
        if len(lines[-1]) + len(text) > _WIDTH:
            lines.append(indent)
        lines[-1] += text if lines[-1] == indent else f" {text}"
    return "\n".join(lines)


def template(helm: Path, *values: Path, release: str = "qinfer", namespace: str = "qinfer") -> str:
    """Returns what Helm makes of the chart with these values files, hooks too.

    Raises:
        subprocess.CalledProcessError: Helm refuses the values; `stderr` says why.
    """
    command = [str(helm), "template", release, str(CHART), "--namespace", namespace, "--kube-version", KUBERNETES]
    for path in values:
        command += ["--values", str(path)]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        error.add_note(error.stderr)
        raise


def without_helm(text: str) -> dict[str, str]:
    """Returns the objects of a rendered chart by the file of the chart, without hooks and Helm's own labels."""
    files: dict[str, list[str]] = {}
    for document in re.split(r"^---\n", text, flags=re.MULTILINE):
        source = _SOURCE.search(document)
        if source is None or "helm.sh/hook:" in document:
            continue
        plain = _HELMS_OWN.sub("", _SOURCE.sub("", document)).strip() + "\n"
        files.setdefault(source[1], []).append(plain)
    return {name: NOTICE + "---\n".join(documents) for name, documents in files.items()}


def kustomize(helm: Path) -> dict[Path, str]:
    """Returns the files of the kustomize base, and of the overlays that add objects of the chart."""
    base = KUSTOMIZE / "base"
    made = {base / name: text for name, text in without_helm(template(helm, base / "values.yaml")).items()}
    for overlay, names in ADDED.items():
        folder = KUSTOMIZE / "overlays" / overlay
        files = without_helm(template(helm, base / "values.yaml", folder / "values.yaml"))
        made |= {folder / name: files[name] for name in names}
    return made


def copies() -> dict[Path, str]:
    """Returns what is made without Helm: the schema, and the rules within the chart."""
    rules = {CHART / "rules" / path.name: path.read_text() for path in sorted(RULES.glob("*.yml"))}
    return {SCHEMA: schema(), **rules}


def main() -> int:
    """Writes everything; returns the exit status."""
    made = copies()
    _write(made)
    helm = find_helm()
    if helm is None:
        print("no helm: the kustomize base was left as it is; scripts/tools fetches it", file=sys.stderr)
        return 1
    _write(kustomize(helm))
    return 0


def _write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
