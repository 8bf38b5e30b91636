"""What mkdocs does besides: pages and files of the repository that the documentation links to become part of the site.

There is no public address of the repository that a link could lead to. So a document outside docs/ becomes a page, any
other file that is linked a file of the site, and a directory a page that lists its files. Links are changed on the way
only; in the repository they stay relative paths.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source|video)\b[^>]*?\b(?:src|href|srcset)=[\"']?(?:https?:)?//[^>]*>"
)

PROJECT = {
    "ARCHITECTURE.md": "builders/architecture.md",
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "builders/contributing.md",
    "SECURITY.md": "project/security.md",
}
"""Documents outside docs/ that the navigation names: path in the repository → path in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is outside docs/: the documents of the project, and whatever a page links to.

    Args:
        files: What mkdocs found in docs/.
        config: The site's configuration.
    """
    for source in PROJECT:
        files.append(File.generated(config, site_path(source), content=(ROOT / source).read_text()))
    for source in sorted(linked()):
        if source not in PROJECT:
            files.append(_brought(ROOT / source, config))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links that leave docs/ to where their targets are in the site.

    Args:
        markdown: The page's text.
        page: The page.
        config: The site's configuration.
        files: All files of the site.
    """
    here = page.file.src_uri
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # its list of pages has one row: the cards need the room
    return relinked(markdown, source_path(here), here)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Refuses a page that a browser would fetch something else for from elsewhere.

    Args:
        output: The page's HTML.
        page: The page.
        config: The site's configuration.

    Raises:
        PluginError: It names something.
    """
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} makes browsers fetch {found[0]}; keep it beside the page")
    return output


def relinked(markdown: str, source: str, here: str) -> str:
    """Returns a page's text with its links changed.

    Args:
        markdown: The text.
        source: The page's path in the repository, from which its links count.
        here: Its path in the site, from which the new ones do.
    """

    def replaced(match: re.Match[str]) -> str:
        target, hash_, anchor = match[2].partition("#")
        to = _resolved(source, target)
        if to is None:
            return match[0]
        path = posixpath.relpath(site_path(to), posixpath.dirname(here) or ".")
        return f"{match[1]}{path}{hash_}{anchor}{match[3]}"

    return LINK.sub(replaced, markdown)


def linked() -> set[str]:
    """Returns the paths outside docs/ that pages of the site link to; also those that only such a document links to."""
    found: set[str] = set()
    to_read = [named(page) for page in DOCS.rglob("*.md")] + list(PROJECT)
    while to_read:
        source = to_read.pop()
        for target in _targets(source):
            if not target.startswith("docs/") and target not in found:
                found.add(target)
                to_read += [target] if target.endswith(".md") and target not in PROJECT else []
    return found


def site_path(source: str) -> str:
    """Returns where a path of the repository is in the site.

    Args:
        source: The path, from the root of the repository.
    """
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if source in PROJECT:
        return PROJECT[source]
    return f"files/{source}/index.md" if (ROOT / source).is_dir() else f"files/{source}"


def source_path(here: str) -> str:
    """Returns the path in the repository of a page of the site.

    Args:
        here: The page's path in the site.
    """
    sources = {to: source for source, to in PROJECT.items()}
    if here in sources:
        return sources[here]
    return here.removeprefix("files/") if here.startswith("files/") else f"docs/{here}"


def named(path: Path) -> str:
    """Returns a path as links are counted: from the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def _targets(source: str) -> Iterator[str]:
    """Yields what a document links to that is in the repository."""
    for match in LINK.finditer(FENCE.sub("", (ROOT / source).read_text())):
        target = _resolved(source, match[2].partition("#")[0])
        if target is not None:
            yield target


def _resolved(source: str, target: str) -> str | None:
    """Returns the path that a link means; None where it is an address, an anchor, or leads nowhere."""
    if not target or "://" in target or target.startswith(("/", "mailto:")):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return path if not path.startswith("..") and path != "." and (ROOT / path).exists() else None


def _brought(path: Path, config: MkDocsConfig) -> File:
    to = site_path(named(path))
    if path.is_dir():
        return File.generated(config, to, content=_listing(path), inclusion=InclusionLevel.NOT_IN_NAV)
    return File.generated(config, to, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)


def _listing(directory: Path) -> str:
    """Returns a page that shows the text of a directory's files."""
    lines = [f"# {named(directory)}\n"]
    for path in sorted(directory.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            lines += [
                f"## {path.relative_to(directory)}\n",
                f"````{_language(path)}\n{path.read_text(errors='replace')}\n````\n",
            ]
    return "\n".join(lines)


def _language(path: Path) -> str:
    return {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}.get(path.suffix, "text")
