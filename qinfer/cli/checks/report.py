"""The findings of checks, and their report."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

HIDDEN = "…"


class Severity(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    subject: str
    level: Severity
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    """Returns a finding without a problem."""
    return Finding(subject, Severity.OK, text)


def warning(subject: str, text: str, remedy: str = "") -> Finding:
    """Returns a finding about something that works badly."""
    return Finding(subject, Severity.WARNING, text, remedy)


def problem(subject: str, text: str, remedy: str = "") -> Finding:
    """Returns a finding about something that does not work."""
    return Finding(subject, Severity.PROBLEM, text, remedy)


def without(secrets: Iterable[str], findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings without secrets."""
    hidden = sorted({secret for secret in secrets if secret}, key=len, reverse=True)

    def clean(text: str) -> str:
        for secret in hidden:
            text = text.replace(secret, HIDDEN)
        return text

    return [Finding(finding.subject, finding.level, clean(finding.text), clean(finding.remedy)) for finding in findings]


def as_builtins(findings: Sequence[Finding]) -> dict[str, object]:
    """Returns the report in its JSON form."""
    counts = {level.value: sum(finding.level is level for finding in findings) for level in Severity}
    return {"counts": counts, "findings": msgspec.to_builtins(findings)}


def print_findings(findings: Sequence[Finding]) -> None:
    """Prints the report as a table."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console()
    colours = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.PROBLEM: "bold red"}
    table = Table.grid(padding=(0, 2, 0, 0))
    for finding in findings:
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="cyan")
        table.add_row(Text(finding.level.value, style=colours[finding.level]), Text(finding.subject), text)
    console.print(table)
    problems, warnings = (sum(f.level is level for f in findings) for level in (Severity.PROBLEM, Severity.WARNING))
    console.print(
        Padding(Text(f"{_format_count(problems, 'problem')}, {_format_count(warnings, 'warning')}"), (1, 0, 0, 0))
    )


def _format_count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
