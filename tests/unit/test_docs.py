"""The documents are true: links lead somewhere, code compiles, and the commands, settings and files they name exist."""

import importlib.util
import re
import textwrap
from pathlib import Path

import pytest
import typer

from qinfer.cli.console import API_KEY_VARIABLE
from qinfer.cli.main import app
from qinfer.settings import Settings
from scripts import generate_reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SETTING = re.compile(r"\bQINFER_[A-Z_]+[A-Z]")
INLINE = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"(?:^|\s)qinfer ([a-z]+)(?: ([a-z]+))?", re.MULTILINE)
TARGET = re.compile(r"^make ([a-z0-9-]+)", re.MULTILINE)
MODULE = re.compile(r"python -m ([\w.]+)")
FILE = re.compile(r"`((?:qinfer|api|workers|tests|scripts|examples|docs|benchmarks)/[\w./-]*)`")

GENERATED = ["settings.md", "cli.md", "metrics.md", "model-config.md", "http-operations.md", "redis-keys.md"]
MADE_LATER = {
    "benchmarks/.venvs",
    "benchmarks/.work/",
    "benchmarks/RESULTS.md",
    "benchmarks/results.json",
}  # by the benchmarks


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def setting_names() -> set[str]:
    names = {f"QINFER_TEST_{name}" for name in ("PROCESSES", "EXAMPLES", "SEED")}  # read by scripts/test, and by tests
    names.add(API_KEY_VARIABLE)  # by the command line
    for name, field in Settings.model_fields.items():
        fields = getattr(field.annotation, "model_fields", None)
        names |= {f"QINFER_{name}__{inner}".upper() for inner in fields} if fields else {f"QINFER_{name}".upper()}
    return names


def shell_code(page: Path) -> str:
    """Returns the shell blocks and the inline code of a page, which may hold commands."""
    text = page.read_text()
    blocks = [block for language, block in FENCE.findall(text) if language == "sh"]
    return "\n".join([*blocks, *INLINE.findall(FENCE.sub("", text))])


@pytest.fixture(params=PAGES, ids=named)
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_links_lead_somewhere(page: Path) -> None:
    """A relative link names a file of this repository."""
    targets = [target.partition("#")[0] for target in LINK.findall(page.read_text()) if "://" not in target]

    assert [target for target in targets if target and not (page.parent / target).exists()] == []


def test_python_compiles(page: Path) -> None:
    """Each block of Python is at least Python."""
    for language, block in FENCE.findall(page.read_text()):
        if language == "python":
            compile(textwrap.dedent(block), named(page), "exec")


def test_settings_exist(page: Path) -> None:
    """Each environment variable named is one that is read."""
    assert set(SETTING.findall(page.read_text())) - setting_names() == set()


def test_commands_exist(page: Path) -> None:
    """Each `qinfer` command named is one."""
    commands = getattr(typer.main.get_command(app), "commands", {})
    for name, sub in COMMAND.findall(shell_code(page)):
        assert name in commands, f"qinfer {name}"
        subcommands = getattr(commands[name], "commands", {})
        assert not subcommands or not sub or sub in subcommands, f"qinfer {name} {sub}"


def test_make_targets_exist(page: Path) -> None:
    """Each `make` target named is in the Makefile."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert set(TARGET.findall(shell_code(page))) - targets == set()


def test_modules_exist(page: Path) -> None:
    """Each `python -m` module named can be found."""
    assert [name for name in MODULE.findall(page.read_text()) if importlib.util.find_spec(name) is None] == []


def test_files_exist(page: Path) -> None:
    """Each source file named in backticks is there."""
    if page.name == "CHANGELOG.md":
        pytest.skip("a changelog may name what is gone")

    assert [name for name in set(FILE.findall(page.read_text())) - MADE_LATER if not (ROOT / name).exists()] == []


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return generate_reference.pages()


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_up_to_date(name: str, generated: dict[str, str]) -> None:
    """`make docs` was run after the last change of a setting, a command, a metric, a field, a route or a key."""
    assert (generate_reference.REFERENCE / name).read_text() == generated[name]


def test_all_generated_pages_are_compared(generated: dict[str, str]) -> None:
    """A page that is added to the generator is added to the list above."""
    assert set(generated) == set(GENERATED)
