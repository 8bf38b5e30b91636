"""The Airflow provider: an operator, a trigger and a hook for bulk jobs (docs/how-to/schedulers.md).

Airflow finds it by the entry point `apache_airflow_provider`. It needs Airflow 3 and the base installation of qinfer.
"""

from typing import Any

_HERE = __name__


def get_provider_info() -> dict[str, Any]:
    """Returns the provider's metadata for Airflow."""
    name = "qinfer"
    return {
        "package-name": "qinfer-ml",
        "name": name,
        "description": "Bulk jobs of qinfer, in which models score files.",
        "integrations": [
            {"integration-name": name, "external-doc-url": "https://pypi.org/project/qinfer-ml/", "tags": ["service"]}
        ],
        "operators": [{"integration-name": name, "python-modules": [f"{_HERE}.operator"]}],
        "hooks": [{"integration-name": name, "python-modules": [f"{_HERE}.hook"]}],
        "triggers": [{"integration-name": name, "python-modules": [f"{_HERE}.trigger"]}],
        "connection-types": [
            {"connection-type": name, "hook-class-name": f"{_HERE}.hook.QinferHook", "hook-name": name}
        ],
    }
