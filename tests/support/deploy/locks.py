"""Reads the locks that `scripts/lock.py` writes."""

from pathlib import Path

from packaging.requirements import Requirement


def locked(*paths: Path) -> dict[str, str]:
    """Returns the version of each distribution that locks name for this Python."""
    lines = [line.rstrip(" \\") for path in paths for line in path.read_text().splitlines() if line[:1].isalnum()]
    found = [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate()]
    return {each.name: str(each.specifier).removeprefix("==") for each in found}
