"""Counts the files and lines of code of each feature, by the list `scripts/features.toml`.

    python -m scripts.features

Docstrings, comments and blank lines do not count. Python and Lua are counted apart.
"""

import ast
import io
import tokenize
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FEATURES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
FOLDERS, LANGUAGES = ("qinfer", "api", "workers"), (".py", ".lua")


def main() -> None:
    """Prints the table."""
    print(f"{'':37}{'files':>6}{'code':>8}{'Lua files':>11}{'Lua':>7}")
    for feature, files in [*((feature, files_of(feature)) for feature in FEATURES), ("all", sources())]:
        code, lua = ([lines_of_code(path) for path in files if path.suffix == language] for language in LANGUAGES)
        print(f"{feature:37}{len(code):6}{sum(code):8}{len(lua):11}{sum(lua):7}")


def sources() -> list[Path]:
    """Returns every source file of the library and the programs."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in LANGUAGES]


def matches(pattern: str) -> list[Path]:
    """Returns the source files of one entry of the list; a pattern leaves out the files that another entry names."""
    named = {ROOT / path for patterns in FEATURES.values() for path in patterns} if "*" in pattern else set()
    return [path for path in sorted(ROOT.glob(pattern)) if path.suffix in LANGUAGES and path not in named]


def files_of(feature: str) -> list[Path]:
    """Returns the source files of a feature."""
    return [path for pattern in FEATURES[feature] for path in matches(pattern)]


def lines_of_code(path: Path) -> int:
    """Counts the lines of a source file that hold code."""
    text = path.read_text()
    code = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    if path.suffix == ".lua":
        return len(code) - sum(line.lstrip().startswith("--") for line in text.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            code.discard(token.start[0])
    for node in ast.walk(ast.parse(text)):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node):
            code.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code)


if __name__ == "__main__":
    main()
