"""The lists of backends' names agree."""

import tomllib
from pathlib import Path

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
