"""The documents are true: links lead somewhere, code compiles, and the commands, settings and files they name exist."""

import importlib.util
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import typer

from qinfer.cli.main import app
from qinfer.client.connection import API_KEY_VARIABLE
from qinfer.core.settings import Settings
from scripts import generate_reference

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SETTING = re.compile(r"\bQINFER_[A-Z_]+[A-Z]")
INLINE = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"(?:^|\s)qinfer ([a-z]+)(?: ([a-z]+))?", re.MULTILINE)
TARGET = re.compile(r"^make ([a-z0-9-]+)", re.MULTILINE)
MODULE = re.compile(r"python -m ([\w.]+)")
FILE = re.compile(r"`((?:qinfer|api|workers|tests|scripts|examples|docs|benchmarks)/[\w./-]*)`")

REFERENCE = ROOT / "docs" / "reference"
GENERATED = [
    "settings.md",
    "cli.md",
    "metrics.md",
    "model-config.md",
    "http-operations.md",
    "../builders/redis-keys.md",
    "alerts.md",
]
GENERATED += [str(page.relative_to(REFERENCE)) for page in sorted((REFERENCE / "alerts").iterdir())]
MADE_LATER = {
    "benchmarks/.venvs",
    "benchmarks/.work/",
    "benchmarks/.work/partial.json",
    "benchmarks/.work/results.json",
    "benchmarks/GPU.md",
}  # by the benchmarks


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def setting_names() -> set[str]:
    # Read by scripts/test, and by tests.
    own = (
        "PROCESSES",
        "EXAMPLES",
        "SEED",
        "FUZZ_S",
        "FUZZ_TABLE",
        "HOSTILE",
        "HOSTILE_S",
        "HOSTILE_EACH_S",
        "EARLIER",
        "PEERS",
    )
    names = {f"QINFER_TEST_{name}" for name in own}
    names |= {API_KEY_VARIABLE, "QINFER_URL"}  # by the command line
    for name, field in Settings.model_fields.items():
        fields = getattr(field.annotation, "model_fields", None)
        names |= {f"QINFER_{name}__{inner}".upper() for inner in fields} if fields else {f"QINFER_{name}".upper()}
    return names


def shell_code(page: Path) -> str:
    """Returns the shell blocks and the inline code of a page, which may hold commands."""
    text = page.read_text()
    blocks = [block for language, block in FENCE.findall(text) if language == "sh"]
    return "\n".join([*blocks, *INLINE.findall(FENCE.sub("", text))])


def wrong(find: Callable[[Path], Iterable[str]], pages: Sequence[Path] = PAGES) -> dict[str, list[str]]:
    """Returns what is found to be wrong, by page."""
    return {named(page): found for page in pages if (found := sorted(find(page)))}


def test_there_are_pages() -> None:
    assert len(PAGES) > 40


def test_links_lead_somewhere() -> None:
    """A relative link names a file of this repository."""

    def dead(page: Path) -> list[str]:
        targets = [target.partition("#")[0] for target in LINK.findall(page.read_text()) if "://" not in target]
        return [target for target in targets if target and not (page.parent / target).exists()]

    assert wrong(dead) == {}


def test_python_compiles() -> None:
    """Each block of Python is at least Python."""
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text()):
            if language == "python":
                compile(textwrap.dedent(block), named(page), "exec")


def test_settings_exist() -> None:
    """Each environment variable named is one that is read."""
    names = setting_names()

    assert wrong(lambda page: set(SETTING.findall(page.read_text())) - names) == {}


def test_commands_exist() -> None:
    """Each `qinfer` command named is one."""
    commands = getattr(typer.main.get_command(app), "commands", {})

    def is_known(name: str, sub: str) -> bool:
        subcommands = getattr(commands.get(name), "commands", {})
        return name in commands and (not subcommands or not sub or sub in subcommands)

    def unknown(page: Path) -> list[str]:
        return [f"qinfer {name} {sub}" for name, sub in COMMAND.findall(shell_code(page)) if not is_known(name, sub)]

    assert wrong(unknown) == {}


def test_make_targets_exist() -> None:
    """Each `make` target named is in the Makefile."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert wrong(lambda page: set(TARGET.findall(shell_code(page))) - targets) == {}


def test_modules_exist() -> None:
    """Each `python -m` module named can be found."""

    def missing(page: Path) -> list[str]:
        return [name for name in MODULE.findall(page.read_text()) if importlib.util.find_spec(name) is None]

    assert wrong(missing) == {}


def test_files_exist() -> None:
    """Each source file named in backticks is there; a changelog may name what is gone."""

    def missing(page: Path) -> list[str]:
        return [name for name in set(FILE.findall(page.read_text())) - MADE_LATER if not (ROOT / name).exists()]

    assert wrong(missing, [page for page in PAGES if page.name != "CHANGELOG.md"]) == {}


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
