"""Checks how the tree reads: headless sentences, vague words, and class names that several modules define.

A headless sentence begins with What, Who, Whose, Those or That and has no noun of its own ("What waits is refused").
The check reads docstrings, comments and texts of Python, comments of Lua, and the paragraphs of Markdown.

    python -m scripts.plain_words            fails where a rule is broken, and prints the figures
    python -m scripts.plain_words --names    lists the function names that many modules define, too
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("qinfer", "api", "workers")
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs", "benchmarks")
MANY_MODULES, MAX_MANY = 8, 25
"""At most `MAX_MANY` function names may be defined in `MANY_MODULES` modules or more."""

HEADLESS = re.compile(
    r"(?:^|(?<=[.:;] )|(?<=\n))(?:What|Who|Whoever|Whose|Those|That)\b(?! (?:is why|way|means|follows))[^.?!]{8,}[.:;]"
)
VAGUE = re.compile(r"\b(?:[Nn]obody|[Ww]hoever|[Ww]hatever)\b|(?<!= )\b(?:none|such)\.")

ALLOWED_WORDS: dict[str, str] = {
    **dict.fromkeys(
        (f"CONTRIBUTING.md: {word}" for word in ("nobody", "Whoever", "whoever", "none.", "such.")),
        "the rule quotes them",
    ),
}
"""`PATH: the words` → why they stay."""
ALLOWED_CLASSES: dict[str, str] = {
    "State": "an argument of users' functions, and the desired state of models, which they never see",
    "ModelMetadata": "the schema of a reply in OpenAPI, and the client's own type for it",
    "ModelStatistics": "the schema of a reply in OpenAPI, and the client's own type for it",
    "TensorMetadata": "the schema of a reply in OpenAPI, and the client's own type for it",
    "Tensor": "qinfer's public type, and the one that model.py imports from triton_python_backend_utils",
}
"""A class name that several modules define → why no reader mistakes one for the other."""


class Place(NamedTuple):
    """A passage of prose, and where it begins."""

    path: str
    line: int
    text: str


class Names(NamedTuple):
    """The modules that define each class and each function; the methods of a protocol have one module."""

    classes: dict[str, set[str]]
    functions: dict[str, set[str]]

    def doubled(self) -> list[str]:
        """Returns the class names of several modules."""
        return sorted(name for name, where in self.classes.items() if len(where) > 1)

    def many(self) -> list[str]:
        """Returns the function names of many modules."""
        return sorted(name for name, where in self.functions.items() if len(where) >= MANY_MODULES)


def python_prose(path: str, source: str) -> Iterator[Place]:
    """Yields comments, and the literals that have a space in them; docstrings are literals."""
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("#"):
            yield Place(path, number, line.strip("# "))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Place(path, node.lineno, re.sub(r"`[^`]*`", "x", node.value))


def lua_prose(path: str, source: str) -> Iterator[Place]:
    """Yields the comments."""
    for number, line in enumerate(source.splitlines(), 1):
        _, dashes, comment = line.partition("--")
        if dashes:
            yield Place(path, number, comment.strip())


def markdown_prose(path: str, source: str) -> Iterator[Place]:
    """Yields paragraphs without code; tables and headings are left out."""
    text = re.sub(r"```.*?```", lambda block: "\n" * block.group().count("\n"), source, flags=re.DOTALL)
    for found in re.finditer(r"(?:[^\n`|#].*\n?)+", text):
        yield Place(path, text[: found.start()].count("\n") + 1, re.sub(r"`[^`]*`", "x", found.group()))


READERS = {".py": python_prose, ".lua": lua_prose, ".md": markdown_prose}


def files(places: tuple[str, ...], suffix: str) -> Iterator[tuple[str, str]]:
    """Yields path and content of the files with an ending."""
    for place in places:
        path = ROOT / place
        for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = str(each.relative_to(ROOT))
            if each.suffix == suffix:
                yield name, each.read_text()


def methods(node: ast.ClassDef) -> set[str]:
    """Returns the names of a class's methods."""
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def names_of(sources: dict[str, str]) -> Names:
    """Collects the names that modules define."""
    names = Names(defaultdict(set), defaultdict(set))
    trees = {path: list(ast.walk(ast.parse(source))) for path, source in sources.items()}
    classes = [(path, node) for path, nodes in trees.items() for node in nodes if isinstance(node, ast.ClassDef)]
    protocols = [methods(node) for _, node in classes if any("Protocol" in ast.unparse(each) for each in node.bases)]
    implemented: dict[str, set[str]] = defaultdict(set)
    for path, node in classes:
        names.classes[node.name].add(path)
        implemented[path].update(*(each for each in protocols if each <= methods(node)))
    for path, nodes in trees.items():
        for each in nodes:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.name.startswith("__"):
                names.functions[each.name].add("a protocol" if each.name in implemented[path] else path)
    return names


def faults(places: list[Place]) -> tuple[Counter[str], list[str]]:
    """Counts headless sentences and vague words; returns a line for each that is not allowed."""
    counts, lines = Counter[str](), []
    for place in dict.fromkeys(places):
        for kind, pattern in (("headless", HEADLESS), ("vague", VAGUE)):
            for match in pattern.finditer(place.text):
                words = " ".join(match.group().split())
                counts[kind] += 1
                if f"{place.path}: {words}" not in ALLOWED_WORDS:
                    lines.append(f"{place.path}:{place.line}: {kind}: {words[:100]}")
    return counts, lines


def main() -> int:
    """Prints figures and faults; returns the exit status."""
    sources = {suffix: dict(files(PROGRAMS, suffix)) for suffix in (".py", ".lua")}
    sources[".md"] = dict(files(DOCUMENTS, ".md"))
    places = [
        place
        for suffix, of_suffix in sources.items()
        for path, source in of_suffix.items()
        for place in READERS[suffix](path, source)
    ]
    counts, lines = faults(places)
    names = names_of(sources[".py"])
    doubled, many = names.doubled(), names.many()
    lines += [
        f"class {name}: {', '.join(sorted(names.classes[name]))}" for name in doubled if name not in ALLOWED_CLASSES
    ]
    is_over = len(many) > MAX_MANY
    if is_over or "--names" in sys.argv:
        lines += [f"function {name}: {len(names.functions[name])} modules" for name in many]
    words = sum(len(place.text.split()) for place in places)
    print(f"prose: {words} words, {counts['headless']} headless sentences, {counts['vague']} vague words")
    print(f"names: {len(doubled)} classes in several modules, {len(many)} functions in {MANY_MODULES} or more")
    print("\n".join(lines), end="\n" if lines else "")
    return int(is_over or any(not line.startswith("function") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
