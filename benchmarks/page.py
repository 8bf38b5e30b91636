"""RESULTS.md: one page, of which each tool writes the section that it measured, and leaves the others as they are."""

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks import environments

PAGE = environments.HERE / "RESULTS.md"
SECTIONS = {
    "speed": "Speed",
    "bulk": "Bulk jobs",
    "mixed": "Online requests beside a bulk job",
    "overload": "Goodput under overload",
    "bridge": "From a queue to a model and back",
    "sizing": "Memory of Redis",
    "soak": "Memory under steady load",
}
"""The sections in their order, with their titles."""
_HEAD = (
    "# Results\n\nPrograms write this page, each its section; [README](README.md) shows what they measure, and how.\n"
)


def write(name: str, text: str, facts: Mapping[str, str], path: Path = PAGE) -> None:
    """Writes a section in its place.

    Args:
        name: One of `SECTIONS`.
        text: The section in Markdown, without its title.
        facts: The facts of the machine, as `machine.describe` returns them.
        path: The page.
    """
    sections = read(path)
    sections[name] = f"## {SECTIONS[name]}\n\n{text.strip()}\n\n{measured_on(facts)}\n"
    parts = [_marked(one, sections[one]) for one in SECTIONS if one in sections]
    path.write_text("\n".join([_HEAD, *parts]))


def read(path: Path = PAGE) -> dict[str, str]:
    """Returns the sections of the page by name."""
    text = path.read_text() if path.exists() else ""
    return dict(re.findall(r"<!-- section: (\w+) -->\n(.*?)<!-- /section -->\n", text, re.DOTALL))


def measured_on(facts: Mapping[str, str]) -> str:
    """Returns date, commit and machine in one line."""
    machine = ", ".join(facts[name] for name in ("processor", "memory", "kernel") if name in facts)
    return f"Measured on {facts['date']} at commit {facts['commit']}: {machine}."


def _marked(name: str, section: str) -> str:
    return f"<!-- section: {name} -->\n{section}<!-- /section -->\n"
