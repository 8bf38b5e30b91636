"""The page of public imports and the modules list the same names."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SECTION = re.compile(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LISTED = {
    module: dict(ROW.findall(text))
    for module, text in SECTION.findall((ROOT / "docs" / "reference" / "python-api.md").read_text())
}


def public_names(name: str) -> set[str]:
    """Returns a module's `__all__`; without one, the classes that it defines."""
    module = importlib.import_module(name)
    defined = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == name]
    return set(getattr(module, "__all__", [key for key in defined if inspect.isclass(getattr(module, key))]))


def test_the_public_modules_are_listed() -> None:
    names = ("errors", "tensors", "backends", "labeling", "testing", "testing.backend_contract")
    modules = {f"qinfer.{name}" for name in (*names, "integrations.airflow.operator")}

    assert set(LISTED) == {"qinfer", *modules}


@pytest.mark.parametrize("name", LISTED)
def test_each_public_name_is_listed_and_exists(name: str) -> None:
    if name.startswith("qinfer.integrations.airflow"):
        pytest.importorskip(
            "airflow.configuration", reason="Airflow is not installed: tests/e2e/jobs/test_airflow.py imports it"
        )
    module = importlib.import_module(name)

    assert set(LISTED[name]) == public_names(name)
    assert [each for each in LISTED[name] if not hasattr(module, each)] == []


def test_qinfer_exports_what_the_client_exports_and_what_apps_need() -> None:
    frameworks = {"from_mlflow", "from_onnx", "from_sklearn", "from_torch", "from_transformers"}
    for_apps = {"Device", "State", "call", "local", "model"} | frameworks

    assert set(LISTED["qinfer"]) == {*public_names("qinfer.client"), "__version__", *for_apps}


def test_apps_import_nothing_heavy() -> None:
    """Each app imports `qinfer.model`, in a process that may need nothing else of qinfer."""
    code = "import qinfer, sys; qinfer.model; print({'numpy', 'httpx', 'redis', 'pydantic'} & set(sys.modules))"

    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_documents_and_examples_import_public_names_only() -> None:
    """A page that names another path would break its readers' code with the next version."""
    pages = [page.read_text() for page in (ROOT / "docs").rglob("*.md")]
    blocks = [block for page in pages for block in PYTHON.findall(page)]
    blocks += [example.read_text() for example in (ROOT / "examples").rglob("*.py")]
    statements = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    imported = {(node.module or "", alias.name) for node in statements for alias in node.names}

    private = {(m, n) for m, n in imported if m.split(".")[0] == "qinfer" and n not in LISTED.get(m, {})}

    assert len(blocks) > 10
    assert private == set()
