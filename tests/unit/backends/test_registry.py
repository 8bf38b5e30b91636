"""The lists of backends' names agree, and the list for operators names missing packages."""

import tomllib
from pathlib import Path

import pytest

from qinfer.backends import frameworks, registry
from qinfer.backends.isolated import PACKAGES
from qinfer.cli.checks.all import RUNTIMES
from qinfer.models.config.config import FILES_OF
from qinfer.models.config.optimization import BACKENDS
from qinfer.models.spec import FRAMEWORKS, IN_PROCESS

BUILT_IN = registry._BUILT_IN.keys() - {"stub"}


def test_every_backend_is_in_every_list() -> None:
    assert IN_PROCESS | FRAMEWORKS | {"python"} == BUILT_IN
    assert set(FILES_OF) == set(BACKENDS) == RUNTIMES.keys() | {"python"} == BUILT_IN


def test_every_framework_has_an_adapter_and_packages() -> None:
    adapters = {path.stem for path in Path(str(frameworks.__file__)).parent.glob("*.py")} - {"__init__", "base"}

    assert adapters == PACKAGES.keys() == FRAMEWORKS
    assert all(RUNTIMES[name].module in packages for name, packages in PACKAGES.items())


def test_the_remedies_name_extras_of_the_package() -> None:
    document = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    extras = {registry._BUILT_IN[name].extra for name in BUILT_IN}

    assert extras <= set(document["project"]["optional-dependencies"])
    assert all(runtime.extra == registry._BUILT_IN[name].extra for name, runtime in RUNTIMES.items())


def test_a_framework_that_is_not_installed_is_listed_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program of qinfer imports it."""
    monkeypatch.setattr(registry, "known_names", lambda: ["forest", "jax"])
    monkeypatch.setattr(registry, "find_spec", lambda package: None if package == "jaxlib" else object())

    listed = {name: problem for name, _, problem in registry.listed()}

    assert listed["forest"] == ""
    assert listed["jax"].startswith("backend 'jax' needs jaxlib, ")
    assert listed["jax"].endswith("pip install 'qinfer-ml[jax]'")
