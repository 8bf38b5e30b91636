"""The site shows every page, and what pages link to outside docs/ is part of it. `make docs` builds it."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

from scripts import docs_hooks

ROOT = docs_hooks.ROOT
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
INDEXES = {"reference/alerts/": "reference/alerts.md", "explanation/decisions/": "explanation/decisions/README.md"}
"""Folders whose pages are in no navigation, and the pages that list them."""


def named(part: Any) -> Iterator[str]:
    """Walks the navigation, and yields its pages."""
    if isinstance(part, str):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from named(inner)


def pages() -> set[str]:
    return {str(page.relative_to(docs_hooks.DOCS)) for page in docs_hooks.DOCS.rglob("*.md")}


def listed(index: str) -> set[str]:
    """Returns the pages of docs/ that a page links to."""
    return {target.removeprefix("docs/") for target in docs_hooks._targets(f"docs/{index}")}


def test_the_navigation_names_every_page_once_and_nothing_else() -> None:
    """Pages of docs/, and the project's documents outside it; single alerts and decisions have their indexes."""
    indexed = {page for page in pages() if page.startswith(tuple(INDEXES)) and not page.endswith("README.md")}

    assert sorted(named(CONFIG["nav"])) == sorted(pages() - indexed | set(docs_hooks.PROJECT.values()))


@pytest.mark.parametrize("folder", [*INDEXES, "builders/"])
def test_an_index_lists_every_page_of_its_folder(folder: str) -> None:
    index = INDEXES.get(folder, f"{folder}README.md")

    assert {page for page in pages() if page.startswith(folder)} - {index} <= listed(index)


def test_the_first_page_links_to_every_guide() -> None:
    """docs/README.md, which is what people see who have no site, names all that has no index of its own."""
    indexed = (*INDEXES, "builders/")

    unnamed = pages() - listed("README.md") - {"README.md"}
    assert sorted(page for page in unnamed if not page.startswith(indexed)) == []
    assert {"builders/README.md", *INDEXES.values()} <= listed("README.md")


def test_nothing_is_fetched() -> None:
    """No fonts, scripts or styles of others, and no address of a repository that does not exist."""
    assert CONFIG["theme"]["font"] is False
    assert not {"repo_url", "site_url", "extra_css", "extra_javascript"} & set(CONFIG)
    assert [page for page in docs_hooks.DOCS.rglob("*.md") if "```mermaid" in page.read_text()] == []


@pytest.mark.parametrize(
    ("html", "is_refused"),
    [
        ('<script src="https://unpkg.com/x.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example.org/css">', True),
        ("<img alt=x src='http://example.org/x.png'>", True),
        ('<a href="https://example.org">there</a> <img src="../assets/x.png"> <script src="bundle.js">', False),
    ],
)
def test_a_page_that_fetches_is_refused(html: str, *, is_refused: bool) -> None:
    """Links may lead elsewhere; pictures, scripts and styles may not come from there."""
    page = Mock(spec=Page, file=Mock(src_uri="page.md"))
    with pytest.raises(PluginError, match="fetch") if is_refused else nullcontext():
        assert docs_hooks.on_post_page(html, page=page, config=Mock(spec=MkDocsConfig)) == html


def test_what_the_site_brings_in_exists() -> None:
    """Also what only a document of the project links to."""
    assert "examples/bridge/routes.yaml" in docs_hooks.linked()
    assert [path for path in docs_hooks.linked() | set(docs_hooks.PROJECT) if not (ROOT / path).exists()] == []


def test_links_lead_out_of_docs_and_back() -> None:
    """From pages to documents and files outside, and from documents outside to pages."""
    changed = docs_hooks.relinked(
        "[a](../../ARCHITECTURE.md#layers) [b](../../examples/digits.py) [c](settings.md#log) [d](https://example.org/x)",
        "docs/reference/cli.md",
        "reference/cli.md",
    )
    assert changed == (
        "[a](../builders/architecture.md#layers) [b](../files/examples/digits.py) [c](settings.md#log) "
        "[d](https://example.org/x)"
    )
    back = docs_hooks.relinked("[a](docs/how-to/bulk-jobs.md) [b](examples)", "README.md", "project/readme.md")
    assert back == "[a](../how-to/bulk-jobs.md) [b](../files/examples/index.md)"


def test_paths_of_the_site_lead_back_to_the_repository() -> None:
    """From which the links of a page count."""
    for source in ("docs/how-to/bulk-jobs.md", "README.md", "ARCHITECTURE.md", "benchmarks/RESULTS.md"):
        assert docs_hooks.source_path(docs_hooks.site_path(source)) == source


def test_a_link_that_leads_nowhere_is_left_to_mkdocs() -> None:
    """It is reported there with the page and the link as they were written."""
    text = "[a](../../no/such/file.md)"

    assert docs_hooks.relinked(text, "docs/how-to/bulk-jobs.md", "how-to/bulk-jobs.md") == text


def test_a_directory_becomes_a_page_of_its_files() -> None:
    """Such as that of an example that a guide links to."""
    page = docs_hooks._listing(Path(ROOT / "examples" / "backend"))

    assert "## linear_backend.py" in page
    assert "class LinearBackend" in page
