"""Where compiled engines are kept between starts: a build takes minutes, and fits one GPU and one version only."""

from pathlib import Path

_DEFAULT = Path("~/.cache/qinfer/engines")

_root: list[Path] = []


def use(directory: Path) -> None:
    """Sets the directory of this process; called once, by the program that composes it."""
    _root[:] = [directory]


def root() -> Path:
    """Returns the directory, which need not exist: the one that was set, else one of the user's cache."""
    return _root[0] if _root else _DEFAULT.expanduser()
