"""The distribution `qinfer-ml`: its name in every text, its extras, and what works without them."""

import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from qinfer.cli.checks.all import examine_installation
from qinfer.cli.checks.doctor import Severity

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: [Requirement(line) for line in lines] for name, lines in PROJECT["optional-dependencies"].items()}
FOLDERS = ("api", "benchmarks", "deploy", "docs", "examples", "qinfer", "scripts", "tests", "workers", ".github", ".ci")
WRONG_NAME = re.compile(r"(?<![\w./-])qinfer\\?\[|pip3? install (?:-\S+ )*['\"]?qinfer(?!-ml)\b")

WITHOUT_SERVER = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = ["qinfer", *sys.argv[1:]]
"""


@cache
def modules_of_the_server() -> list[str]:
    wanted = {canonicalize_name(each.name) for each in EXTRAS["server"]}
    modules = {
        module
        for module, names in packages_distributions().items()
        if wanted & {canonicalize_name(name) for name in names}
    }
    assert {"redis", "uvloop", "google"} <= modules
    return sorted(modules)


def without_server(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs code where no package can be imported that the extra `server` brings."""
    whole = WITHOUT_SERVER.format(modules=modules_of_the_server()) + code
    return subprocess.run([sys.executable, "-c", whole, *arguments], check=False, capture_output=True, text=True)


def test_every_text_has_the_name_of_the_distribution() -> None:
    """`pip install qinfer` installs somebody else's package."""
    places = [path for name in FOLDERS for path in (ROOT / name).rglob("*")] + [*ROOT.glob("*.*"), ROOT / "Makefile"]
    made = {"__pycache__", ".work", ".venvs"}  # by the interpreter and by benchmarks
    files = [path for path in places if path.is_file() and path != Path(__file__) and not made & set(path.parts)]
    wrong = [str(path) for path in files if WRONG_NAME.search(path.read_text(errors="replace"))]

    assert (len(files) > 500, wrong) == (True, [])


def test_the_wrong_name_is_recognized() -> None:
    wrong = ["'qinfer[s3]'", r"qinfer\[s3\]", "pip install qinfer", "pip install -U 'qinfer'"]
    right = ["'qinfer-ml[s3]'", "pip install qinfer-ml", "dist/qinfer_ml.whl[s3]"]

    assert all(map(WRONG_NAME.search, wrong))
    assert not any(map(WRONG_NAME.search, right))


def test_every_extra_contains_the_server() -> None:
    def contains(extra: str) -> bool:
        own = [each for each in EXTRAS[extra] if each.name == PROJECT["name"]]
        return extra == "server" or any(contains(name) for each in own for name in each.extras)

    assert {extra for extra in EXTRAS if not contains(extra)} == {"client"}


def test_the_clients_need_nothing_of_the_server() -> None:
    done = without_server(
        "import qinfer; qinfer.Client('http://127.0.0.1:1'); qinfer.AsyncClient('http://127.0.0.1:1')"
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["--help"], 0, "Usage: qinfer"),
        (["infer", "m", "--input", "x=[1]", "--url", "http://127.0.0.1:1"], 69, "no server answers at"),
        (["submit", "m", "a.parquet", "s3://b/out", "--url", "http://127.0.0.1:1"], 69, "no server answers at"),
        (["jobs", "list", "--url", "http://127.0.0.1:1"], 69, "no server answers at"),
        (["models", "load", "m", "--url", "http://127.0.0.1:1"], 69, "no server answers at"),
        (["up"], 1, "is not installed: pip install 'qinfer-ml[server]'"),
        (["status"], 1, "is not installed: pip install 'qinfer-ml[server]'"),
    ],
)
def test_a_command_without_the_server_works_or_says_what_to_install(command: list[str], code: int, said: str) -> None:
    done = without_server("from qinfer.cli.main import app; app()", *command)

    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stderr


def test_doctor_names_the_other_distribution(tmp_path: Path) -> None:
    """It has the same import name; our own metadata of another name has no files there."""
    other = tmp_path / "qinfer-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: qinfer\nVersion: 1.0\n")
    assert [*examine_installation([str(tmp_path)])] == []

    (other / "RECORD").write_text("qinfer/__init__.py,,\nqinfer-1.0.dist-info/METADATA,,\n")
    (found,) = examine_installation([str(tmp_path)])

    assert (found.level, found.subject) == (Severity.PROBLEM, "installation")
    assert "qinfer 1.0 is installed beside qinfer-ml" in found.text
    assert found.remedy.startswith("pip uninstall --yes qinfer")
